"""Tensor-parallel ranks as processes of a gloo group against one process: every layer, whole models, the demo and its engine."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.layers import rank_cases
from tests.layers.processes import run_ranks

TOLERANCE = 1e-5  # of the largest value, float32
NAMES = [f"{name}, {form}" for name in (*rank_cases.CASES, "checkpoint") for form in rank_cases.FORMS]


class Group:
    """Results of the ranks of a group, and those of one process."""

    def __init__(self, size: int, folder: Path) -> None:
        self.size, self.folder = size, folder
        rank_cases.write_checkpoints(size, folder)
        self.ranks = run_ranks(rank_cases.work, size, folder)
        assert [one for one in self.ranks if not isinstance(one, dict)] == []

    def alone(self, name: str) -> list[torch.Tensor]:
        case, _, form = name.partition(", ")
        if case == "checkpoint":
            return rank_cases.checkpoint_case(form, None, self.size, self.folder)
        return rank_cases.CASES[case](form, None, self.size)


@pytest.fixture(scope="module", params=rank_cases.SIZES)
def group(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Group:
    return Group(request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", NAMES)
def test_ranks_give_what_one_process_gives(group: Group, name: str) -> None:
    wanted = group.alone(name)
    for rank in group.ranks:
        assert len(rank[name]) == len(wanted) > 0
        for found, expected in zip(rank[name], wanted, strict=True):
            assert found.shape == expected.shape and expected.numel()
            assert float((found - expected).abs().max()) <= TOLERANCE * float(expected.abs().max())


@pytest.mark.parametrize("name", NAMES)
def test_the_ranks_results_are_the_same_bits(group: Group, name: str) -> None:
    first, *others = [rank[name] for rank in group.ranks]
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def test_groups_that_cannot_divide_a_model_are_named(group: Group) -> None:
    size = group.size
    wanted = {
        "heads": f"ValueError: linear_num_key_heads: expected a multiple of {size} ranks, got 5",
        "attention": f"ValueError: num_attention_heads: expected a multiple of {size} ranks, got 5",
        "keys": f"ValueError: num_key_value_heads: expected a multiple or a divisor of {size} ranks, got 5",
        "width": f"ValueError: intermediate_size: expected a multiple of {size} ranks, got 13",
        "experts": f"ValueError: moe_intermediate_size: expected a multiple of {size} ranks, got 13",
    }
    expected = "TypeError: tp_group: expected a torch.distributed.ProcessGroup that this process is in, or None, got int"
    for rank, found in enumerate(group.ranks):
        outside = {"outside": expected} if rank else {}
        assert found["refusals"] == wanted | {"size": expected} | outside


def test_the_demo(group: Group) -> None:
    passed, tokens, others = rank_cases.demo_report(group.size)
    assert passed and others == ()
    for rank in group.ranks:
        assert rank["demo"] == (True, tokens, (0,) * (group.size - 1))


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_dies_ends_the_others(size: int, tmp_path: Path) -> None:
    """Within the group's time-out, and not before it is gone."""
    started = time.monotonic()
    *others, last = run_ranks(rank_cases.die, size, tmp_path, timeout_s=20.0)
    assert last is None
    for found in others:
        assert isinstance(found, str) and "RuntimeError" in found.splitlines()[-1] and "all_reduce" in found
    assert time.monotonic() - started < 20.0 + 20.0


def test_refused_without_a_group() -> None:
    group: Any = 2
    with pytest.raises(TypeError, match="tp_group: expected a torch.distributed.ProcessGroup"):
        rank_cases.HybridModel(rank_cases.make_config("dense", 2), tp_group=group)
