"""Steps around the gated delta rule: causal convolution, projection split, gates, gated norm."""

from dataclasses import dataclass, field
from typing import NamedTuple

from gdn.problem import COMPILES, DTYPE_BYTES, TUNES, Problem, Tensor, dtype_bytes, size


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
