"""Convolution, gates, split, norm and the fused decode: bad calls raise, name the argument, and touch nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gdn
from gdn.testing.compare import same_bits
from tests.ops.bad_calls import Bad

H, HV, K, V, W, DIM = 2, 4, 8, 8, 4, 2 * 2 * 8 + 4 * 8
Arguments = dict[str, Any]


def conv_fn() -> Arguments:
    return {
        "x": torch.randn(6, DIM), "weight": torch.randn(DIM, W), "bias": torch.randn(DIM),
        "conv_states": torch.randn(5, DIM, W - 1), "query_start_loc": torch.tensor([0, 2, 6]),
        "cache_indices": torch.tensor([3, 1]), "out": torch.zeros(6, DIM),
    }  # fmt: skip


def conv_update() -> Arguments:
    return {
        "x": torch.randn(6, DIM), "conv_state": torch.randn(5, DIM, W), "weight": torch.randn(DIM, W),
        "query_start_loc": torch.tensor([0, 2, 6]), "conv_state_indices": torch.tensor([[3, 1], [2, 4]]),
        "num_accepted_tokens": torch.tensor([1, 2], dtype=torch.int32), "out": torch.zeros(6, DIM),
    }  # fmt: skip


def gating() -> Arguments:
    return {"A_log": torch.randn(HV), "a": torch.randn(3, HV), "b": torch.randn(3, HV), "dt_bias": torch.randn(HV)}


def split() -> Arguments:
    return {
        "mixed_qkvz": torch.randn(3, 2 * H * K + 2 * HV * V), "mixed_ba": torch.randn(3, 2 * HV), "num_heads_qk": H,
        "num_heads_v": HV, "head_qk": K, "head_v": V,
    }  # fmt: skip


def add_norm() -> Arguments:
    return {"x": torch.randn(3, V), "residual": torch.randn(3, V), "weight": torch.randn(V)}


def norm() -> Arguments:
    return {"x": torch.randn(3, HV, V), "z": torch.randn(3, HV, V), "weight": torch.randn(V)}


def decode() -> Arguments:
    return {
        "mixed_qkv": torch.randn(3, DIM), "z": torch.randn(3, HV, V), "b": torch.randn(3, HV), "a": torch.randn(3, HV),
        "conv_state": torch.randn(6, DIM, W - 1), "conv_weight": torch.randn(DIM, W), "A_log": torch.randn(HV),
        "dt_bias": torch.randn(HV), "norm_weight": torch.randn(V), "ssm_state": torch.randn(6, HV, K, V),
        "state_indices": torch.tensor([4, 2, 0]), "num_k_heads": H, "head_k_dim": K, "head_v_dim": V,
        "out": torch.zeros(3, HV * V),
    }  # fmt: skip


CALLS: list[tuple[str, Callable[[], Arguments], Bad]] = [
    ("causal_conv1d_fn", conv_fn, Bad("x_rank", lambda a: {"x": a["x"][0]}, ValueError, r"^x: expected shape \[tokens, dim\]")),
    ("causal_conv1d_fn", conv_fn, Bad("x_dtype", lambda a: {"x": a["x"].int()}, TypeError, r"^x: expected dtype float32")),
    ("causal_conv1d_fn", conv_fn, Bad("weight", lambda a: {"weight": a["weight"][1:]}, ValueError, r"^x: expected 63 channels")),
    ("causal_conv1d_fn", conv_fn, Bad("width", lambda a: {"weight": a["weight"][:, :1]}, ValueError, r"^weight: .*w >= 2")),
    ("causal_conv1d_fn", conv_fn, Bad("bias", lambda a: {"bias": a["bias"][1:]}, ValueError, r"^bias: expected shape \[64\]")),
    ("causal_conv1d_fn", conv_fn, Bad("activation", lambda a: {"activation": "relu"}, ValueError, r"^activation: .*got 'relu'")),
    (
        "causal_conv1d_fn",
        conv_fn,
        Bad("columns", lambda a: {"conv_states": a["conv_states"][..., :2]}, ValueError, r"^conv_states: .*columns >= 3\], got"),
    ),
    (
        "causal_conv1d_fn",
        conv_fn,
        Bad(
            "no_slots",
            lambda a: {"conv_states": a["conv_states"][:1], "cache_indices": None},
            ValueError,
            r"^conv_states: expected at least 2 slots without cache_indices, got shape \[1",
        ),
    ),
    (
        "causal_conv1d_fn",
        conv_fn,
        Bad(
            "indices",
            lambda a: {"cache_indices": a["cache_indices"][:1]},
            ValueError,
            r"^cache_indices: .*N = 2, got shape \[1\]",
        ),
    ),
    (
        "causal_conv1d_fn",
        conv_fn,
        Bad("mask", lambda a: {"has_initial_state": a["cache_indices"]}, TypeError, r"^has_initial_state: expected dtype bool"),
    ),
    (
        "causal_conv1d_fn",
        conv_fn,
        Bad(
            "offsets", lambda a: {"query_start_loc": a["query_start_loc"].float()}, TypeError, r"^query_start_loc: expected dtype"
        ),
    ),
    (
        "causal_conv1d_fn",
        conv_fn,
        Bad(
            "checkpoint",
            lambda a: {"checkpoint_slots": a["cache_indices"][:, None]},
            ValueError,
            r"^checkpoint_offsets: expected",
        ),
    ),
    ("causal_conv1d_fn", conv_fn, Bad("out", lambda a: {"out": a["out"][1:]}, ValueError, r"^out: expected shape \[6, 64\]")),
    ("causal_conv1d_fn", conv_fn, Bad("backend", lambda a: {"backend": "cute"}, ValueError, r"cute")),
    (
        "causal_conv1d_update",
        conv_update,
        Bad("x", lambda a: {"x": a["x"][..., None]}, ValueError, r"^x: expected shape \[tokens"),
    ),
    (
        "causal_conv1d_update",
        conv_update,
        Bad(
            "columns", lambda a: {"conv_state": a["conv_state"][..., :3]}, ValueError, r"^conv_state: .*columns >= 4\], got shape"
        ),
    ),
    (
        "causal_conv1d_update",
        conv_update,
        Bad(
            "indices",
            lambda a: {"conv_state_indices": a["conv_state_indices"].float()},
            TypeError,
            r"^conv_state_indices: expected",
        ),
    ),
    (
        "causal_conv1d_update",
        conv_update,
        Bad(
            "accepted",
            lambda a: {"num_accepted_tokens": a["num_accepted_tokens"][:1]},
            ValueError,
            r"^num_accepted_tokens: .*N = 2",
        ),
    ),
    (
        "causal_conv1d_update",
        conv_update,
        Bad(
            "parent",
            lambda a: {
                "parent_token": torch.zeros(6),
            },
            TypeError,
            r"^parent_token: expected dtype int32",
        ),
    ),
    (
        "causal_conv1d_update",
        conv_update,
        Bad(
            "parent_1d",
            lambda a: {"parent_token": torch.zeros(6).int(), "conv_state_indices": a["conv_state_indices"][:, 0]},
            ValueError,
            r"^parent_token: expected -1 or a node before node 0, got 0",
        ),
    ),
    ("fused_gdn_gating", gating, Bad("b", lambda a: {"b": a["b"][1:]}, ValueError, r"^b: expected shape \[3, 4\]")),
    ("fused_gdn_gating", gating, Bad("A_log", lambda a: {"A_log": a["A_log"][1:]}, ValueError, r"^A_log: expected shape \[4\]")),
    ("fused_gdn_gating", gating, Bad("a", lambda a: {"a": a["a"].int()}, TypeError, r"^a: expected dtype")),
    ("fused_gdn_gating", gating, Bad("beta", lambda a: {"beta": 0.0}, ValueError, r"^beta: expected a number > 0, got 0.0")),
    (
        "fused_qkvzba_split_reshape_cat",
        split,
        Bad("width", lambda a: {"mixed_qkvz": a["mixed_qkvz"][:, 1:]}, ValueError, r"^mixed_qkvz: expected shape \[L, 96\], got"),
    ),
    (
        "fused_qkvzba_split_reshape_cat",
        split,
        Bad("ba", lambda a: {"mixed_ba": a["mixed_ba"][1:]}, ValueError, r"^mixed_ba: expected shape \[3, 8\]"),
    ),
    (
        "fused_qkvzba_split_reshape_cat",
        split,
        Bad("heads", lambda a: {"num_heads_v": 3}, ValueError, r"^num_heads_v: expected a mul"),
    ),
    (
        "add_rms_norm",
        add_norm,
        Bad("residual", lambda a: {"residual": a["residual"][1:]}, ValueError, r"^residual: expected shape \[3, 8\]"),
    ),
    (
        "add_rms_norm",
        add_norm,
        Bad("dtype", lambda a: {"residual": a["residual"].bfloat16()}, TypeError, r"^residual: expected dtype float32"),
    ),
    ("add_rms_norm", add_norm, Bad("gain", lambda a: {"weight": a["weight"][1:]}, ValueError, r"^weight: expected shape \[8\]")),
    ("add_rms_norm", add_norm, Bad("flag", lambda a: {"zero_centred": 1}, TypeError, r"^zero_centred: expected a bool")),
    (
        "add_rms_norm",
        add_norm,
        Bad("scale", lambda a: {"layer_scale": a["weight"][1:]}, ValueError, r"^layer_scale: expected shape \[8\]"),
    ),
    (
        "add_rms_norm",
        add_norm,
        Bad(
            "scale alone",
            lambda a: {"layer_scale": a["weight"], "residual": None},
            ValueError,
            r"^layer_scale: expected None without a residual, got a tensor",
        ),
    ),
    ("rms_norm_gated", norm, Bad("z", lambda a: {"z": a["z"][1:]}, ValueError, r"^z: expected shape \[3, 4, 8\]")),
    ("rms_norm_gated", norm, Bad("weight", lambda a: {"weight": a["weight"][1:]}, ValueError, r"^weight: expected shape \[8\]")),
    ("rms_norm_gated", norm, Bad("eps", lambda a: {"eps": -1.0}, ValueError, r"^eps: expected a number >= 0, got -1")),
    ("rms_norm_gated", norm, Bad("eps size", lambda a: {"eps": 10**400}, ValueError, r"^eps: expected a finite number, got inf")),
    ("rms_norm_gated", norm, Bad("eps type", lambda a: {"eps": "1e-6"}, TypeError, r"^eps: expected a number, got str")),
    ("rms_norm_gated", norm, Bad("activation", lambda a: {"activation": "gelu"}, ValueError, r"^activation: .*got 'gelu'")),
    (
        "fused_gdn_decode",
        decode,
        Bad("width", lambda a: {"mixed_qkv": a["mixed_qkv"][:, 1:]}, ValueError, r"^mixed_qkv: expected sh"),
    ),
    (
        "fused_gdn_decode",
        decode,
        Bad("layout", lambda a: {"projection_layout": "x"}, ValueError, r"^projection_layout: .*got 'x'"),
    ),
    ("fused_gdn_decode", decode, Bad("z_none", lambda a: {"z": None}, TypeError, r"^z: expected a torch.Tensor, got NoneType")),
    (
        "fused_gdn_decode",
        decode,
        Bad(
            "interleaved_z",
            lambda a: {"projection_layout": "interleaved", "mixed_qkv": torch.zeros(3, DIM + HV * V)},
            ValueError,
            r"^z: expected None with projection_layout='interleaved'",
        ),
    ),
    (
        "fused_gdn_decode",
        decode,
        Bad(
            "merged_a",
            lambda a: {
                "projection_layout": "merged",
                "mixed_qkv": torch.zeros(3, DIM + HV * V),
                "z": None,
                "b": a["b"].repeat(1, 2),
            },
            ValueError,
            r"^a: expected None with projection_layout='merged'",
        ),
    ),
    (
        "fused_gdn_decode",
        decode,
        Bad(
            "merged_gates",
            lambda a: {"projection_layout": "merged", "mixed_qkv": torch.zeros(3, DIM + HV * V), "z": None, "a": None},
            ValueError,
            r"^b: expected shape",
        ),
    ),
    (
        "fused_gdn_decode",
        decode,
        Bad(
            "concatenated_b",
            lambda a: {"projection_layout": "concatenated", "mixed_qkv": torch.zeros(3, DIM + HV * V + 2 * HV), "z": None},
            ValueError,
            r"^b: expected None with projection_layout='concatenated'",
        ),
    ),
    (
        "fused_gdn_decode",
        decode,
        Bad(
            "concatenated_width",
            lambda a: {"projection_layout": "concatenated", **dict.fromkeys(("z", "b", "a"))},
            ValueError,
            r"^mixed_qkv: expected shape \[tokens, >= \d+\]",
        ),
    ),
    (
        "fused_gdn_decode",
        decode,
        Bad("heads", lambda a: {"num_k_heads": 3}, ValueError, r"^A_log: .*multiple of num_k_heads = 3"),
    ),
    (
        "fused_gdn_decode",
        decode,
        Bad("state", lambda a: {"ssm_state": a["ssm_state"].half()}, TypeError, r"^ssm_state: .*float16"),
    ),
    (
        "fused_gdn_decode",
        decode,
        Bad("stride", lambda a: {"ssm_state": a["ssm_state"].mT}, ValueError, r"^ssm_state: .*contiguous inn"),
    ),
    (
        "fused_gdn_decode",
        decode,
        Bad("conv", lambda a: {"conv_state": a["conv_state"][:, 1:]}, ValueError, r"^conv_state: expected"),
    ),
    (
        "fused_gdn_decode",
        decode,
        Bad(
            "accepted", lambda a: {"num_accepted_tokens": torch.ones(3).int()}, ValueError, r"^num_accepted_tokens: expected None"
        ),
    ),
    (
        "fused_gdn_decode",
        decode,
        Bad("gate", lambda a: {"gate_activation": "relu"}, ValueError, r"^gate_activation: .*got 'relu'"),
    ),
    ("fused_gdn_decode", decode, Bad("seed", lambda a: {"rounding_seed": torch.ones(1)}, TypeError, r"^rounding_seed: .*int64")),
    ("fused_gdn_decode", decode, Bad("backend", lambda a: {"backend": "tilelang"}, ValueError, r"tilelang")),
]


def spoil(function: str, good: Arguments, bad: Bad) -> None:
    tensors = [x for x in good.values() if isinstance(x, torch.Tensor)]
    before = [x.clone() for x in tensors]
    with pytest.raises(bad.error, match=bad.match):
        getattr(gdn, function)(**{**good, **bad.change(good)})
    assert all(same_bits(x, y) for x, y in zip(tensors, before, strict=True))


@pytest.mark.parametrize(("function", "good", "bad"), CALLS, ids=[f"{call[0]}-{call[2].name}" for call in CALLS])
def test_bad_calls(function: str, good: Callable[[], Arguments], bad: Bad) -> None:
    spoil(function, good(), bad)


VALIDATED = [
    (
        "causal_conv1d_fn",
        conv_fn,
        Bad(
            "slot",
            lambda a: {"cache_indices": torch.tensor([0, 5])},
            ValueError,
            r"^cache_indices: expected slots below 5 .*got 5",
        ),
    ),
    (
        "causal_conv1d_fn",
        conv_fn,
        Bad(
            "offsets",
            lambda a: {"query_start_loc": torch.tensor([0, 4, 3])},
            ValueError,
            r"^query_start_loc: expected offsets that",
        ),
    ),
    (
        "causal_conv1d_update",
        conv_update,
        Bad(
            "accepted",
            lambda a: {"num_accepted_tokens": torch.tensor([1, 3])},
            ValueError,
            r"^num_accepted_tokens: expected 1 to 2",
        ),
    ),
    (
        "fused_gdn_decode",
        decode,
        Bad(
            "slot",
            lambda a: {"state_indices": torch.tensor([0, 1, 6])},
            ValueError,
            r"^state_indices: expected slots below 6 .*got 6",
        ),
    ),
]


@pytest.mark.parametrize(("function", "good", "bad"), VALIDATED, ids=[f"{call[0]}-{call[2].name}" for call in VALIDATED])
def test_validate(function: str, good: Callable[[], Arguments], bad: Bad, switch: Callable[..., object]) -> None:
    switch(GDN_VALIDATE="1")
    getattr(gdn, function)(**good())
    spoil(function, good(), bad)
