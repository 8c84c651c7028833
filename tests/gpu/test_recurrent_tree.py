"""Draft trees in the recurrent operator on the GPU, against the float64 oracle and against their paths."""

from typing import Any

import pytest
import torch

import gdn
from gdn.ops.delta_rule.inputs import recurrent_inputs, recurrent_problem
from tests.compile.pairwise import pairwise
from tests.gpu import cases
from tests.gpu.delta_rule import backends, copied, run
from tests.gpu.test_recurrent import FUNCTION, LAYOUTS, check
from tests.gpu.twins import check_repeats

pytestmark = pytest.mark.gpu

BACKENDS = pytest.mark.parametrize("backend", backends("recurrent"))

LENGTHS = [1, 0, 9, 3, 2, 6]
TREE: dict[str, Any] = {"index_dtype": "int32", "write_every_token": True, "has_accepted": True, "has_parent": True}
AXES: dict[str, Any] = {
    "heads": [(2, 2, 4), (2, 2, 2), (4, 2, 2)],
    "head_dim": [128, 64, 256],
    "state_dtype": ["float32", "bfloat16"],
    "state_v_first": [True, False],
    "index_dtype": ["int32", "int64"],
    "final": [{}, {"has_final_indices": True}, {"has_final_state": False}],
    "gates": [{}, {"gate_dtype": "bfloat16", "use_gate": True, "beta_dtype": "bfloat16", "use_beta_sigmoid": True}],
    "use_qk_l2norm": [True, False],
    "shape": ["binary", "random", "line", "star"],
}


def parents(shape: str, lengths: list[int]) -> list[int]:
    def of(i: int, n: int) -> int:
        if i == 0 or shape == "star":
            return -1
        return {"binary": (i - 1) // 2, "line": i - 1, "random": -1 if (i + n) % 4 == 3 else (i * 5 + n) % i}[shape]

    return [of(i, n) for n, length in enumerate(lengths) for i in range(length)]


def arguments_of(problem: Any, shape: str, device: torch.device, **changes: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "lengths": LENGTHS, "strided": True, "padded_tokens": 4, "slot_gap": 24, "null_sequences": [3], "null_slot": 0,
        "num_columns": 7,
    }  # fmt: skip
    arguments = recurrent_inputs(problem, device, **{**options, **changes})
    rows = arguments["parent_token"].shape[0]
    known = parents(shape, changes.get("lengths", LENGTHS))
    arguments["parent_token"] = torch.tensor(known + [0] * (rows - len(known)), dtype=torch.int32, device=device)
    v = arguments["v"]
    heads = (problem.num_state_heads, problem.head_v_dim)
    arguments["out"] = torch.full((1, v.shape[1], *heads), torch.nan, dtype=v.dtype, device=device)
    return arguments


@BACKENDS
@pytest.mark.parametrize("row", pairwise(AXES), ids=lambda row: "-".join(str(x) for x in row.values()))
def test_variants(row: dict[str, Any], backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    same = ("state_dtype", "state_v_first", "use_qk_l2norm")
    fields = dict(zip(("num_q_heads", "num_k_heads", "num_v_heads"), row["heads"], strict=True))
    fields |= dict.fromkeys(("head_k_dim", "head_v_dim"), row["head_dim"])
    fields |= {**TREE, "index_dtype": row["index_dtype"], **row["final"], **row["gates"], **{name: row[name] for name in same}}
    arguments = arguments_of(recurrent_problem(dtype="bfloat16", **fields), row["shape"], device)
    check(arguments, backend, monkeypatch)


@BACKENDS
@LAYOUTS
def test_a_node_is_its_path(v_first: bool, backend: str, device: torch.device) -> None:
    """Every node of a tree gives what its path gives as a line of tokens, but for the last bits of float32."""
    problem = recurrent_problem(**{**cases.MAIN, **TREE, "state_v_first": v_first})
    tree = arguments_of(problem, "random", device, lengths=[9], null_sequences=[], num_columns=9, padded_tokens=0)
    above, start = tree["parent_token"].tolist(), copied(tree)["initial_state"]
    gdn.fused_recurrent_gated_delta_rule(**tree, backend=backend)
    for node in range(9):
        path = [node]
        while above[path[0]] >= 0:
            path.insert(0, above[path[0]])
        line = {name: tree[name][:, path] for name in ("q", "k", "v", "g", "beta", "out") if tree.get(name) is not None}
        pool = start.clone()
        slot = tree["ssm_state_indices"][0, int(tree["num_accepted_tokens"][0]) - 1 :][:1]
        o, _ = gdn.fused_recurrent_gated_delta_rule(
            **{**tree, **line, "initial_state": pool, "ssm_state_indices": slot, "cu_seqlens": None, "parent_token": None,
               "num_accepted_tokens": None, "out": None}, backend=backend,
        )  # fmt: skip
        torch.testing.assert_close(o[0, -1], tree["out"][0, node], rtol=2.0**-7, atol=1e-5)
        kept = tree["initial_state"][int(tree["ssm_state_indices"][0, node])]
        torch.testing.assert_close(pool[int(slot)], kept, rtol=1e-5, atol=1e-5)


@BACKENDS
@LAYOUTS
def test_repeats(v_first: bool, backend: str, device: torch.device) -> None:
    arguments = arguments_of(recurrent_problem(**{**cases.MAIN, **TREE, "state_v_first": v_first}), "random", device)
    check_repeats(gdn.fused_recurrent_gated_delta_rule, arguments, backend=backend)


@BACKENDS
def test_walks_end_whatever_the_tree_says(backend: str, device: torch.device) -> None:
    """A parent that is no node before its child is the caller's error; it must not hang."""
    arguments = arguments_of(recurrent_problem(**{**cases.MAIN, **TREE}), "line", device)
    arguments["parent_token"].copy_(torch.tensor([5, -9, 7, 1] * 10)[: arguments["parent_token"].shape[0]])
    run(FUNCTION, arguments, backend)
    torch.cuda.synchronize()
