"""The steps around the recurrence as cases: both convolutions, the projection split, the gates, both norms.

Inputs have a layer's layout: x of a convolution, a and b of the gates are slices of wider projections, and so is the norm's
gate where its problem keeps heads apart.

The fused decode and prefill step as cases: outputs of projections as slices of wide rows, pools whose slots have no order.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from gdn.core import tunable as base
from gdn.ops.delta_rule.cases import ring_of
from gdn.ops.delta_rule.replay import ring_shape
from gdn.ops.layer_step.problem import (
    AddRmsNormParams,
    AddRmsNormProblem,
    Conv1dParams,
    Conv1dProblem,
    Conv1dUpdateParams,
    Conv1dUpdateProblem,
    ConvolutionProblem,
    GatingParams,
    GatingProblem,
    GdnDecodeParams,
    GdnDecodeProblem,
    GdnPrefillParams,
    GdnPrefillProblem,
    RmsNormGatedParams,
    RmsNormGatedProblem,
    SplitParams,
    SplitProblem,
)


def _convolution(make: base.Maker, problem: ConvolutionProblem) -> dict[str, Any]:
    """Arguments x (a slice of a projection), the filter and out."""
    num_tokens = problem.sizes()["num_tokens"]
    return {
        "x": make.normal(num_tokens, problem.dim + problem.dim // 2, dtype=problem.dtype)[:, : problem.dim],
        "weight": make.normal(problem.dim, problem.width, dtype=problem.weight_dtype),
        "bias": None if problem.bias_dtype is None else make.normal(problem.dim, dtype=problem.bias_dtype),
        "activation": "silu" if problem.silu else None, "out": make.poisoned(num_tokens, problem.dim, dtype=problem.dtype),
    }  # fmt: skip


def _windows(make: base.Maker, problem: Any, together: bool, dtype: str, slots: int, columns: int) -> base.Tensor:
    """Windows with values that rows can have. together: the channels of a column are neighbours, else the columns of one."""
    values = make.normal(slots, *((columns, problem.dim) if together else (problem.dim, columns)), dtype=problem.dtype)
    values = values.to(getattr(torch, dtype))
    return values.mT if together else values


def _layer_windows(make: base.Maker, problem: GdnDecodeProblem | GdnPrefillProblem, slots: int, columns: int) -> base.Tensor:
    return _windows(make, problem, problem.conv_channels_contiguous, problem.conv_dtype, slots, columns)


def _pool(make: base.Maker, problem: ConvolutionProblem, slots: int, columns: int) -> base.Tensor:
    """Windows with values that x can have: the reference in float64 then keeps the same bits."""
    return _windows(make, problem, problem.state_channels_contiguous, str(problem.state_dtype), slots, columns)


def _conv1d(make: base.Maker, problem: Conv1dProblem, lengths: Sequence[int]) -> base.Work:
    if problem.checkpoint_dtype is not None:
        raise ValueError(f"problem: expected no checkpoints, got {problem.static_key()}")
    arguments, count = _convolution(make, problem), len(lengths)
    mask = make.integers([True] * count, "bool") if problem.has_mask else None
    arguments |= {
        "conv_states": None, "has_initial_state": mask, "cache_indices": None,
        "query_start_loc": make.integers([0, *accumulate(lengths)], problem.cu_seqlens_dtype),
    }  # fmt: skip
    updated: tuple[str, ...] = ()
    if problem.state_dtype is not None:
        arguments["conv_states"], updated = _pool(make, problem, count + 3, problem.width - 1), ("conv_states",)
    if problem.index_dtype is not None:
        arguments["cache_indices"] = make.order(count, count + 3, problem.index_dtype)
    own = {"cu_seqlens": arguments["query_start_loc"], "has_initial_state": None if mask is None else mask.view(torch.uint8)}
    params = base.params_of(Conv1dParams, arguments, **own, null_slot=-1)
    return base.Work("causal_conv1d_fn", arguments, params, (params.out,), updated)


def _conv1d_update(make: base.Maker, problem: Conv1dUpdateProblem, lengths: Sequence[int]) -> base.Work:
    if problem.has_accepted != problem.has_columns or (problem.cu_seqlens_dtype is None) != (max(lengths) == 1):
        raise ValueError(f"problem: expected offsets and accepted counts with drafts alone, got {problem.static_key()}")
    if problem.state_dtype is None or problem.index_dtype is None:
        raise ValueError(f"problem: expected a pool and indices, got {problem.static_key()}")
    arguments = _convolution(make, problem)
    batch, columns = len(lengths), max(lengths) if problem.has_columns else 1
    # A tree keeps a window per node, each in a slot of its own; a line of drafts one long window in its first slot.
    slots = make.order(batch * columns, batch * columns + 3, problem.index_dtype)
    window = problem.width - 1 + (0 if problem.has_parent else columns - 1)
    arguments |= {"conv_state": _pool(make, problem, batch * columns + 3, window), "conv_state_indices": slots}
    if problem.has_columns:
        arguments["conv_state_indices"] = slots.view(batch, columns)
        arguments["num_accepted_tokens"] = make.integers([1 + n % columns for n in range(batch)], "int32")
    if problem.cu_seqlens_dtype is not None:
        arguments["query_start_loc"] = make.integers([0, *accumulate(lengths)], problem.cu_seqlens_dtype)
    if problem.has_parent:  # two children a node
        parents = [(i - 1) // 2 if i else -1 for length in lengths for i in range(length)]
        arguments["parent_token"] = make.integers(parents, "int32")
    params = base.params_of(Conv1dUpdateParams, arguments, cu_seqlens=arguments.get("query_start_loc"), null_slot=-1)
    return base.Work("causal_conv1d_update", arguments, params, (params.out,), ("conv_state",))


def _split(make: base.Maker, problem: SplitProblem, lengths: Sequence[int]) -> base.Work:
    rows, heads, values = problem.num_tokens, problem.num_v_heads, problem.num_v_heads * problem.head_v_dim
    mixed_qkvz = make.normal(rows, problem.row_elements, dtype=problem.dtype)
    mixed_ba = make.normal(rows, 2 * heads, dtype=problem.ba_dtype)
    widths = ((problem.row_elements - values, problem.dtype), (values, problem.dtype), *[(heads, problem.ba_dtype)] * 2)
    outputs = tuple(make.poisoned(rows, width, dtype=dtype) for width, dtype in widths)
    arguments = {
        "mixed_qkvz": mixed_qkvz, "mixed_ba": mixed_ba, "num_heads_qk": problem.num_k_heads, "num_heads_v": heads,
        "head_qk": problem.head_k_dim, "head_v": problem.head_v_dim,
    }  # fmt: skip
    return base.Work("fused_qkvzba_split_reshape_cat", arguments, SplitParams(mixed_qkvz, mixed_ba, *outputs), outputs)


def _gating(make: base.Maker, problem: GatingProblem, lengths: Sequence[int]) -> base.Work:
    rows, heads = problem.num_tokens, problem.num_heads
    A_log, dt_bias = make.normal(heads, dtype=problem.A_log_dtype), make.normal(heads, dtype=problem.dt_bias_dtype)
    b = make.normal(rows, 2 * heads, dtype=problem.b_dtype)[:, :heads]
    a = make.normal(rows, 2 * heads, dtype=problem.a_dtype)[:, heads:]
    outputs = make.poisoned(rows, heads, dtype="float32"), make.poisoned(rows, heads, dtype="float32")
    arguments = {"A_log": A_log, "a": a, "b": b, "dt_bias": dt_bias}
    return base.Work("fused_gdn_gating", arguments, GatingParams(A_log, a, b, dt_bias, *outputs, 1.0, 20.0), outputs)


def _rms_norm_gated(make: base.Maker, problem: RmsNormGatedProblem, lengths: Sequence[int]) -> base.Work:
    rows, heads, dim = problem.num_tokens, problem.num_heads, problem.head_dim
    x = make.normal(rows, heads, dim, dtype=problem.dtype)
    gap = 0 if heads == 1 else 2 * heads * dim  # elements before z in a row of its projection
    z = make.normal(rows, gap + heads * dim, dtype=problem.z_dtype)[:, gap:].unflatten(1, (heads, dim))
    weight = make.normal(dim, dtype=problem.weight_dtype)
    out = make.poisoned(rows, heads, dim, dtype=problem.dtype)
    arguments = {"x": x, "z": z, "weight": weight, "activation": "sigmoid" if problem.sigmoid else "silu"}
    return base.Work("rms_norm_gated", arguments, RmsNormGatedParams(x, z, weight, out, 1e-6), (out,))


def _add_rms_norm(make: base.Maker, problem: AddRmsNormProblem, lengths: Sequence[int]) -> base.Work:
    if not problem.has_residual or problem.layer_scale_dtype is not None:
        raise ValueError(f"problem: expected a residual and no layer_scale, got {problem.static_key()}")
    x, residual = [make.normal(problem.num_tokens, problem.dim, dtype=problem.dtype) for _ in range(2)]
    weight = make.normal(problem.dim, dtype=problem.weight_dtype)
    normed, total = [make.poisoned(problem.num_tokens, problem.dim, dtype=problem.dtype) for _ in range(2)]
    arguments = {"x": x, "residual": residual, "weight": weight, "zero_centred": problem.zero_centred}
    params = AddRmsNormParams(x, residual, weight, None, normed, total, 1e-6)
    return base.Work("add_rms_norm", arguments, params, (normed, total))


def _prompts(heads: tuple[int, int], lengths: Sequence[int]) -> base.Shape:
    return base.packed("conv1d", f"{heads[0]}/{heads[1]} {{}}", lengths, base.heads_of(*heads))


def _update(batch: int, drafts: int = 0, tree: bool = False) -> base.Shape:
    return base.decode_steps("conv1d_update", (16, 32), batch, drafts, has_parent=tree, **_flags(drafts))


def _flags(drafts: int) -> dict[str, Any]:
    """Fields of a decode step that follow from its drafts."""
    return {"cu_seqlens_dtype": "int32" if drafts else None, "has_columns": drafts > 0, "has_accepted": drafts > 0}


def _projection(heads: tuple[int, int], num_tokens: int) -> base.Shape:
    return base.Shape(f"{heads[0]}/{heads[1]} {num_tokens}", base.example("split", base.heads_of(*heads), num_tokens=num_tokens))


def _gates(num_heads: int, num_tokens: int) -> base.Shape:
    return base.Shape(
        f"{num_tokens} x {num_heads}", base.example("gating", base.heads_of(num_heads, num_heads), num_tokens=num_tokens)
    )


def _norm(num_tokens: int, num_heads: int, strided: bool = False) -> base.Shape:
    """strided: the gate is a slice of its projection; otherwise all rows are contiguous and count as rows of one head."""
    heads, rows = (num_heads, num_tokens) if strided else (1, num_tokens * num_heads)
    problem = base.example("rms_norm_gated", base.heads_of(num_heads, num_heads), num_heads=heads, num_tokens=rows)
    return base.Shape(f"{num_tokens} x {num_heads} x 128" + (", gate in its projection" if strided else ""), problem)


def _residual(num_tokens: int, dim: int) -> base.Shape:
    problem = base.example("add_rms_norm", base.heads_of(16, 32), dim=dim, num_tokens=num_tokens)
    return base.Shape(f"{num_tokens} x {dim}", problem)


conv1d = base.Tunable(
    partial(base.StepCase, _conv1d, verdict="close", copied=("conv_states",)),
    shapes=(*(_prompts((16, 32), lengths) for lengths in ([8192], [1024] * 8, [64] * 128, [1024])), _prompts((4, 8), [8192])),
    useful_flops=base.no_flops,
    small=lambda shape: base.resized(shape, (70, 5), dim=64),
)
conv1d_update = base.Tunable(
    partial(base.StepCase, _conv1d_update, verdict="close", copied=("conv_state",)),
    shapes=(*(_update(batch) for batch in (1, 32, 128, 512)), _update(128, drafts=3), _update(128, drafts=3, tree=True)),
    useful_flops=base.no_flops,
    small=lambda shape: base.resized(shape, shape.lengths[:3], dim=64),
)
split = base.Tunable(
    partial(base.StepCase, _split, verdict="bits"),
    shapes=(_projection((16, 32), 8192), _projection((16, 32), 128), _projection((4, 8), 8192)),
    small=lambda shape: base.resized(shape, num_k_heads=2, num_v_heads=4, num_tokens=5),
)
gating = base.Tunable(
    partial(base.StepCase, _gating, verdict="close"),
    shapes=(_gates(32, 8192), _gates(32, 128)),
    small=lambda shape: base.resized(shape, num_tokens=5),
)
rms_norm_gated = base.Tunable(
    partial(base.StepCase, _rms_norm_gated, verdict="close"),
    shapes=(_norm(8192, 32), _norm(128, 32), _norm(8192, 32, strided=True), _norm(128, 32, strided=True)),
    small=lambda shape: base.resized(shape, num_tokens=5),
)
add_rms_norm = base.Tunable(
    partial(base.StepCase, _add_rms_norm, verdict="close"),
    shapes=tuple(_residual(num_tokens, dim) for dim in (2048, 4096, 5120) for num_tokens in (8192, 128, 32, 1)),
    small=lambda shape: base.resized(shape, num_tokens=5),
)


def _step(make: base.Maker, problem: GdnDecodeProblem, lengths: Sequence[int]) -> base.Work:
    """One decode step of a layer, with drafts or without."""
    if problem.has_rounding:
        raise ValueError(f"problem: expected no noise, got {problem.static_key()}")
    # With a ring drafts have no slots of their own.
    has_drafts = problem.has_columns if problem.ring_rows is None else problem.has_accepted
    if problem.has_accepted != has_drafts or (problem.cu_seqlens_dtype is None) != (max(lengths) == 1):
        raise ValueError(f"problem: expected offsets and accepted counts with drafts alone, got {problem.static_key()}")
    heads, K, V = problem.num_v_heads, problem.head_k_dim, problem.head_v_dim
    rows, batch, most = sum(lengths), len(lengths), max(lengths)
    columns = most if problem.has_columns else 1
    slots = make.order(batch * columns, batch * columns + 3, problem.index_dtype)
    offsets = accepted = None
    if problem.cu_seqlens_dtype is not None:
        offsets = make.integers([0, *accumulate(lengths)], problem.cu_seqlens_dtype)
    if problem.has_accepted:
        accepted = make.integers([1 + n % most for n in range(batch)], "int32")
    inner = (V, K) if problem.state_v_first else (K, V)
    arguments = {
        **_projections(make, problem, rows),
        "conv_state": _layer_windows(make, problem, batch * columns + 3, problem.width - 2 + (most if has_drafts else 1)),
        **_layer(make, problem),
        "ssm_state": make.normal(batch * columns + 3, heads, *inner, dtype=problem.state_dtype),
        "state_indices": slots.view(batch, columns) if problem.has_columns else slots, "query_start_loc": offsets,
        "num_accepted_tokens": accepted, "out": make.poisoned(rows, heads * V, dtype=problem.dtype),
        **_replay(make, problem, batch),
    }  # fmt: skip
    params = base.params_of(GdnDecodeParams, arguments, cu_seqlens=offsets, scale=K**-0.5, eps=1e-6, null_slot=-1)
    updated = ("conv_state", "ssm_state") if problem.ring_rows is None else ("conv_state", "ssm_state", "ring")
    return base.Work("fused_gdn_decode", arguments, params, (arguments["out"],), updated)


def _replay(make: base.Maker, problem: GdnDecodeProblem, batch: int) -> dict[str, Any]:
    """A ring, and positions that are spread evenly over the period of the folds: as many sequences fold as in a call of many."""
    if problem.ring_rows is None or problem.fold_every is None:
        return {}
    slots = batch + 3
    _, width, _ = ring_shape(problem.num_k_heads, problem.num_v_heads, problem.head_k_dim, problem.head_v_dim)
    positions = [(_PERIODS * batch + n) * problem.fold_every // batch for n in range(batch)]
    return {
        "ring": ring_of(make, 1, slots, problem.ring_rows, width)[0],
        "state_tokens": make.integers([0] * slots, "int32"), "num_computed_tokens": make.integers(positions, "int32"),
        "fold_every": problem.fold_every, "fold_phase": 0,
    }  # fmt: skip


def _layer(make: base.Maker, problem: GdnDecodeProblem | GdnPrefillProblem) -> dict[str, Any]:
    """Parameters and flags of a layer, which both steps take."""
    heads, dim, norm_dtype = problem.num_v_heads, problem.dim, problem.norm_dtype
    return {
        "conv_weight": make.normal(dim, problem.width, dtype=problem.weight_dtype),
        "conv_bias": None if problem.bias_dtype is None else make.normal(dim, dtype=problem.bias_dtype),
        "A_log": make.normal(heads, dtype=problem.A_log_dtype), "dt_bias": make.normal(heads, dtype=problem.dt_bias_dtype),
        "norm_weight": None if norm_dtype is None else make.normal(problem.head_v_dim, dtype=norm_dtype),
        "num_k_heads": problem.num_k_heads, "head_k_dim": problem.head_k_dim, "head_v_dim": problem.head_v_dim,
        "activation": "silu" if problem.silu else None, "gate_activation": "sigmoid" if problem.gate_sigmoid else "silu",
        "state_v_first": problem.state_v_first,
    }  # fmt: skip


def _two_projections(make: base.Maker, problem: GdnDecodeProblem | GdnPrefillProblem, rows: int) -> dict[str, Any]:
    """Rows of the two projections of the interleaved and the merged layout."""
    heads, values = problem.num_v_heads, problem.num_v_heads * problem.head_v_dim
    return {
        "mixed_qkv": make.normal(rows, problem.dim + values, dtype=problem.dtype), "z": None,
        "b": make.normal(rows, 2 * heads, dtype=problem.b_dtype), "a": None,
        "projection_layout": "merged" if problem.merged else "interleaved",
    }  # fmt: skip


def _projections(make: base.Maker, problem: GdnDecodeProblem, rows: int) -> dict[str, Any]:
    """Rows of the projections: slices of wide ones, or the whole, as the layer passes it."""
    heads, values, dim = problem.num_v_heads, problem.num_v_heads * problem.head_v_dim, problem.dim
    if problem.interleaved or problem.merged:
        return _two_projections(make, problem, rows)
    if problem.concatenated:
        row = make.normal(rows, dim + values + 2 * heads, dtype=problem.dtype)
        return {"mixed_qkv": row, **dict.fromkeys(("z", "b", "a")), "projection_layout": "concatenated"}
    z = None
    if problem.z_dtype is not None:
        z = make.normal(rows, dim + values, dtype=problem.z_dtype)[:, dim:].unflatten(1, (heads, problem.head_v_dim))
    return {
        "mixed_qkv": make.normal(rows, dim + values, dtype=problem.dtype)[:, :dim],
        "z": z,
        "b": make.normal(rows, 2 * heads, dtype=problem.b_dtype)[:, :heads],
        "a": make.normal(rows, 2 * heads, dtype=problem.a_dtype)[:, heads:],
    }


def step_shape(heads: tuple[int, int], batch: int, state_dtype: str = "float32", drafts: int = 0, **fields: Any) -> base.Shape:
    return base.decode_steps("gdn_decode", heads, batch, drafts, state_dtype=state_dtype, **_flags(drafts), **fields)


_PERIODS = 64  # of folds before a call with a ring
_WHOLE: dict[str, Any] = {"concatenated": True, **dict.fromkeys(("z_dtype", "b_dtype", "a_dtype"))}  # as the layer's
_CONCATENATED = [step_shape((16, 32), batch, **_WHOLE) for batch in (1, 32, 128)]

gdn_decode = base.Tunable(
    partial(base.StepCase, _step, verdict="close", copied=("conv_state",), states=("ssm_state", "ring")),
    shapes=(
        *(step_shape((16, 32), batch) for batch in (1, 8, 32, 128, 512)),
        *(step_shape((16, 32), batch, "bfloat16") for batch in (128, 512)),
        *(step_shape((4, 8), batch) for batch in (1, 8, 32, 128)),
        *(step_shape((16, 32), batch, drafts=3) for batch in (32, 128)),
    ),
    measured_only=tuple(replace(shape, name=f"{shape.name}, concatenated") for shape in _CONCATENATED),
    small=lambda shape: base.resized(shape, shape.lengths[:3], num_k_heads=2, num_v_heads=4, head_k_dim=32, head_v_dim=32),
)


# Largest accepted relative error: that of the chunk form, and of q, k and v in 16 bits before it. The
# norm makes both larger where an output is next to nothing: such a row is judged by the reference with the same roundings.
_PREFILL_LIMIT = 1e-2


def _rows(make: base.Maker, problem: GdnPrefillProblem, rows: int) -> dict[str, Any]:
    """Rows of the projections: q, k, v and z as slices of one, b and a of others; or the whole of two."""
    if problem.interleaved or problem.merged:
        return _two_projections(make, problem, rows)
    heads, V, dim = problem.num_v_heads, problem.head_v_dim, problem.dim
    wide, z = make.normal(rows, dim + heads * V, dtype=problem.dtype), None
    if problem.z_dtype is not None:
        z = wide[:, dim:].to(getattr(torch, problem.z_dtype)).unflatten(1, (heads, V))
    return {
        "mixed_qkv": wide[:, :dim], "z": z, "b": make.normal(rows, 2 * heads, dtype=problem.b_dtype)[:, :heads],
        "a": make.normal(rows, 2 * heads, dtype=problem.a_dtype)[:, heads:],
    }  # fmt: skip


def _prefill(make: base.Maker, problem: GdnPrefillProblem, lengths: Sequence[int]) -> base.Work:
    """One prefill step of a layer; two sequences of three continue from their slots."""
    if problem.has_checkpoints or not problem.has_mask:
        raise ValueError(f"problem: expected a mask and no checkpoints, got {problem.static_key()}")
    heads, K, V = problem.num_v_heads, problem.head_k_dim, problem.head_v_dim
    rows, count = sum(lengths), len(lengths)
    inner = (V, K) if problem.state_v_first else (K, V)
    arguments = {
        **_rows(make, problem, rows), "conv_states": _layer_windows(make, problem, count + 3, problem.width - 1),
        **_layer(make, problem),
        "ssm_state": make.normal(count + 3, heads, *inner, dtype=problem.state_dtype),
        "state_indices": make.order(count, count + 3, problem.index_dtype),
        "query_start_loc": make.integers([0, *accumulate(lengths)], problem.cu_seqlens_dtype),
        "has_initial_state": make.integers([n % 3 != 1 for n in range(count)], "bool"),
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
