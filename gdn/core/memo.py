"""Repeated calls: an eager call that matches an earlier one skips the checks, the problem and the choice of a kernel.

An operator that finds no plan takes its ordinary path and then passes the Params of its launches to `Memo.record`. The
resulting Plan says which of the call's tensors, which views of them, which constants and which created tensors (`make`: outputs,
workspace, some rows, arguments in another dtype) to launch with.
The plan matches later calls that agree in

    every argument that is not a tensor             the flags, part of the key; with their type where equal values differ (1, 1.0)
    type, dtype, device, shape, strides of tensors  the guard
    alignment of addresses                          for tensors of which it decides about a copy or the kernel
    shared memory of tensors                        none with a written tensor, decided once for a set of addresses
    the switches, and that no call is explained     so that GDN_VALIDATE, reload and explain take effect

so everything that the checks and the choice read is the same; a call that raised has no plan and raises again.
A call in which a kernel gets tensors of another origin, such as copies for alignment, is not recorded: it always takes the
ordinary path.
"""

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn.core.overlap import meeting, shares_element, span_bytes
from gdn.core.tensors import ALIGNMENT
from gdn.runtime import env, guards, is_explaining

Created = tuple[Tensor, Callable[..., Tensor], tuple[Tensor, ...]]  # a tensor that is not an argument, its maker, its sources
Launch = tuple[Callable[..., None], Any]  # a kernel, and the operator's Params
Tensors = tuple[Tensor | None, ...]  # every tensor argument of a call, None where it was left out

_ADDRESSES_PER_PLAN = 512  # sets of addresses that a plan remembers as admitted
# Types of flags whose equal values are the same, but for 0.0 and -0.0.
_PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype, type})


class Recorded(NamedTuple):
    """The launches of a call, as a plan repeats them."""

    launches: Sequence[Launch]
    results: Sequence[Tensor | None]  # of the call
    created: Sequence[Created]
    aligned: Sequence[Tensor | None]  # tensors whose alignment matters


class _Origins(NamedTuple):
    """Origins of the values of a call's launches, one after the other, and of its results."""

    places: list[int]  # of each value and result in [*tensors, *created, *constants, *views]
    makers: tuple[tuple[Callable[..., Tensor], tuple[int, ...]], ...]  # of the created tensors, with the places of their sources
    constants: list[Any]
    views: tuple[tuple[int, torch.Size, tuple[int, ...]], ...]  # place of the viewed tensor, size, strides


class Likeness:
    """Whether the tensors of a call are like those of an earlier one: all that the checks read is the same.

    aligned: those of them whose addresses modulo 16 bytes are to be the same. written: those that the call writes.
    """

    __slots__ = (
        "_absent", "_aligned", "_disjoint", "_given", "_good", "_guard", "_last", "_spans", "_watched", "_written",
    )  # fmt: skip

    def __init__(self, tensors: Tensors, aligned_ones: Sequence[Tensor | None], written: Sequence[Tensor | None]) -> None:
        given = [place for place, tensor in enumerate(tensors) if tensor is not None]
        self._guard = guards.maker()([tensor for tensor in tensors if tensor is not None])
        aligned, targets = _places_of(aligned_ones, tensors), _places_of(written, tensors)
        self._given = _tuple_of(given)
        self._absent = _tuple_of([place for place, tensor in enumerate(tensors) if tensor is None])
        # Where only new tensors are written, no addresses matter except those that must be aligned.
        watched = given if targets else aligned
        self._watched = None if watched == given else _tuple_of([given.index(place) for place in watched])
        self._written = [watched.index(place) for place in targets]
        self._spans: list[int] | None = None
        self._last = (*[tensor.data_ptr() for place in watched if (tensor := tensors[place]) is not None],)  # admitted last
        self._aligned = [(own := watched.index(place), self._last[own] % ALIGNMENT) for place in aligned]
        self._good: dict[tuple[int, ...], None] = {self._last: None}  # the call itself was checked
        self._disjoint: dict[tuple[int, int, int], bool] = {}  # places of a pair, difference of addresses -> disjoint

    def _admit(self, watched: tuple[Tensor, ...], addresses: tuple[int, ...]) -> bool:
        """Whether addresses are aligned as they were, and no written tensor shares an element with another tensor."""
        if any(addresses[place] % ALIGNMENT != rest for place, rest in self._aligned):
            return False
        if self._spans is None:
            self._spans = [span_bytes(tensor) for tensor in watched]
        places = range(len(watched))
        for a, b in meeting([(addresses[i], addresses[i] + self._spans[i], i in self._written, i) for i in places]):
            first, second = addresses[a], addresses[b]
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

    def holds(self, tensors: tuple[Any, ...]) -> bool:
        for tensor in self._absent(tensors):  # tuples would ask a tensor whether it equals None, which takes 10 us
            if tensor is not None:
                return False
        given = self._given(tensors)
        if not self._guard(*given):
            return False
        watched = given if self._watched is None else self._watched(given)
        addresses = (*map(_address, watched),)
        return addresses == self._last or addresses in self._good or self._admit(watched, addresses)


class Plan(Likeness):
    """Derivation of launches from the tensors of a call."""

    __slots__ = ("_constants", "_is_plain", "_launches", "_makers", "_results", "_views")

    def __init__(self, tensors: Tensors, recorded: Recorded, origins: _Origins, written: Sequence[Tensor | None]) -> None:
        super().__init__(tensors, recorded.aligned, written)
        places = iter(origins.places)
        # Not _make, which counts the values again.
        self._launches = [
            (launch, functools.partial(tuple.__new__, type(params)), _tuple_of([*itertools.islice(places, len(params))]))
            for launch, params in recorded.launches
        ]
        self._results = itemgetter(*places)
        self._makers, self._constants, self._views = origins.makers, tuple(origins.constants), origins.views
        self._is_plain = not origins.makers and not origins.views

    def run(self, tensors: tuple[Any, ...]) -> Any:
        """Launches and returns the call's results; None where the tensors do not match the plan."""
        if not self.holds(tensors):
            return None
        known: Any
        if self._is_plain:
            known = (*tensors, *self._constants)
        else:
            known = list(tensors)
            for maker, places in self._makers:
                known.append(maker(*[known[place] for place in places]))
            known += self._constants
            for place, size, stride in self._views:
                known.append(guards.view_of(known[place], size, stride))
        for launch, params, arguments in self._launches:
            launch(params(arguments(known)))
        return self._results(known)


class Kept:
    """What is kept of earlier calls, by key, the newest first: bounded, and dropped when the switches are read again."""

    _LIMIT, _PER_KEY = 2048, 8  # keys, enough for the decode batches and prefill lengths of one process; values of a key

    def __init__(self) -> None:
        self._found: dict[Any, tuple[Any, ...]] = {}
        self._switches: env.Switches | None = None
        self._lock = threading.Lock()  # for writers

    def _add(self, key: Any, value: Any, switches: env.Switches) -> None:
        with self._lock:
            if switches is not self._switches:
                self._found.clear()
                self._switches = switches
            others = self._found.pop(key, ())
            while len(self._found) >= self._LIMIT:
                del self._found[next(iter(self._found))]  # the oldest
            self._found[key] = (value, *others)[: self._PER_KEY]


class Memo(Kept):
    """Plans of one operator."""

    def run(self, tensors: tuple[Any, ...], flags: object) -> Any:
        """Launches and returns the call's results, or None where no plan matches.

        tensors: every tensor argument, None where it was left out, always in the same order; the two whose shapes differ
        most from call to call come first. flags: all other arguments.
        """
        if env.current() is not self._switches or is_explaining():
            return None
        second = tensors[1] if len(tensors) > 1 else None
        try:  # the same as _key, without a function call
            plans: tuple[Plan, ...] = self._found.get((tensors[0].shape, None if second is None else second.shape, flags), ())
        except (TypeError, AttributeError):  # an unhashable flag or not a tensor: the checks name it
            return None
        for plan in plans:
            found = plan.run(tensors)
            if found is not None:
                return found
        return None

    def record(
        self,
        tensors: Tensors,
        flags: tuple[Any, ...],
        switches: env.Switches,
        recorded: Recorded,
        written: Sequence[Tensor],
        key: object = None,
    ) -> None:
        """Records a checked call.

        switches: those in effect when it was checked and prepared. written: by the launches. key: what `run` gets for the flags.
        """
        if switches.validate or switches is not env.current() or not all(map(_is_plain, flags)):
            return
        origins = _origins(tensors, recorded)
        if origins is None:
            return
        plan = Plan(tensors, recorded, origins, written)
        self._add(_key(tensors, flags if key is None else key), plan, switches)


def _is_plain(flag: object) -> bool:
    """Whether equal flags are the same. A tuple stands for numbers on the host: these and their types, or one and its type."""
    return type(flag) in _PLAIN or (type(flag) is tuple and all(map(_is_plain, flag)))


_address = Tensor.data_ptr  # a method of C, so that map() calls it without a Python frame


def _tuple_of(places: Sequence[int]) -> Callable[[Any], tuple[Any, ...]]:
    """Function that takes these places of a sequence as a tuple: itemgetter, which returns no tuple for fewer than two."""
    if len(places) > 1:
        return itemgetter(*places)
    if not places:
        return lambda _: ()
    place = places[0]
    return lambda sequence: (sequence[place],)


def _key(tensors: tuple[Any, ...], flags: object) -> tuple[Any, ...]:
    first, second = tensors[0], tensors[1] if len(tensors) > 1 else None
    return first.shape, None if second is None else second.shape, flags


def _places_of(some: Sequence[Tensor | None], tensors: Tensors) -> list[int]:
    wanted = {id(tensor) for tensor in some if tensor is not None}
    return [place for place, tensor in enumerate(tensors) if id(tensor) in wanted]


def _origins(tensors: Tensors, recorded: Recorded) -> _Origins | None:
    """Origins of the values of all launches and of the results; None where one is unknown or ambiguous.

    A value must be one of the call's tensors, a created tensor, a constant, or a view from the start of one of these tensors.
    """
    sources = [*tensors, *[tensor for tensor, _, _ in recorded.created]]
    place_of = {id(source): place for place, source in enumerate(sources) if source is not None}
    place_at = {source.data_ptr(): place for place, source in enumerate(tensors) if source is not None}
    if len(place_at) < len([tensor for tensor in tensors if tensor is not None]):
        return None  # the same memory twice: the origin of a value is ambiguous
    place_at |= {tensor.data_ptr(): place for place, (tensor, _, _) in enumerate(recorded.created, len(tensors))}
    constants: list[Any] = []
    views: list[tuple[int, torch.Size, tuple[int, ...]]] = []
    kinds: list[tuple[int, int]] = []  # per value: 0 source, 1 constant, 2 view; its place there
    for value in (*itertools.chain(*[params for _, params in recorded.launches]), *recorded.results):
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
    makers = tuple((maker, tuple(place_of[id(source)] for source in origins)) for _, maker, origins in recorded.created)
    return _Origins([starts[kind] + place for kind, place in kinds], makers, constants, tuple(views))
