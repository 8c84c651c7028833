"""Steps around the gated delta rule: convolution, projection split, gates, norms, and whole decode and prefill steps."""

from dataclasses import dataclass, field
from typing import NamedTuple

from gdn.device import DeviceSpec
from gdn.ops.delta_rule.problem import replay_bytes, ring_notes
from gdn.problem import COMPILES, DTYPE_BYTES, TUNES, Problem, Tensor, dtype_bytes, hint, size


@dataclass(frozen=True)
class ConvolutionProblem(Problem):
    """Fields that prefill and decode of the causal depthwise convolution share.

    A pool of windows has its channels contiguous in memory and every other stride a multiple of 16 bytes
    (`state_channels_contiguous`: neighbouring channels are read together), or any strides.
    """

    dim: int = field(metadata=TUNES)
    width: int = field(metadata=TUNES)
    dtype: str = field(metadata=TUNES)  # of x and out: bfloat16 | float16
    weight_dtype: str = field(metadata=COMPILES)
    bias_dtype: str | None = field(metadata=COMPILES)
    silu: bool = field(metadata=COMPILES)
    state_dtype: str | None = field(metadata=TUNES)  # None = no pool: start from zeros, keep nothing
    state_channels_contiguous: bool = field(metadata=TUNES)
    cu_seqlens_dtype: str | None = field(metadata=COMPILES)  # int32 | int64; None = every row of x is a sequence (decode only)
    index_dtype: str | None = field(metadata=COMPILES)  # of the slots; None = slot n for sequence n, and none is padding

    def _filter_bytes(self) -> int:
        return self.dim * (self.width * DTYPE_BYTES[self.weight_dtype] + dtype_bytes(self.bias_dtype))

    def _window_bytes(self) -> int:
        return self.dim * (self.width - 1) * dtype_bytes(self.state_dtype)


@dataclass(frozen=True)
class Conv1dProblem(ConvolutionProblem, op="conv1d"):
    """`gdn.causal_conv1d_fn`: packed prompts.

    Every row of out is written: rows of padding sequences and rows at or beyond cu_seqlens[N] are zero. The slot of a
    sequence is read before it is written; a checkpoint is written after the sequence's own slot.
    """

    has_mask: bool = field(metadata=COMPILES)  # has_initial_state given
    checkpoint_dtype: str | None = field(metadata=COMPILES)  # int32 | int64; None = no checkpoints
    # Of checkpoint_windows; None = checkpoints go to the pool.
    checkpoint_window_dtype: str | None = field(default=None, kw_only=True, metadata=COMPILES)
    num_tokens: int = size()
    num_sequences: int = size()

    def flops(self) -> int:
        return 2 * self.num_tokens * self.dim * self.width

    def bytes_moved(self) -> int:
        rows = 2 * self.num_tokens * self.dim * DTYPE_BYTES[self.dtype]
        return rows + self._filter_bytes() + 2 * self.num_sequences * self._window_bytes()


class Conv1dParams(NamedTuple):
    """Arguments of the launch, in order. L tokens, N sequences.

    Rows of x and out, weight and bias start at multiples of 16 bytes; dim is a multiple of 8.
    """

    x: Tensor  # [L, dim] of the problem's dtype, last dim contiguous
    weight: Tensor  # [dim, width] of weight_dtype, contiguous
    bias: Tensor | None  # [dim] of bias_dtype, contiguous; None without bias_dtype
    conv_states: Tensor | None  # [slots, dim, >= width - 1] of state_dtype, any strides; None without state_dtype
    cu_seqlens: Tensor  # [N + 1] of cu_seqlens_dtype, contiguous: query_start_loc
    cache_indices: Tensor | None  # [>= N] of index_dtype, any stride; None without index_dtype
    has_initial_state: Tensor | None  # [>= N] uint8 (bool viewed as bytes), contiguous; None without has_mask: all True
    checkpoint_offsets: Tensor | None  # [>= N, C] of checkpoint_dtype, any strides; None without checkpoint_dtype
    checkpoint_slots: Tensor | None  # like checkpoint_offsets
    checkpoint_windows: Tensor | None  # [rows, dim, >= width - 1] of checkpoint_window_dtype, any strides; None without it
    out: Tensor  # [L, dim] like x
    null_slot: int  # slots up to this one are padding


@dataclass(frozen=True)
class Conv1dUpdateProblem(ConvolutionProblem, op="conv1d_update"):
    """`gdn.causal_conv1d_update`: one decode step."""

    has_columns: bool = field(metadata=TUNES)  # 2-D indices: drafts
    has_accepted: bool = field(metadata=COMPILES)  # num_accepted_tokens given
    has_parent: bool = field(metadata=TUNES)  # drafts are a tree: a window per node with has_columns, else inputs in token order
    num_tokens: int = size()
    num_sequences: int = size()

    @property
    def keeps_every_input(self) -> bool:
        """The slot takes the shifted window and all inputs of the step, not the last width - 1 columns."""
        return self.has_columns or self.has_accepted or self.has_parent

    def flops(self) -> int:
        return 2 * self.num_tokens * self.dim * self.width

    def bytes_moved(self) -> int:
        rows = 2 * self.num_tokens * self.dim * DTYPE_BYTES[self.dtype]
        if self.has_parent and self.has_columns:
            windows = (self.num_sequences + self.num_tokens) * self._window_bytes()
        elif self.keeps_every_input:
            columns = self.num_sequences * (2 * self.width - 3) + self.num_tokens
            windows = columns * self.dim * dtype_bytes(self.state_dtype)
        else:
            windows = 2 * self.num_sequences * self._window_bytes()
        return rows + self._filter_bytes() + windows


class Conv1dUpdateParams(NamedTuple):
    """Arguments of the launch, in order. L tokens, N sequences. Alignment as in Conv1dParams."""

    x: Tensor  # [L, dim] of the problem's dtype, last dim contiguous; rows at or beyond cu_seqlens[N] are zero in out
    weight: Tensor  # [dim, width] of weight_dtype, contiguous
    bias: Tensor | None  # [dim] of bias_dtype, contiguous; None without bias_dtype
    conv_state: Tensor  # [slots, dim, >= width - 1] of state_dtype, any strides
    conv_state_indices: Tensor | None  # [>= N], or [>= N, columns] with has_columns, any strides; None without index_dtype
    num_accepted_tokens: Tensor | None  # [>= N] int32, any stride; None without has_accepted
    cu_seqlens: Tensor | None  # [N + 1] of cu_seqlens_dtype, contiguous: query_start_loc; None without: one row each
    parent_token: Tensor | None  # [L] int32, contiguous; None without has_parent
    out: Tensor  # [L, dim] like x
    null_slot: int  # slots up to this one are padding


@dataclass(frozen=True)
class SplitProblem(Problem, op="split"):
    """`gdn.fused_qkvzba_split_reshape_cat`: interleaved projections, taken apart."""

    num_k_heads: int = field(metadata=TUNES)
    num_v_heads: int = field(metadata=TUNES)
    head_k_dim: int = field(metadata=TUNES)
    head_v_dim: int = field(metadata=TUNES)
    dtype: str = field(metadata=TUNES)
    ba_dtype: str = field(metadata=COMPILES)
    num_tokens: int = size()

    @property
    def row_elements(self) -> int:
        """Elements of one row of mixed_qkvz."""
        return 2 * (self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim)

    def bytes_moved(self) -> int:
        row = self.row_elements * DTYPE_BYTES[self.dtype] + 2 * self.num_v_heads * DTYPE_BYTES[self.ba_dtype]
        return 2 * self.num_tokens * row


class SplitParams(NamedTuple):
    """Arguments of the launch, in order. L tokens; H and HV heads, K and V elements each; r = HV / H."""

    # [L, H * (2 * K + 2 * r * V)] of dtype: contiguous rows at multiples of 16 bytes, or of 8 where K or V is no multiple of 8
    mixed_qkvz: Tensor
    mixed_ba: Tensor  # [L, 2 * HV] of ba_dtype, last dim contiguous
    mixed_qkv: Tensor  # [L, 2 * H * K + HV * V] like mixed_qkvz: new, contiguous
    z: Tensor  # [L, HV * V] likewise
    b: Tensor  # [L, HV] of ba_dtype: new, contiguous
    a: Tensor  # [L, HV] likewise


@dataclass(frozen=True)
class GatingProblem(Problem, op="gating"):
    """`gdn.fused_gdn_gating`."""

    num_heads: int = field(metadata=TUNES)
    a_dtype: str = field(metadata=TUNES)
    b_dtype: str = field(metadata=TUNES)
    A_log_dtype: str = field(metadata=COMPILES)
    dt_bias_dtype: str = field(metadata=COMPILES)
    num_tokens: int = size()

    def bytes_moved(self) -> int:
        return self.num_tokens * self.num_heads * (DTYPE_BYTES[self.a_dtype] + DTYPE_BYTES[self.b_dtype] + 8)


class GatingParams(NamedTuple):
    """Arguments of the launch, in order. L tokens, HV heads."""

    A_log: Tensor  # [HV] of A_log_dtype, any stride
    a: Tensor  # [L, HV] of a_dtype, any strides
    b: Tensor  # [L, HV] of b_dtype, any strides
    dt_bias: Tensor  # [HV] of dt_bias_dtype, any stride
    g: Tensor  # [L, HV] float32, contiguous
    beta_output: Tensor  # [L, HV] float32, contiguous
    beta: float  # of the softplus
    threshold: float  # of the softplus


@dataclass(frozen=True)
class RmsNormGatedProblem(Problem, op="rms_norm_gated"):
    """`gdn.rms_norm_gated`."""

    num_heads: int = field(metadata=TUNES)
    head_dim: int = field(metadata=TUNES)
    dtype: str = field(metadata=TUNES)  # of x and out
    z_dtype: str = field(metadata=TUNES)
    weight_dtype: str = field(metadata=COMPILES)
    sigmoid: bool = field(metadata=COMPILES)  # the gate: sigmoid(z), else silu(z)
    num_tokens: int = size()

    def bytes_moved(self) -> int:
        per_element = 2 * DTYPE_BYTES[self.dtype] + DTYPE_BYTES[self.z_dtype]
        return self.num_tokens * self.num_heads * self.head_dim * per_element


class RmsNormGatedParams(NamedTuple):
    """Arguments of the launch, in order. L tokens, HV heads, V elements each.

    Bases and strides of x, z and weight are multiples of 8 elements where V is one, else of 4.
    """

    x: Tensor  # [L, HV, V] of the problem's dtype, last dim contiguous
    z: Tensor  # [L, HV, V] of z_dtype, last dim contiguous
    weight: Tensor  # [V] of weight_dtype, contiguous
    out: Tensor  # [L, HV, V] like x, contiguous
    eps: float


@dataclass(frozen=True)
class AddRmsNormProblem(Problem, op="add_rms_norm"):
    """`gdn.add_rms_norm`."""

    dim: int = field(metadata=TUNES)
    dtype: str = field(metadata=TUNES)  # of x, residual and both results
    weight_dtype: str = field(metadata=COMPILES)
    layer_scale_dtype: str | None = field(metadata=COMPILES)  # None without one
    has_residual: bool = field(metadata=COMPILES)
    zero_centred: bool = field(metadata=COMPILES)  # the gain: 1 + weight, else weight
    num_tokens: int = size()

    def bytes_moved(self) -> int:
        return self.num_tokens * self.dim * (4 if self.has_residual else 2) * DTYPE_BYTES[self.dtype]


class AddRmsNormParams(NamedTuple):
    """Arguments of the launch, in order. L tokens of D elements.

    Bases and strides of x, residual, weight and layer_scale are multiples of 8 elements.
    """

    x: Tensor  # [L, D] of the problem's dtype, last dim contiguous
    residual: Tensor | None  # [L, D] likewise
    weight: Tensor  # [D] of weight_dtype, contiguous
    layer_scale: Tensor | None  # [D] of layer_scale_dtype, contiguous; only with a residual
    normed: Tensor  # [L, D] like x, contiguous
    total: Tensor | None  # [L, D] like x, contiguous; None without a residual
    eps: float


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


@dataclass(frozen=True)
class GdnPrefillProblem(Problem, op="gdn_prefill"):
    """`gdn.fused_gdn_prefill`: the whole prefill step between the projections; launched with GdnPrefillParams.

    Rules of slots, windows and states as in Conv1dProblem and ChunkProblem. Every row of out is written: rows of padding
    sequences and rows at or beyond cu_seqlens[N] are zero, whatever mixed_qkv, z, b and a hold there. A launch has at least one
    token and one sequence.
    """

    num_k_heads: int = field(metadata=TUNES)
    num_v_heads: int = field(metadata=TUNES)
    head_k_dim: int = field(metadata=TUNES)
    head_v_dim: int = field(metadata=TUNES)
    width: int = field(metadata=TUNES)  # of the convolution
    dtype: str = field(metadata=TUNES)  # of mixed_qkv and out: bfloat16 | float16
    z_dtype: str | None = field(metadata=COMPILES)  # None = part of mixed_qkv
    a_dtype: str | None = field(metadata=COMPILES)  # None = part of b
    b_dtype: str = field(metadata=COMPILES)
    weight_dtype: str = field(metadata=COMPILES)
    bias_dtype: str | None = field(metadata=COMPILES)
    norm_dtype: str | None = field(metadata=COMPILES)  # None = no norm and no gate: the result is o
    conv_dtype: str = field(metadata=COMPILES)  # of the windows
    conv_channels_contiguous: bool = field(metadata=TUNES)  # as ConvolutionProblem.state_channels_contiguous
    state_dtype: str = field(metadata=TUNES)  # float32 | bfloat16
    state_v_first: bool = field(metadata=TUNES)
    index_dtype: str = field(metadata=COMPILES)  # of all slots
    cu_seqlens_dtype: str = field(metadata=COMPILES)
    interleaved: bool = field(metadata=TUNES)
    silu: bool = field(metadata=COMPILES)  # after the convolution
    gate_sigmoid: bool = field(metadata=COMPILES)  # the norm's gate: sigmoid(z), else silu(z)
    has_mask: bool = field(metadata=COMPILES)  # has_initial_state given
    has_checkpoints: bool = field(metadata=COMPILES)  # checkpoint_offsets / checkpoint_slots given
    # Of checkpoint_states and checkpoint_windows; both None = checkpoints go to the pools, one None = that kind is not kept.
    checkpoint_state_dtype: str | None = field(default=None, kw_only=True, metadata=COMPILES)
    checkpoint_window_dtype: str | None = field(default=None, kw_only=True, metadata=COMPILES)
    A_log_dtype: str = field(default="float32", kw_only=True, metadata=COMPILES)
    dt_bias_dtype: str = field(default="float32", kw_only=True, metadata=COMPILES)
    merged: bool = field(default=False, kw_only=True, metadata=COMPILES)  # mixed_qkv has z too, and b has a, in flat order
    num_tokens: int = size()
    num_sequences: int = size()
    longest: int = hint()  # tokens of the longest sequence, or a few more

    @property
    def dim(self) -> int:
        """Channels of the convolution."""
        return 2 * self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim

    @property
    def has_norm(self) -> bool:
        return self.norm_dtype is not None

    @property
    def keeps_states(self) -> bool:
        """Whether a checkpoint stores the state."""
        return self.has_checkpoints and (self.checkpoint_state_dtype is not None or self.checkpoint_window_dtype is None)

    @property
    def keeps_windows(self) -> bool:
        """Whether a checkpoint stores the window."""
        return self.has_checkpoints and (self.checkpoint_window_dtype is not None or self.checkpoint_state_dtype is None)

    def flops(self) -> int:
        # The chunk form at 64 tokens, as ChunkProblem counts it.
        k, v = self.head_k_dim, self.head_v_dim
        return self.num_tokens * self.num_v_heads * (2 * 64 * (2 * k + 2 * v) + 2 * 3 * k * v)

    def bytes_moved(self) -> int:
        values = self.num_v_heads * self.head_v_dim
        gates = self.num_v_heads * (DTYPE_BYTES[self.b_dtype] + DTYPE_BYTES[self.a_dtype or self.b_dtype])
        row = (self.dim + values) * DTYPE_BYTES[self.dtype] + gates
        if self.has_norm:
            row += values * DTYPE_BYTES[self.z_dtype or self.dtype]
        filters = self.dim * (self.width * DTYPE_BYTES[self.weight_dtype] + dtype_bytes(self.bias_dtype))
        window = (self.width - 1) * self.dim * DTYPE_BYTES[self.conv_dtype]
        state = values * self.head_k_dim * DTYPE_BYTES[self.state_dtype]
        return self.num_tokens * row + filters + 2 * self.num_sequences * (window + state)


class GdnPrefillParams(NamedTuple):
    """Arguments of a launch of the fused prefill step: L tokens in N sequences, H key heads, HV value heads, r = HV / H."""

    # [L, 2 * H * K + HV * V], or interleaved [L, H * (2 * K + 2 * r * V)], or merged with z [L, 2 * H * K + 2 * HV * V]:
    # contiguous rows, 16-byte aligned
    mixed_qkv: Tensor
    z: Tensor  # [L, HV, V], last dim contiguous, rows at multiples of 16 bytes; None: part of mixed_qkv
    b: Tensor  # [L, HV], or interleaved or merged [L, 2 * HV], which holds a too; any strides
    a: Tensor  # [L, HV], any strides; None: part of b
    conv_states: Tensor  # [slots, 2 * H * K + HV * V, columns], updated in place
    conv_weight: Tensor  # [2 * H * K + HV * V, width] contiguous, base a multiple of 16 bytes
    conv_bias: Tensor  # [2 * H * K + HV * V] contiguous, base a multiple of 16 bytes; None: no bias
    A_log: Tensor  # [HV] contiguous
    dt_bias: Tensor  # [HV] contiguous
    norm_weight: Tensor | None  # [V] contiguous, base a multiple of 16 bytes; None without norm_dtype
    ssm_state: Tensor  # [slots, HV, K, V] (or V first), updated in place; slot stride any multiple of 16 bytes
    state_indices: Tensor  # [>= N], any stride
    has_initial_state: Tensor  # [>= N] bool contiguous; None: all True
    cu_seqlens: Tensor  # [N + 1] contiguous
    checkpoint_offsets: Tensor  # [>= N, C] int32 contiguous: tokens after which states are stored, 0 = none; None: no checkpoints
    checkpoint_slots: Tensor  # [>= N, C] contiguous, dtype of state_indices; None: no checkpoints
    checkpoint_states: Tensor  # [rows, HV, K, V] (or V first), as ssm_state, of checkpoint_state_dtype; None without it
    checkpoint_windows: Tensor  # [rows, 2 * H * K + HV * V, columns], any strides, of checkpoint_window_dtype; None without it
    out: Tensor  # [L, HV, V], heads of a row next to each other, rows at multiples of 16 bytes; every row is written
    workspace: Tensor  # uint8 [workspace_bytes(problem, config)], 256-byte aligned, contents undefined
    scale: float
    eps: float
    null_slot: int
