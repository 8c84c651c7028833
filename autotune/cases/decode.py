"""The fused decode step as a case: outputs of projections as slices of wide rows, pools whose slots have no order."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch

from autotune.cases import base
from gdn.problems import GdnDecodeParams, GdnDecodeProblem


def _step(make: base.Maker, problem: GdnDecodeProblem, lengths: Sequence[int]) -> base.Work:
    """One decode step of a layer, with drafts or without."""
    if problem.interleaved or problem.concatenated or problem.has_rounding or not problem.conv_channels_contiguous:
        raise ValueError(f"problem: expected flat rows, windows with channels together, no noise, got {problem.static_key()}")
    if problem.has_accepted != problem.has_columns or (problem.cu_seqlens_dtype is None) != (max(lengths) == 1):
        raise ValueError(f"problem: expected offsets and accepted counts with drafts alone, got {problem.static_key()}")
    heads, K, V, dim = problem.num_v_heads, problem.head_k_dim, problem.head_v_dim, problem.dim
    rows, batch, columns = sum(lengths), len(lengths), max(lengths) if problem.has_columns else 1
    slots = make.order(batch * columns, batch * columns + 3, problem.index_dtype)
    qkv = make.normal(rows, dim + heads * V, dtype=problem.dtype)[:, :dim]
    z = make.normal(rows, dim + heads * V, dtype=problem.z_dtype)[:, dim:].unflatten(1, (heads, V))
    window = make.normal(batch * columns + 3, problem.width - 2 + columns, dim, dtype=problem.dtype)
    offsets = accepted = None
    if problem.cu_seqlens_dtype is not None:
        offsets = make.integers([0, *accumulate(lengths)], problem.cu_seqlens_dtype)
    if problem.has_accepted:
        accepted = make.integers([1 + n % columns for n in range(batch)], "int32")
    inner = (V, K) if problem.state_v_first else (K, V)
    arguments = {
        "mixed_qkv": qkv, "z": z, "b": make.normal(rows, 2 * heads, dtype=problem.b_dtype)[:, :heads],
        "a": make.normal(rows, 2 * heads, dtype=problem.a_dtype)[:, heads:],
        "conv_state": window.to(getattr(torch, problem.conv_dtype)).mT,
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


def _steps(heads: tuple[int, int], batch: int, state_dtype: str = "float32", drafts: int = 0) -> base.Shape:
    flags = {"cu_seqlens_dtype": "int32" if drafts else None, "has_columns": drafts > 0, "has_accepted": drafts > 0}
    return base.decode_steps("gdn_decode", heads, batch, drafts, state_dtype=state_dtype, **flags)


gdn_decode = base.Tunable(
    partial(base.StepCase, _step, verdict="close", copied=("conv_state",), states=("ssm_state",)),
    shapes=(
        *(_steps((16, 32), batch) for batch in (1, 8, 32, 128, 512)),
        *(_steps((16, 32), batch, "bfloat16") for batch in (128, 512)),
        *(_steps((4, 8), batch) for batch in (1, 8, 32, 128)),
        *(_steps((16, 32), batch, drafts=3) for batch in (32, 128)),
    ),
    small=lambda shape: base.resized(shape, shape.lengths[:3], num_k_heads=2, num_v_heads=4, head_k_dim=32, head_v_dim=32),
)
