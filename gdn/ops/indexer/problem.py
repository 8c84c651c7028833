"""The indexer: quantisation, preparation, caches and compressed keys; logits and top-k."""

from dataclasses import dataclass, field
from typing import NamedTuple

from gdn.problem import COMPILES, DTYPE_BYTES, TUNES, Problem, Tensor, dtype_bytes, size


@dataclass(frozen=True)
class QuantizeFp8Problem(Problem, op="quantize_fp8"):
    """`gdn.quantize_fp8`."""

    num_groups: int = field(metadata=TUNES)  # G
    group_dim: int = field(metadata=TUNES)
    dtype: str = field(metadata=TUNES)
    num_tokens: int = size()  # L

    def bytes_moved(self) -> int:
        return self.num_tokens * self.num_groups * (self.group_dim * (DTYPE_BYTES[self.dtype] + 1) + 4)


class QuantizeFp8Params(NamedTuple):
    """Arguments of the launch, in order. L rows, G groups."""

    x: Tensor  # [L, G, group] of the problem's dtype, last dim contiguous, base and strides multiples of 16 bytes
    x_fp8: Tensor  # [L, G, group] float8_e4m3fn: new, contiguous
    scale: Tensor  # [L, G] float32: new, contiguous


@dataclass(frozen=True)
class IndexerCacheProblem(Problem):
    """Fields that the writers and the reader of the indexer's cache share.

    cache: as PagedMqaLogitsProblem's, [pages, elements of a page]; uint8 pages hold e4m3 values and one float32 scale per
    (row, key head). The page size follows from the elements of a page: it is no part of the compiled code.
    """

    num_kv_heads: int = field(metadata=TUNES)  # 0: no keys and no cache (the query alone is prepared)
    head_dim: int = field(metadata=TUNES)
    cache_dtype: str | None = field(metadata=TUNES)  # uint8 (scaled e4m3) | float8_e4m3fn | a float dtype; None without keys

    @property
    def scaled(self) -> bool:
        return self.cache_dtype == "uint8"

    def _cache_row_bytes(self) -> int:
        """Bytes of one key row, all key heads together."""
        return self.num_kv_heads * (self.head_dim * dtype_bytes(self.cache_dtype) + 4 * self.scaled)


@dataclass(frozen=True)
class WriteIndexerCacheProblem(IndexerCacheProblem, op="write_indexer_cache"):
    """`gdn.write_indexer_cache`."""

    dtype: str = field(metadata=TUNES)  # of k: bfloat16 | float16
    slot_dtype: str = field(metadata=COMPILES)  # int32 | int64
    num_tokens: int = size()

    def bytes_moved(self) -> int:
        row = self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]
        return self.num_tokens * (row + self._cache_row_bytes() + DTYPE_BYTES[self.slot_dtype])


class WriteIndexerCacheParams(NamedTuple):
    """Arguments of the launch, in order. L tokens."""

    k: Tensor  # [L, kv_heads, D] of the problem's dtype, last dim contiguous, base and strides multiples of 16 bytes
    cache: Tensor  # [pages, elements of a page] of cache_dtype
    slot_mapping: Tensor  # [L] of slot_dtype, any stride; a negative slot writes nothing


@dataclass(frozen=True)
class RotatedKeysProblem(IndexerCacheProblem):
    """Fields of `prepare_indexer` and `compress_indexer_keys`: norm and RoPE in float32, one rounding to the input's dtype."""

    rotary_dim: int = field(metadata=TUNES)
    zero_centred: bool = field(metadata=COMPILES)  # gain 1 + weight, else weight
    dtype: str = field(metadata=TUNES)  # of q (raw_k): bfloat16 | float16
    position_dtype: str = field(metadata=COMPILES)  # int32 | int64
    cos_sin_dtype: str = field(metadata=COMPILES)
    k_norm_dtype: str | None = field(metadata=COMPILES)
    slot_dtype: str | None = field(metadata=COMPILES)  # of slot_mapping


@dataclass(frozen=True)
class PrepareIndexerProblem(RotatedKeysProblem, op="prepare_indexer"):
    """`gdn.prepare_indexer`. Positions are clamped to the rows of cos_sin; a negative slot writes nothing."""

    num_heads: int = field(metadata=TUNES)
    k_dtype: str | None = field(metadata=COMPILES)
    weights_dtype: str | None = field(metadata=COMPILES)
    q_norm_dtype: str = field(metadata=COMPILES)
    q_out_dtype: str = field(metadata=TUNES)  # float8_e4m3fn, or dtype
    folds_weights: bool = field(metadata=COMPILES)  # q is quantised with scales, which go into weights_out
    has_values: bool = field(metadata=COMPILES)  # rows like the keys' that go to a second cache as they are
    num_tokens: int = size()

    def bytes_moved(self) -> int:
        query = self.num_heads * self.head_dim * (DTYPE_BYTES[self.dtype] + DTYPE_BYTES[self.q_out_dtype])
        weights = self.num_heads * self.folds_weights * (dtype_bytes(self.weights_dtype) + 4)
        keys = self.num_kv_heads * self.head_dim * dtype_bytes(self.k_dtype) + self._cache_row_bytes()
        keys *= 1 + self.has_values
        rest = self.rotary_dim * DTYPE_BYTES[self.cos_sin_dtype] + DTYPE_BYTES[self.position_dtype] + dtype_bytes(self.slot_dtype)
        return self.num_tokens * (query + weights + keys + rest)


class PrepareIndexerParams(NamedTuple):
    """Arguments of the launch, in order. L tokens, H heads.

    Rows: last dim contiguous, base and strides multiples of 16 bytes. Without keys (num_kv_heads 0) k, k_norm, cache and
    slot_mapping are None; without has_values v and v_cache.
    """

    q: Tensor  # [L, H, D] of the problem's dtype: rows
    k: Tensor | None  # [L, kv_heads, D] of k_dtype: rows
    weights: Tensor | None  # [L, H] of weights_dtype, any strides; None without weights_dtype
    positions: Tensor  # [L] of position_dtype, any stride
    cos_sin: Tensor  # [max_positions, rotary_dim] of cos_sin_dtype: rows
    q_norm: Tensor  # [D] of q_norm_dtype, contiguous, base a multiple of 16 bytes
    k_norm: Tensor | None  # [D] of k_norm_dtype, likewise
    cache: Tensor | None  # [pages, elements of a page] of cache_dtype
    slot_mapping: Tensor | None  # [L] of slot_dtype, any stride
    q_out: Tensor  # [L, H, D] of q_out_dtype: new, contiguous
    weights_out: Tensor | None  # [L, H] float32: new, contiguous; None where weights are not folded
    v: Tensor | None  # [L, kv_heads, D] of k_dtype: rows
    v_cache: Tensor | None  # [pages, elements of a page] of cache_dtype
    eps: float


@dataclass(frozen=True)
class CompressIndexerKeysProblem(RotatedKeysProblem, op="compress_indexer_keys"):
    """`gdn.compress_indexer_keys`. Ring rows are read before the same call overwrites them."""

    ratio: int = field(metadata=TUNES)
    ring_slot_dtype: str = field(metadata=COMPILES)
    ring_aligned: bool = field(metadata=TUNES)  # rows of the ring start at multiples of 16 bytes
    num_tokens: int = size()

    def bytes_moved(self) -> int:
        """An upper bound: counts every token as stored in the ring, where few tokens of a long prompt are."""
        raw = 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]
        rest = DTYPE_BYTES[self.position_dtype] + dtype_bytes(self.slot_dtype) + DTYPE_BYTES[self.ring_slot_dtype]
        group = self._cache_row_bytes() + self.rotary_dim * DTYPE_BYTES[self.cos_sin_dtype]
        return self.num_tokens * (raw + rest) + self.num_tokens // self.ratio * group


class CompressIndexerKeysParams(NamedTuple):
    """Arguments of the launch, in order. L tokens. Rows as in PrepareIndexerParams."""

    raw_k: Tensor  # [L, kv_heads, D] of the problem's dtype: rows
    ring: Tensor  # [sequences, size, kv_heads, D] like raw_k: rows, where ring_aligned
    cache: Tensor  # [pages, elements of a page] of cache_dtype
    positions: Tensor  # [L] of position_dtype, any stride
    cos_sin: Tensor  # [max_positions, rotary_dim] of cos_sin_dtype: rows
    k_norm: Tensor  # [D] of k_norm_dtype, contiguous, base a multiple of 16 bytes
    ring_slots: Tensor  # [L] of ring_slot_dtype, any stride
    slot_mapping: Tensor  # [L] of slot_dtype, any stride
    eps: float
    null_slot: int  # this ring slot and negative ones: the token is skipped


@dataclass(frozen=True)
class GatherIndexerCacheProblem(IndexerCacheProblem, op="gather_indexer_cache"):
    """`gdn.gather_indexer_cache`.

    Every row is written: those at or beyond cu_seqlens[N] with zeros. Page numbers are clamped to the cache.
    """

    cu_seqlens_dtype: str = field(metadata=COMPILES)
    num_rows: int = size()
    num_sequences: int = size()

    def bytes_moved(self) -> int:
        return 2 * self.num_rows * self._cache_row_bytes()


class GatherIndexerCacheParams(NamedTuple):
    """Arguments of the launch, in order. N sequences."""

    cache: Tensor  # [pages >= 1, elements of a page] of cache_dtype
    block_tables: Tensor  # [N >= 1, max_pages >= 1] int32, any strides
    cu_seqlens: Tensor  # [N + 1] of cu_seqlens_dtype, any stride
    k: Tensor  # [rows, kv_heads * D] of the cache's kind of value: new, contiguous
    k_scale: Tensor | None  # [rows, kv_heads] float32: new, contiguous; None where the cache is not scaled


@dataclass(frozen=True)
class ExpandTopkGroupsProblem(Problem, op="expand_topk_groups"):
    """`gdn.expand_topk_groups`. Every entry of out is written."""

    ratio: int = field(metadata=TUNES)
    group_dtype: str = field(metadata=TUNES)  # int32 | int64
    position_dtype: str = field(metadata=COMPILES)
    num_tokens: int = size()
    k: int = size()

    def bytes_moved(self) -> int:
        listed = self.k * self.ratio + self.ratio - 1
        return self.num_tokens * (self.k * DTYPE_BYTES[self.group_dtype] + 4 * listed + DTYPE_BYTES[self.position_dtype])


class ExpandTopkGroupsParams(NamedTuple):
    """Arguments of the launch, in order. L tokens."""

    group_indices: Tensor  # [L, k] of group_dtype, any strides
    positions: Tensor  # [L] of position_dtype, any stride
    out: Tensor  # [L, k * ratio + ratio - 1] int32, any row stride, last dim contiguous


@dataclass(frozen=True)
class LogitsProblem(Problem):
    """Fields that ragged and paged indexer logits share: score = scale * sum_h w[h] * act(q[h] . k[h // group]) (* k_scale)."""

    num_heads: int = field(metadata=TUNES)
    num_kv_heads: int = field(metadata=TUNES)
    head_dim: int = field(metadata=TUNES)
    dtype: str = field(metadata=TUNES)  # of q: float8_e4m3fn | bfloat16; keys are of the same kind
    has_k_scale: bool = field(metadata=COMPILES)  # keys carry one float32 scale per (row, kv head)
    weights_dtype: str | None = field(metadata=COMPILES)  # None = weights are 1
    relu: bool = field(metadata=COMPILES)
    clean: bool = field(metadata=COMPILES)  # write -inf outside a row's range (False: unspecified there)
    out_dtype: str = field(metadata=TUNES)  # float32 | bfloat16

    def _key_bytes(self) -> int:
        return self.num_kv_heads * (self.head_dim * DTYPE_BYTES[self.dtype] + 4 * self.has_k_scale)

    def _query_bytes(self) -> int:
        return self.num_heads * (self.head_dim * DTYPE_BYTES[self.dtype] + dtype_bytes(self.weights_dtype))


@dataclass(frozen=True)
class MqaLogitsProblem(LogitsProblem, op="mqa_logits"):
    """`gdn.mqa_logits`: ragged prefill."""

    packed: bool = field(metadata=COMPILES)  # out columns are relative to ks[i]
    num_queries: int = size()
    num_keys: int = size()
    num_columns: int = size()

    def flops(self) -> int:
        return 2 * self.num_queries * min(self.num_keys, self.num_columns) * self.num_heads * self.head_dim

    def bytes_moved(self) -> int:
        written = self.num_queries * self.num_columns * DTYPE_BYTES[self.out_dtype]
        return self.num_queries * self._query_bytes() + self.num_keys * self._key_bytes() + written


@dataclass(frozen=True)
class PagedMqaLogitsProblem(LogitsProblem, op="paged_mqa_logits"):
    """`gdn.paged_mqa_logits`: decode from cache pages; operations and bytes count every context as max_context_len long."""

    page_size: int = field(metadata=TUNES)
    next_n: int = field(metadata=TUNES)
    per_draft_lengths: bool = field(metadata=COMPILES)
    batch: int = size()
    max_context_len: int = size()

    def flops(self) -> int:
        return 2 * self.batch * self.next_n * self.max_context_len * self.num_heads * self.head_dim

    def bytes_moved(self) -> int:
        scores = self.next_n * self.max_context_len * DTYPE_BYTES[self.out_dtype]
        return self.batch * (self.next_n * self._query_bytes() + self.max_context_len * self._key_bytes() + scores)


class MqaLogitsParams(NamedTuple):
    """Arguments of a launch of `mqa_logits`; M, Nk and W are at least 1. Ranges are clamped to [0, Nk]; ks >= ke is empty."""

    q: Tensor  # [M, H, D] of dtype, contiguous
    k: Tensor  # [Nk, kv_heads, D] of dtype, contiguous
    k_scale: Tensor | None  # [Nk, kv_heads] float32, contiguous; None without has_k_scale
    weights: Tensor | None  # [M, H] of weights_dtype, any row stride, last dim contiguous; None where weights_dtype is
    cu_seqlen_ks: Tensor  # [M] int32: first key of each row
    cu_seqlen_ke: Tensor  # [M] int32: end of each row's keys
    out: Tensor  # [M, W] of out_dtype, any row stride, last dim contiguous; W = Nk, or packed: max_seqlen_k, column 0 = key ks[i]
    scale: float
    skip_rows_up_to: int = 0  # rows of at most this many keys may stay unscored (0: none); only without clean


class PagedMqaLogitsParams(NamedTuple):
    """Arguments of a launch of `paged_mqa_logits`; the batch, pages, max_pages and max_context_len are at least 1.

    With one length per sequence, draft i sees context_len - next_n + 1 + i keys. Lengths are clamped to
    [0, min(max_context_len, max_pages * page_size)].
    """

    q: Tensor  # [B, next_n, H, D] of dtype, contiguous
    # With has_k_scale uint8 [pages, page_size * kv_heads * (D + 4)], the values of the whole page before its float32 scales; else
    # dtype [pages, page_size * kv_heads * D]. Last dim contiguous, page stride any multiple of 16 bytes.
    cache: Tensor
    weights: Tensor | None  # [B * next_n, H] of weights_dtype, any row stride, last dim contiguous; None where weights_dtype is
    context_lens: Tensor  # [B] int32; with per_draft_lengths [B, next_n], contiguous
    block_tables: Tensor  # [B, max_pages] int32, any row stride
    out: Tensor  # [B * next_n, max_context_len] of out_dtype, any row stride, last dim contiguous
    scale: float
    skip_rows_up_to: int = 0  # as in MqaLogitsParams


@dataclass(frozen=True)
class TopkProblem(Problem, op="topk"):
    """`gdn.topk_indices` and the selection of `gdn.indexer_topk`: writes every entry of out, reads only a row's own range."""

    dtype: str = field(metadata=TUNES)  # of logits: float32 | bfloat16 (others on the reference)
    starts_dtype: str | None = field(metadata=COMPILES)  # int32 | int64; None = rows start at column 0
    ends_dtype: str | None = field(metadata=COMPILES)  # int32 | int64; None = rows end with the last column
    sorted_by: str = field(metadata=TUNES)  # index | score
    k: int = size()  # a count like the others: it compiles nothing anew
    num_rows: int = size()
    num_columns: int = size()
    ratio: int = field(default=1, metadata=COMPILES)  # tokens of a column; above 1 the result lists tokens, as expand_topk_groups
    position_dtype: str | None = field(default=None, metadata=COMPILES)  # int32 | int64; None with ratio 1

    def bytes_moved(self) -> int:
        """Upper bound: counts every row as num_columns long."""
        listed = self.k * self.ratio + self.ratio - 1
        return self.num_rows * (self.num_columns * DTYPE_BYTES[self.dtype] + 4 * listed)


class TopkParams(NamedTuple):
    """Arguments of the launch, in order."""

    logits: Tensor  # [rows, n] of the problem's dtype, any row stride, last dim contiguous
    row_starts: Tensor | None  # [rows] of starts_dtype, any stride, any values; None without starts_dtype
    row_ends: Tensor | None  # [rows / drafts] of ends_dtype, any stride, any values; None without ends_dtype
    positions: Tensor | None  # [rows] of position_dtype, any stride; None with ratio 1
    out: Tensor  # [rows, k * ratio + ratio - 1] int32, any row stride, last dim contiguous
    list_short: int = 0  # 1: a row of at most k columns lists them all, and none of its logits is read
    num_keys: int = -1  # >= 0, with both bounds: they are ranges of num_keys keys, and column 0 is the first key of each
    drafts: int = 1  # > 1, without row_starts: an end belongs to the last of `drafts` rows; each row before has one column less
