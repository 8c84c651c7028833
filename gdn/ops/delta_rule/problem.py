"""Gated delta rule: chunk, recurrent and the fused decode step."""

from dataclasses import dataclass, field
from typing import NamedTuple

from gdn.device import DeviceSpec
from gdn.ops.delta_rule.problem_replay import replay_bytes, ring_notes
from gdn.problem import COMPILES, DTYPE_BYTES, TUNES, Problem, Tensor, dtype_bytes, size


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


@dataclass(frozen=True)
class ChunkProblem(DeltaRuleProblem, op="chunk"):
    """`gdn.chunk_gated_delta_rule` on packed tokens; launches take ChunkParams."""

    has_mask: bool = field(metadata=COMPILES)  # has_initial_state given
    has_checkpoints: bool = field(metadata=COMPILES)  # checkpoint_offsets / checkpoint_slots given
    # Of checkpoint_states; None = checkpoints go to the pool.
    checkpoint_state_dtype: str | None = field(default=None, kw_only=True, metadata=COMPILES)
    num_tokens: int = size()
    num_sequences: int = size()

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


@dataclass(frozen=True)
class GdnDecodeProblem(Problem, op="gdn_decode"):
    """`gdn.fused_gdn_decode`: the whole decode step between the projections; launched with GdnDecodeParams.

    Rules of slots and windows as in RecurrentProblem and Conv1dUpdateProblem; a sequence one of whose two slots to read
    is null is padding: nothing of it is read or written. Every row of out is written. A launch has at least one token and one
    sequence. With ring_rows: replay decode (gdn.ops.delta_rule.problem); has_columns is False, and with has_accepted the
    windows are those of speculative rows, in the one slot of the sequence.
    """

    num_k_heads: int = field(metadata=TUNES)
    num_v_heads: int = field(metadata=TUNES)
    head_k_dim: int = field(metadata=TUNES)
    head_v_dim: int = field(metadata=TUNES)
    width: int = field(metadata=TUNES)  # of the convolution
    dtype: str = field(metadata=TUNES)  # of mixed_qkv and out: bfloat16 | float16
    z_dtype: str | None = field(metadata=COMPILES)  # None = part of mixed_qkv
    a_dtype: str | None = field(metadata=COMPILES)  # None = part of b, or of mixed_qkv
    b_dtype: str | None = field(metadata=COMPILES)  # None = part of mixed_qkv
    weight_dtype: str = field(metadata=COMPILES)
    bias_dtype: str | None = field(metadata=COMPILES)
    A_log_dtype: str = field(metadata=COMPILES)
    dt_bias_dtype: str = field(metadata=COMPILES)
    norm_dtype: str | None = field(metadata=COMPILES)  # None = no norm and no gate: the result is o
    conv_dtype: str = field(metadata=COMPILES)  # of the windows
    conv_channels_contiguous: bool = field(metadata=TUNES)  # as ConvolutionProblem.state_channels_contiguous
    state_dtype: str = field(metadata=TUNES)  # float32 | bfloat16
    state_v_first: bool = field(metadata=TUNES)
    index_dtype: str = field(metadata=COMPILES)
    cu_seqlens_dtype: str | None = field(metadata=COMPILES)  # None = one token per sequence
    interleaved: bool = field(metadata=TUNES)
    concatenated: bool = field(metadata=COMPILES)  # mixed_qkv has z, b and a too, one after the other
    silu: bool = field(metadata=COMPILES)  # after the convolution
    gate_sigmoid: bool = field(metadata=COMPILES)  # the norm's gate: sigmoid(z), else silu(z)
    has_columns: bool = field(metadata=TUNES)  # 2-D indices: drafts
    has_accepted: bool = field(metadata=COMPILES)  # num_accepted_tokens given
    has_rounding: bool = field(metadata=COMPILES)  # stochastic rounding of a bf16 state
    # Of intermediate_states, which take the state after every token: nothing goes to the pools then. None = not given.
    intermediate_dtype: str | None = field(default=None, kw_only=True, metadata=COMPILES)
    merged: bool = field(default=False, kw_only=True, metadata=COMPILES)  # mixed_qkv has z too, and b has a, in flat order
    # Replay decode, as in RecurrentProblem: the ring's rows R and the tokens F from one fold to the next; both None = no ring.
    ring_rows: int | None = field(default=None, kw_only=True, metadata=TUNES)
    fold_every: int | None = field(default=None, kw_only=True, metadata=COMPILES)
    num_tokens: int = size()
    num_sequences: int = size()

    @property
    def dim(self) -> int:
        """Channels of the convolution."""
        return 2 * self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim

    @property
    def has_norm(self) -> bool:
        return self.norm_dtype is not None

    def flops(self) -> int:
        return self.num_tokens * (self.num_v_heads * 6 * self.head_k_dim * self.head_v_dim + 2 * self.dim * self.width)

    def bytes_moved(self) -> int:
        values = self.num_v_heads * self.head_v_dim
        state = values * self.head_k_dim * DTYPE_BYTES[self.state_dtype]
        states = self.num_sequences + (self.num_tokens if self.has_columns else self.num_sequences)
        columns = 2 * self.num_sequences * (self.width - 1)
        intermediate = 0
        replayed = states * state
        if self.fold_every is not None:
            entry = self.num_k_heads * self.head_k_dim + values + self.num_v_heads
            replayed = replay_bytes(state, 4 * entry, self.fold_every, self.num_tokens, self.num_sequences)
            if self.has_accepted:
                columns = self.num_sequences * (2 * self.width - 3) + self.num_tokens
        if self.intermediate_dtype is not None:
            replayed, columns = self.num_sequences * state, columns // 2
            intermediate = self.num_tokens * values * self.head_k_dim * DTYPE_BYTES[self.intermediate_dtype]
        if self.has_columns:
            columns = self.num_sequences * (2 * self.width - 3) + self.num_tokens
        b_dtype = self.b_dtype or self.dtype
        z_bytes = values * DTYPE_BYTES[self.z_dtype or self.dtype] if self.has_norm else 0
        gates = self.num_v_heads * (DTYPE_BYTES[b_dtype] + DTYPE_BYTES[self.a_dtype or b_dtype])
        row = (self.dim + values) * DTYPE_BYTES[self.dtype] + z_bytes + gates
        filters = self.dim * (self.width * DTYPE_BYTES[self.weight_dtype] + dtype_bytes(self.bias_dtype))
        windows = columns * self.dim * DTYPE_BYTES[self.conv_dtype]
        return replayed + intermediate + windows + self.num_tokens * row + filters

    def notes(self, device: DeviceSpec) -> tuple[str, ...]:
        return ring_notes(self, device, has_windows=True)


class GdnDecodeParams(NamedTuple):
    """Arguments of a launch of the fused decode step: L tokens in N sequences, H key heads, HV value heads."""

    # [L, 2 * H * K + HV * V], or interleaved [L, H * (2 * K + 2 * r * V)], or merged with z [L, 2 * H * K + 2 * HV * V], or
    # concatenated with z, b and a [L, >= 2 * H * K + 2 * HV * V + 2 * HV]: contiguous rows, 16-byte aligned
    mixed_qkv: Tensor
    z: Tensor  # [L, HV, V], last dim contiguous; None: part of mixed_qkv
    b: Tensor  # [L, HV], or interleaved or merged [L, 2 * HV], which holds a too; any strides; None: part of mixed_qkv
    a: Tensor  # [L, HV], any strides; None: part of b, or of mixed_qkv
    conv_state: Tensor  # [slots, 2 * H * K + HV * V, columns], updated in place
    conv_weight: Tensor  # [2 * H * K + HV * V, width] contiguous, base a multiple of 16 bytes
    conv_bias: Tensor  # [2 * H * K + HV * V] contiguous, base a multiple of 16 bytes; None: no bias
    A_log: Tensor  # [HV], any stride
    dt_bias: Tensor  # [HV], any stride
    norm_weight: Tensor | None  # [V], any stride; None without norm_dtype
    ssm_state: Tensor  # [slots, HV, K, V] (or V first), updated in place; slot stride any multiple of 16 bytes
    state_indices: Tensor  # [>= N], or with has_columns [>= N, columns], any strides
    num_accepted_tokens: Tensor  # [>= N] int32, any stride; None: 1 of each sequence
    cu_seqlens: Tensor  # [N + 1] contiguous; None: one token per sequence
    rounding_seed: Tensor  # [1] int64; None: round to nearest
    intermediate_states: Tensor  # as in RecurrentParams
    intermediate_indices: Tensor  # as in RecurrentParams
    ring: Tensor  # as in RecurrentParams
    state_tokens: Tensor  # as in RecurrentParams
    num_computed_tokens: Tensor  # as in RecurrentParams
    out: Tensor  # [L, HV * V], last dim contiguous; every row is written
    scale: float
    eps: float
    null_slot: int
    fold_phase: int | None  # 0 to fold_every - 1; None without a ring
