"""Calls seen before: an eager call like an earlier one skips the checks, the problem and the choice of a kernel.

An operator that finds no plan takes its ordinary path and then hands `Memo.learn` what it passed to the kernel. From that
comes a Plan: which of the call's tensors, which views of them, which constants and which tensors made anew (`make`: outputs,
workspace, arguments in another dtype) are launched.
The plan serves later calls that agree in

    every argument that is no tensor               the flags, part of the key; with its type where equal is not the same (1, 1.0)
    type, dtype, device, shape, strides of tensors  the guard
    alignment of addresses                          of the tensors that kernels read by 16 bytes
    which tensors share memory                      none that is written, decided once for a set of addresses
    the switches, and that nobody is explaining     so that GDN_VALIDATE, reload and explain do what they say

so everything that the checks and the choice look at is the same, and what raised before finds no plan and raises again.
Nothing is learned from a call with tensors of other origin, as copies for alignment: such calls take the ordinary path.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

from gdn.ops._overlap import shares_element, span_bytes
from gdn.ops._tensors import ALIGNMENT
from gdn.runtime import env, is_explaining

Tensor = torch.Tensor
Made = tuple[Tensor, Callable[..., Tensor], tuple[Tensor, ...]]  # a tensor that is no argument, what makes it, from what
Guard = Callable[..., bool]

_LIMIT = 2048  # keys kept: decode batches and prefill lengths of one process
_PLANS_PER_KEY = 8
_ADDRESSES_PER_PLAN = 512  # sets of addresses that a plan remembers to have found good
_PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype, type})  # types of flags that are what they equal

# torch's compiler checks its own assumptions with these, in C++. They are private: without them Python does the same.
_PRIVATE: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_view: Callable[..., Tensor] = getattr(
    _PRIVATE, "_reinterpret_tensor", lambda tensor, size, stride, _: torch.as_strided(tensor, size, stride)
)


class Plan:
    """How the launch of a kernel follows from a call's tensors."""

    __slots__ = (
        "_absent", "_aligned", "_arguments", "_constants", "_disjoint", "_given", "_good", "_guard", "_is_plain", "_last",
        "_launch", "_makers", "_nothing", "_pairs", "_params", "_results", "_spans", "_views", "_watched",
    )  # fmt: skip

    def __init__(
        self,
        tensors: Sequence[Tensor | None],
        launch: Callable[..., None],
        params: Callable[[tuple[Any, ...]], Any] | None,
        makers: Sequence[tuple[Callable[..., Tensor], tuple[int, ...]]],
        constants: Sequence[Any],
        views: Sequence[tuple[int, torch.Size, tuple[int, ...]]],
        arguments: Sequence[int],
        results: Sequence[int],
        aligned: Sequence[int],
        written: Sequence[int],
    ) -> None:
        """params: makes of the arguments what launch takes; None: they are passed as they are. arguments, results: places in
        [*tensors, *made, *constants, *views]; makers: with the places that each makes its tensor from; views: of a place, with
        size and strides; aligned, written: places of tensors."""
        given = [place for place, tensor in enumerate(tensors) if tensor is not None]
        self._guard = _guard_maker()([tensor for tensor in tensors if tensor is not None])
        self._given = _tuple_of(given)
        absent = [place for place, tensor in enumerate(tensors) if tensor is None]
        self._absent, self._nothing = _tuple_of(absent), (None,) * len(absent)
        # Where nothing is written but new tensors, only addresses that must be aligned matter.
        watched = given if written else sorted(aligned)
        self._watched = None if watched == given else _tuple_of([given.index(place) for place in watched])
        self._aligned = [watched.index(place) for place in aligned]
        self._spans = [span_bytes(tensor) for place in watched if (tensor := tensors[place]) is not None]
        ours = [watched.index(place) for place in written]
        self._pairs = [(a, b) for a in ours for b in range(len(watched)) if b != a and not (b in ours and b < a)]
        self._good: dict[tuple[int, ...], None] = {}
        self._last: tuple[int, ...] | None = None  # of the good ones
        self._disjoint: dict[tuple[int, int, int], bool] = {}  # a pair's places and the difference of addresses -> apart
        self._launch, self._params = launch, params
        self._makers, self._constants, self._views = tuple(makers), tuple(constants), tuple(views)
        self._is_plain = not makers and not views
        self._arguments, self._results = itemgetter(*arguments), itemgetter(*results)

    def _admit(self, watched: tuple[Tensor, ...], addresses: tuple[int, ...]) -> bool:
        """Whether addresses are aligned, and what is written shares no element with another tensor."""
        if any(addresses[place] % ALIGNMENT for place in self._aligned):
            return False
        for a, b in self._pairs:
            first, second = addresses[a], addresses[b]
            if first + self._spans[a] <= second or second + self._spans[b] <= first:
                continue
            key = (a, b, second - first)
            apart = self._disjoint.get(key)
            if apart is None:
                apart = self._disjoint[key] = not shares_element(watched[a], watched[b], first, second)
            if not apart:
                return False
        if len(self._good) >= _ADDRESSES_PER_PLAN:
            self._good.clear()
            self._disjoint.clear()
        self._good[addresses] = None
        self._last = addresses
        return True

    def run(self, tensors: tuple[Any, ...]) -> Any:
        """Launches and returns what the call returns; None where the tensors are not like those the plan was made for."""
        given = self._given(tensors)
        try:
            if self._absent(tensors) != self._nothing or not self._guard(*given):
                return None
        except ValueError:  # an array of another library, which compares with None by elements: the checks will name it
            return None
        watched = given if self._watched is None else self._watched(given)
        addresses = (*map(_address, watched),)
        if addresses != self._last and addresses not in self._good and not self._admit(watched, addresses):
            return None
        known: Any
        if self._is_plain:
            known = (*tensors, *self._constants)
            if self._params is None:
                self._launch(*self._arguments(known))
            else:
                self._launch(self._params(self._arguments(known)))
            return self._results(known)
        known = list(tensors)
        for maker, places in self._makers:
            known.append(maker(*[tensors[place] for place in places]))
        known += self._constants
        for place, size, stride in self._views:
            known.append(_view(known[place], size, stride, 0))
        if self._params is None:
            self._launch(*self._arguments(known))
        else:
            self._launch(self._params(self._arguments(known)))
        return self._results(known)


class Memo:
    """The plans of one operator, bounded; forgotten when the switches are read again."""

    def __init__(self) -> None:
        self._plans: dict[Any, tuple[Plan, ...]] = {}
        self._switches: env.Switches | None = None
        self._lock = threading.Lock()  # of writers

    def run(self, tensors: tuple[Any, ...], flags: tuple[Any, ...]) -> Any:
        """Launches and returns what the call returns, or None where no plan serves it.

        tensors: every tensor argument, None where it was left out, always in the same order; the two whose shapes differ
        most from call to call come first. flags: all other arguments.
        """
        if env.current() is not self._switches or is_explaining():
            return None
        second = tensors[1] if len(tensors) > 1 else None
        try:  # as _key, without a call
            plans = self._plans.get((tensors[0].shape, None if second is None else second.shape, flags), ())
        except (TypeError, AttributeError):  # a flag without a hash, no tensor: the checks will say what is wrong
            return None
        for plan in plans:
            found = plan.run(tensors)
            if found is not None:
                return found
        return None

    def learn(
        self,
        tensors: tuple[Tensor | None, ...],
        flags: tuple[Any, ...],
        switches: env.Switches,
        launch: Callable[..., None],
        arguments: Sequence[Any],
        results: Sequence[Tensor | None],
        made: Sequence[Made] = (),
        aligned: Sequence[Tensor | None] = (),
        written: Sequence[Tensor | None] = (),
    ) -> None:
        """Remembers a checked call. switches: those it was checked and prepared under. arguments: what was launched.
        aligned: tensors whose addresses were found to be multiples of 16 bytes. written: tensors that the launch writes."""
        if switches.validate or switches is not env.current() or not _PLAIN.issuperset(map(type, flags)):
            return
        plan = _plan(tensors, launch, arguments, results, made, aligned, written)
        if plan is None:
            return
        key = _key(tensors, flags)
        with self._lock:
            if switches is not self._switches:
                self._plans.clear()
                self._switches = switches
            others = self._plans.pop(key, ())
            while len(self._plans) >= _LIMIT:
                del self._plans[next(iter(self._plans))]  # the oldest
            self._plans[key] = (plan, *others)[:_PLANS_PER_KEY]


_address = Tensor.data_ptr  # a method of C, so that map() calls it without a Python frame


def _tuple_of(places: Sequence[int]) -> Callable[[Any], tuple[Any, ...]]:
    """What takes these places of a sequence: itemgetter, which gives no tuple for fewer than two."""
    if len(places) > 1:
        return itemgetter(*places)
    if not places:
        return lambda _: ()
    place = places[0]
    return lambda sequence: (sequence[place],)


def _key(tensors: tuple[Any, ...], flags: tuple[Any, ...]) -> tuple[Any, ...]:
    first, second = tensors[0], tensors[1] if len(tensors) > 1 else None
    return first.shape, None if second is None else second.shape, flags


def _plan(
    tensors: tuple[Tensor | None, ...],
    launch: Callable[..., None],
    arguments: Sequence[Any],
    results: Sequence[Tensor | None],
    made: Sequence[Made],
    aligned: Sequence[Tensor | None],
    written: Sequence[Tensor | None],
) -> Plan | None:
    """None where an argument is neither the call's nor made nor a view from the start of one, or could be of several."""
    sources = [*tensors, *[tensor for tensor, _, _ in made]]
    place_of = {id(source): place for place, source in enumerate(sources) if source is not None}
    place_at = {source.data_ptr(): place for place, source in enumerate(tensors) if source is not None}
    if len(place_at) < len([tensor for tensor in tensors if tensor is not None]):
        return None  # the same memory twice: which one an argument came from cannot be told
    place_at |= {tensor.data_ptr(): place for place, (tensor, _, _) in enumerate(made, len(tensors))}
    constants: list[Any] = []
    views: list[tuple[int, torch.Size, tuple[int, ...]]] = []
    kinds: list[tuple[int, int]] = []  # of arguments and results: 0 source, 1 constant, 2 view; and its place there
    for value in (*arguments, *results):
        place = place_of.get(id(value))
        if place is not None:
            kinds.append((0, place))
        elif not isinstance(value, Tensor):
            kinds.append((1, len(constants)))
            constants.append(value)
        else:
            place = place_at.get(value.data_ptr())
            source = None if place is None else sources[place]
            if place is None or source is None or source.dtype != value.dtype or value.numel() == 0:
                return None
            kinds.append((2, len(views)))
            views.append((place, value.shape, value.stride()))
    starts = (0, len(sources), len(sources) + len(constants))
    places = [starts[kind] + place for kind, place in kinds]
    must_align = {id(tensor) for tensor in aligned if tensor is not None}
    is_written = {id(tensor) for tensor in written if tensor is not None}
    return Plan(
        tensors,
        launch,
        getattr(arguments, "_make", None),
        [(maker, tuple(place_of[id(source)] for source in origins)) for _, maker, origins in made],
        constants,
        views,
        places[: len(arguments)],
        places[len(arguments) :],
        [place for place, tensor in enumerate(tensors) if id(tensor) in must_align],
        [place for place, tensor in enumerate(tensors) if id(tensor) in is_written],
    )


@functools.cache
def _guard_maker() -> Callable[[Sequence[Tensor]], Guard]:
    """torch's comparison of tensors with those it was made from, where it is there and does what is expected of it.

    True where each tensor has the metadata of its model and no two are the same."""

    def of_torch(tensors: Sequence[Tensor]) -> Guard:
        guard: Guard = _PRIVATE.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return guard

    try:
        with torch.inference_mode(False):
            first, second, third = (torch.empty(2, 3, device="cpu") for _ in range(3))  # a graph may be being captured
            guard = of_torch([first, second])
            others = (third[:1], third.half(), torch.empty(3, 2, device="cpu").T, third.to("meta"), [1.0], None, first)
            is_trusted = guard(first, third) and not any(guard(first, other) for other in others)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        is_trusted = False
    return of_torch if is_trusted else _python_guard


def _python_guard(tensors: Sequence[Tensor]) -> Guard:
    def metadata(tensor: Tensor) -> tuple[Any, ...]:
        return type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride()

    wanted = [metadata(tensor) for tensor in tensors]

    def guard(*found: Any) -> bool:
        if not all(isinstance(one, Tensor) for one in found) or len(set(map(id, found))) < len(found):
            return False
        return wanted == [metadata(one) for one in found]

    return guard
