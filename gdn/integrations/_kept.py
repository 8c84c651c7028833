"""What an adapter keeps between calls, and what makes it wrong.

A view of a tensor that lives as long as its layer is kept while the tensor is the same object, at the same address, in the same
form. Nothing here keeps a tensor of the host alive: a view goes when its tensor goes, and those of a step with its metadata.
"""

import contextlib
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gdn.runtime import guards

Tensor = torch.Tensor


def bound(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """An operator with its arguments that are no tensors given once, which takes the tensors by position or by name."""
    operator: Any = getattr(function, "operator")  # noqa: B009  # the attribute is unknown to type checkers
    found: Callable[..., Any] = operator.bind(**options)
    return found


class Served:
    """Whether the tensors of a call are like those of the last call that was served, so that nothing need be asked again.

    For what depends on the types, dtypes, devices, shapes and strides of these tensors alone, and on the last one's alignment:
    states that are updated in place. What autograd wants is asked anew.
    """

    __slots__ = ("_guard",)

    def __init__(self) -> None:
        self._guard: guards.Guard = never

    def __call__(self, *tensors: Tensor) -> bool:
        return self._guard(*tensors) and not tensors[-1].data_ptr() & UNALIGNED and not torch.is_grad_enabled()

    def judge(self, reason: str | None, *tensors: Tensor) -> str | None:
        """Returns the reason why a call is left to the host; remembers a call without."""
        if reason is None and not torch.compiler.is_compiling():
            self._guard = guards.maker()(tensors)
        return reason


class ServedOf:
    """A `Served` of each of a host's layers, as long as the layer lives."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Callable[[], Any], Served]] = {}

    def __call__(self, layer: Any) -> Served:
        place, kept = id(layer), self._kept
        owner, served = kept.get(place, _NO_LAYER)
        if owner() is layer:
            return served  # type: ignore[no-any-return]
        found = Served()
        kept[place] = (weakref.ref(layer, lambda _: kept.pop(place, None)), found)
        return found


UNALIGNED = 15  # bits of an address that kernels do not take, of what they update in place


def never(*_: Tensor) -> bool:
    return False


def _nothing() -> None:
    return None


_NO_LAYER: Any = (_nothing, None)


def alias(view: Tensor) -> Tensor:
    """A tensor on the memory of a view, with its form, that does not hold the viewed tensor: a view of torch's would."""
    found: Tensor = view.new_empty(0).set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())
    return found


class LayerViews:
    """A view of each of two tensors of a layer, kept until one of them is not what it was.

    To keep views costs as much as to make them a few times, so new tensors have to come again before theirs are kept: of tensors
    that alternate, some get plain views. first, second: make a view; `alias` of it is kept. A call may name others beside the
    two: views are kept for calls with others like them, in type, dtype, device, shape and strides.

    record: views, tensors, their addresses and their guard, for `kept` written out where each function counts.
    """

    def __init__(self, first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> None:
        self._makers = (first, second)
        self._last: tuple[Callable[[], Any], Callable[[], Any], int] = (_nothing, _nothing, 0)  # and how often they came
        # One tuple, as another thread may be between two of them.
        self.record: tuple[Any, Callable[[], Any], Callable[[], Any], tuple[int, int], guards.Guard] = _NO_VIEWS

    def __call__(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """The views of both."""
        return self.kept(first, second) or self.make(first, second)

    def kept(self, first: Tensor, second: Tensor, *others: Tensor) -> tuple[Tensor, Tensor] | None:
        """The views, if they are kept. Identity tells tensors apart, addresses their memory, and the guard the rest."""
        views, of_first, of_second, at, guard = self.record
        if first is of_first() and second is of_second() and (first.data_ptr(), second.data_ptr()) == at:
            return views if guard(first, second, *others) else None
        return None

    def make(self, first: Tensor, second: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        """New views, which are kept if the same tensors have come often enough."""
        views = (self._makers[0](first), self._makers[1](second))
        of_first, of_second, count = self._last
        if first is not of_first() or second is not of_second():
            of_first, of_second, count = weakref.ref(first), weakref.ref(second), 0
        self._last = (of_first, of_second, count + 1)
        if count < _PLAIN:
            return views
        with torch.inference_mode(False), torch.no_grad():  # they may be used outside of the mode that is on now
            views = (alias(views[0]), alias(views[1]))
        forget = partial(_forget, weakref.ref(self))
        references = (weakref.ref(first, forget), weakref.ref(second, forget))
        self.record = (views, *references, (first.data_ptr(), second.data_ptr()), guards.maker()([first, second, *others]))
        return views


class PartViews:
    """Views of the parts of one tensor of a layer, kept until it is not what it was.

    make: takes the tensor, gives a NamedTuple of views; an `alias` of each is kept.
    """

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        self._make = make
        self._kept: tuple[Any, Callable[[], Any], int, guards.Guard] = _NO_PARTS

    def __call__(self, of: Tensor) -> Any:
        """The views. Identity, address and guard as in `LayerViews`."""
        parts, kept, at, guard = self._kept
        if of is kept() and of.data_ptr() == at and guard(of):
            return parts
        with torch.inference_mode(False), torch.no_grad():
            made = self._make(of)
            parts = type(made)(*map(alias, made))
        self._kept = (parts, weakref.ref(of, partial(_let_go, weakref.ref(self))), of.data_ptr(), guards.maker()([of]))
        return parts


_NO_PARTS: Any = (None, _nothing, 0, never)


def _let_go(owner: "weakref.ref[PartViews]", source: Any) -> None:
    views = owner()
    if views is not None and source is views._kept[1]:
        views._kept = _NO_PARTS


_PLAIN = 3  # calls before views are kept
_NO_VIEWS: Any = (None, _nothing, _nothing, (0, 0), never)


def _forget(owner: "weakref.ref[LayerViews]", source: Any) -> None:
    views = owner()
    if views is not None and (source is views.record[1] or source is views.record[2]):
        views.record = _NO_VIEWS


class StepView:
    """A view of a tensor of a step's metadata, or a number from it, made by the first of the layers that share it.

    make: takes the tensor, or what holds it, and a count.
    """

    def __init__(self, make: Callable[[Any, int], Any]) -> None:
        self._make = make
        self._kept: tuple[Callable[[], Any], Any, int, Any] = (_nothing, None, 0, None)

    def __call__(self, metadata: Any, source: Any, count: int) -> Any:
        """The view. metadata: that of the step, alive; another one, or another tensor in it, makes it anew."""
        owner, of, number, view = self._kept
        if of is source and number == count and owner() is metadata:
            return view
        made = self._make(source, count)
        with contextlib.suppress(TypeError):  # its class has no weak references
            self._kept = (weakref.ref(metadata, partial(_drop, weakref.ref(self))), source, count, made)
        return made


def _drop(holder: "weakref.ref[StepView]", owner: Any) -> None:
    view = holder()
    if view is not None and view._kept[0] is owner:
        view._kept = (_nothing, None, 0, None)
