"""Calls like earlier ones skip their checks, and no other calls do: on the CPU in place of a GPU without kernels' work."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import gdn.distributed
from benchmarks.host_cost import without_device
from gdn.distributed import chunk, known
from gdn.distributed import group as groups
from gdn.runtime import env

T, HEADS, D = 96, 2, 64


@pytest.fixture(params=[(0, None), (2, None), (3, -1), (1, 2)], ids=str)
def place(request: pytest.FixtureRequest) -> Iterator[tuple[Any, int | None]]:
    """A rank of four, which exchange nothing, and the one that gets the final states."""
    rank, final = request.param
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    with without_device(), mock.patch.object(chunk, "_known", known.Known()):
        for module in (chunk, groups, known):
            mock.patch.object(module, "reads_values", lambda device: False).start()
        yield dist.group.WORLD, final
        mock.patch.stopall()
    dist.destroy_process_group()


def arguments(place: tuple[Any, int | None], **changes: Any) -> dict[str, Any]:
    q, k, v = torch.zeros(3, 1, T, HEADS, D, dtype=torch.bfloat16).unbind()
    return {
        "q": q, "k": k, "v": v, "g": torch.zeros(1, T, HEADS), "beta": torch.zeros(1, T, HEADS),
        "initial_state": torch.zeros(4, HEADS, D, D), "state_indices": torch.ones(1, dtype=torch.int32),
        "cu_seqlens": torch.tensor([0, T], dtype=torch.int32), "output_final_state": True, "state_v_first": True,
        "out": torch.zeros(1, T, HEADS, D, dtype=torch.bfloat16), "group": place[0], "final_rank": place[1], **changes,
    }  # fmt: skip


def checks(calls: list[dict[str, Any]]) -> int:
    """Number of these calls that are checked."""
    with mock.patch.object(chunk, "_checked", wraps=chunk._checked) as checked:
        for call in calls:
            gdn.distributed.chunk_gated_delta_rule(**call)
    return checked.call_count


def test_a_repeated_call_is_checked_once(place: Any) -> None:
    assert checks([arguments(place) for _ in range(4)]) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"scale": 0.5}, {"output_final_state": False}, {"state_v_first": False}, {"null_slot": 0}, {"out": None},
        {"state_indices": torch.ones(1, dtype=torch.int64)}, {"initial_state": torch.zeros(4, HEADS, D, D, dtype=torch.bfloat16)},
        {"initial_state": torch.zeros(4, HEADS, D, D + 4)[..., :D].contiguous()[:3]}, {"beta": None},
        {"has_initial_state": torch.ones(1, dtype=torch.bool)},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_another_call_is_checked(place: Any, changes: dict[str, Any]) -> None:
    assert checks([arguments(place), arguments(place, **changes)]) == 2


def test_wrong_calls_are_refused_after_right_ones(place: Any) -> None:
    gdn.distributed.chunk_gated_delta_rule(**arguments(place))
    right = arguments(place)
    shared, numbers = torch.zeros(1, T, HEADS, D, dtype=torch.bfloat16), 4 * HEADS * D * D
    odd = torch.zeros(numbers + 1)[1:].view(4, HEADS, D, D)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("out: expected memory of its own", {"out": shared, "v": shared[:]}),
        ("k: expected", {"k": right["k"][:, 1:]}),
        ("initial_state: expected a slot stride and an address", {"initial_state": odd}),
        ("head_first", {"head_first": True}),
        ("checkpoint_offsets", {"checkpoint_offsets": torch.zeros(1, 1, dtype=torch.int32)}),
        ("final_rank: expected", {"final_rank": 4}),
        ("scale: expected", {"scale": "1"}),
    ]  # fmt: skip
    for message, changes in wrong:
        with pytest.raises((TypeError, ValueError), match=message):
            gdn.distributed.chunk_gated_delta_rule(**right | changes)


def test_nothing_is_kept_where_values_are_checked(place: Any) -> None:
    with mock.patch.object(known, "reads_values", lambda device: True):
        assert checks([arguments(place) for _ in range(3)]) == 3


def test_new_switches_forget(place: Any) -> None:
    assert checks([arguments(place)]) == 1
    env.reload()
    assert checks([arguments(place)] * 2) == 1


def test_a_repeated_call_makes_few_operations(place: Any) -> None:
    """Tensors made are those that the passes return: message, states and rows; and offsets of segments where parts are cut."""
    calls = [arguments(place) for _ in range(3)]
    for call in calls[:2]:
        gdn.distributed.chunk_gated_delta_rule(**call)
    made: list[str] = []
    empty, new_empty = torch.empty, torch.Tensor.new_empty

    def count(name: str, function: Any) -> Any:
        def counted(*values: Any, **options: Any) -> Any:
            made.append(name)
            return function(*values, **options)

        return counted

    with (
        mock.patch.object(torch, "empty", count("empty", empty)),
        mock.patch.object(torch.Tensor, "new_empty", count("new_empty", new_empty)),
    ):
        gdn.distributed.chunk_gated_delta_rule(**calls[2])
    assert made.count("empty") <= 5 and made.count("new_empty") <= 1, made
