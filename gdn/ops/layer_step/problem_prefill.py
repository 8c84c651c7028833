"""Gated delta rule: the fused prefill step."""

from dataclasses import dataclass, field
from typing import NamedTuple

from gdn.problem import COMPILES, DTYPE_BYTES, TUNES, Problem, Tensor, dtype_bytes, size


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
    dt_bias_dtype: str = field(default="float32", kw_only=True, metadata=COMPILES)
    merged: bool = field(default=False, kw_only=True, metadata=COMPILES)  # mixed_qkv has z too, and b has a, in flat order
    num_tokens: int = size()
    num_sequences: int = size()

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
    A_log: Tensor  # [HV] float32 contiguous
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
