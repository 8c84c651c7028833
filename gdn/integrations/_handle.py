"""`Handle`: what `enable` of an adapter returns; it reports, and puts the host's own code back."""

import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self

from gdn.integrations import _records
from gdn.integrations._calls import Calls, unserved_machine
from gdn.integrations._hosts import Host
from gdn.integrations._points import Missing, Point, Undo, Unreplaced, resolve
from gdn.runtime import env, log
from gdn.warmup import unusable

_lock = threading.RLock()
_enabled: dict[tuple[str, Hashable], "Handle"] = {}


@dataclass(frozen=True)
class PointReport:
    """One point: its path, whether it is replaced now, why it is not (or what to know of it), and its calls since `enable`."""

    path: str
    replaced: bool
    why: str | None
    served: int
    left: MappingProxyType[str, int]  # reason -> calls left to the host

    def __str__(self) -> str:
        state = "replaced" if self.replaced else "not replaced"
        why = f" ({self.why})" if self.why else ""
        left = "".join(f"\n    {count} left to the host: {reason}" for reason, count in self.left.items())
        return f"  {self.path}: {state}{why}, {self.served} calls served{left}"


@dataclass(frozen=True)
class Report:
    """What an adapter replaced in its host, and what came of it. `str()` is for people."""

    host: str
    version: str | None
    notes: tuple[str, ...]
    points: tuple[PointReport, ...]

    def __str__(self) -> str:
        lines = [f"gdn.integrations.{self.host}, host version {self.version or 'unknown'}", *(f"  {one}" for one in self.notes)]
        return "\n".join([*lines, *map(str, self.points)])


@dataclass
class _Installed:
    point: Point
    calls: Calls
    undo: Undo | None = None
    why: str | None = None


@dataclass
class Handle:
    """An enabled adapter. As a context manager it disables itself at the end.

    Attributes
    ----------
    host : str
        Name of the adapter.
    options : mapping
        The arguments of `enable`.
    """

    host: str
    version: str | None
    options: MappingProxyType[str, Any]
    notes: list[str] = field(default_factory=list)
    _installed: list[_Installed] = field(default_factory=list, repr=False)
    _scope: Hashable = field(default=None, repr=False)
    _switch: tuple[str, str, str | None] | None = field(default=None, repr=False)  # set by `enable`: name, value, former value
    _enabled: bool = field(default=True, repr=False)
    _forget: "weakref.finalize[..., Any] | None" = field(default=None, repr=False)  # out of the registry when the scope dies

    @property
    def enabled(self) -> bool:
        """False after `disable`."""
        return self._enabled

    def disable(self) -> None:
        """Puts the host's own code back. Points that someone else has patched since stay, and the report says so.

        Whatever still reaches a replacement afterwards, through a copied reference or a patch on top, runs the host's own code.
        A variable of the environment that `enable` set gets its former value. A second call does nothing.
        """
        with _lock:
            if not self._enabled:
                return
            self._enabled = False
            try:
                for one in reversed(self._installed):
                    one.calls.active = False
                    if one.undo is not None:
                        one.why, one.undo = one.undo() or "disabled", None
            finally:
                if _enabled.get((self.host, self._scope)) is self:
                    del _enabled[(self.host, self._scope)]
                if self._forget is not None:
                    self._forget.detach()
                self._put_switch_back()

    def _put_switch_back(self) -> None:
        if self._switch is None:
            return
        name, value, before = self._switch
        if env.exported(name) == value:
            env.export(name, before)
        if env.reload().value(name) != "0":
            self.notes.append(f"disabled, but {name} was set by others: the host's next start enables it again")

    def report(self) -> Report:
        """Per point: replaced or not and why, calls served, calls left to the host by reason."""
        points = []
        for one in self._installed:
            left = MappingProxyType(dict(one.calls.left))
            points.append(PointReport(one.point.path, one.undo is not None, one.why, one.calls.served, left))
        return Report(self.host, self.version, tuple(self.notes), tuple(points))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.disable()


def enable(
    host: Host,
    points: Sequence[Point],
    *,
    strict: bool = False,
    allow_reference: bool = False,
    options: dict[str, Any] | None = None,
    notes: Sequence[str] = (),
    scope: Hashable = None,
) -> Handle:
    """Replaces points of a host; what the `enable` of every adapter calls.

    Parameters
    ----------
    host : Host
        The host, from `_hosts`.
    points : sequence of Point
        What to replace, in this order; `disable` goes backwards.
    strict : bool
        Raise where a point cannot be replaced because its signature is not a recorded one. Nothing is replaced then.
    allow_reference : bool
        Serve tensors on the CPU, by the plain-torch reference, on any machine. For tests.
    options : dict
        Further options of the adapter's own `enable`.
    notes : sequence of str
        What the report says besides its points.
    scope : hashable
        One handle exists for each host and scope: the process, or a weak reference, such as to a model.

    Raises
    ------
    ValueError
        If this host and scope is enabled with other options.
    RuntimeError
        With strict, if a point cannot be replaced, or no kernel can run in this process.
    """
    given = {"strict": strict, "allow_reference": allow_reference, **(options or {})}
    with _lock:
        existing = _enabled.get((host.name, scope))
        if existing is not None:
            if existing.options != given:
                raise ValueError(f"enable: expected the options of the enabled handle, {dict(existing.options)}, got {given}")
            return existing
        reason = unserved_machine(allow_reference)
        if reason is None and not allow_reference and (reason := unusable()) is not None and strict:
            raise RuntimeError(f"gdn.integrations.{host.name}, strict: nothing would be replaced, {reason}")
        handle = Handle(host.name, _records.installed_version(host), MappingProxyType(given), list(notes), _scope=scope)
        if reason is not None:
            handle._installed = [_Installed(point, Calls(), why=reason) for point in points]
            log.once(f"{host.name}: nothing is replaced, {reason}")
        else:
            handle._installed = [_Installed(point, Calls(allow_reference)) for point in points]
            _install(host, handle._installed, strict)
        _enabled[(host.name, scope)] = handle
        if isinstance(scope, weakref.ref) and (owner := scope()) is not None:
            handle._forget = weakref.finalize(owner, _enabled.pop, (host.name, scope), None)
            handle._forget.atexit = False
        return handle


def enable_by_switch(
    switch: str, host: Host, points: Callable[[], Sequence[Point]], *, strict: bool, allow_reference: bool
) -> Handle:
    """`enable`, with the switch set in the environment, for the processes that the host starts. points: made after it is set."""
    value = "strict" if strict else "1"
    with _lock:
        before = env.export(switch, value)
        try:
            handle = enable(host, points(), strict=strict, allow_reference=allow_reference)
        except BaseException:
            env.export(switch, before)
            raise
        if handle._switch is None:
            handle._switch = (switch, value, before)
        return handle


def _install(host: Host, wanted: list[_Installed], strict: bool) -> None:
    for one in wanted:
        one.why = _guard(host, one.point)
    try:
        if strict:
            _raise_where_left(host, wanted)
        for one in wanted:
            if one.why is None:
                try:
                    one.undo = one.point.install(one.calls)
                except Unreplaced as error:
                    one.why = str(error)
        if strict:
            _raise_where_left(host, wanted)
    except BaseException:
        for one in reversed(wanted):
            if one.undo is not None:
                one.undo()
        raise
    for one in wanted:
        if one.why is not None:
            log.once(f"{host.name}: left alone, {one.point.path}: {one.why}", logging.WARNING)


def _raise_where_left(host: Host, wanted: list[_Installed]) -> None:
    left = [f"{one.point.path}: {one.why}" for one in wanted if one.why is not None]
    if left:
        raise RuntimeError(f"gdn.integrations.{host.name}, strict: " + "; ".join(left))


def _guard(host: Host, point: Point) -> str | None:
    """Why a point must be left alone; None where every guarded name has a recorded signature."""
    for name in point.guards:
        try:
            value = resolve(name)[2]
        except Missing:
            return f"{name} is not there (tested: {host.tested})"
        except ImportError as error:
            return f"{name} cannot be imported: {error}"
        verdict = _records.judge(host, name, value)
        if verdict.refusal is not None:
            return f"{name}: {verdict.refusal}"
        if verdict.warning is not None:
            log.once(f"{host.name}: {name}: {verdict.warning}", logging.WARNING)
    return None
