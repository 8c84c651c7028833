"""The indexer's logits and top-k."""

from dataclasses import dataclass, field
from typing import NamedTuple

from gdn.problem import COMPILES, DTYPE_BYTES, TUNES, Problem, Tensor, dtype_bytes, size


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
