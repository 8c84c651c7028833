"""The indexer's logits and top-k."""

from dataclasses import dataclass, field
from typing import ClassVar

from gdn.problems.base import COMPILES, DTYPE_BYTES, TUNES, Problem, size


@dataclass(frozen=True)
class LogitsProblem(Problem):
    """What ragged and paged indexer logits share: score = scale * sum_h w[h] * act(q[h] . k[h // group]) (* k_scale)."""

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
        weights = DTYPE_BYTES[self.weights_dtype] if self.weights_dtype is not None else 0
        return self.num_heads * (self.head_dim * DTYPE_BYTES[self.dtype] + weights)


@dataclass(frozen=True)
class MqaLogitsProblem(LogitsProblem):
    """`gdn.mqa_logits`: ragged prefill.

    launch(compiled, q, k, k_scale, weights, cu_seqlen_ks, cu_seqlen_ke, out, scale, least=0)
        q [M, H, D] contiguous; k [Nk, kv_heads, D] contiguous; k_scale [Nk, kv_heads] float32 or None
        weights [M, H], any row stride, last dim contiguous, or None; cu_seqlen_ks, cu_seqlen_ke [M] int32
        out [M, W], last dim contiguous, row stride any: W = Nk, or with packed W = max_seqlen_k and column 0 is key ks[i]
    A range is clamped to [0, Nk]; ks >= ke is empty. Of a row of at most `least` keys nothing need be scored (0 = every row);
    only without `clean`.
    """

    op: ClassVar[str] = "mqa_logits"

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
class PagedMqaLogitsProblem(LogitsProblem):
    """`gdn.paged_mqa_logits`: decode from cache pages.

    launch(compiled, q, cache, weights, context_lens, block_tables, out, scale, least=0)
        q [B, next_n, H, D] contiguous
        cache: with has_k_scale uint8 [pages, page_size * kv_heads * (D + 4)] (values of the whole page first, then its
            float32 scales), else dtype [pages, page_size * kv_heads * D]; last dim contiguous, page stride any multiple
            of 16 bytes
        weights [B * next_n, H] or None; context_lens int32 [B], or [B, next_n] with per_draft_lengths
        block_tables int32 [B, max_pages], any row stride; out [B * next_n, max_context_len], last dim contiguous
    With one length per sequence, draft i sees context_len - next_n + 1 + i keys. Lengths are clamped to
    [0, min(max_context_len, max_pages * page_size)]. least: as above.
    """

    op: ClassVar[str] = "paged_mqa_logits"

    page_size: int = field(metadata=TUNES)
    next_n: int = field(metadata=TUNES)
    per_draft_lengths: bool = field(metadata=COMPILES)
    batch: int = size()
    max_context_len: int = size()

    def flops(self) -> int:
        """As if every context were max_context_len long."""
        return 2 * self.batch * self.next_n * self.max_context_len * self.num_heads * self.head_dim

    def bytes_moved(self) -> int:
        """As if every context were max_context_len long."""
        scores = self.next_n * self.max_context_len * DTYPE_BYTES[self.out_dtype]
        return self.batch * (self.next_n * self._query_bytes() + self.max_context_len * self._key_bytes() + scores)


@dataclass(frozen=True)
class TopkProblem(Problem):
    """`gdn.topk_indices`.

    launch(compiled, logits, row_starts, row_ends, out, list_short=0, num_keys=-1, drafts=1)
        logits [rows, n] any row stride, last dim contiguous; row_starts, row_ends [rows] any stride, any values, or None
        out int32 [rows, k], any row stride, last dim contiguous
        list_short: 1 = a row of at most k columns lists them all, and none of its logits is read
        num_keys: not -1, with both bounds = they are ranges of so many keys, and column 0 is the first key of each
        drafts: not 1, without row_starts = row_ends [rows / drafts] are those of the last of so many rows, and each row before
            it has one column less
    Every entry of out is written. Only a row's own range is read.
    """

    op: ClassVar[str] = "topk"

    dtype: str = field(metadata=TUNES)  # of logits: float32 | bfloat16 (others on the reference)
    starts_dtype: str | None = field(metadata=COMPILES)  # int32 | int64; None = rows start at column 0
    ends_dtype: str | None = field(metadata=COMPILES)  # int32 | int64; None = rows end with the last column
    sorted_by: str = field(metadata=TUNES)  # index | score
    k: int = size()  # a count like the others: it compiles nothing anew
    num_rows: int = size()
    num_columns: int = size()

    def flops(self) -> int:
        return 0

    def bytes_moved(self) -> int:
        """Upper bound: counts every row as num_columns long."""
        return self.num_rows * (self.num_columns * DTYPE_BYTES[self.dtype] + 4 * self.k)
