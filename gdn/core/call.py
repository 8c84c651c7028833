"""The decorator of every public operator: `@operator` over a function that checks, chooses and launches.

The decorated function is the ordinary path. It runs the checks, calls `prepare`, creates the tensors that the kernel needs
with `make`, and ends in `launch`; where no kernel serves the problem, `prepare` leaves it for the reference. The decorator
handles before it, from the function's signature alone:

    a compiler is tracing          the operator of torch.library (gdn.core.library)
    the call matches a plan        the memo (gdn.core.memo) launches: no check, no choice
    any other call                 argument types are checked against the annotations (TypeError by name), gradients and
                                   autocast are off, and the reference gets the same arguments if it runs

The wrapper is generated from the signature, like the `__init__` of a dataclass: binding the arguments through `*args` would
cost more than everything else in a repeated call.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from gdn import runtime
from gdn.core import library, modes
from gdn.core.check import bad_value
from gdn.core.kinds import Kind, kind_of
from gdn.core.library import NEW as NEW
from gdn.core.library import Arguments, Condition
from gdn.core.library import always as always
from gdn.core.memo import Created, Launch, Memo, Recorded
from gdn.core.overlap import meeting, overlaps_itself, shares_element, span_bytes
from gdn.core.tensors import contiguous_last
from gdn.problem import Problem
from gdn.runtime import Choice, Prepared, env, is_explaining

Function = TypeVar("Function", bound=Callable[..., Any])


class _RunReference(Exception):
    """Raised where no kernel serves the call."""


@dataclass
class Call:
    """One call on its ordinary path."""

    operator: "Operator"
    given: Arguments  # the caller's
    arguments: Arguments  # Python numbers, contiguous last dimensions, settled defaults
    created: list[Created] = field(default_factory=list)
    known: set[int] = field(default_factory=set)  # id of each argument and created tensor
    launches: list[Launch] = field(default_factory=list)
    recorded: Recorded | None = None
    ran_reference: bool = False  # in one of its parts
    has_checked_memory: bool = False


_current: ContextVar[Call] = ContextVar("gdn_call")
_BY_NAME: "dict[str, Operator]" = {}  # every operator, by its name under torch.ops.gdn
_MOST_BOUND = 256  # sets of options of an operator: bounds the memory where a number of them is new in every call


class Operator:
    """Decorator that turns a function into a public operator. It handles a part of each call, from the function's signature."""

    def __init__(
        self,
        reference: Callable[..., Any],
        *,
        name: str | None = None,
        writes: Mapping[str, Condition] | None = None,
        in_place: Mapping[str, str] | None = None,
        returns: library.Returns = library.out_or_new,
        varies: Sequence[str] = (),
        contiguous: Sequence[str] = (),
        hints: Sequence[str] = (),
    ) -> None:
        """Options of an operator.

        reference: the operator in plain torch, with the same arguments but `backend` and hints.
        name: name under `torch.ops.gdn`; default: the function's.
        writes: arguments that a call may write, each with the condition for it.
        in_place: written argument -> the argument that it may be identical to.
        returns: origin of each result, from the arguments: the name of an argument, NEW or None. Default: one result, `out` where
            it is given.
        varies: the two tensors whose shapes change most between calls. Where given, repeated calls skip the ordinary path.
        contiguous: arguments whose last dimension must be contiguous; where it is not, the call gets a copy, logged once.
        hints: numbers that say what the host knows of the tensors' values. What `bind` returns takes them in every call.
        """
        self.reference, self.name, self.returns = reference, name, returns
        self.reference_names = tuple(inspect.signature(reference).parameters)
        self.writes, self.in_place = dict(writes or {}), dict(in_place or {})
        self.memo = Memo() if varies else None
        self.varies, self.contiguous, self.hints = tuple(varies), tuple(contiguous), tuple(hints)
        self._bound: dict[tuple[Any, ...], Callable[..., Any]] = {}  # flags -> what `bind` made for them

    def __call__(self, body: Function) -> Function:
        self.body, self.name = body, self.name or body.__name__
        self.signature = inspect.signature(body)
        self.kinds: dict[str, Kind] = {name: kind_of(p.annotation) for name, p in self.signature.parameters.items()}
        self.tensors = [name for name, kind in self.kinds.items() if kind.type is Tensor]
        self.tensors.sort(key=lambda name: self.varies.index(name) if name in self.varies else len(self.varies))
        flags = {name: kind.key_source(name) for name, kind in self.kinds.items() if kind.type is not Tensor}
        self.flags_source = f"({''.join(f'{source}, ' for source in flags.values())})"  # source of the memo's key
        self._flags_key: Callable[..., tuple[Any, ...]] = eval(f"lambda {', '.join(flags)}: {self.flags_source}")
        self.flags = list(flags)
        _BY_NAME[self.name] = self
        self.library = library.Registered(self.name, self.signature, self.writes, self.returns, self.run)
        return self._public()  # type: ignore[return-value]

    def trace(self, *values: Any) -> Any:
        """Adds the call to a compiler's graph. values: every argument, in the signature's order.

        Types are checked here: a schema would convert a flag (True to 1), and refuse an object without naming the argument.
        """
        arguments = dict(zip(self.kinds, values, strict=True))
        for name, kind in self.kinds.items():
            kind.check_type(name, arguments[name])
        return self.library.call(arguments)

    def run(self, *values: Any, key: object = None) -> Any:
        """Runs the ordinary path of a call. key: what stands for the flags in the memo; None = the flags themselves."""
        arguments = dict(zip(self.kinds, values, strict=True))
        if modes.has_memory() and modes.lack_memory(values):
            return self.trace(*values)
        given = dict(arguments)
        arguments = self.check_types(arguments)
        if is_explaining():
            return self._explain(arguments)
        call = Call(self, given, dict(arguments))
        switches = env.current()
        token = _current.set(call)
        try:
            with inference(given.values()), without_autocast():
                for name in self.contiguous:
                    if arguments[name] is not None:
                        take_contiguous(name, arguments[name])
                try:
                    result = self.body(**call.arguments)
                except _RunReference:
                    result = self.reference(**{name: call.arguments[name] for name in self.reference_names})
        finally:
            _current.reset(token)
        if call.recorded is not None and self.memo is not None and modes.has_memory():
            tensors = tuple(given[name] for name in self.tensors)
            flags = self._flags_key(*[given[name] for name in self.flags])
            self.memo.record(tensors, flags, switches, call.recorded, list(self.written(arguments).values()), key)
        return result

    def _explain(self, arguments: Arguments) -> Any:
        """Runs everything but launches, on tensors without memory: `prepare` records the choice."""
        fakes, mode = modes.faked(arguments)
        token = _current.set(Call(self, fakes, dict(fakes)))
        try:
            with mode, torch.no_grad(), without_autocast(), contextlib.suppress(_RunReference):
                return self.body(**fakes)
            return None
        finally:
            _current.reset(token)

    def written(self, arguments: Arguments) -> dict[str, Tensor]:
        """Arguments that a call may write."""
        given = {name: arguments[name] for name, condition in self.writes.items() if condition(arguments)}
        return {name: tensor for name, tensor in given.items() if tensor is not None}

    def check_types(self, given: Arguments) -> Arguments:
        """The arguments of a call, numbers as Python numbers. Raises TypeError or ValueError, naming the argument."""
        checked = dict(given)
        for name, kind in self.kinds.items():
            if given[name] is not None or not kind.is_optional:  # most arguments are left out
                checked[name] = kind.check(name, given[name])
        return checked

    def check_places(self, given: Arguments, arguments: Arguments) -> None:
        """Raises ValueError where a written argument overlaps itself or shares an element with another one.

        given: the caller's; arguments: those that the operator goes on with, copies where it had to make some.
        """
        written = self.written(given)
        names: list[str] = []
        places: list[int] = []
        spans: list[tuple[int, int, bool, int]] = []
        for name in self.tensors:
            tensor = given[name]
            if tensor is None or (place := modes.place(tensor)) is None:
                continue
            spans.append((place, place + span_bytes(tensor), name in written, len(names)))
            names.append(name)
            places.append(place)
        met = meeting(spans)
        for name, tensor in written.items():
            if overlaps_itself(tensor):
                shape = f"shape {list(tensor.shape)}, strides {tensor.stride()}"
                bad_value(name, "elements that do not overlap each other", shape)
            for a, b in met:
                if names[a] != name:
                    continue
                other, address, other_address = names[b], places[a], places[b]
                is_whole = address == other_address and _is_same(tensor, given[other])
                if is_whole and self.in_place.get(name) == other and arguments[other] is given[other]:
                    continue
                if shares_element(tensor, given[other], address, other_address):
                    bad_value(name, "memory of its own", f"elements that it shares with {other}")

    def bind(self, **options: Any) -> Callable[..., Any]:
        """The public function with its arguments that are no tensors given once, for a caller that gives the same in every call.

        Parameters
        ----------
        **options
            Arguments that are no tensors, by name; the others have their defaults.

        Returns
        -------
        callable
            Takes the tensors, by position in the signature's order (those after its `*` too) or by name; hints by name. A call
            does all that one of the public function does, and costs the host less: as long as tensors are like those of an
            earlier call, most of its time goes into the reading of keywords.

        Raises
        ------
        TypeError
            If a name is none of them, one without a default is missing, or a value has another type than the argument.
        """
        defaults = {name: self.signature.parameters[name].default for name in self.flags if name not in self.hints}
        for name in options:
            if name not in defaults:
                raise TypeError(f"{name}: expected an argument of {self.name} that is no tensor, got {options[name]!r}")
        given = defaults | options
        for name, value in given.items():
            if value is inspect.Parameter.empty:
                raise TypeError(f"{name}: expected a value, got none")
            self.kinds[name].check_type(name, value)
            if self.kinds[name].type is tuple and value is not None:
                given[name] = tuple(value)  # a caller may change a list
        flags = self._flags_key(*[given.get(name) for name in self.flags])
        if flags not in self._bound:  # equal layers share their plans
            if len(self._bound) >= _MOST_BOUND:
                self._bound.clear()
            own = [*(name for name in self.kinds if name in self.tensors), *self.hints]
            every = ", ".join(name if name in own else f"_given[{name!r}]" for name in self.kinds)
            space: dict[str, Any] = {"_given": given, "_key": object()}  # hashed at once, unlike the flags
            hints = [self.kinds[name].key_source(name) for name in self.hints]
            key = f"(_key, {', '.join(hints)})" if hints else "_key"
            self._bound[flags] = self._generate(
                [self._parameter(name, space) for name in own], every, f"{every}, key={key}", key, space
            )
        return self._bound[flags]

    def _public(self) -> Callable[..., Any]:
        """Generates the public function from the signature; see the module's docstring."""
        space: dict[str, Any] = {"type": type}
        parameters, star = [], False
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY and not star:
                parameters.append("*")
                star = True
            parameters.append(self._parameter(name, space))
        every = ", ".join(self.kinds)
        function = functools.update_wrapper(self._generate(parameters, every, every, self.flags_source, space), self.body)
        self.library.public = function
        setattr(function, "operator", self)  # noqa: B010  # a plain assignment is an error of type
        return function

    def _parameter(self, name: str, space: dict[str, Any]) -> str:
        """Source of a parameter; its default goes to the names that the function sees."""
        default = self.signature.parameters[name].default
        if default is inspect.Parameter.empty:
            return name
        space[f"_{name}"] = default
        return f"{name}=_{name}"

    def _generate(self, parameters: list[str], every: str, run: str, key: str, space: dict[str, Any]) -> Callable[..., Any]:
        """A function that calls the operator. every, run: sources of the arguments of `trace` and `run`; key: of the memo's."""
        lines = [f"def {self.name}({', '.join(parameters)}):"]
        lines += ["    if is_compiling():", f"        return trace({every})"]
        if self.memo is not None:
            tensors = "".join(f"{name}, " for name in self.tensors)
            lines += [f"    found = plan(({tensors}), {key})", "    if found is not None:"]
            lines += [f"        return {'None' if self.signature.return_annotation is None else 'found'}"]
        lines += [f"    return run({run})"]
        plan = None if self.memo is None else self.memo.run
        space |= {"trace": self.trace, "plan": plan, "run": self.run, "is_compiling": torch.compiler.is_compiling}
        exec(compile("\n".join(lines), f"<gdn.{self.name}>", "exec"), space)
        function: Callable[..., Any] = space[str(self.name)]
        return function


operator = Operator


def operator_of(function: Callable[..., Any]) -> Operator:
    """The operator that a public function calls."""
    found: Operator = getattr(function, "operator")  # noqa: B009  # the attribute is unknown to type checkers
    return found


def operator_named(name: str) -> Operator:
    """The operator of this name under `torch.ops.gdn`."""
    return _BY_NAME[name]


def inference(values: Iterable[Any]) -> AbstractContextManager[Any]:
    """No gradients; inference mode where one of the tensors was created in it and so may only be written in it."""
    is_inference = any([isinstance(value, Tensor) and value.is_inference() for value in values])
    return torch.inference_mode() if is_inference else torch.no_grad()


class without_autocast:
    """Switches autocast off for the CPU and CUDA, where it is on."""

    def __enter__(self) -> None:
        self._on = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
        for device in self._on:
            torch.set_autocast_enabled(device, False)

    def __exit__(self, *_: object) -> None:
        for device in self._on:
            torch.set_autocast_enabled(device, True)


def reads_values(device: torch.device) -> bool:
    """Whether to check values in tensors: always on the CPU; on a GPU with GDN_VALIDATE=1, unless it is capturing a graph."""
    if not modes.has_memory():
        return False
    if device.type != "cuda":
        return device.type == "cpu"
    return env.current().validate and not torch.cuda.is_current_stream_capturing()


def validates(device: torch.device) -> bool:
    """Whether values with a defined but hardly intended meaning are errors: with GDN_VALIDATE=1."""
    return env.current().validate and reads_values(device)


def settle(**values: Any) -> None:
    """Sets arguments whose defaults the operator has resolved: the reference gets these values."""
    _current.get().arguments.update(values)


def take_contiguous(name: str, x: Tensor) -> Tensor:
    """An argument, or a copy, logged once and used from here on, where its last dimension is not contiguous."""
    if x.dim():
        x = _current.get().arguments[name] = contiguous_last(name, x)
    return x


def check_memory() -> None:
    """Raises ValueError where a written argument overlaps itself or shares an element with another argument.

    Called by `prepare`, after all other checks; by composed operators before their first part. The second time it does nothing.
    While a compiler traces, only views of one tensor with known sizes and offsets are compared.
    """
    call = _current.get()
    if not call.has_checked_memory:
        call.operator.check_places(call.given, call.arguments)
        call.has_checked_memory = True


def _is_same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors at one address hold the same elements in the same order. Strides of dimensions of one are ignored."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    strides = zip(first.shape, first.stride(), second.stride(), strict=True)
    return all(size == 1 or one == other for size, one, other in strides)


def choose(problem: Problem, device: torch.device, backend: str | None) -> Prepared:
    """The choice for a problem. Ends the checks: nothing is written before. `launch` is None where the reference runs."""
    check_memory()
    if modes.is_tracing():
        return Prepared("traced", None, 0, lambda *_: None, Choice(problem.op, "traced"))
    prepared = runtime.prepare(problem, device, backend)
    if prepared.launch is None:
        _current.get().ran_reference = True
    return prepared


def prepare(problem: Problem, device: torch.device, backend: str | None) -> Prepared:
    """The kernel of a problem, as `choose`; leaves the operator for its reference where no kernel serves the problem."""
    prepared = choose(problem, device, backend)
    return run_reference(prepared.choice.decided_by) if prepared.launch is None else prepared


def run_reference(reason: str) -> NoReturn:
    """Leaves the operator and runs its reference with the same arguments. reason: what an explained call is told."""
    runtime.record_reference(reason)
    raise _RunReference


def make(maker: Callable[..., Tensor], *sources: Tensor) -> Tensor:
    """Returns maker(*sources), recorded for the memo where it is a new tensor.

    sources: arguments of the call, or tensors made of them. Where one is a copy of an argument instead, the memo does not know
    the new tensor either, so the call is not recorded.
    """
    tensor, call = maker(*sources), _current.get()
    if any(tensor is source for source in sources):
        return tensor
    known = call.known
    if not known:
        known.update(map(id, call.given.values()))
    if all(id(source) in known for source in sources):
        call.created.append((tensor, maker, sources))
        known.add(id(tensor))
    return tensor


def part(x: Tensor, rows: slice) -> Tensor:
    """Some rows of x, recorded for the memo, or x itself where these are all."""
    return x if (rows.start, rows.stop) == (0, x.shape[0]) else make(functools.partial(_rows, rows), x)


def _rows(rows: slice, x: Tensor) -> Tensor:
    return x[rows]


def new(dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    """An uninitialised tensor, recorded for the memo."""
    return make(functools.partial(torch.empty, *shape, dtype=dtype, device=device))


def launch(
    prepared: Prepared, params: Any, results: Sequence[Tensor | None] | None = None, aligned: Sequence[Tensor | None] = ()
) -> None:
    """Launches a kernel. With `results` it also records the call, whose only launch this is.

    params: the operator's Params. results, aligned: see `record`.
    """
    assert prepared.launch is not None
    prepared.launch(params)
    call = _current.get()
    call.launches.append((prepared.launch, params))
    if results is not None:
        record(results, aligned)


def record(results: Sequence[Tensor | None], aligned: Sequence[Tensor | None] = ()) -> None:
    """Records the call for the memo, unless a part of it ran the reference. The caller sees to it that nothing but `launch`,
    `make`, `part` and `new` has worked on the call's tensors.

    results: of the call. aligned: arguments whose alignment decides about a copy or the kernel.
    """
    call = _current.get()
    if not call.ran_reference:
        call.recorded = Recorded(call.launches, results, call.created, aligned)
