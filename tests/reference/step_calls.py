"""Calls of the fused steps in float64, on a small layer, in all layouts of the projections."""

from typing import Any

import torch

from tests.reference.calls import Arguments, randn

F64 = torch.float64
H, HV, K, V, W = 2, 4, 6, 8, 4
CHANNELS = 2 * H * K + HV * V
POOLS = ("conv_state", "conv_states", "ssm_state")


def flat_call(rows: int, windows: str, columns: int, **more: Any) -> Arguments:
    """Projections of so many tokens, the layer's parameters, and pools of 9 slots. windows: name of the convolution's pool."""
    shapes: dict[str, tuple[int, ...]] = {
        "mixed_qkv": (rows, CHANNELS), "z": (rows, HV, V), "b": (rows, HV), "a": (rows, HV), windows: (9, CHANNELS, columns),
        "conv_weight": (CHANNELS, W), "A_log": (HV,), "dt_bias": (HV,), "norm_weight": (V,), "ssm_state": (9, HV, K, V),
    }  # fmt: skip
    drawn = {name: randn(*shape, seed=seed, dtype=F64) for seed, (name, shape) in enumerate(shapes.items())}
    return drawn | {"num_k_heads": H, "head_k_dim": K, "head_v_dim": V} | more


def in_layout(flat: Arguments, layout: str) -> Arguments:
    """The same call with its projections in another layout, on pools of its own."""
    given = {
        **flat,
        **{name: flat[name].clone() for name in POOLS if name in flat},
        "projection_layout": layout,
        "z": None,
        "a": None,
    }
    mixed, z, b, a = (flat[name] for name in ("mixed_qkv", "z", "b", "a"))
    if layout == "interleaved":  # by key heads: q, k, the group's v and z; its b and a
        q, k, v = mixed.split([H * K, H * K, HV * V], dim=1)
        parts = [part.reshape(len(mixed), H, -1) for part in (q, k, v, z)]
        gates = [gate.view(len(mixed), H, HV // H) for gate in (b, a)]
        return given | {"mixed_qkv": torch.cat(parts, dim=2).flatten(1), "b": torch.cat(gates, dim=2).flatten(1)}
    if layout == "merged":
        return given | {"mixed_qkv": torch.cat([mixed, z.flatten(1)], 1), "b": torch.cat([b, a], 1)}
    spare = torch.full((len(mixed), 3), torch.nan, dtype=F64)
    return given | {"mixed_qkv": torch.cat([mixed, z.flatten(1), b, a, spare], 1), "b": None}
