"""Empty batches on a Hopper GPU: every operator, every backend, every dimension that may be empty, against the reference.

What the reference gives is held to the contract by `tests.ops.test_empty`.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gdn
from gdn.testing.compare import same_bits
from tests.gpu import calls, test_streams
from tests.gpu.delta_rule import Arguments, backends, poisoned_memory
from tests.gpu.twins import copy_of, whole
from tests.ops.emptied import FORMS, OFFSETS, SLOTS
from tests.ops.spoiling.call import Call
from tests.ops.spoiling.calls import good_call
from tests.ops.test_empty import REFUSED, RESULTS, WITHOUT_WORK, listed, spoil_padding

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
MADE: dict[str, tuple[str, str, Callable[[torch.device], Arguments]]] = {
    **{name: (call.function, call.op, call.make) for name, call in calls.CALLS.items()},
    **{f"{name}, all": one for name, one in (test_streams.CALLS | test_streams.MORE).items()},
}
EVERY = [(name, backend) for name, (_, op, _) in MADE.items() for backend in backends(op)]
UNSPECIFIED = ("mqa_logits", "paged_mqa_logits", "gather_indexer_cache")  # what is in columns without a key, rows of nobody


def given(arguments: Arguments, names: tuple[str, ...]) -> bool:
    return any(arguments.get(name) is not None for name in names)


@functools.cache
def dims_of(operator: str, path: str, rank: int, has_offsets: bool, has_slots: bool) -> str:
    """Names of the dimensions of an argument, from the drawn calls."""
    for seed in range(200):
        call = good_call(operator, seed)
        dims = call.dims.get(path, ())
        if len(dims) == rank and given(call.arguments, OFFSETS) == has_offsets and given(call.arguments, SLOTS) == has_slots:
            return " ".join(dims)
    raise LookupError(f"{operator}: no drawn call has {path} with {rank} dimensions")


def named(operator: str, arguments: Arguments) -> Call:
    """The call with the names of its dimensions."""
    call = Call(operator)
    form = given(arguments, OFFSETS), given(arguments, SLOTS)
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            call.give(name, value, dims_of(operator, name, value.dim(), *form))
        elif isinstance(value, tuple) and isinstance(value[0], Tensor):
            for place, entry in enumerate(value):
                path = f"{name}[{place}]"
                call.give(path, entry, dims_of(operator, path, entry.dim(), *form))
        else:
            call.arguments[name] = value
    return call


def twin(call: Call) -> Call:
    return call.with_values({path: copy_of(x) for path, x in call.tensors().items()})


def left(call: Call, backend: str) -> tuple[list[Any], dict[str, Tensor]]:
    """The results, and the memory of every argument but `out`."""
    found = getattr(gdn, call.operator)(**call.arguments, backend=backend)
    return listed(found), {path: whole(x) for path, x in call.tensors().items() if path != "out"}


def check(call: Call, form: str, backend: str) -> bool:
    """One form of a call; False where the call has no such form, or it is refused before a backend is asked."""
    emptied = FORMS[form](call)
    if emptied is None or (call.operator, form) in REFUSED:
        return False
    call = twin(emptied.call)
    if form in WITHOUT_WORK and RESULTS[call.operator] and RESULTS[call.operator][0][1] == 0.0:
        spoil_padding(call)
    before = {path: whole(x).clone() for path, x in call.tensors().items() if path != "out"}
    wanted, _ = left(twin(call), "reference")
    with poisoned_memory():
        found, memory = left(twin(call), backend)
    assert len(found) == len(wanted)
    for own, other in zip(found, wanted, strict=True):
        assert (own is None) == (other is None)
        if own is not None:
            assert own.shape == other.shape and own.dtype == other.dtype
            if call.operator not in UNSPECIFIED:
                torch.testing.assert_close(own, other, equal_nan=True)
    assert [path for path, x in before.items() if not same_bits(memory[path], x)] == [], "something was written"
    return True


@pytest.mark.parametrize(("name", "backend"), EVERY)
def test_an_empty_batch(name: str, backend: str, device: torch.device) -> None:
    operator, _, make = MADE[name]
    call = named(operator, make(device))
    seen = set()
    for form in FORMS:
        try:
            if check(call, form, backend):
                seen.add(form)
        except Exception as error:
            error.add_note(f"{name}, {form}")
            raise
    torch.cuda.synchronize()
    assert seen
