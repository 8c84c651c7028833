"""The fused steps without the norm: what they return is o, and the norm of it is the whole step."""

from typing import Any

import pytest
import torch

import gdn
from tests.ops.test_decode_launch import VARIANTS, arguments_of
from tests.ops.test_prefill_launch import prefill_arguments

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


@pytest.mark.parametrize("name", ["plain", "columns", "merged", "concatenated", "given"])
def test_decode(name: str) -> None:
    arguments = {"projection_layout": "flat"} | arguments_of(4, **VARIANTS[name])
    z = arguments["z"]
    if name in ("merged", "concatenated"):
        heads, v_dim = arguments["A_log"].shape[0], arguments["head_v_dim"]
        first = 2 * arguments["num_k_heads"] * arguments["head_k_dim"] + heads * v_dim
        z = arguments["mixed_qkv"][:, first : first + heads * v_dim].unflatten(1, (heads, v_dim))
    check(gdn.fused_gdn_decode, arguments, z)


def test_prefill() -> None:
    arguments = {"projection_layout": "flat"} | prefill_arguments(70)
    check(gdn.fused_gdn_prefill, arguments, arguments["z"])


@pytest.mark.parametrize("function", [gdn.fused_gdn_decode, gdn.fused_gdn_prefill])
def test_z_without_the_norm_is_refused(function: Any) -> None:
    arguments = arguments_of(4) if function is gdn.fused_gdn_decode else prefill_arguments(70)
    with pytest.raises(ValueError, match="^z: expected None without norm_weight, got a tensor"):
        function(**arguments | {"norm_weight": None})
