"""Problems of the operators of a Gated DeltaNet layer on a model's shapes, as a serving engine calls them (gdn.core.example)."""

from typing import Any

from gdn.core.example import BF16, TOKENS, heads_of, same
from gdn.models import ModelShape
from gdn.ops.layer_step.problem import (
    AddRmsNormProblem,
    Conv1dProblem,
    Conv1dUpdateProblem,
    GatingProblem,
    GdnDecodeProblem,
    GdnPrefillProblem,
    RmsNormGatedProblem,
    SplitProblem,
)


def gdn_decode(model: ModelShape, fp8: bool = False) -> GdnDecodeProblem:
    """A whole decode step of a layer: flat projections, both pools, no drafts."""
    return GdnDecodeProblem(
        **heads_of(model),
        width=model.conv_width,
        **same(BF16, "dtype", "z_dtype", "a_dtype", "b_dtype", "weight_dtype", "norm_dtype", "conv_dtype"),
        **same("float32", "A_log_dtype", "dt_bias_dtype", "state_dtype"),
        **same(None, "bias_dtype", "cu_seqlens_dtype"),
        index_dtype="int32",
        **same(True, "conv_channels_contiguous", "state_v_first", "silu"),
        **same(False, "interleaved", "concatenated", "gate_sigmoid", "has_columns", "has_accepted", "has_rounding"),
        **same(128, "num_tokens", "num_sequences"),
    )


def gdn_prefill(model: ModelShape, fp8: bool = False) -> GdnPrefillProblem:
    """The whole prefill step of a layer for four prompts, some of which continue from cached states: flat projections."""
    return GdnPrefillProblem(
        **heads_of(model),
        width=model.conv_width,
        **same(BF16, "dtype", "z_dtype", "a_dtype", "b_dtype", "weight_dtype", "norm_dtype", "conv_dtype"),
        bias_dtype=None,
        state_dtype="float32",
        **same("int32", "index_dtype", "cu_seqlens_dtype"),
        **same(True, "conv_channels_contiguous", "state_v_first", "silu", "has_mask"),
        **same(False, "interleaved", "gate_sigmoid", "has_checkpoints"),
        num_tokens=TOKENS,
        num_sequences=4,
    )


def conv1d(model: ModelShape, fp8: bool = False) -> Conv1dProblem:
    """Four prompts, some of which continue from a cached window."""
    sizes: dict[str, Any] = {"num_tokens": TOKENS, "num_sequences": 4}
    return Conv1dProblem(**_convolution(model), cu_seqlens_dtype="int32", has_mask=True, checkpoint_dtype=None, **sizes)


def conv1d_update(model: ModelShape, fp8: bool = False) -> Conv1dUpdateProblem:
    """One token of each of 128 sequences, without drafts."""
    flags = same(False, "has_columns", "has_accepted", "has_parent")
    sizes = same(128, "num_tokens", "num_sequences")
    return Conv1dUpdateProblem(**_convolution(model), cu_seqlens_dtype=None, **flags, **sizes)


def _convolution(model: ModelShape) -> dict[str, Any]:
    return {
        "dim": model.conv_dim,
        "width": model.conv_width,
        **same(BF16, "dtype", "weight_dtype", "state_dtype"),
        "bias_dtype": None,
        "index_dtype": "int32",
        **same(True, "silu", "state_channels_contiguous"),
    }


def split(model: ModelShape, fp8: bool = False) -> SplitProblem:
    """Interleaved projections of a prompt."""
    return SplitProblem(**heads_of(model), dtype=BF16, ba_dtype=BF16, num_tokens=TOKENS)


def gating(model: ModelShape, fp8: bool = False) -> GatingProblem:
    """Gates of a prompt."""
    parameters = same("float32", "A_log_dtype", "dt_bias_dtype")
    return GatingProblem(model.num_v_heads, a_dtype=BF16, b_dtype=BF16, **parameters, num_tokens=TOKENS)


def rms_norm_gated(model: ModelShape, fp8: bool = False) -> RmsNormGatedProblem:
    """Contiguous rows, one per token and head: to the kernel they are tokens of one head."""
    dtypes = {"dtype": BF16, "z_dtype": BF16, "weight_dtype": "float32"}
    num_tokens = TOKENS * model.num_v_heads
    return RmsNormGatedProblem(num_heads=1, head_dim=model.head_v_dim, **dtypes, sigmoid=False, num_tokens=num_tokens)


def add_rms_norm(model: ModelShape, fp8: bool = False) -> AddRmsNormProblem:
    """Residual stream of a prompt."""
    dtypes: dict[str, Any] = {"dtype": BF16, "weight_dtype": BF16, "layer_scale_dtype": None}
    return AddRmsNormProblem(model.hidden_size, **dtypes, has_residual=True, zero_centred=True, num_tokens=TOKENS)
