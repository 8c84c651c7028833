"""What a Gated DeltaNet layer computes around the delta rule, operator by operator, and its whole prefill and decode steps."""

from gdn.runtime.registry import Operator, family, modules

_DECODE, _STEPS = family("layer_step", "decode"), family("layer_step", "steps")

STEP_OPERATORS = (
    Operator("gdn_decode", _DECODE, ("fused_gdn_decode",), modules("gdn_decode", "cute")),
    Operator("gdn_prefill", _DECODE, ("fused_gdn_prefill",), modules("gdn_prefill", "cute")),
)

OPERATORS = (
    Operator("gating", _STEPS, ("fused_gdn_gating",), modules("gdn_steps.gating", "cute")),
    Operator("split", _STEPS, ("fused_qkvzba_split_reshape_cat",), modules("gdn_steps.split", "cute")),
    Operator("conv1d", _STEPS, ("causal_conv1d_fn",), modules("conv1d.prefill", "cute")),
    Operator("conv1d_update", _STEPS, ("causal_conv1d_update",), modules("conv1d.update", "cute")),
    Operator("add_rms_norm", _STEPS, ("add_rms_norm",), modules("gdn_steps.add_rms_norm", "cute")),
    Operator("rms_norm_gated", _STEPS, ("rms_norm_gated",), modules("gdn_steps.rms_norm_gated", "cute")),
)
