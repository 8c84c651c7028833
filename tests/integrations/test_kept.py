"""What adapters keep between calls: it is right after the host has replaced anything, and goes when the host's tensor goes."""

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gdn
from gdn.integrations._kept import LayerViews, Served, StepView, bound
from gdn.runtime import guards

Tensor = torch.Tensor


@pytest.fixture(params=["torch", "python"], autouse=True)
def guard(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(guards, "maker", lambda: guards.in_python)


class Layer:
    """Pages [slots, columns, channels], a filter [channels, 1, w], and their views."""

    def __init__(self) -> None:
        self.pages, self.weight = torch.randn(3, 4, 5), nn.Parameter(torch.randn(5, 1, 4), requires_grad=False)
        self.views = LayerViews(lambda pages: pages.transpose(1, 2), lambda weight: weight.squeeze(1))

    def check(self) -> bool:
        """The views are right; returns whether they are kept ones."""
        last = self.views.record[0]
        with torch.inference_mode():
            found = self.views(self.pages, self.weight)
        for view, source in zip(found, (self.pages.transpose(1, 2), self.weight.squeeze(1)), strict=True):
            assert (view.data_ptr(), view.shape, view.stride()) == (source.data_ptr(), source.shape, source.stride())
            assert view.dtype == source.dtype
            assert found is not last or not (view.requires_grad or view.is_inference())
        return found is last

    def keep(self) -> None:
        """They are kept from the fifth call on."""
        assert [self.check() for _ in range(6)] == [False] * 4 + [True] * 2


def test_views_of_a_layer_are_kept() -> None:
    layer = Layer()
    layer.keep()
    with torch.no_grad():
        layer.pages.add_(1)
        layer.weight.copy_(torch.zeros(5, 1, 4))
    assert layer.check()  # values are no concern of theirs


def test_tensors_that_alternate_leave_what_is_kept() -> None:
    layer = Layer()
    layer.keep()
    pages, others, kept = layer.pages, torch.randn(3, 4, 5), []
    for _ in range(3):
        layer.pages = others
        assert not layer.check()
        layer.pages = pages
        kept.append(layer.check())
    assert kept == [True] * 3


def _same_memory_in_another_form(layer: Layer) -> None:
    """A new tensor on the old memory, which may even have the old one's place in Python."""
    layer.pages = layer.pages.view(3, 2, 10)


def _another_type(layer: Layer) -> None:
    layer.weight.data = layer.weight.data.view(torch.int32).view(5, 1, 4)


CHANGES: dict[str, Callable[[Layer], object]] = {
    "pool of the same shape": lambda layer: setattr(layer, "pages", torch.randn(3, 4, 5)),
    "pool of another shape": lambda layer: setattr(layer, "pages", torch.randn(9, 4, 5)),
    "pool of other strides": lambda layer: setattr(layer, "pages", torch.randn(3, 8, 5)[:, :4]),
    "the same memory in another form": _same_memory_in_another_form,
    "weight": lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(5, 1, 4))),
    "weight by its data": lambda layer: setattr(layer.weight, "data", torch.randn(5, 1, 4)),
    "weight's data in another form": lambda layer: setattr(layer.weight, "data", layer.weight.data.view(4, 1, 5)),
    "weight's data of another type": _another_type,
    "both": lambda layer: vars(layer).update(pages=torch.randn(3, 4, 5), weight=nn.Parameter(torch.randn(5, 1, 4))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_replaced_tensor_is_noticed(change: str) -> None:
    layer = Layer()
    layer.keep()
    CHANGES[change](layer)
    assert not layer.check()
    assert [layer.check() for _ in range(5)][-1]


def test_another_tensor_in_the_place_of_the_last_one() -> None:
    """Same `id` and same address, as Python and allocators reuse both, other strides."""
    memory, layer, places = torch.randn(60), Layer(), set()
    for turn in range(20):
        layer.pages = memory.view(3, 4, 5) if turn % 2 else memory.view(3, 5, 4).transpose(1, 2)
        places.add(id(layer.pages))
        layer.keep()
        del layer.pages
    assert len(places) < 20  # some had the place of another one


def test_views_do_not_keep_the_memory() -> None:
    layer = Layer()
    array = np.zeros((3, 4, 5), np.float32)
    gone = weakref.ref(array)
    layer.pages = torch.from_numpy(array)
    layer.keep()
    del array
    assert gone() is not None
    layer.pages = torch.randn(3, 4, 5)  # no call since
    assert gone() is None and not layer.check()
    owner = weakref.ref(layer.views)
    gc.disable()
    try:
        del layer
        assert owner() is None  # nothing that a garbage collector must find
    finally:
        gc.enable()


# --- of a step ------------------------------------------------------------------------------------------------------------------


class Metadata:
    def __init__(self, slots: Tensor) -> None:
        self.slots = slots


def test_a_view_of_a_step_is_made_once_for_its_layers() -> None:
    first = StepView(lambda slots, count: slots[:count])
    step = Metadata(torch.arange(9))
    made = first(step, step.slots, 3)
    assert made.tolist() == [0, 1, 2] and first(step, step.slots, 3) is made
    assert first(step, step.slots, 4).tolist() == [0, 1, 2, 3]
    step.slots = torch.arange(10, 19)  # the same step, as the host may build it
    assert first(step, step.slots, 3).tolist() == [10, 11, 12]
    other = Metadata(step.slots)
    assert first(other, other.slots, 3) is not first(step, step.slots, 3)


def test_another_step_at_the_address_of_the_last_one() -> None:
    first, places = StepView(lambda slots, count: slots[:count]), set()
    for turn in range(20):
        step = Metadata(torch.arange(turn, turn + 9))
        places.add(id(step))
        assert first(step, step.slots, 2).tolist() == [turn, turn + 1]
        del step
    assert len(places) < 20


def test_a_view_goes_with_its_step() -> None:
    first = StepView(lambda slots, count: slots[:count])
    array = np.arange(9)
    gone, step = weakref.ref(array), Metadata(torch.from_numpy(array))
    first(step, step.slots, 3)
    del array
    assert gone() is not None
    del step
    assert gone() is None


def test_metadata_without_weak_references_is_served() -> None:
    first, step = StepView(lambda slots, count: slots[:count]), SimpleNamespace(slots=torch.arange(9))
    made = first(step, step.slots, 3)
    assert made.tolist() == [0, 1, 2] and first(step, step.slots, 3) is not made


# --- calls that were served -----------------------------------------------------------------------------------------------------


def test_calls_like_the_last_one_that_was_served() -> None:
    served, x, pool = Served(), torch.zeros(2, 3), torch.zeros(4, 5)
    with torch.no_grad():
        assert not served(x, pool)
        assert served.judge("a reason", x, pool) == "a reason" and not served(x, pool)
        assert served.judge(None, x, pool) is None and served(x, pool) and served(torch.ones(2, 3), pool)
        for other in (x[:1], x.double(), torch.zeros(3, 2).T, x.to("meta")):
            assert not served(other, pool) and not served(pool, other)
        served.judge("a reason", x[:1], pool)
        assert served(x, pool) and not served(x[:1], pool)
    assert not served(x, pool)  # autograd is on: what it wants must be asked


def test_an_operator_with_its_options() -> None:
    x, gate, gain = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    norm = bound(gdn.rms_norm_gated, eps=1e-3, activation="sigmoid")
    assert torch.equal(norm(x, gate, gain), gdn.rms_norm_gated(x, gate, gain, 1e-3, "sigmoid"))
    assert bound(gdn.rms_norm_gated, eps=1e-3, activation="sigmoid") is norm
    options: dict[str, Any] = {"eps": "small"}
    with pytest.raises(TypeError, match="eps: expected a number, got str"):
        bound(gdn.rms_norm_gated, **options)


def test_states_of_the_same_form_at_another_alignment_are_asked_again() -> None:
    served, rows = Served(), torch.zeros(2, 4)
    memory = torch.zeros(33)
    aligned, beside = memory[:32].view(2, 16), memory[1:].view(2, 16)
    assert aligned.data_ptr() % 16 == 0 != beside.data_ptr() % 16
    with torch.no_grad():
        assert served.judge(None, rows, aligned) is None and served(rows, aligned)
        assert not served(rows, beside)
