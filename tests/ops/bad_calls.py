"""Bad calls: how to spoil good arguments, the error that must come, what it must name; and those of the delta-rule operators."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import gdn
from gdn.ops.delta_rule.inputs import chunk_inputs, chunk_problem, recurrent_inputs, recurrent_problem
from gdn.testing.compare import same_bits

Arguments = dict[str, Any]


@dataclass
class Bad:
    name: str
    change: Callable[[Arguments], Arguments]  # arguments -> what differs
    error: type[Exception]
    match: str  # of the message: argument, expected, got


# Relations between arguments and their wording, and one row for each property of a tensor (its type, dtype, rank, sizes, device,
# strides, address). What is refused of every single argument is in tests/ops/spoiling.
SHARED = [
    Bad("k_dtype", lambda a: {"k": a["k"].half()}, TypeError, r"^k: expected dtype bfloat16, got torch.float16"),
    Bad("q_type", lambda a: {"q": [1.0]}, TypeError, r"^q: expected a torch.Tensor, got list"),
    Bad("q_rank", lambda a: {"q": a["q"][0]}, ValueError, r"^q: expected shape \[B, T, Hq, K\], got shape \["),
    Bad("v_tokens", lambda a: {"v": a["v"][:, 1:]}, ValueError, r"^v: expected shape \[1, \d+, HV, V\], got shape"),
    Bad("heads_modulo", lambda a: {"v": a["v"][:, :, :3]}, ValueError, r"^q, k, v: expected GVA heads .* got Hq=2, Hk=2, HV=3"),
    Bad("heads_both", lambda a: {"q": a["q"].repeat(1, 1, 2, 1)}, ValueError, r"^q, k, v: expected GVA .* got Hq=4, Hk=2, HV=4"),
    Bad("gate_without_g", lambda a: {"g": None, "use_gate_in_kernel": True}, ValueError, r"^g: expected the raw gate.*got None"),
    Bad(
        "gate_without_A_log", lambda a: {"use_gate_in_kernel": True}, TypeError, r"^A_log: expected a torch.Tensor, got NoneType"
    ),
    Bad(
        "sigmoid_without_beta",
        lambda a: {"beta": None, "use_beta_sigmoid_in_kernel": True},
        ValueError,
        r"^beta: expected the raw b.*got None",
    ),
    Bad("cu_rank", lambda a: {"cu_seqlens": a["cu_seqlens"][None]}, ValueError, r"^cu_seqlens: expected shape \[N \+ 1\]"),
    Bad(
        "cu_with_batch",
        lambda a: (
            {name: a[name].repeat(2, 1, 1, 1)[..., : a[name].shape[-1]] for name in ("q", "k", "v")}
            | {name: a[name].repeat(2, 1, 1) for name in ("g", "beta")}
        ),
        ValueError,
        r"^q: expected shape \[1, T, Hq, K\]",
    ),
    Bad("state_none", lambda a: {"initial_state": None}, ValueError, r"^initial_state: expected the state pool.*got None"),
    Bad(
        "pool_inner_stride",
        lambda a: {"initial_state": a["initial_state"].mT},
        ValueError,
        r"^initial_state: expected contiguous inner three dims.*got strides",
    ),
    Bad(
        "pool_slot_stride",
        lambda a: {"initial_state": torch.zeros(9, 1025, device=a["q"].device)[:, :1024].view(9, 4, 16, 16)},
        ValueError,
        r"^initial_state: expected a slot stride .* multiples of 16 bytes, got a slot stride of 4100 bytes",
    ),
    Bad(
        "pool_overlap",
        lambda a: {"initial_state": a["initial_state"][:1].expand(9, -1, -1, -1)},
        ValueError,
        r"^initial_state: .*slots that do not overlap, got strides",
    ),
    Bad(
        "pool_address",
        lambda a: {"initial_state": torch.zeros(1 + 9 * 1024, device=a["q"].device)[1:].view(9, 4, 16, 16)},
        ValueError,
        r"^initial_state: expected a slot stride and an address .* multiples of 16 bytes",
    ),
    Bad("pool_device", lambda a: {"initial_state": a["initial_state"].to("meta")}, ValueError, r"^initial_state: .*meta"),
]

CHUNK = [
    *SHARED,
    Bad(
        "mask_rows",
        lambda a: {"has_initial_state": a["state_indices"][:2] > 0},
        ValueError,
        r"^has_initial_state: expected shape \[>= N\] with N = 3, got shape \[2\]",
    ),
    Bad(
        "final_alone",
        lambda a: {"final_state_indices": a["state_indices"], "state_indices": None, "initial_state": None},
        ValueError,
        r"^final_state_indices: expected None without state_indices",
    ),
    Bad(
        "checkpoint_shapes",
        lambda a: {
            "checkpoint_offsets": a["state_indices"][:, None],
            "checkpoint_slots": a["state_indices"][:, None].repeat(1, 2),
        },
        ValueError,
        r"^checkpoint_slots: expected shape \[3, 1\], got shape \[3, 2\]",
    ),
    Bad(
        "state_rows",
        lambda a: {"state_indices": None, "initial_state": a["initial_state"][:2]},
        ValueError,
        r"^initial_state: expected shape \[3, 4, 16, 16\], got shape \[2, 4, 16, 16\]",
    ),
]

RECURRENT = [
    *SHARED,
    Bad(
        "not_in_place",
        lambda a: {"inplace_final_state": False},
        ValueError,
        r"^inplace_final_state: expected None or True with ssm_state_indices.*got False",
    ),
    Bad(
        "indices_columns",
        lambda a: {"ssm_state_indices": a["ssm_state_indices"][:, None][:, :0]},
        ValueError,
        r"^ssm_state_indices: expected shape .*columns >= 1\].*got shape \[3, 0\]",
    ),
    Bad(
        "in_place_rows",
        lambda a: {"ssm_state_indices": None, "inplace_final_state": True},
        ValueError,
        r"^initial_state: expected shape \[3, 4, 16, 16\], got shape",
    ),
    Bad(
        "in_place_nothing",
        lambda a: {"ssm_state_indices": None, "inplace_final_state": True, "initial_state": None},
        ValueError,
        r"^initial_state: expected the state pool.*got None",
    ),
    Bad(
        "accepted_1d",
        lambda a: {"num_accepted_tokens": a["ssm_state_indices"]},
        ValueError,
        r"^num_accepted_tokens: expected None without 2-D ssm_state_indices",
    ),
    Bad(
        "parent_1d",
        lambda a: {"parent_token": torch.full((6,), -1, dtype=torch.int32, device=a["q"].device)},
        ValueError,
        r"^parent_token: expected None without 2-D ssm_state_indices",
    ),
]


def good_chunk(device: str = "cpu", head_dim: int = 16) -> Arguments:
    problem = chunk_problem(dtype="bfloat16", index_dtype="int32", head_k_dim=head_dim, head_v_dim=head_dim)
    arguments = chunk_inputs(problem, device, lengths=[3, 0, 3])
    arguments["out"] = torch.zeros(1, 6, 4, head_dim, dtype=torch.bfloat16, device=device)
    return arguments


def good_recurrent(device: str = "cpu", head_dim: int = 16) -> Arguments:
    problem = recurrent_problem(dtype="bfloat16", index_dtype="int32", head_k_dim=head_dim, head_v_dim=head_dim)
    arguments = recurrent_inputs(problem, device, lengths=[3, 0, 3])
    arguments["out"] = torch.zeros(1, 6, 4, head_dim, dtype=torch.bfloat16, device=device)
    return arguments


def check(function: str, good: Arguments, bad: Bad) -> None:
    """The call raises as described, and every tensor of the good and the spoilt arguments keeps its bits."""
    import pytest

    call = {**good, **bad.change(good)}
    tensors = [x for x in {**good, **{f"{k}'": v for k, v in call.items()}}.values() if isinstance(x, torch.Tensor)]
    tensors = [x for x in tensors if x.device.type != "meta"]
    before = [x.clone() for x in tensors]
    with pytest.raises(bad.error, match=bad.match):
        getattr(gdn, function)(**call)
    assert all(same_bits(x, y) for x, y in zip(tensors, before, strict=True))
