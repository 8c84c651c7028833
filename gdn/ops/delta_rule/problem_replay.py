"""Replay decode: a state that is a few tokens old, and a ring of entries (key, correction, log decay) of the tokens since then.

Positions are token counts of a sequence. All places follow from integers that kernels only read:

    p       committed tokens before the call: num_computed_tokens[n]
    a       accepted tokens of the sequence's previous call: num_accepted_tokens[n]; 1 without it, and then a call has one token
    p0      state_tokens[slot]: tokens the state contained when something other than a decode call last wrote it
    c(x)    max(p0, F * floor((x + phase) / F) - phase): tokens the state contains once x tokens are committed and a call has run

The state in memory contains c = c(p - a) tokens, positions [c, p) are live entries, position j is row j mod R of the ring. A
call of T tokens appends [p, p + T) and, where c' = c(p) > c, replaces the state by one that contains c' tokens. p - a may be
negative.

A sequence is padding (zero rows of the output, nothing read or written) where its slot is null or has no ring, p < p0, T is above
Tmax, or a is outside of 1..Tmax. Tmax is (R + 1 - F) // 2, without num_accepted_tokens 1; in the fused step at most columns -
width + 2 as well. A sequence without tokens is untouched.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gdn.device import DeviceSpec
from gdn.problem import COMPILES, DTYPE_BYTES, TUNES, Problem, Tensor, dtype_bytes, size


def state_position(written: int, committed: int, fold_every: int, fold_phase: int) -> int:
    """c(x): the tokens that a state contains once `committed` tokens are and a call has run. written: p0."""
    return max(written, fold_every * ((committed + fold_phase) // fold_every) - fold_phase)


def most_tokens(ring_rows: int, fold_every: int) -> int:
    """Tmax: the most tokens of a sequence in one call, with num_accepted_tokens."""
    return (ring_rows + 1 - fold_every) // 2


def ring_choice(tokens: int, state_dtype: str) -> tuple[int, int]:
    """R and F of a ring for up to `tokens` tokens of a sequence in a call: about the fewest bytes, in little memory."""
    fold_every = max(11 if state_dtype == "bfloat16" else 15, 3 * tokens)
    return fold_every - 1 + 2 * tokens, fold_every


def entry_width(num_k_heads: int, num_state_heads: int, head_k_dim: int, head_v_dim: int) -> int:
    """Elements of a ring's row that are used: k of all key heads, u and g of all state heads."""
    return num_k_heads * head_k_dim + num_state_heads * (head_v_dim + 1)


def mean_accepted(tokens_per_sequence: float) -> float:
    """Accepted tokens of a call that estimates of bytes assume."""
    return 1 + 0.6 * (tokens_per_sequence - 1)


def mean_live(fold_every: int, tokens_per_sequence: float) -> float:
    """Live entries of a sequence, averaged over positions."""
    return (fold_every - 1) / 2 + mean_accepted(tokens_per_sequence)


def replay_bytes(state: int, entry: int, fold_every: int, num_tokens: int, num_sequences: int, *, is_written: bool = True) -> int:
    """Bytes of the states and entries of a call, averaged over positions. state, entry: bytes of one, of all heads."""
    each = num_tokens / max(num_sequences, 1)
    per_sequence = state + mean_live(fold_every, each) * entry
    if is_written:
        per_sequence += state * mean_accepted(each) / fold_every + each * entry
    return round(num_sequences * per_sequence)


def ring_notes(problem: Any, device: DeviceSpec, *, has_windows: bool) -> tuple[str, ...]:
    """Notes of a problem that may have a ring: tokens of a call, live entries, bytes and floor. has_windows: of a convolution."""
    if problem.ring_rows is None or problem.fold_every is None:
        return ()
    most = most_tokens(problem.ring_rows, problem.fold_every) if problem.has_accepted else 1
    windows = ", fewer where a window has no room for them" if has_windows and most > 1 else ""
    each = problem.num_tokens / max(problem.num_sequences, 1)
    return (
        f"replay: at most {most} token{'s' if most > 1 else ''} of a sequence in a call{windows}",
        f"replay: a mean of {mean_live(problem.fold_every, each):.3g} live entries a sequence, a fold every "
        f"{problem.fold_every} tokens; {problem.traffic(device)}",
    )


@dataclass(frozen=True)
class FoldStatesProblem(Problem, op="fold_states"):
    """`gdn.fold_states`: the live entries of each sequence go into its state; launched with FoldStatesParams.

    Where p > c the state gets [c, p). Then state_tokens[slot] = p, by a later launch than the folds, which read it. With
    has_final_indices the folded state (a copy where nothing is live) goes to another slot, whose state_tokens becomes p, and
    the source keeps everything. A slot without a ring has no live entries. A sequence is padding where its slot is null, p < p0
    or a is outside of 1..Tmax.
    """

    num_k_heads: int = field(metadata=TUNES)
    num_state_heads: int = field(metadata=TUNES)
    head_k_dim: int = field(metadata=TUNES)
    head_v_dim: int = field(metadata=TUNES)
    state_dtype: str = field(metadata=TUNES)  # float32 | bfloat16
    state_v_first: bool = field(metadata=TUNES)
    ring_rows: int = field(metadata=TUNES)
    fold_every: int = field(metadata=COMPILES)
    index_dtype: str = field(metadata=COMPILES)  # of all slots
    has_accepted: bool = field(metadata=COMPILES)
    has_final_indices: bool = field(metadata=COMPILES)
    has_rounding: bool = field(metadata=COMPILES)  # stochastic rounding of a bf16 state
    num_layers: int = size()
    num_sequences: int = size()

    def bytes_moved(self) -> int:
        state = self.num_state_heads * self.head_k_dim * self.head_v_dim * DTYPE_BYTES[self.state_dtype]
        entry = 4 * entry_width(self.num_k_heads, self.num_state_heads, self.head_k_dim, self.head_v_dim)
        return round(self.num_layers * self.num_sequences * (2 * state + mean_live(self.fold_every, 1) * entry))

    def notes(self, device: DeviceSpec) -> tuple[str, ...]:
        live = mean_live(self.fold_every, 1)
        return (f"replay: {self.traffic(device)}, where every sequence has {live:.3g} entries",)


class FoldStatesParams(NamedTuple):
    """Arguments of a launch of `fold_states`: N sequences, HS state heads."""

    ssm_state: Tensor  # [layers, slots, HS, K, V] (or V first): inner three dims contiguous, strides multiples of 16 bytes
    ring: Tensor  # [layers, ring slots, R, W] float32, rows as in RecurrentParams
    state_indices: Tensor  # [>= N] of index_dtype, any stride
    state_tokens: Tensor  # [slots] int32, any stride; written
    num_computed_tokens: Tensor  # [N] int32, any stride
    num_accepted_tokens: Tensor  # [N] int32, any stride; None: 1 of each sequence
    final_state_indices: Tensor  # [N] of index_dtype, any stride, null = not written; None: the slots of state_indices
    rounding_seed: Tensor  # [1] int64; None: round to nearest
    fold_phase: int  # of layer 0; layer l has (fold_phase + l) mod fold_every
    null_slot: int


@dataclass(frozen=True)
class AcceptDraftTreeProblem(Problem, op="accept_draft_tree"):
    """`gdn.accept_draft_tree`: entries and inputs of an accepted path, side by side; takes AcceptDraftTreeParams.

    The path of sequence n is accepted_nodes[n] and its ancestors, m nodes in ascending order, the i-th is nodes[i]. Whole rows
    (p + nodes[i]) mod R of the ring go to (p + i) mod R, columns w - 2 + nodes[i] of the window to w - 2 + i, one i after the
    other, and num_accepted_tokens[n] becomes m. A sequence is padding where it has no token, its slot is null or has no ring.
    """

    ring_rows: int = field(metadata=TUNES)
    ring_width: int = field(metadata=TUNES)
    conv_dim: int | None = field(metadata=TUNES)  # channels; None = no windows
    conv_dtype: str | None = field(metadata=TUNES)
    conv_channels_contiguous: bool = field(metadata=TUNES)
    conv_width: int = field(metadata=COMPILES)
    index_dtype: str = field(metadata=COMPILES)
    cu_seqlens_dtype: str = field(metadata=COMPILES)
    num_layers: int = size()
    num_tokens: int = size()
    num_sequences: int = size()

    def bytes_moved(self) -> int:
        # The path to a leaf of a binary tree has a node a level, of which the root stays in its place: of 8 nodes 2 rows move.
        nodes = self.num_tokens // max(self.num_sequences, 1)
        moved = self.num_sequences * max((nodes + 1).bit_length() - 2, 0)
        token = 4 * self.ring_width + (self.conv_dim or 0) * dtype_bytes(self.conv_dtype)
        return 2 * self.num_layers * moved * token


class AcceptDraftTreeParams(NamedTuple):
    """Arguments of a launch of `accept_draft_tree`: L tokens in N sequences."""

    ring: Tensor  # [layers, slots, R, W] float32, last dim contiguous, address and strides multiples of 16 bytes
    conv_state: Tensor  # [layers, slots, dim, columns] of conv_dtype, any strides; None without conv_dim
    state_indices: Tensor  # [>= N] of index_dtype, any stride
    parent_token: Tensor  # [L] int32 contiguous
    accepted_nodes: Tensor  # [>= N] int32, any stride
    num_computed_tokens: Tensor  # [>= N] int32, any stride
    num_accepted_tokens: Tensor  # [>= N] int32, any stride; written
    cu_seqlens: Tensor  # [N + 1] contiguous
    null_slot: int
