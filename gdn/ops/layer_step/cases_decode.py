"""The fused decode and prefill step as cases: outputs of projections as slices of wide rows, pools whose slots have no order."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from gdn.core import tunable as base
from gdn.ops.delta_rule.problem import GdnDecodeParams, GdnDecodeProblem
from gdn.ops.layer_step.problem_prefill import GdnPrefillParams, GdnPrefillProblem


def _step(make: base.Maker, problem: GdnDecodeProblem, lengths: Sequence[int]) -> base.Work:
    """One decode step of a layer, with drafts or without."""
    if problem.interleaved or problem.has_rounding or not problem.conv_channels_contiguous:
        raise ValueError(f"problem: expected whole rows, windows with channels together, no noise, got {problem.static_key()}")
    if problem.has_accepted != problem.has_columns or (problem.cu_seqlens_dtype is None) != (max(lengths) == 1):
        raise ValueError(f"problem: expected offsets and accepted counts with drafts alone, got {problem.static_key()}")
    heads, K, V, dim = problem.num_v_heads, problem.head_k_dim, problem.head_v_dim, problem.dim
    rows, batch, columns = sum(lengths), len(lengths), max(lengths) if problem.has_columns else 1
    slots = make.order(batch * columns, batch * columns + 3, problem.index_dtype)
    window = make.normal(batch * columns + 3, problem.width - 2 + columns, dim, dtype=problem.dtype)
    offsets = accepted = None
    if problem.cu_seqlens_dtype is not None:
        offsets = make.integers([0, *accumulate(lengths)], problem.cu_seqlens_dtype)
    if problem.has_accepted:
        accepted = make.integers([1 + n % columns for n in range(batch)], "int32")
    inner = (V, K) if problem.state_v_first else (K, V)
    arguments = {
        **_projections(make, problem, rows), "conv_state": window.to(getattr(torch, problem.conv_dtype)).mT,
        "conv_weight": make.normal(dim, problem.width, dtype=problem.weight_dtype),
        "conv_bias": None if problem.bias_dtype is None else make.normal(dim, dtype=problem.bias_dtype),
        "A_log": make.normal(heads, dtype=problem.A_log_dtype), "dt_bias": make.normal(heads, dtype=problem.dt_bias_dtype),
        "norm_weight": make.normal(V, dtype=problem.norm_dtype),
        "ssm_state": make.normal(batch * columns + 3, heads, *inner, dtype=problem.state_dtype),
        "state_indices": slots.view(batch, columns) if problem.has_columns else slots, "query_start_loc": offsets,
        "num_accepted_tokens": accepted, "num_k_heads": problem.num_k_heads, "head_k_dim": K, "head_v_dim": V,
        "activation": "silu" if problem.silu else None,
        "gate_activation": "sigmoid" if problem.gate_sigmoid else "silu", "state_v_first": problem.state_v_first,
        "out": make.poisoned(rows, heads * V, dtype=problem.dtype),
    }  # fmt: skip
    params = base.params_of(GdnDecodeParams, arguments, cu_seqlens=offsets, scale=K**-0.5, eps=1e-6, null_slot=-1)
    return base.Work("fused_gdn_decode", arguments, params, (arguments["out"],), ("conv_state", "ssm_state"))


def _projections(make: base.Maker, problem: GdnDecodeProblem, rows: int) -> dict[str, Any]:
    """Rows of one projection: slices of wide ones, or the whole, as the layer passes it."""
    heads, values, dim = problem.num_v_heads, problem.num_v_heads * problem.head_v_dim, problem.dim
    if problem.concatenated:
        row = make.normal(rows, dim + values + 2 * heads, dtype=problem.dtype)
        return {"mixed_qkv": row, **dict.fromkeys(("z", "b", "a")), "projection_layout": "concatenated"}
    return {
        "mixed_qkv": make.normal(rows, dim + values, dtype=problem.dtype)[:, :dim],
        "z": make.normal(rows, dim + values, dtype=problem.z_dtype)[:, dim:].unflatten(1, (heads, problem.head_v_dim)),
        "b": make.normal(rows, 2 * heads, dtype=problem.b_dtype)[:, :heads],
        "a": make.normal(rows, 2 * heads, dtype=problem.a_dtype)[:, heads:],
    }


def _steps(heads: tuple[int, int], batch: int, state_dtype: str = "float32", drafts: int = 0, **fields: Any) -> base.Shape:
    flags = {"cu_seqlens_dtype": "int32" if drafts else None, "has_columns": drafts > 0, "has_accepted": drafts > 0}
    return base.decode_steps("gdn_decode", heads, batch, drafts, state_dtype=state_dtype, **flags, **fields)


_WHOLE: dict[str, Any] = {"concatenated": True, **dict.fromkeys(("z_dtype", "b_dtype", "a_dtype"))}  # as the layer's
_CONCATENATED = [_steps((16, 32), batch, **_WHOLE) for batch in (1, 32, 128)]

gdn_decode = base.Tunable(
    partial(base.StepCase, _step, verdict="close", copied=("conv_state",), states=("ssm_state",)),
    shapes=(
        *(_steps((16, 32), batch) for batch in (1, 8, 32, 128, 512)),
        *(_steps((16, 32), batch, "bfloat16") for batch in (128, 512)),
        *(_steps((4, 8), batch) for batch in (1, 8, 32, 128)),
        *(_steps((16, 32), batch, drafts=3) for batch in (32, 128)),
    ),
    measured_only=tuple(replace(shape, name=f"{shape.name}, concatenated") for shape in _CONCATENATED),
    small=lambda shape: base.resized(shape, shape.lengths[:3], num_k_heads=2, num_v_heads=4, head_k_dim=32, head_v_dim=32),
)


# Largest accepted relative error: that of the chunk form, and of q, k and v in 16 bits before it. The
# norm makes both larger where an output is next to nothing: such a row is judged by the reference with the same roundings.
_PREFILL_LIMIT = 1e-2


def _prefill(make: base.Maker, problem: GdnPrefillProblem, lengths: Sequence[int]) -> base.Work:
    """One prefill step of a layer; two sequences of three continue from their slots."""
    if problem.interleaved or problem.has_checkpoints or not (problem.has_mask and problem.conv_channels_contiguous):
        raise ValueError(f"problem: expected flat rows, a mask and windows with channels together, got {problem.static_key()}")
    heads, K, V, dim = problem.num_v_heads, problem.head_k_dim, problem.head_v_dim, problem.dim
    rows, count = sum(lengths), len(lengths)
    wide = make.normal(rows, dim + heads * V, dtype=problem.dtype)
    window = make.normal(count + 3, problem.width - 1, dim, dtype=problem.dtype)
    inner = (V, K) if problem.state_v_first else (K, V)
    arguments = {
        "mixed_qkv": wide[:, :dim], "z": wide[:, dim:].to(getattr(torch, str(problem.z_dtype))).unflatten(1, (heads, V)),
        "b": make.normal(rows, 2 * heads, dtype=problem.b_dtype)[:, :heads],
        "a": make.normal(rows, 2 * heads, dtype=problem.a_dtype)[:, heads:],
        "conv_states": window.to(getattr(torch, problem.conv_dtype)).mT,
        "conv_weight": make.normal(dim, problem.width, dtype=problem.weight_dtype),
        "conv_bias": None if problem.bias_dtype is None else make.normal(dim, dtype=problem.bias_dtype),
        "A_log": make.normal(heads, dtype="float32"), "dt_bias": make.normal(heads, dtype=problem.dt_bias_dtype),
        "norm_weight": make.normal(V, dtype=problem.norm_dtype),
        "ssm_state": make.normal(count + 3, heads, *inner, dtype=problem.state_dtype),
        "state_indices": make.order(count, count + 3, problem.index_dtype),
        "query_start_loc": make.integers([0, *accumulate(lengths)], problem.cu_seqlens_dtype),
        "has_initial_state": make.integers([n % 3 != 1 for n in range(count)], "bool"), "num_k_heads": problem.num_k_heads,
        "head_k_dim": K, "head_v_dim": V, "activation": "silu" if problem.silu else None,
        "gate_activation": "sigmoid" if problem.gate_sigmoid else "silu", "state_v_first": problem.state_v_first,
        "out": make.poisoned(rows, heads * V, dtype=problem.dtype),
    }  # fmt: skip
    own = {"cu_seqlens": arguments["query_start_loc"], "out": arguments["out"].view(-1, heads, V)}
    params = base.params_of(GdnPrefillParams, arguments, **own, scale=K**-0.5, eps=1e-6, null_slot=-1)
    return base.Work("fused_gdn_prefill", arguments, params, (arguments["out"],), ("conv_states", "ssm_state"))


def _prefill_arguments(shape: base.Shape, device: torch.device, seed: int) -> dict[str, Any]:
    problem: Any = shape.problem
    return _prefill(base.Maker(device, seed), problem, shape.lengths).arguments


gdn_prefill = base.Tunable(
    partial(
        base.StepCase, _prefill, verdict="close", copied=("conv_states",), states=("ssm_state",), limit=_PREFILL_LIMIT,
        by_rounding=True,
    ),
    shapes=(
        *(base.packed("gdn_prefill", "16/32 {}", lengths, base.heads_of(16, 32)) for lengths in ((8192,), (1024,) * 8, (1024,))),
        *(base.packed("gdn_prefill", "4/8 {}", lengths, base.heads_of(4, 8)) for lengths in ((8192,), (1024,) * 8)),
    ),
    small=lambda shape: base.resized(shape, (66, 3, 1)[: len(shape.lengths)], num_k_heads=2, num_v_heads=4, head_k_dim=32,
                                     head_v_dim=32),
    peer_arguments=_prefill_arguments,
)  # fmt: skip
