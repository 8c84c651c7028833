"""Problems of hosts that keep steps around the delta rule: the rule by itself, and what those hosts let us do of the others."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gdn.models import ModelShape
from gdn.ops.delta_rule import examples as delta_rule_examples
from gdn.ops.layer_step import examples as layer_step_examples
from gdn.served import sizes
from gdn.served.sizes import Group


def sglang(model: ModelShape, state: str, num_spec: int) -> Iterator[Group]:
    """SGLang's backend: decode, prompts with and without snapshots, drafts as chains and trees; and the steps before the rule."""
    yield from _sglang_steps(model, state, num_spec)
    recurrent = replace(delta_rule_examples.recurrent(model), state_dtype=state)
    yield sizes.steps(recurrent)
    chunk = replace(
        delta_rule_examples.chunk(model), state_dtype=state, gate_dtype="float32", beta_dtype="float32", use_gate=False,
        use_beta_sigmoid=False, has_mask=False,
    )  # fmt: skip
    yield sizes.prompts(chunk)
    yield sizes.prompts(replace(chunk, has_checkpoints=True, checkpoint_state_dtype="float32"))
    if num_spec:
        for has_parent in (False, True):
            verify = replace(recurrent, has_final_state=False, has_parent=has_parent, intermediate_dtype=state)
            yield sizes.steps(verify, 1 + num_spec)


def _sglang_steps(model: ModelShape, state: str, num_spec: int) -> Iterator[Group]:
    """Decode as one operator without its norm, from separate or merged projections, and the convolutions; the columns of a window
    are adjacent in SGLang's pool."""
    for dt_bias in ("float32", "bfloat16"):
        fused = replace(
            layer_step_examples.gdn_decode(model), state_dtype=state, dt_bias_dtype=dt_bias, z_dtype=None, norm_dtype=None,
            conv_channels_contiguous=False,
        )  # fmt: skip
        yield sizes.steps(fused)
        yield sizes.steps(replace(fused, merged=True, a_dtype=None))
    update = replace(layer_step_examples.conv1d_update(model), state_channels_contiguous=False)
    yield sizes.steps(update)
    prompts = replace(layer_step_examples.conv1d(model), state_channels_contiguous=False)
    yield sizes.prompts(prompts)
    if num_spec:  # the windows after the drafts share columns, or are apart
        yield sizes.steps(replace(update, cu_seqlens_dtype="int32", has_columns=True), 1 + num_spec)
        kept = replace(prompts, has_mask=False, checkpoint_dtype="int32", checkpoint_window_dtype="bfloat16")
        yield sizes.steps(kept, 1 + num_spec)


def transformers(model: ModelShape, gate_activation: str) -> Iterator[Group]:
    """Transformers' functions: states K first and of one row a sequence, gates already applied, a norm of its own."""
    applied: dict[str, Any] = {"state_v_first": False, "gate_dtype": "float32", "use_gate": False, "use_beta_sigmoid": False}
    chunk = replace(delta_rule_examples.chunk(model), **applied, index_dtype=None, has_mask=False)
    for has_initial, has_final in ((False, False), (False, True), (True, True)):
        yield sizes.prompts(replace(chunk, has_initial_state=has_initial, has_final_state=has_final))
    yield sizes.steps(replace(delta_rule_examples.recurrent(model), **applied))
    # The convolution of a prompt has no states; the host keeps its window.
    without: dict[str, Any] = {"state_dtype": None, "index_dtype": None, "state_channels_contiguous": False, "has_mask": False}
    yield sizes.prompts(replace(layer_step_examples.conv1d(model), **without))
    update = replace(
        layer_step_examples.conv1d_update(model), cu_seqlens_dtype="int32", index_dtype=None, state_channels_contiguous=False
    )
    yield sizes.steps(update)
    for weight in ("bfloat16", "float32"):
        norm = replace(layer_step_examples.rms_norm_gated(model), weight_dtype=weight, sigmoid=gate_activation == "sigmoid")
        yield sizes.at(norm, ("num_tokens",), ((model.num_v_heads * count,) for count in sizes.PROMPTS))
