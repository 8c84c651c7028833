"""The indexer's steps and caches around its logits: quantisation, preparation, caches, compressed keys."""

from dataclasses import dataclass, field
from typing import ClassVar

from gdn.problems.base import COMPILES, DTYPE_BYTES, TUNES, Problem, dtype_bytes, size


@dataclass(frozen=True)
class QuantizeFp8Problem(Problem):
    """`gdn.quantize_fp8`.

    launch(compiled, x, x_fp8, scale)
        x [L, G, group]: last dim contiguous, base and strides multiples of 16 bytes
        x_fp8 [L, G, group] float8_e4m3fn, scale [L, G] float32: new, contiguous
    """

    op: ClassVar[str] = "quantize_fp8"

    num_groups: int = field(metadata=TUNES)  # G
    group_dim: int = field(metadata=TUNES)
    dtype: str = field(metadata=TUNES)
    num_tokens: int = size()  # L

    def flops(self) -> int:
        return 0

    def bytes_moved(self) -> int:
        return self.num_tokens * self.num_groups * (self.group_dim * (DTYPE_BYTES[self.dtype] + 1) + 4)


@dataclass(frozen=True)
class IndexerCacheProblem(Problem):
    """What the writers and the reader of the indexer's cache share.

    cache: as PagedMqaLogitsProblem's, [pages, elements of a page]; uint8 pages hold e4m3 values and one float32 scale per
    (row, key head). The page size follows from the elements of a page: it compiles nothing anew.
    """

    num_kv_heads: int = field(metadata=TUNES)  # 0: no keys and no cache (the query alone is prepared)
    head_dim: int = field(metadata=TUNES)
    cache_dtype: str | None = field(metadata=TUNES)  # uint8 (scaled e4m3) | float8_e4m3fn | bfloat16; None without keys

    @property
    def scaled(self) -> bool:
        return self.cache_dtype == "uint8"

    def _cache_row_bytes(self) -> int:
        """Of one key row of all key heads."""
        return self.num_kv_heads * (self.head_dim * dtype_bytes(self.cache_dtype) + 4 * self.scaled)


@dataclass(frozen=True)
class WriteIndexerCacheProblem(IndexerCacheProblem):
    """`gdn.write_indexer_cache`.

    launch(compiled, k, cache, slot_mapping)
        k [L, kv_heads, D]: last dim contiguous, base and strides multiples of 16 bytes; slot_mapping [L] any stride
    A negative slot writes nothing.
    """

    op: ClassVar[str] = "write_indexer_cache"

    dtype: str = field(metadata=TUNES)  # of k: bfloat16 | float16
    slot_dtype: str = field(metadata=COMPILES)  # int32 | int64
    num_tokens: int = size()

    def flops(self) -> int:
        return 0

    def bytes_moved(self) -> int:
        row = self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]
        return self.num_tokens * (row + self._cache_row_bytes() + DTYPE_BYTES[self.slot_dtype])


@dataclass(frozen=True)
class RotatedKeysProblem(IndexerCacheProblem):
    """What `prepare_indexer` and `compress_indexer_keys` share: norm and RoPE in float32, one rounding to the input's dtype."""

    rotary_dim: int = field(metadata=TUNES)
    zero_centred: bool = field(metadata=COMPILES)  # gain 1 + weight, else weight
    dtype: str = field(metadata=TUNES)  # of q (raw_k): bfloat16 | float16
    position_dtype: str = field(metadata=COMPILES)  # int32 | int64
    cos_sin_dtype: str = field(metadata=COMPILES)
    k_norm_dtype: str | None = field(metadata=COMPILES)
    slot_dtype: str | None = field(metadata=COMPILES)  # of slot_mapping


@dataclass(frozen=True)
class PrepareIndexerProblem(RotatedKeysProblem):
    """`gdn.prepare_indexer`.

    launch(compiled, q, k, weights, positions, cos_sin, q_norm, k_norm, cache, slot_mapping, q_out, weights_out, eps)
        q [L, H, D], k [L, kv_heads, D] or None: last dim contiguous, bases and strides multiples of 16 bytes
        weights [L, H] any strides, or None; positions, slot_mapping [L] any stride
        cos_sin [max_positions, rotary_dim]: rows as those of q; q_norm, k_norm [D]: contiguous, bases multiples of 16 bytes
        cache [pages, elements of a page] or None
        q_out [L, H, D] of q_out_dtype, weights_out [L, H] float32 or None: new, contiguous
    k, k_norm, cache and slot_mapping are None where num_kv_heads is 0; weights_out is None where weights are not folded.
    Positions are clamped to the rows of cos_sin; a negative slot writes nothing.
    """

    op: ClassVar[str] = "prepare_indexer"

    num_heads: int = field(metadata=TUNES)
    k_dtype: str | None = field(metadata=COMPILES)
    weights_dtype: str | None = field(metadata=COMPILES)
    q_norm_dtype: str = field(metadata=COMPILES)
    q_out_dtype: str = field(metadata=TUNES)  # float8_e4m3fn, or dtype
    folds_weights: bool = field(metadata=COMPILES)  # q is quantised with scales, which go into weights_out
    num_tokens: int = size()

    def flops(self) -> int:
        return 0

    def bytes_moved(self) -> int:
        query = self.num_heads * self.head_dim * (DTYPE_BYTES[self.dtype] + DTYPE_BYTES[self.q_out_dtype])
        weights = self.num_heads * self.folds_weights * (dtype_bytes(self.weights_dtype) + 4)
        keys = self.num_kv_heads * self.head_dim * dtype_bytes(self.k_dtype) + self._cache_row_bytes()
        rest = self.rotary_dim * DTYPE_BYTES[self.cos_sin_dtype] + DTYPE_BYTES[self.position_dtype] + dtype_bytes(self.slot_dtype)
        return self.num_tokens * (query + weights + keys + rest)


@dataclass(frozen=True)
class CompressIndexerKeysProblem(RotatedKeysProblem):
    """`gdn.compress_indexer_keys`.

    launch(compiled, raw_k, ring, cache, positions, cos_sin, k_norm, ring_slots, slot_mapping, eps, null_slot)
        raw_k [L, kv_heads, D], ring [sequences, size, kv_heads, D]: last dim contiguous, bases and strides multiples of 16
            bytes; the rest as PrepareIndexerProblem's; ring_slots [L] any stride; null_slot int
    Ring rows are read before the same call overwrites them.
    """

    op: ClassVar[str] = "compress_indexer_keys"

    ratio: int = field(metadata=TUNES)
    ring_slot_dtype: str = field(metadata=COMPILES)
    ring_aligned: bool = field(metadata=TUNES)  # rows of the ring start at multiples of 16 bytes
    num_tokens: int = size()

    def flops(self) -> int:
        return 0

    def bytes_moved(self) -> int:
        """As if every token were stored in the ring: of a long prompt few are."""
        raw = 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]
        rest = DTYPE_BYTES[self.position_dtype] + dtype_bytes(self.slot_dtype) + DTYPE_BYTES[self.ring_slot_dtype]
        group = self._cache_row_bytes() + self.rotary_dim * DTYPE_BYTES[self.cos_sin_dtype]
        return self.num_tokens * (raw + rest) + self.num_tokens // self.ratio * group


@dataclass(frozen=True)
class GatherIndexerCacheProblem(IndexerCacheProblem):
    """`gdn.gather_indexer_cache`.

    launch(compiled, cache, block_tables, cu_seqlens, k, k_scale)
        cache [pages >= 1, elements of a page]; block_tables [N >= 1, max_pages >= 1] int32 any strides; cu_seqlens [N + 1]
            any stride
        k [rows, kv_heads * D] of the cache's kind of value, k_scale [rows, kv_heads] float32 or None: new, contiguous
    Every row is written: those at or beyond cu_seqlens[N] with zeros. Page numbers are clamped to the cache.
    """

    op: ClassVar[str] = "gather_indexer_cache"

    cu_seqlens_dtype: str = field(metadata=COMPILES)
    num_rows: int = size()
    num_sequences: int = size()

    def flops(self) -> int:
        return 0

    def bytes_moved(self) -> int:
        return 2 * self.num_rows * self._cache_row_bytes()


@dataclass(frozen=True)
class ExpandTopkGroupsProblem(Problem):
    """`gdn.expand_topk_groups`.

    launch(compiled, group_indices, positions, out)
        group_indices [L, k] any strides; positions [L] any stride
        out int32 [L, k * ratio + ratio - 1], any row stride, last dim contiguous
    Every entry of out is written.
    """

    op: ClassVar[str] = "expand_topk_groups"

    ratio: int = field(metadata=TUNES)
    group_dtype: str = field(metadata=TUNES)  # int32 | int64
    position_dtype: str = field(metadata=COMPILES)
    num_tokens: int = size()
    k: int = size()

    def flops(self) -> int:
        return 0

    def bytes_moved(self) -> int:
        listed = self.k * self.ratio + self.ratio - 1
        return self.num_tokens * (self.k * DTYPE_BYTES[self.group_dtype] + 4 * listed + DTYPE_BYTES[self.position_dtype])
