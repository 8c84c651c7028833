"""The fused steps without the norm: what they return is o, and the norm of it is the whole step."""

from typing import Any

import pytest
import torch

import gdn
from tests.described import plain
from tests.ops.spoiling.calls import good_call

POOLS = ("conv_state", "conv_states", "ssm_state")
Arguments = dict[str, Any]


def wide(arguments: Arguments) -> Arguments:
    """The arguments with floats in float64, pools as copies."""
    return {
        name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() and name != "ssm_state"
        else x.clone() if name in POOLS else x
        for name, x in arguments.items()
    }  # fmt: skip


def check(function: Any, arguments: Arguments, z: torch.Tensor) -> None:
    whole, part = wide(arguments), wide(arguments)
    expected = function(**whole)
    part["norm_weight"] = None
    if part["projection_layout"] == "flat":
        part["z"] = None
    o = function(**part)
    heads = z.shape[1]
    normed = gdn.rms_norm_gated(
        o.unflatten(1, (heads, -1)), z.double(), arguments["norm_weight"].double(), arguments.get("eps", 1e-6),
        arguments.get("gate_activation", "silu"),
    ).flatten(1)  # fmt: skip
    torch.testing.assert_close(normed, expected, rtol=1e-9, atol=1e-12)
    for name in POOLS:
        if name in arguments:
            assert torch.equal(part[name], whole[name])


def z_of(arguments: Arguments) -> Any:
    """z, which a row of all projections but pairs has after q, k and v."""
    if arguments["z"] is not None:
        return arguments["z"]
    width = arguments["A_log"].shape[0] * arguments["head_v_dim"]
    first = 2 * arguments["num_k_heads"] * arguments["head_k_dim"] + width
    return arguments["mixed_qkv"][:, first : first + width].unflatten(1, (-1, arguments["head_v_dim"]))


@pytest.mark.parametrize("function", [gdn.fused_gdn_decode, gdn.fused_gdn_prefill])
def test_drawn_calls(function: Any) -> None:
    layouts = set()
    for seed in range(60):
        arguments = {"projection_layout": "flat"} | good_call(function.__name__, seed).arguments | {"scale": 2, "eps": 1e-3}
        others = ("ring", "intermediate_states", "checkpoint_states", "checkpoint_windows", "out")  # no float64
        is_normed = arguments.get("norm_weight") is not None
        if is_normed and arguments["projection_layout"] != "interleaved" and arguments.keys().isdisjoint(others):
            check(function, arguments, z_of(arguments))
            layouts.add(arguments["projection_layout"])
    assert layouts == {"flat", "merged"} | ({"concatenated"} if function is gdn.fused_gdn_decode else set())


@pytest.mark.parametrize(("name", "tokens"), [("fused_gdn_decode", 4), ("fused_gdn_prefill", 70)])
def test_z_without_the_norm_is_refused(name: str, tokens: int) -> None:
    with pytest.raises(ValueError, match="^z: expected None without norm_weight, got a tensor"):
        getattr(gdn, name)(**plain.call(name, tokens, torch.bfloat16) | {"norm_weight": None})
