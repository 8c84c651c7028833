"""Problems of a Gated DeltaNet layer of `gdn.layers` where it takes one operator for each step between its projections."""

from collections.abc import Iterator
from typing import Any

from gdn.ops.delta_rule.problem import AcceptDraftTreeProblem, ChunkProblem, RecurrentProblem, entry_width
from gdn.ops.layer_step.problem import Conv1dProblem, Conv1dUpdateProblem, RmsNormGatedProblem
from gdn.served import sizes
from gdn.served.gdn_layer import GdnLayer, fold
from gdn.served.sizes import Group


def prefill(layer: GdnLayer) -> Iterator[Group]:
    """Prompts, where the fused step has no kernel for the head dims."""
    for has_checkpoints in layer.checkpoints:
        kept = "int32" if has_checkpoints else None
        convolution = Conv1dProblem(
            **_convolution(layer), cu_seqlens_dtype=layer.index_dtype, has_mask=True, checkpoint_dtype=kept, num_tokens=1,
            num_sequences=1,
        )  # fmt: skip
        yield sizes.prompts(convolution)
        rule = ChunkProblem(**_rule(layer), has_mask=True, has_checkpoints=has_checkpoints, num_tokens=1, num_sequences=1)
        yield sizes.prompts(rule)
    yield _norm(layer)


def trees(layer: GdnLayer) -> Iterator[Group]:
    """Drafts that form a tree, which the fused step refuses."""
    flags: dict[str, Any] = {"has_accepted": True, "has_parent": True, "num_tokens": 1, "num_sequences": 1}
    has_columns = not layer.replay
    convolution = Conv1dUpdateProblem(**_convolution(layer), cu_seqlens_dtype=layer.index_dtype, has_columns=has_columns, **flags)
    yield sizes.steps(convolution, 1 + layer.num_spec)
    rule = RecurrentProblem(**_rule(layer), write_every_token=has_columns, has_rounding=False, **flags, **layer.ring)
    yield sizes.steps(rule, 1 + layer.num_spec)
    yield _norm(layer)


def folds(layer: GdnLayer, num_layers: int) -> Iterator[Group]:
    """States of all layers that prompts continue, after decode by replay."""
    for has_accepted in dict.fromkeys((False, layer.num_spec > 0)):
        yield fold(layer, num_layers, has_accepted)


def accepted_trees(layer: GdnLayer, num_layers: int) -> Iterator[Group]:
    """The accepted paths of draft trees after decode by replay, in all layers."""
    convolution = _convolution(layer)
    entry = entry_width(layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)
    problem = AcceptDraftTreeProblem(
        ring_rows=layer.ring["ring_rows"], ring_width=-(-entry // 4) * 4, conv_dim=convolution["dim"],
        conv_dtype=convolution["state_dtype"], conv_channels_contiguous=layer.channels_contiguous, conv_width=layer.conv_width,
        index_dtype=layer.index_dtype, cu_seqlens_dtype=layer.index_dtype, num_layers=num_layers, num_tokens=1, num_sequences=1,
    )  # fmt: skip
    yield sizes.steps(problem, 1 + layer.num_spec)


def _convolution(layer: GdnLayer) -> dict[str, Any]:
    keys, values = layer.num_k_heads * layer.head_k_dim, layer.num_v_heads * layer.head_v_dim
    return {
        "dim": 2 * keys + values, "width": layer.conv_width, "dtype": layer.dtype, "weight_dtype": layer.dtype,
        "bias_dtype": layer.bias_dtype, "silu": layer.activation is not None, "state_dtype": layer.conv_dtype or layer.dtype,
        "state_channels_contiguous": layer.channels_contiguous, "index_dtype": layer.index_dtype,
    }  # fmt: skip


def _rule(layer: GdnLayer) -> dict[str, Any]:
    flags = ("state_v_first", "use_qk_l2norm", "use_gate", "use_beta_sigmoid", "has_initial_state", "has_final_state")
    return {
        "num_q_heads": layer.num_k_heads,
        **{name: getattr(layer, name) for name in ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")},
        **dict.fromkeys(("dtype", "gate_dtype", "beta_dtype"), layer.dtype), "state_dtype": layer.state_dtype,
        **dict.fromkeys(("cu_seqlens_dtype", "index_dtype"), layer.index_dtype), **dict.fromkeys(flags, True),
        "has_final_indices": False,
    }  # fmt: skip


def _norm(layer: GdnLayer) -> Group:
    problem = RmsNormGatedProblem(
        num_heads=layer.num_v_heads, head_dim=layer.head_v_dim, dtype=layer.dtype, z_dtype=layer.dtype,
        weight_dtype=layer.norm_dtype or layer.dtype, sigmoid=layer.gate_activation == "sigmoid", num_tokens=1,
    )  # fmt: skip
    return sizes.rows(problem)
