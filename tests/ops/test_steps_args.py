"""Convolution, gates, split, norm and the fused decode: bad calls raise, name the argument, and touch nothing."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import gdn
from tests.described import plain
from tests.ops.bad_calls import Bad, check

H, HV, K, V, W, DIM = 2, 4, 8, 8, 4, 2 * 2 * 8 + 4 * 8
Arguments = dict[str, Any]


def _plain(name: str) -> Callable[[], Arguments]:
    return partial(plain.call, name, 3, torch.float32)


def conv_update() -> Arguments:
    return {
        "x": torch.randn(6, DIM), "conv_state": torch.randn(5, DIM, W), "weight": torch.randn(DIM, W),
        "query_start_loc": torch.tensor([0, 2, 6]), "conv_state_indices": torch.tensor([[3, 1], [2, 4]]),
        "num_accepted_tokens": torch.tensor([1, 2], dtype=torch.int32), "out": torch.zeros(6, DIM),
    }  # fmt: skip


def decode() -> Arguments:
    return {
        "mixed_qkv": torch.randn(3, DIM), "z": torch.randn(3, HV, V), "b": torch.randn(3, HV), "a": torch.randn(3, HV),
        "conv_state": torch.randn(6, DIM, W - 1), "conv_weight": torch.randn(DIM, W), "A_log": torch.randn(HV),
        "dt_bias": torch.randn(HV), "norm_weight": torch.randn(V), "ssm_state": torch.randn(6, HV, K, V),
        "state_indices": torch.tensor([4, 2, 0]), "num_k_heads": H, "head_k_dim": K, "head_v_dim": V,
        "out": torch.zeros(3, HV * V),
    }  # fmt: skip


# The wording of relations between arguments, and what is special; what is refused of every argument is in tests/ops/spoiling.
BAD: dict[str, tuple[Callable[[], Arguments], list[Bad]]] = {
    "causal_conv1d_fn": (_plain("causal_conv1d_fn"), [
        Bad("weight", lambda a: {"weight": a["weight"][1:]}, ValueError, r"^x: expected 11 channels"),
        Bad("columns", lambda a: {"conv_states": a["conv_states"][..., :2]}, ValueError, r"^conv_states: .*columns >= 3\], got"),
        Bad(
            "no_slots", lambda a: {"conv_states": a["conv_states"][:1], "cache_indices": None}, ValueError,
            r"^conv_states: expected at least 2 slots without cache_indices, got shape \[1",
        ),
        Bad("backend", lambda a: {"backend": "cute"}, ValueError, r"cute"),
    ]),
    "causal_conv1d_update": (conv_update, [
        Bad("columns", lambda a: {"conv_state": a["conv_state"][..., :3]}, ValueError, r"^conv_state: .*columns >= 4\], got"),
        Bad(
            "parent_1d", lambda a: {"parent_token": torch.zeros(6).int(), "conv_state_indices": a["conv_state_indices"][:, 0]},
            ValueError, r"^parent_token: expected -1 or a node before node 0, got 0",
        ),
    ]),
    "fused_qkvzba_split_reshape_cat": (_plain("fused_qkvzba_split_reshape_cat"), [
        Bad("width", lambda a: {"mixed_qkvz": a["mixed_qkvz"][:, 1:]}, ValueError, r"^mixed_qkvz: expected shape \[L, 48\], got"),
        Bad("heads", lambda a: {"num_heads_v": 3}, ValueError, r"^num_heads_v: expected a mul"),
    ]),
    "add_rms_norm": (_plain("add_rms_norm"), [
        Bad(
            "scale alone", lambda a: {"layer_scale": a["weight"], "residual": None}, ValueError,
            r"^layer_scale: expected None without a residual, got a tensor",
        ),
    ]),
    "fused_gdn_decode": (decode, [
        Bad("width", lambda a: {"mixed_qkv": a["mixed_qkv"][:, 1:]}, ValueError, r"^mixed_qkv: expected sh"),
        Bad("z_none", lambda a: {"z": None}, TypeError, r"^z: expected a torch.Tensor, got NoneType"),
        Bad(
            "interleaved_z", lambda a: {"projection_layout": "interleaved", "mixed_qkv": torch.zeros(3, DIM + HV * V)},
            ValueError, r"^z: expected None with projection_layout='interleaved'",
        ),
        Bad("merged_a", lambda a: _merged() | {"b": a["b"].repeat(1, 2)}, ValueError, r"^a: .*None with .*='merged'"),
        Bad("merged_gates", lambda a: _merged() | {"a": None}, ValueError, r"^b: expected shape"),
        Bad(
            "concatenated_b",
            lambda a: {"projection_layout": "concatenated", "mixed_qkv": torch.zeros(3, DIM + HV * V + 2 * HV), "z": None},
            ValueError, r"^b: expected None with projection_layout='concatenated'",
        ),
        Bad(
            "concatenated_width", lambda a: {"projection_layout": "concatenated", **dict.fromkeys(("z", "b", "a"))},
            ValueError, r"^mixed_qkv: expected shape \[tokens, >= \d+\]",
        ),
        Bad("heads", lambda a: {"num_k_heads": 3}, ValueError, r"^A_log: .*multiple of num_k_heads = 3"),
        Bad("stride", lambda a: {"ssm_state": a["ssm_state"].mT}, ValueError, r"^ssm_state: .*contiguous inn"),
        Bad("accepted", lambda a: {"num_accepted_tokens": torch.ones(3).int()}, ValueError, r"^num_accepted_tokens: .*None"),
        Bad("backend", lambda a: {"backend": "tilelang"}, ValueError, r"tilelang"),
    ]),
}  # fmt: skip
CALLS = [(function, good, bad) for function, (good, every) in BAD.items() for bad in every]


def _merged() -> Arguments:
    return {"projection_layout": "merged", "mixed_qkv": torch.zeros(3, DIM + HV * V), "z": None}


@pytest.mark.parametrize(("function", "good", "bad"), CALLS, ids=[f"{call[0]}-{call[2].name}" for call in CALLS])
def test_bad_calls(function: str, good: Callable[[], Arguments], bad: Bad) -> None:
    check(function, good(), bad)


def test_accepted_counts_beyond_the_columns(switch: Callable[..., object]) -> None:
    """An engine's mistake with GDN_VALIDATE=1; padding without."""
    switch(GDN_VALIDATE="1")
    gdn.causal_conv1d_update(**conv_update())
    beyond = {"num_accepted_tokens": torch.tensor([1, 3])}
    bad = Bad("accepted", lambda a: beyond, ValueError, r"^num_accepted_tokens: expected 1 to 2")
    check("causal_conv1d_update", conv_update(), bad)
