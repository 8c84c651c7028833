"""Tensor-parallel ranks as processes of a gloo group against one process: every layer, whole models, the demo and its engine."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.layers import rank_cases
from tests.layers.processes import Work, run_ranks

TOLERANCE = 1e-5  # of the largest value, float32
CASES = [(name, form) for name in rank_cases.CASES for form in rank_cases.FORMS]
LONG = [2, *(pytest.param(size, marks=pytest.mark.cover) for size in (3, 4))]


class Group:
    """A group of processes, and what each rank found."""

    def __init__(self, work: Work, size: int, folder: Path) -> None:
        self.size, self.folder, self.ranks = size, folder, run_ranks(work, size, folder)
        assert [one for one in self.ranks if not isinstance(one, dict)] == []

    def compare(self, name: str, wanted: list[torch.Tensor]) -> None:
        """Every rank has what one process has, and all have the same bits."""
        for rank in self.ranks:
            assert len(rank[name]) == len(wanted) > 0
            for found, expected, first in zip(rank[name], wanted, self.ranks[0][name], strict=True):
                assert found.shape == expected.shape and expected.numel()
                assert float((found - expected).abs().max()) <= TOLERANCE * float(expected.abs().max())
                assert torch.equal(found, first)


@pytest.fixture(scope="module", params=rank_cases.SIZES)
def layers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Group:
    folder = tmp_path_factory.mktemp("layers")
    rank_cases.write_checkpoints(request.param, folder)
    return Group(rank_cases.run_layers, request.param, folder)


@pytest.fixture(scope="module", params=LONG)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Group:
    return Group(rank_cases.run_engines, request.param, tmp_path_factory.mktemp("engines"))


@pytest.mark.parametrize(("name", "form"), CASES)
def test_ranks_give_what_one_process_gives(layers: Group, name: str, form: str) -> None:
    layers.compare(f"{name}, {form}", rank_cases.CASES[name](form, None, layers.size, layers.folder))


@pytest.mark.parametrize("form", rank_cases.FORMS)
def test_the_engine(engines: Group, form: str) -> None:
    """The tokens of one process, and the logits of whole sequences."""
    engines.compare(form, rank_cases.engine_case(form, None, engines.size))


def test_groups_that_cannot_divide_a_model_are_named(layers: Group) -> None:
    size = layers.size
    wanted = {
        "heads": f"ValueError: linear_num_key_heads: expected a multiple of {size} ranks, got 5",
        "attention": f"ValueError: num_attention_heads: expected a multiple of {size} ranks, got 5",
        "keys": f"ValueError: num_key_value_heads: expected a multiple or a divisor of {size} ranks, got 5",
        "width": f"ValueError: intermediate_size: expected a multiple of {size} ranks, got 13",
        "experts": f"ValueError: moe_intermediate_size: expected a multiple of {size} ranks, got 13",
    }
    expected = "TypeError: tp_group: expected a torch.distributed.ProcessGroup that this process is in, or None, got int"
    for rank, found in enumerate(layers.ranks):
        outside = {"outside": expected} if rank else {}
        assert found["refusals"] == wanted | {"size": expected} | outside


def test_the_demo(engines: Group) -> None:
    passed, tokens, others = rank_cases.demo_report(engines.size)
    assert passed and others == ()
    for rank in engines.ranks:
        assert rank["demo"] == (True, tokens, (0,) * (engines.size - 1))


@pytest.mark.parametrize("size", LONG)
def test_a_rank_that_dies_ends_the_others(size: int, tmp_path: Path) -> None:
    """The others end within the group's time-out, and not before it is gone."""
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
