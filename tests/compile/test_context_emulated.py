"""Whole launches of the kernels of `kernels_cute.context`, emulated, against their references in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from gdn.ops.context import reference
from tests.compile.emulated_context import launch
from tests.context_calls import Call, parts_call, start_call, total_call

pytestmark = pytest.mark.cover  # every instruction of every thread is run by Python


def run(call: Call) -> None:
    """The kernel's results are the reference's, and nothing else is written."""
    found, wanted = call.copied(), call.copied()
    launch(found.problem, found.params)
    exact = wanted.in_float64()
    getattr(reference, call.problem.op)(exact.problem, exact.params)
    for name, (one, other) in found.written_with(exact).items():
        same = torch.isnan(one) == torch.isnan(other) if one.is_floating_point() else torch.tensor(True)
        assert bool(same.all()), f"{name}: elements that only one of them writes"
        torch.testing.assert_close(
            one.double(), other.double(), rtol=2e-5, atol=2e-5, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


SMALL: dict[str, Any] = {"heads": 1, "dims": (64, 64)}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("segments", [1, 2, 8])
def test_parts(segments: int, dtype: torch.dtype) -> None:
    run(parts_call([1000, 0, 64, 5], segments, dtype))
    run(parts_call([1000], segments, None, length=1000))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("v_first", [False, True])
def test_total(rank: int, segments: int, v_first: bool) -> None:
    run(total_call(rank, 2, segments, v_first, **SMALL))


def test_total_of_a_start_alone() -> None:
    call = total_call(0, 3, 1, True, **SMALL)
    problem = replace(call.problem, has_summaries=False)
    run(replace(call, problem=problem, params=call.params._replace(h=None, P=None)))


@pytest.mark.parametrize("dims", [(64, 128), (128, 64), (128, 128)])
@pytest.mark.parametrize("v_first", [False, True])
def test_total_of_all_head_dims(dims: tuple[int, int], v_first: bool) -> None:
    run(total_call(1, 1, 2, v_first, heads=1, dims=dims))


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize(("rank", "ranks", "segments"), [(1, 2, 2), (0, 1, 1), (0, 3, 1), (1, 2, 1), (2, 4, 3), (3, 4, 2)])
def test_start(rank: int, ranks: int, segments: int, v_first: bool) -> None:
    final = "pool" if (rank + segments) % 2 else "rows"
    run(start_call(rank, ranks, 2, segments, v_first, final, **SMALL))


def test_start_without_final_states() -> None:
    run(start_call(2, 3, 1, 2, True, None, heads=2, dims=(64, 64)))


def test_states_that_the_pass_has_left() -> None:
    run(start_call(1, 2, 3, 2, False, "ends here", **SMALL))
