"""The decorator that every public operator has in common: `@operator` over a function that checks, chooses and launches.

The function below the decorator is the ordinary path. It reads its own arguments, calls the checks, `prepare`, makes what the
kernel needs with `make`, and ends in `launch`, or in `run_reference` where no kernel serves the problem. The decorator puts
before it, from the function's signature alone:

    while a compiler traces        the operator of torch.library (gdn.ops._library)
    a call like an earlier one     the memo's plan (gdn.ops._memo): no check, no choice, straight to the launch
    else                           every argument is of the kind that its annotation says (TypeError by name), gradients and
                                   autocast are off, and the reference gets the same arguments where it is wanted

The wrapper is generated from the signature, as dataclasses generate `__init__`: a call that binds its arguments through
`*args` would cost more than all else that a repeated call does.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import torch

from gdn import runtime
from gdn.ops import _library, _modes
from gdn.ops._kinds import Kind, kind_of
from gdn.ops._library import NEW, always
from gdn.ops._memo import Made, Memo
from gdn.ops._overlap import overlaps_itself, shares_element
from gdn.ops._tensors import bad_value, contiguous_last
from gdn.problems import Problem
from gdn.runtime import Choice, Prepared, env, is_explaining

Tensor = torch.Tensor
Function = TypeVar("Function", bound=Callable[..., Any])
Arguments = dict[str, Any]
Condition = Callable[[Arguments], bool]


__all__ = [
    "NEW",
    "always",
    "check_memory",
    "launch",
    "make",
    "new",
    "operator",
    "prepare",
    "reads_values",
    "run_reference",
    "settle",
    "take_contiguous",
    "validates",
]


class _RunReference(Exception):
    """No kernel serves the call."""


@dataclass
class Call:
    """One call on its ordinary path."""

    operator: "Operator"
    given: Arguments  # by the caller
    arguments: Arguments  # numbers as Python's own, last dimensions contiguous, defaults settled
    made: list[Made] = field(default_factory=list)
    learned: tuple[Any, ...] | None = None  # launch, its arguments, results, what was made, what is aligned


_current: ContextVar[Call] = ContextVar("gdn_call")


class Operator:
    """One public operator: its signature, and what of a call the decorator decides."""

    def __init__(
        self,
        name: str,
        body: Callable[..., Any],
        reference: Callable[..., Any] | None,
        writes: Mapping[str, Condition],
        in_place: Mapping[str, str],
        returns: _library.Returns,
        memo: Memo | None,
        varies: Sequence[str],
        contiguous: Sequence[str],
    ) -> None:
        self.name, self.body, self.memo = name, body, memo
        self.signature = inspect.signature(body)
        self.kinds: dict[str, Kind] = {name: kind_of(p.annotation) for name, p in self.signature.parameters.items()}
        self.tensors = [name for name, kind in self.kinds.items() if kind.is_tensor]
        self.tensors.sort(key=lambda name: list(varies).index(name) if name in varies else len(varies))
        flags = {name: kind.key_source(name) for name, kind in self.kinds.items() if not kind.is_tensor}
        self.flags_source = f"({''.join(f'{source}, ' for source in flags.values())})"  # the memo's key, of these variables
        self._flags_key: Callable[..., tuple[Any, ...]] = eval(f"lambda {', '.join(flags)}: {self.flags_source}")
        self.flags = list(flags)
        self.writes, self.in_place, self.contiguous = dict(writes), dict(in_place), tuple(contiguous)
        self.reference = reference
        self.reference_names = () if reference is None else tuple(inspect.signature(reference).parameters)
        self.library = _library.Registered(self.name, self.signature, self.writes, returns, self.run)

    def trace(self, *values: Any) -> Any:
        """The call as a node of a compiler's graph. values: every argument, in the signature's order.

        A schema would convert a flag of another kind (True to 1), and refuses an object without naming the argument.
        """
        arguments = dict(zip(self.kinds, values, strict=True))
        for name, kind in self.kinds.items():
            kind.check_type(name, arguments[name])
        return self.library.call(arguments)

    def run(self, *values: Any) -> Any:
        """The ordinary path of a call."""
        arguments = dict(zip(self.kinds, values, strict=True))
        if _modes.has_memory() and _modes.lack_memory(values):
            return self.trace(*values)
        given = dict(arguments)
        for name, kind in self.kinds.items():
            arguments[name] = kind.check(name, arguments[name])
        if is_explaining():
            return self._explain(arguments)
        call = Call(self, given, dict(arguments))
        switches = env.current()
        token = _current.set(call)
        try:
            with _inference(given.values()), _without_autocast():
                for name in self.contiguous:
                    if arguments[name] is not None:
                        take_contiguous(name, arguments[name])
                try:
                    result = self.body(**call.arguments)
                except _RunReference:
                    assert self.reference is not None
                    result = self.reference(**{name: call.arguments[name] for name in self.reference_names})
        finally:
            _current.reset(token)
        if call.learned is not None and self.memo is not None and _modes.has_memory():
            tensors = tuple(given[name] for name in self.tensors)
            flags = self._flags_key(*[given[name] for name in self.flags])
            launched, handed, results, made, aligned = call.learned
            written = list(self.written(arguments).values())
            self.memo.learn(tensors, flags, switches, launched, handed, results, made, aligned, written)
        return result

    def _explain(self, arguments: Arguments) -> Any:
        """Everything but launches, on tensors without memory: `prepare` notes what would run."""
        fakes, mode = _modes.faked(arguments)
        token = _current.set(Call(self, fakes, dict(fakes)))
        try:
            with mode, torch.no_grad(), _without_autocast():
                return self.body(**fakes)
        finally:
            _current.reset(token)

    def written(self, arguments: Arguments) -> dict[str, Tensor]:
        """The arguments that a call may write."""
        given = {name: arguments[name] for name, condition in self.writes.items() if condition(arguments)}
        return {name: tensor for name, tensor in given.items() if tensor is not None}


def operator(
    *,
    name: str | None = None,
    reference: Callable[..., Any] | None = None,
    writes: Mapping[str, Condition] | None = None,
    in_place: Mapping[str, str] | None = None,
    returns: _library.Returns | None = None,
    memo: bool = False,
    varies: Sequence[str] = (),
    contiguous: Sequence[str] = (),
) -> Callable[[Function], Function]:
    """Makes a public operator of a function.

    name: of the operator under `torch.ops.gdn`; the function's own if left out.
    reference: the same signature without `backend`.
    writes: arguments that a call may write, and when.
    in_place: a written argument -> the argument that it may be, exactly.
    returns: what a call's results are, by its arguments: the name of an argument, NEW or None each. Left out: one
        result, `out` where it is given.
    memo: repeated calls skip the ordinary path. varies: the two tensors whose shapes differ most from call to call.
    contiguous: arguments whose last dimension must be contiguous; where it is not, the call gets a copy, logged once.
    """

    def decorate(body: Function) -> Function:
        of_body = Operator(
            name or body.__name__,
            body,
            reference,
            writes or {},
            in_place or {},
            returns or _library.out_or_new,
            Memo() if memo else None,
            varies,
            contiguous,
        )
        return _wrapper(of_body)  # type: ignore[return-value]

    return decorate


def _wrapper(operator: Operator) -> Callable[..., Any]:
    """The public function: see the module's docstring. Its source follows from the signature."""
    parameters, defaults, star = [], {}, False
    for name, parameter in operator.signature.parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parameters.append("*")
            star = True
        if parameter.default is parameter.empty:
            parameters.append(name)
        else:
            defaults[f"_{name}"] = parameter.default
            parameters.append(f"{name}=_{name}")
    every = ", ".join(operator.kinds)
    lines = [f"def {operator.name}({', '.join(parameters)}):"]
    lines += ["    if is_compiling():", f"        return trace({every})"]
    if operator.memo is not None:
        tensors = "".join(f"{name}, " for name in operator.tensors)
        lines += [f"    found = plan(({tensors}), {operator.flags_source})", "    if found is not None:"]
        lines += [f"        return {'None' if operator.signature.return_annotation is None else 'found'}"]
    lines += [f"    return run({every})"]
    space: dict[str, Any] = {
        **defaults,
        "is_compiling": torch.compiler.is_compiling,
        "trace": operator.trace,
        "plan": None if operator.memo is None else operator.memo.run,
        "run": operator.run,
        "type": type,
    }
    exec(compile("\n".join(lines), f"<gdn.{operator.name}>", "exec"), space)
    function = functools.update_wrapper(space[operator.name], operator.body)
    operator.library.public = function
    setattr(function, "operator", operator)  # noqa: B010  # a plain assignment is an error of type
    return function


def _inference(values: Iterable[Any]) -> AbstractContextManager[Any]:
    """No gradients; and inference mode where a tensor of it comes, which may not be written outside."""
    is_inference = any(isinstance(value, Tensor) and value.is_inference() for value in values)
    return torch.inference_mode() if is_inference else torch.no_grad()


class _without_autocast:
    """Autocast off for the CPU and CUDA, where it is on."""

    def __enter__(self) -> None:
        self._on = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
        for device in self._on:
            torch.set_autocast_enabled(device, False)

    def __exit__(self, *_: object) -> None:
        for device in self._on:
            torch.set_autocast_enabled(device, True)


# --- what a function below the decorator calls --------------------------------------------------------------------------


def reads_values(device: torch.device) -> bool:
    """Whether values in tensors are checked now: always on the CPU, with GDN_VALIDATE=1 also on a GPU that is not capturing."""
    if not _modes.has_memory():
        return False
    if device.type != "cuda":
        return device.type == "cpu"
    return env.current().validate and not torch.cuda.is_current_stream_capturing()


def validates(device: torch.device) -> bool:
    """Whether values that have a meaning, but hardly the meant one, are errors now: with GDN_VALIDATE=1."""
    return env.current().validate and reads_values(device)


def settle(**values: Any) -> None:
    """Arguments whose defaults the operator has settled: the reference gets these values."""
    _current.get().arguments.update(values)


def take_contiguous(name: str, x: Tensor) -> Tensor:
    """An argument, or where its last dimension is not contiguous a copy that the call goes on with, logged once."""
    if x.dim():
        x = _current.get().arguments[name] = contiguous_last(name, x)
    return x


def check_memory() -> None:
    """Raises ValueError where a written argument overlaps itself or shares an element with another argument.

    Called by `prepare`, after all other checks; by operators that are made of others, before the first of these. A compiler
    knows of views of one tensor, where it keeps no size or offset of them symbolic.
    """
    call = _current.get()
    given = {name: call.given[name] for name in call.operator.tensors if call.given[name] is not None}
    places = {name: place for name, tensor in given.items() if (place := _modes.place(tensor)) is not None}
    for name, written in call.operator.written(call.given).items():
        if overlaps_itself(written):
            shape = f"shape {list(written.shape)}, strides {written.stride()}"
            bad_value(name, "elements that do not overlap each other", shape)
        for other, tensor in given.items():
            if other == name or tensor.device != written.device or name not in places or other not in places:
                continue
            (memory, address), (other_memory, other_address) = places[name], places[other]
            if memory != other_memory:
                continue
            is_whole = address == other_address and _is_same(written, tensor)
            if is_whole and call.operator.in_place.get(name) == other and call.arguments[other] is tensor:
                continue
            if shares_element(written, tensor, address, other_address):
                bad_value(name, "memory of its own", f"elements that it shares with {other}")


def _is_same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors of one address are one: the same elements in the same order. The stride of a dimension of one says
    nothing."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    strides = zip(first.shape, first.stride(), second.stride(), strict=True)
    return all(size == 1 or one == other for size, one, other in strides)


def prepare(problem: Problem, device: torch.device, backend: str | None) -> Prepared:
    """The kernel of a problem. The last check: nothing is written before. `launch` is None where the reference shall run."""
    check_memory()
    if _modes.is_tracing():
        return Prepared("traced", None, 0, _launch_nothing, Choice(problem.op, "traced"))
    return runtime.prepare(problem, device, backend)


def _launch_nothing(*_: Any) -> None:
    pass


def run_reference() -> NoReturn:
    """Leaves the operator; its reference gets the same arguments."""
    raise _RunReference


def make(maker: Callable[..., Tensor], *sources: Tensor) -> Tensor:
    """maker(*sources), noted for the memo where it is a new tensor. sources: arguments of the call."""
    tensor = maker(*sources)
    if all(tensor is not source for source in sources):
        _current.get().made.append((tensor, maker, sources))
    return tensor


def new(dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    """An uninitialised tensor, noted for the memo."""
    return make(functools.partial(torch.empty, *shape, dtype=dtype, device=device))


def launch(
    prepared: Prepared, arguments: Sequence[Any], results: Sequence[Tensor | None], aligned: Sequence[Tensor | None] = ()
) -> None:
    """Launches a kernel and leaves the call for the memo.

    arguments: the operator's Params, or, until every operator has one, what its launch takes, in order. results: what the call
    returns. aligned: tensors whose addresses were found to be multiples of 16 bytes.
    """
    assert prepared.launch is not None
    prepared.launch(*([arguments] if hasattr(arguments, "_fields") else arguments))
    call = _current.get()
    call.learned = (prepared.launch, arguments, results, call.made, aligned)
