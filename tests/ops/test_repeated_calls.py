"""Repeated calls of every operator: what the memo launches is what the ordinary path launches for the same tensors.

A stand-in on the CPU takes the place of every kernel and keeps the arguments of each launch. A drawn call comes twice, with
equal metadata in other memory; then the switches are read again, which drops all plans, and it comes a third time.
"""

import contextlib
import inspect
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import gdn
from gdn import runtime
from gdn.runtime import env, registry
from gdn.testing.compare import same_bits
from tests.described import plain
from tests.ops.spoiling.calls import OPERATORS, cover_from, good_call
from tests.ops.spoiling.judge import spoilt
from tests.ops.spoiling.table import rows
from tests.ops.stand_in import StandIn

Arguments = dict[str, Any]
NAMES = sorted(OPERATORS)
NUMBERS = ("scale", "max_seqlen_k", "max_context_len", "num_rows", "max_seqlen", "max_query_len")  # or None


class Kernels(StandIn):
    """Stands in for every kernel: keeps the arguments of launches, computes nothing."""

    workspace_bytes = 64

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[Any] = []
        self.left: int | None = None  # launches until one fails

    def launch(self, problem: Any, params: Any) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("the driver refused")
        self.launched.append(params)

    def call(self, name: str, arguments: Arguments) -> tuple[list[Any], Any]:
        """Arguments of the call's launches, and its result or what it refuses."""
        before = len(self.launched)
        try:
            result = getattr(gdn, name)(**arguments)
        except (TypeError, ValueError) as error:  # such as an address that the operator does not take
            result = str(error)
        return self.launched[before:], result


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    monkeypatch.setattr(runtime, "can_run", lambda *_: True)
    # What nobody has written is equal then.
    monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    yield Kernels().put(monkeypatch)
    env.reload()


def copies(value: Any, shift: int = 0) -> Any:
    """The same in other memory, with the same strides. shift: elements by which it begins later than an aligned address."""
    if isinstance(value, dict):
        return {key: copies(one, shift) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(copies(one, shift) for one in value)
    if not isinstance(value, torch.Tensor):
        return value
    span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)) if value.numel() else 0
    memory = torch.zeros(shift + span, dtype=value.dtype)
    return memory.as_strided(value.shape, value.stride(), shift).copy_(value)


def tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [one for value in values for one in tensors(value)] if isinstance(values, tuple | list) else []


def check(
    name: str, arguments: Arguments, kernels: Kernels, shift: int = 0, first_shift: int = 0, only: str | None = None
) -> None:
    """shift, first_shift: of the tensors of the repeated call, or of one argument of it, and of those of the first call."""
    kernels.call(name, copied := copies(arguments, first_shift))
    stale = {x.data_ptr() for x in tensors([*copied.values(), *kernels.launched]) if x.numel()}
    others = copies(arguments, shift) if only is None else copies(arguments) | {only: copies(arguments[only], shift)}
    launches, result = kernels.call(name, others)
    env.reload()
    expected, expected_result = kernels.call(name, others)
    own = {x.data_ptr() for x in tensors([*others.values()]) if x.numel()}
    assert len(launches) == len(expected) and isinstance(result, str) == isinstance(expected_result, str)
    if isinstance(result, str):
        assert shift and result == expected_result
    for params, wanted in zip(launches, expected, strict=True):
        assert type(params) is type(wanted)
        for field, one, other in zip(wanted._fields, params, wanted, strict=True):
            assert type(one) is type(other), field
            if not isinstance(one, torch.Tensor):
                assert one == other, field
                continue
            assert same_bits(one, other) and one.stride() == other.stride(), field
            # The same memory, or new memory that stands for no argument and no earlier call.
            places = {one.data_ptr(), other.data_ptr()}
            assert not one.numel() or len(places) == 1 or not places & (own | stale), field
    mine, theirs = tensors(result), tensors(expected_result)
    given = [id(x) for x in tensors([*others.values()])]
    for one, other in zip(mine, theirs, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
        assert id(one) == id(other) or not {id(one), id(other)} & set(given)


@pytest.mark.usefixtures("guard")
@pytest.mark.parametrize("name", sorted({operator.functions[0] for operator in registry.OPERATORS.values()}))
def test_a_repeated_call_comes_to_no_choice(name: str, kernels: Kernels) -> None:
    arguments = plain.call(name, 8, torch.bfloat16, is_served=True)
    kernels.call(name, copies(arguments))
    before, launches = kernels.prepared, len(kernels.launched)
    kernels.call(name, copies(arguments))
    assert kernels.prepared == before
    assert len(kernels.launched) == 2 * launches > 0


def _several_launches(name: str) -> Arguments:
    """A call of several launches: three blocks of rows or sequences, or decode rows before prefill rows."""
    if name != "attention":
        arguments = plain.call(name, 6, torch.bfloat16, is_served=True)
        paged = name == "paged_indexer_topk"
        width = arguments["block_tables"].shape[1] * 64 if paged else arguments["k"].shape[0]
        rows = 2 * arguments["q"].shape[1] if paged else 2
        return arguments | {"topk": 1, "workspace_bytes": 4 * width * rows}
    lengths, cached = (1, 2, 20, 9), (30, 2, 45, 9)
    return {
        "q": torch.randn(34, 4, 128).bfloat16(), "kv_cache": torch.randn(2, 8, 16, 2, 128).bfloat16(),
        "block_tables": torch.arange(12, dtype=torch.int32).view(4, 3) % 8, "query_start_loc": torch.tensor([0, 1, 3, 23, 32]),
        "seq_lens": torch.tensor(cached), "seq_lens_host": cached, "query_lens_host": lengths, "max_seq_len": 48,
    }  # fmt: skip


SEVERAL = ["attention", "indexer_topk", "paged_indexer_topk"]


@pytest.mark.parametrize(("first", "shift"), [(0, 0), (0, 1), (1, 0)])
@pytest.mark.parametrize("name", SEVERAL)
def test_a_call_of_several_launches(name: str, first: int, shift: int, kernels: Kernels) -> None:
    check(name, arguments := _several_launches(name), kernels, shift, first)
    before, prepared = len(kernels.launched), kernels.prepared
    kernels.call(name, arguments)
    assert len(kernels.launched) - before >= 2
    if not shift:
        assert kernels.prepared == prepared


@pytest.mark.parametrize("name", SEVERAL)
def test_a_launch_that_fails_leaves_the_next_call_whole(name: str, kernels: Kernels) -> None:
    """The first call fails in its second launch, and so does a later one that has a plan."""
    arguments = _several_launches(name)
    for is_known in (False, True):
        kernels.left = 1
        with pytest.raises(RuntimeError, match="refused"):
            kernels.call(name, arguments)
        kernels.left = None
        before, prepared = len(kernels.launched), kernels.prepared
        kernels.call(name, arguments)
        assert len(kernels.launched) - before >= 2 and (kernels.prepared == prepared) == is_known


def check_drawn(seed: int, kernels: Kernels) -> None:
    source = random.Random(seed)
    name = source.choice(NAMES)
    kernels.launched.clear()
    first, shift = source.choice(((0, 0), (0, 0), (0, 1), (0, 4), (1, 0), (4, 0), (1, 1)))
    check(name, good_call(name, seed).arguments, kernels, shift, first)


@pytest.mark.usefixtures("guard")
@pytest.mark.parametrize("first", cover_from(400, range(0, 6000, 100)))
def test_drawn_calls(first: int, kernels: Kernels) -> None:
    for seed in range(first, first + 100):
        check_drawn(seed, kernels)


@pytest.mark.parametrize("name", NAMES)
def test_the_address_of_each_tensor_is_looked_at(name: str, kernels: Kernels) -> None:
    for seed in range(8):
        arguments = good_call(name, seed).arguments
        for argument in (key for key, value in arguments.items() if tensors(value)):
            check(name, arguments, kernels, 1, 0, argument)


def check_after(name: str, good: Arguments, other: Arguments, kernels: Kernels, around: Any = contextlib.nullcontext) -> Any:
    """After a good call, another one does what it does alone. Returns its result, or what it refuses."""
    found = []
    for before in ({}, good):
        env.reload()
        if before:
            kernels.call(name, before)
        with around():
            found.append(kernels.call(name, other))
    (launches, alone), (own, result) = found
    assert len(own) == len(launches) and isinstance(result, str) == isinstance(alone, str)
    assert not isinstance(result, str) or result == alone
    return result


def metadata(arguments: Arguments) -> list[Any]:
    """What a plan looks at. Values of tensors it takes from a call as they are."""
    found: list[Any] = []
    for key, value in arguments.items():
        given = tensors(value)
        found += [(key, type(x), x.dtype, x.shape, x.layout, x.device, x.layout == torch.strided and x.stride()) for x in given]
        found += [(key, x.data_ptr() % 16) for x in given if x.layout == torch.strided]
        found += [] if given else [(key, type(value), repr(value))]
    return found


@pytest.mark.usefixtures("guard")
@pytest.mark.parametrize("name", NAMES)
def test_a_spoilt_call_after_a_good_one(name: str, kernels: Kernels) -> None:
    """What another argument shares memory with is test_memory's."""
    refused = 0
    for row in (row for row in rows(name) if row.verdict.errors):
        good, spoiled = next(found for seed in itertools.count() if (found := spoilt(row, seed)) is not None)
        if metadata(good.arguments) != metadata(spoiled.call.arguments):
            refused += isinstance(check_after(name, good.arguments, spoiled.call.arguments, kernels, spoiled.around), str)
    assert refused


def equals(value: Any) -> list[Any]:
    """What equals a flag, and is of another type; and what has no hash."""
    if type(value) not in (bool, int, float):
        return []
    others = [kind(value) for kind in (bool, int, float, torch.tensor) if kind(value) == value and kind is not type(value)]
    return [*others, [value]]


@pytest.mark.parametrize("name", NAMES)
def test_equal_is_not_the_same(name: str, kernels: Kernels) -> None:
    """True, 1 and 1.0 are equal, and seldom all of them what a flag may be."""
    refused = 0
    arguments = good_call(name, 0).arguments
    flags = {key: one.default for key, one in inspect.signature(getattr(gdn, name)).parameters.items()} | arguments
    for key, own in flags.items():
        for value in [own, 1, 1.0] if type(own) in (bool, int, float) or key in NUMBERS else []:
            good = arguments | {key: value}
            if isinstance(kernels.call(name, good)[1], str):
                continue
            refused += sum(isinstance(check_after(name, good, good | {key: other}, kernels), str) for other in equals(value))
    assert refused or not any(type(value) in (bool, int, float) for value in flags.values())
