"""Sparse attention over a paged cache of keys and values."""

from dataclasses import dataclass, field
from typing import NamedTuple

from gdn.problem import COMPILES, DTYPE_BYTES, TUNES, Problem, Tensor, dtype_bytes, size


@dataclass(frozen=True)
class AttentionProblem(Problem):
    """Fields that decode and prefill share: o = softmax(scale * q k^T) v over the selected positions of each query token."""

    num_heads: int = field(metadata=TUNES)
    num_kv_heads: int = field(metadata=TUNES)
    head_dim: int = field(metadata=TUNES)
    dtype: str = field(metadata=TUNES)  # of q, keys and values
    block_size: int = field(metadata=COMPILES)  # positions of a cache block
    index_dtype: str | None = field(metadata=COMPILES)  # int32 | int64; None: dense
    has_topk_length: bool = field(metadata=COMPILES)  # only the leading entries of an index row count
    has_gate: bool = field(metadata=COMPILES)  # the output is multiplied by sigmoid(gate)
    heads_adjacent: bool = field(metadata=COMPILES)  # the rows of a position's kv heads are one piece of memory, in both caches
    rows_aligned: bool = field(metadata=COMPILES)  # every row of both caches starts at a multiple of 16 bytes

    def _row_bytes(self) -> int:
        """Key and value of one position."""
        return 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    def _token_bytes(self) -> int:
        """Query, gate, output and log-sum-exp of one token."""
        return self.num_heads * ((2 + self.has_gate) * self.head_dim * DTYPE_BYTES[self.dtype] + 4)


@dataclass(frozen=True)
class SparseDecodeProblem(AttentionProblem, op="sparse_attention_decode"):
    """`gdn.sparse_attention` of a few query tokens a sequence; dense: of `gdn.attention`, over all positions."""

    dense: bool = field(metadata=TUNES)  # no indices: index_dtype is None
    num_tokens: int = size()
    num_sequences: int = size()
    k: int = size()  # indices of a row; dense: positions that the block table of a sequence can address

    def flops(self) -> int:
        return 4 * self.num_tokens * self.k * self.num_heads * self.head_dim

    def bytes_moved(self) -> int:
        """Every token's positions are counted; dense: each sequence's once."""
        rows = (self.num_sequences if self.dense else self.num_tokens) * self.k
        indices = 0 if self.dense else self.num_tokens * self.k * dtype_bytes(self.index_dtype)
        return rows * self._row_bytes() + indices + self.num_tokens * self._token_bytes()


@dataclass(frozen=True)
class SparsePrefillProblem(AttentionProblem, op="sparse_attention_prefill"):
    """`gdn.sparse_attention` of many query tokens a sequence."""

    num_tokens: int = size()
    num_sequences: int = size()
    k: int = size()  # indices of a row
    max_context_len: int = size()  # positions that the block table of a sequence can address

    def flops(self) -> int:
        return 4 * self.num_tokens * self.k * self.num_heads * self.head_dim

    def bytes_moved(self) -> int:
        """Every cached position is counted once."""
        rows = min(self.num_sequences * self.max_context_len, self.num_tokens * self.k)
        indices = self.num_tokens * self.k * dtype_bytes(self.index_dtype)
        return rows * self._row_bytes() + indices + self.num_tokens * self._token_bytes()


@dataclass(frozen=True)
class AttentionPrefillProblem(AttentionProblem, op="attention_prefill"):
    """`gdn.attention` of many query tokens a sequence: index_dtype is None."""

    num_tokens: int = size()
    num_sequences: int = size()  # with new tokens, where the host knows their lengths
    # Positions of the longest sequence, to a power of two of blocks, where the host knows the lengths, else those that the block
    # table of a sequence can address.
    max_context_len: int = size()

    def flops(self) -> int:
        """Of the pairs that the mask leaves, in equal sequences that are as long as they can be."""
        new = self.num_tokens // max(1, self.num_sequences)  # tokens of a sequence
        pairs = self.num_tokens * (2 * self.max_context_len - new + 1) // 2
        return 4 * pairs * self.num_heads * self.head_dim

    def bytes_moved(self) -> int:
        """Every cached position is counted once."""
        return self.num_sequences * self.max_context_len * self._row_bytes() + self.num_tokens * self._token_bytes()


class SparseDecodeParams(NamedTuple):
    """Arguments of a launch of `sparse_attention_decode`; tokens, sequences, blocks, block table columns and k are at least 1.

    Token t belongs to sequence n with query_start_loc[n] <= t < query_start_loc[n + 1], at position
    seq_lens[n] - query_start_loc[n + 1] + t; it sees the positions up to its own. Tokens outside of all sequences and tokens
    without a valid position get o = 0 and lse = -inf.
    """

    q: Tensor  # [tokens, heads, D] of dtype, contiguous
    # [num_blocks, block_size, kv_heads, D] of dtype, last dim contiguous, other strides any that rows_aligned allows
    k_cache: Tensor
    v_cache: Tensor
    topk_indices: Tensor | None  # [tokens, k] of index_dtype, any row stride, last dim contiguous; -1 = none; None where dense
    block_tables: Tensor  # [N, max_blocks] int32, any row stride, last dim contiguous
    query_start_loc: Tensor  # [N + 1] int32, contiguous
    seq_lens: Tensor  # [N] int32, contiguous
    topk_length: Tensor | None  # [tokens] int32, contiguous; None without has_topk_length
    # [tokens, heads, D] of dtype, every row at a multiple of 16 bytes; None without has_gate. o, rounded to dtype, is multiplied
    # by its sigmoid in float32.
    gate: Tensor | None
    out: Tensor  # [tokens, heads, D] of dtype, any token and head stride, last dim contiguous
    lse: Tensor  # [tokens, heads] float32, contiguous: natural logarithm
    workspace: Tensor | None  # [workspace_bytes] uint8, at a multiple of 16 bytes; None where it is 0
    scale: float


class SparsePrefillParams(NamedTuple):
    """Arguments of a launch of `sparse_attention_prefill`, as for decode; topk_indices is there."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    topk_indices: Tensor
    block_tables: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    topk_length: Tensor | None
    gate: Tensor | None
    out: Tensor
    lse: Tensor
    workspace: Tensor | None
    scale: float


class AttentionPrefillParams(NamedTuple):
    """Arguments of a launch of `attention_prefill`, as for sparse prefill, without indices."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    gate: Tensor | None
    out: Tensor
    lse: Tensor
    scale: float
