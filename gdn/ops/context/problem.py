"""Context parallel: what a rank computes between its passes of the chunk kernels (`gdn.distributed`).

Symbols: N sequences, each cut into S segments on a rank; R ranks; HS state heads. A state is [HS, K, V], or [HS, V, K] with
`state_v_first`; a transition P is [HS, K, K], transposed with `state_v_first`.

The message of a rank is one row of numbers: h of all sequences, P of all sequences, then a number a sequence, 1 where the rank
has tokens of it and else 0, then padding. h is the state after the first rank's part, and on the others the part's offset.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gdn.problem import COMPILES, DTYPE_BYTES, TUNES, Problem, Tensor, size


@dataclass(frozen=True)
class ContextPartsProblem(Problem, op="context_parts"):
    """Starts of the segments of a rank's sequences, their rows of states, and a mask of the sequences with tokens."""

    sum_dtype: str = field(metadata=TUNES)  # of the message: float32 (float64 on the reference)
    cu_seqlens_dtype: str | None = field(metadata=COMPILES)  # int32 | int64; None = rows of one length
    index_dtype: str | None = field(metadata=COMPILES)  # of state_indices; None = no padding
    has_segments: bool = field(metadata=COMPILES)  # offsets are written
    num_sequences: int = size()
    num_segments: int = size()

    def bytes_moved(self) -> int:
        rows = self.num_sequences * self.num_segments
        return 4 * (3 * self.num_sequences + rows * (2 if self.has_segments else 1))


class ContextPartsParams(NamedTuple):
    """Arguments of a launch: N >= 1 sequences."""

    cu_seqlens: Tensor  # [N + 1], any stride; None: every sequence has `length` tokens, and where S > 1 there is one
    state_indices: Tensor  # [>= N], any stride; None: no padding
    offsets: Tensor  # [N S + 1] of cu_seqlens's dtype (int32 without): of the segments; None: not written
    rows: Tensor  # [N S] int32: 0, 1, 2, ..., and -1 for segments of padding
    message: Tensor  # the rank's message, contiguous: its last N numbers before the padding are written
    flags_at: int  # place of these in it
    length: int
    num_segments: int
    null_slot: int


@dataclass(frozen=True)
class _ComposingProblem(Problem):
    """Fields of the problems that compose states."""

    num_state_heads: int = field(metadata=TUNES)
    head_k_dim: int = field(metadata=TUNES)
    head_v_dim: int = field(metadata=TUNES)
    sum_dtype: str = field(metadata=TUNES)  # of h, P and states: float32 (float64 on the reference)
    state_v_first: bool = field(metadata=TUNES)

    def _numbers(self) -> tuple[int, int]:
        """Numbers of a sequence's state, and of its P."""
        per_row = self.num_state_heads * self.head_k_dim
        return per_row * self.head_v_dim, per_row * self.head_k_dim

    def _bytes(self, states: int, transitions: int) -> int:
        state, transition = self._numbers()
        return DTYPE_BYTES[self.sum_dtype] * (states * state + transitions * transition)


@dataclass(frozen=True)
class ContextTotalProblem(_ComposingProblem, op="context_total"):
    """A rank's message from the summaries of its segments.

    First rank: also the states before its segments, since it knows the one before its part. It sends no P.
    """

    is_first: bool = field(metadata=COMPILES)
    has_summaries: bool = field(metadata=COMPILES)  # False on the first rank alone: a start state is all that is made
    state_dtype: str | None = field(metadata=COMPILES)  # of the pool that the first rank starts from; None = zeros, or not first
    index_dtype: str | None = field(metadata=COMPILES)  # of state_indices; None = row n is sequence n's
    has_mask: bool = field(metadata=COMPILES)  # has_initial_state given
    num_sequences: int = size()
    num_segments: int = size()

    def flops(self) -> int:
        state, transition = self._numbers()
        links = self.num_segments - 1 + self.is_first
        return 2 * self.num_sequences * links * self.head_k_dim * (state + (0 if self.is_first else transition))

    def bytes_moved(self) -> int:
        segments = self.num_segments if self.has_summaries else 0
        made = 1 + self.num_segments if self.is_first else 1
        return self.num_sequences * self._bytes(segments + made, segments + (not self.is_first))


class ContextTotalParams(NamedTuple):
    """Arguments of a launch: N >= 1 sequences. Tensors of [N S, ...] are contiguous, the segments of a sequence in order."""

    h: Tensor  # [N S, HS, K, V] (or V first); None without summaries
    P: Tensor  # [N S, HS, K, K]; None without summaries
    initial_state: Tensor  # pool [slots, HS, K, V] (or V first), inner three dims contiguous, slots at multiples of 16 bytes
    state_indices: Tensor  # [>= N], any stride
    has_initial_state: Tensor  # [>= N] bool, any stride; None: all True
    states: Tensor  # [N S, HS, K, V] (or V first), written on the first rank; None on others
    message: Tensor  # contiguous: h and P are written, P not by the first rank, neither without summaries
    num_sequences: int
    num_segments: int
    null_slot: int


@dataclass(frozen=True)
class ContextStartProblem(_ComposingProblem, op="context_start"):
    """States before a rank's segments, from the messages of all ranks, and the states after the last rank's part."""

    has_segments: bool = field(metadata=COMPILES)  # states before this rank's segments are written
    is_cut: bool = field(metadata=COMPILES)  # there are several segments, whose summaries are given
    ends_here: bool = field(metadata=COMPILES)  # states hold what the last pass has left: nothing is composed, it is stored
    final_dtype: str | None = field(metadata=COMPILES)  # of final_state; None = not written
    index_dtype: str | None = field(metadata=COMPILES)  # of state_indices; None = final_state has a row for each sequence
    final_index_dtype: str | None = field(metadata=COMPILES)  # of final_state_indices; None = not given
    num_sequences: int = size()
    num_segments: int = size()
    num_ranks: int = size()

    def _links(self) -> int:
        """Most compositions of a sequence, those of the last rank."""
        if self.ends_here:
            return 0
        return (self.num_ranks - 1) + (self.num_segments - 1 if self.has_segments else 0)

    def flops(self) -> int:
        return 2 * self.num_sequences * self._links() * self.head_k_dim * self._numbers()[0]

    def bytes_moved(self) -> int:
        made = (self.num_segments if self.has_segments else 0) + (self.final_dtype is not None)
        return self.num_sequences * self._bytes(1 + self._links() + made, self._links())


class ContextStartParams(NamedTuple):
    """Arguments of a launch: N >= 1 sequences. Tensors of [N S, ...] as in ContextTotalParams.

    A pool's slot is written where its sequence is no padding, has tokens on some rank, and the slot is greater than null_slot.
    """

    messages: Tensor  # [R, numbers], rows contiguous
    h: Tensor  # [N S, HS, K, V] (or V first) of this rank's segments; None where parts are not cut
    P: Tensor  # [N S, HS, K, K]; None where parts are not cut
    states: Tensor  # [N S, HS, K, V] (or V first): written, or read where the call ends here; None without either
    final_state: (
        Tensor  # pool [slots, HS, K, V] (or V first), as initial_state of ContextTotalParams, or [N, ...]; None: no final
    )
    state_indices: Tensor  # [>= N], any stride
    final_state_indices: Tensor  # [>= N], any stride; None: the slots of state_indices
    rank: int
    num_sequences: int
    num_segments: int
    null_slot: int


def message_numbers(problem: Any) -> tuple[int, int, int]:
    """Numbers of a message before P, before the flags, and before the padding. problem: one that composes states."""
    state, transition = problem._numbers()
    count = problem.num_sequences
    return count * state, count * (state + transition), count * (state + transition + 1)
