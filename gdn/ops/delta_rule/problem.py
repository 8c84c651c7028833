"""Gated delta rule: chunk, recurrent, and what replay decode adds.

Replay decode: a state that is a few tokens old, and a ring of entries (key, correction, log decay) of the tokens since then.

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
from gdn.problem import COMPILES, DTYPE_BYTES, TUNES, Problem, Tensor, dtype_bytes, hint, size


@dataclass(frozen=True)
class DeltaRuleProblem(Problem):
    """Fields common to the chunk and the recurrent operator.

    State heads: with GVA (num_v_heads = r * num_k_heads, num_q_heads = num_k_heads) there is one state per value head;
    with GQA (num_q_heads = r * num_k_heads, num_v_heads = num_k_heads) one per query head. So
    `num_state_heads = max(num_q_heads, num_v_heads)`, and state head s reads q head `s // (num_state_heads // num_q_heads)`,
    k head `s // (num_state_heads // num_k_heads)`, v head `s // (num_state_heads // num_v_heads)`.
    """

    num_q_heads: int = field(metadata=TUNES)
    num_k_heads: int = field(metadata=TUNES)
    num_v_heads: int = field(metadata=TUNES)
    head_k_dim: int = field(metadata=TUNES)
    head_v_dim: int = field(metadata=TUNES)
    dtype: str = field(metadata=TUNES)  # of q, k, v and o: bfloat16 | float16 (float32, float64 on the reference)
    state_dtype: str = field(metadata=TUNES)  # of initial_state / the pool: float32 | bfloat16; float32 where no state is given
    gate_dtype: str | None = field(metadata=COMPILES)  # of g (or raw a); None = no decay
    beta_dtype: str | None = field(metadata=COMPILES)  # of beta (or raw b); None = beta is 1
    cu_seqlens_dtype: str = field(metadata=COMPILES)  # int32 | int64
    index_dtype: str | None = field(metadata=COMPILES)  # of all slots; None = initial_state is one row per sequence
    state_v_first: bool = field(metadata=TUNES)  # state is [.., V, K] instead of [.., K, V]
    use_qk_l2norm: bool = field(metadata=COMPILES)
    use_gate: bool = field(metadata=COMPILES)  # g is raw a: decay = exp(-exp(A_log) * softplus(a + dt_bias))
    use_beta_sigmoid: bool = field(metadata=COMPILES)  # beta is raw b
    has_initial_state: bool = field(metadata=COMPILES)  # an initial_state tensor is given; False = all states start from zero
    has_final_state: bool = field(metadata=COMPILES)  # a state is written: into final_state (new tensor) or the pool
    has_final_indices: bool = field(metadata=COMPILES)  # final_state_indices given: the write slots

    @property
    def num_state_heads(self) -> int:
        return max(self.num_q_heads, self.num_v_heads)

    @property
    def pooled(self) -> bool:
        return self.index_dtype is not None

    def _token_bytes(self) -> int:
        """Bytes of one token of q, k, v, o, g and beta."""
        heads = (self.num_q_heads + self.num_k_heads) * self.head_k_dim
        heads += (self.num_v_heads + self.num_state_heads) * self.head_v_dim
        gates = sum(DTYPE_BYTES[d] for d in (self.gate_dtype, self.beta_dtype) if d is not None)
        return heads * DTYPE_BYTES[self.dtype] + gates * self.num_state_heads

    def _state_bytes(self, initial_states: int, final_states: int) -> int:
        """Bytes of this many states, where they are read and written."""
        final_dtype = self.state_dtype if self.pooled else "float32"
        per_element = initial_states * self.has_initial_state * DTYPE_BYTES[self.state_dtype]
        per_element += final_states * self.has_final_state * DTYPE_BYTES[final_dtype]
        return self.num_state_heads * self.head_k_dim * self.head_v_dim * per_element


def unserved_dtypes(problem: DeltaRuleProblem) -> str | None:
    """Part of a refusal that names what kernels of 16-bit tokens cannot take; None: nothing."""
    if problem.dtype not in ("bfloat16", "float16"):
        return f"requires q, k, v of bfloat16 or float16, got {problem.dtype}"
    if problem.state_dtype not in ("float32", "bfloat16"):
        return f"requires a state of float32 or bfloat16, got {problem.state_dtype}"
    for name, dtype in (("g", problem.gate_dtype), ("beta", problem.beta_dtype)):
        if dtype is not None and dtype not in ("float32", "bfloat16", "float16"):
            return f"requires {name} of float32, bfloat16 or float16, got {dtype}"
    return None


LEAST_UNEVEN = 4  # times the mean that the longest sequence has where lengths count as uneven
MOST_EQUAL = 1.06  # times the mean that it has where they count as equal


def tells(longest: int, num_sequences: int, num_tokens: int) -> bool:
    """Whether a host's number for the longest sequence says that lengths are uneven. More than all tokens says nothing."""
    return longest <= num_tokens and longest * num_sequences >= LEAST_UNEVEN * num_tokens


def tells_equal(longest: int, num_sequences: int, num_tokens: int) -> bool:
    """Whether it says that several lengths are about equal."""
    return num_sequences > 1 and num_tokens <= longest * num_sequences <= MOST_EQUAL * num_tokens


@dataclass(frozen=True)
class ChunkProblem(DeltaRuleProblem, op="chunk"):
    """`gdn.chunk_gated_delta_rule` on packed tokens; launches take ChunkParams."""

    has_mask: bool = field(metadata=COMPILES)  # has_initial_state given
    has_checkpoints: bool = field(metadata=COMPILES)  # checkpoint_offsets / checkpoint_slots given
    # Of checkpoint_states; None = checkpoints go to the pool.
    checkpoint_state_dtype: str | None = field(default=None, kw_only=True, metadata=COMPILES)
    num_tokens: int = size()
    num_sequences: int = size()
    longest: int = hint()  # tokens of the longest sequence, or a few more

    @property
    def checkpoint_index_dtype(self) -> str:
        """Of checkpoint_slots."""
        return self.index_dtype or "int64"

    def flops(self) -> int:
        # The chunk form at 64 tokens: K K^T, Q K^T (per state head), the two 64-wide products, and three with the state.
        k, v = self.head_k_dim, self.head_v_dim
        per_token = 2 * 64 * (2 * k + 2 * v) + 2 * 3 * k * v
        return self.num_tokens * self.num_state_heads * per_token

    def bytes_moved(self) -> int:
        return self.num_tokens * self._token_bytes() + self._state_bytes(self.num_sequences, self.num_sequences)


class ChunkParams(NamedTuple):
    """Arguments of a launch of a chunk kernel, on packed tokens: L >= 1 tokens in N >= 1 sequences, HS state heads.

    Every row of out is written: rows of padding sequences and rows at or beyond cu_seqlens[N] are zero.
    """

    q: Tensor  # [1, L, Hq, K], last dim contiguous; base and strides multiples of 16 bytes (strides of 8 where a head is none)
    k: Tensor  # [1, L, Hk, K], as q
    v: Tensor  # [1, L, HV, V], as q
    g: Tensor  # [1, L, HS], any strides: log decay, or with use_gate the raw gate; None: no decay
    beta: Tensor  # [1, L, HS], any strides; None: beta is 1
    A_log: Tensor  # [HS] float32 contiguous; None without use_gate
    dt_bias: Tensor  # [HS] float32 contiguous; None without use_gate
    initial_state: Tensor  # pool [slots, HS, K, V] (or V first), slot stride a multiple of 16 bytes; else [N, ...]; None: zeros
    state_indices: Tensor  # [>= N], any stride; None without a pool
    has_initial_state: Tensor  # [>= N] bool; None: all True
    final_state: Tensor  # with a pool the pool itself, else a new [N, HS, K, V] (or V first) float32; None: nothing is written
    final_state_indices: Tensor  # [>= N]: the slots to write; None: those of state_indices
    cu_seqlens: Tensor  # [N + 1] contiguous
    checkpoint_offsets: Tensor  # [N, C] int32 contiguous: tokens after which a state is stored, 0 = none; None: no checkpoints
    checkpoint_slots: Tensor  # [N, C] contiguous, of checkpoint_index_dtype; None: no checkpoints
    checkpoint_states: Tensor  # [rows, HS, K, V] (or V first) as the pool, of checkpoint_state_dtype: what checkpoint_slots index
    out: Tensor  # [1, L, HS, V], as q
    workspace: Tensor  # uint8 [workspace_bytes(problem, config)], 256-byte aligned, contents undefined; None where that is 0
    scale: float
    null_slot: int


@dataclass(frozen=True)
class ChunkSummaryProblem(Problem, op="chunk_summary"):
    """`gdn.chunk_summary` on packed tokens; launches take ChunkSummaryParams."""

    num_k_heads: int = field(metadata=TUNES)
    num_v_heads: int = field(metadata=TUNES)
    num_state_heads: int = field(metadata=TUNES)
    head_k_dim: int = field(metadata=TUNES)
    head_v_dim: int = field(metadata=TUNES)
    dtype: str = field(metadata=TUNES)  # of k and v: bfloat16 | float16 (float32, float64 on the reference)
    gate_dtype: str | None = field(metadata=COMPILES)  # of g (or raw a); None = no decay
    beta_dtype: str | None = field(metadata=COMPILES)  # of beta (or raw b); None = beta is 1
    cu_seqlens_dtype: str = field(metadata=COMPILES)  # int32 | int64
    state_v_first: bool = field(metadata=TUNES)
    use_k_l2norm: bool = field(metadata=COMPILES)
    use_gate: bool = field(metadata=COMPILES)  # g is raw a
    use_beta_sigmoid: bool = field(metadata=COMPILES)  # beta is raw b
    num_tokens: int = size()
    num_sequences: int = size()

    def flops(self) -> int:
        # K K^T and the inverse, and for h and P the 64-wide product and two with the state.
        k, v = self.head_k_dim, self.head_v_dim
        per_token = 2 * 64 * (k + k + v) + 2 * 2 * k * (k + v)
        return self.num_tokens * self.num_state_heads * per_token

    def bytes_moved(self) -> int:
        heads = self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim
        gates = sum(DTYPE_BYTES[d] for d in (self.gate_dtype, self.beta_dtype) if d is not None)
        states = self.num_state_heads * self.head_k_dim * (self.head_k_dim + self.head_v_dim)
        per_token = heads * DTYPE_BYTES[self.dtype] + gates * self.num_state_heads
        return self.num_tokens * per_token + self.num_sequences * states * DTYPE_BYTES["float32"]


class ChunkSummaryParams(NamedTuple):
    """Arguments of a launch of the summaries' kernel, on packed tokens: L >= 1 tokens in N >= 1 sequences, HS state heads.

    Every row of h and P is written.
    """

    k: Tensor  # [1, L, Hk, K], last dim contiguous; base and strides multiples of 16 bytes
    v: Tensor  # [1, L, HV, V], as k
    g: Tensor  # [1, L, HS], any strides: log decay, or with use_gate the raw gate; None: no decay
    beta: Tensor  # [1, L, HS], any strides; None: beta is 1
    A_log: Tensor  # [HS] float32 contiguous; None without use_gate
    dt_bias: Tensor  # [HS] float32 contiguous; None without use_gate
    cu_seqlens: Tensor  # [N + 1] contiguous
    h: Tensor  # [N, HS, K, V] (or V first) float32, inner three dims contiguous, stride of N a multiple of 16 bytes
    P: Tensor  # [N, HS, K, K], transposed with V first, as h


@dataclass(frozen=True)
class RecurrentProblem(DeltaRuleProblem, op="recurrent"):
    """`gdn.fused_recurrent_gated_delta_rule` on packed ragged tokens; launched with RecurrentParams.

    With ring_rows: replay decode (rule of positions above), index_dtype is set and write_every_token False. Else, without
    write_every_token only the state after the last token is stored. With it (2-D indices) the state is read from
    column num_accepted_tokens - 1 (column 0 without), and the state after token i goes to column i (tokens beyond the last
    column are not stored). A sequence of a pool without tokens touches nothing; without a pool its state passes on. Every row of
    out is written, padding with zeros. A launch has at least one token and one sequence.
    """

    write_every_token: bool = field(metadata=TUNES)  # 2-D indices
    has_accepted: bool = field(metadata=COMPILES)  # num_accepted_tokens given
    has_parent: bool = field(metadata=TUNES)  # tree drafts
    has_rounding: bool = field(metadata=COMPILES)  # stochastic rounding of a bf16 state
    # Of intermediate_states, which take the state after every token instead of the pool; None = not given.
    intermediate_dtype: str | None = field(default=None, kw_only=True, metadata=COMPILES)
    # Replay decode: rows R of the ring, and the tokens F from one fold to the next; both None = no ring. With one the indices
    # are 1-D, and has_final_state False writes neither states nor the ring.
    ring_rows: int | None = field(default=None, kw_only=True, metadata=TUNES)
    fold_every: int | None = field(default=None, kw_only=True, metadata=COMPILES)
    num_tokens: int = size()
    num_sequences: int = size()

    def flops(self) -> int:
        return self.num_tokens * self.num_state_heads * 6 * self.head_k_dim * self.head_v_dim

    def bytes_moved(self) -> int:
        state = self.num_state_heads * self.head_k_dim * self.head_v_dim
        if self.fold_every is not None:
            entry = self.num_k_heads * self.head_k_dim + self.num_state_heads * (self.head_v_dim + 1)
            sizes = (self.num_tokens, self.num_sequences)
            return self.num_tokens * self._token_bytes() + replay_bytes(
                state * DTYPE_BYTES[self.state_dtype], 4 * entry, self.fold_every, *sizes, is_written=self.has_final_state
            )
        written = self.num_tokens if self.write_every_token else self.num_sequences
        intermediate = self.num_tokens * state * dtype_bytes(self.intermediate_dtype)
        return self.num_tokens * self._token_bytes() + self._state_bytes(self.num_sequences, written) + intermediate

    def notes(self, device: DeviceSpec) -> tuple[str, ...]:
        return ring_notes(self, device, has_windows=False)


class RecurrentParams(NamedTuple):
    """Arguments of a launch of the recurrent kernel, on packed tokens: L tokens in N sequences, HS state heads."""

    q: Tensor  # [1, L, Hq, K], last dim contiguous; base and strides multiples of 16 bytes (strides of 8 where a head is none)
    k: Tensor  # [1, L, Hk, K], as q
    v: Tensor  # [1, L, HV, V], as q
    g: Tensor  # [1, L, HS], any strides: log decay, or with use_gate the raw gate; None: no decay
    beta: Tensor  # [1, L, HS], any strides; None: beta is 1
    A_log: Tensor  # [HS] float32 contiguous; None without use_gate
    dt_bias: Tensor  # [HS] float32 contiguous; None without use_gate
    initial_state: Tensor  # as in ChunkParams; a pool is read and written
    state_indices: Tensor  # [>= N], or with write_every_token [>= N, columns], any strides; None without a pool
    num_accepted_tokens: Tensor  # [>= N] int32, any stride; None: 1 of each sequence
    final_state: Tensor  # [N, HS, K, V] (or V first) float32 contiguous; None with a pool, and where no state is written
    final_state_indices: Tensor  # as state_indices: the slots to write; None: those of state_indices
    cu_seqlens: Tensor  # [N + 1] contiguous
    parent_token: Tensor  # [L] int32 contiguous: draft trees; None: each token follows the one before
    rounding_seed: Tensor  # [1] int64; None: round to nearest
    # [rows, T_max, HS, K, V] (or V first) of intermediate_dtype: inner three dims contiguous, strides of rows and tokens any
    # multiples of 16 bytes. None without intermediate_dtype.
    intermediate_states: Tensor
    intermediate_indices: Tensor  # [>= N] of index_dtype, any stride: the row of each sequence, null = nothing is stored
    # With ring_rows, else None: [slots, R, W] float32, a row [k of all key heads | u of all state heads | g of all state
    # heads], last dim contiguous, address and strides multiples of 16 bytes; may have fewer slots than the pool, those beyond
    # have no ring.
    ring: Tensor
    state_tokens: (
        Tensor  # [slots of the pool] int32, any stride: tokens that the state contained when it was last written otherwise
    )
    num_computed_tokens: Tensor  # [>= N] int32, any stride: committed tokens of the sequence before this call
    out: Tensor  # [1, L, HS, V], as q; every row is written
    scale: float
    null_slot: int
    fold_phase: int | None  # 0 to fold_every - 1; None without a ring


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
