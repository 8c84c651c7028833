"""Registration with torch.library: every operator under `torch.ops.gdn`, from `import gdn` on, for compilers.

Public functions use it while a compiler traces them, or when they are called with tensors that have no memory; eager calls
never do. The schema of a torch.library operator declares what it writes, and it returns neither an argument nor a view of
one. Therefore

    an argument that only some calls write (a state that may be a pool) becomes two arguments of the schema: `initial_state`,
    read, and `initial_state_written`, written; a call passes one of them
    so does `out`, both written: the traced call passes `out_written`, because Dynamo refuses a tensor with gaps between its rows
    in an argument of the name `out`
    a result that is an argument (`out`, a pool) or None comes back as an empty tensor, and the public function replaces it by
    the argument or None: `Returns` says which
    views among the written arguments are prepared for compilers first (gdn.core.written)

Shapes come from the operator itself: it runs unchanged on FakeTensors, checks included, and launches nothing.
"""

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from gdn.core import modes
from gdn.core.kinds import without_words
from gdn.core.written import place_written

Arguments = dict[str, Any]
Condition = Callable[[Arguments], bool]
Returns = Callable[[Arguments], tuple[str | None, ...]]  # per result: an argument's name, NEW, or None

NEW = "<new>"
_WRITTEN = "_written"  # suffix of an argument that some calls write
_OUT = "out"

_library = torch.library.Library("gdn", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)  # inductor may not restride pools and outputs


def always(_: Arguments) -> bool:
    return True


def out_or_new(arguments: Arguments) -> tuple[str | None, ...]:
    """One result: `out` where it is given, else a new tensor."""
    return ("out" if arguments.get("out") is not None else NEW,)


class Registered:
    """One operator of torch.library."""

    def __init__(
        self, name: str, signature: inspect.Signature, writes: Mapping[str, Condition], returns: Returns, run: Callable[..., Any]
    ) -> None:
        """writes: arguments that a call may write, with their conditions. run: the ordinary path, arguments by position."""
        self._names = list(signature.parameters)
        self._defaults = {p.name: p.default for p in signature.parameters.values() if p.default is not p.empty}
        self._writes, self._returns, self._run = writes, returns, run
        self._doubled = [argument for argument, condition in writes.items() if condition is not always or argument == _OUT]
        self.public: Callable[..., Any] | None = None  # the public function, with its memo of repeated calls
        self._num_results = _count_results(signature.return_annotation)
        _library.define(name + self._schema(signature), tags=_TAGS)
        qualified = f"gdn::{name}"
        _library.impl(name, self._execute, "CompositeExplicitAutograd")
        _library.impl(name, self._without_gradient, "Autograd")
        torch.library.register_fake(qualified, self._fake, lib=_library)
        self._op = getattr(torch.ops.gdn, name).default

    def _schema(self, signature: inspect.Signature) -> str:
        parameters = [one.replace(annotation=without_words(one.annotation)) for one in signature.parameters.values()]
        doubled = [
            inspect.Parameter(argument + _WRITTEN, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Tensor | None)
            for argument in self._doubled
        ]
        result: Any = None if self._num_results == 0 else Tensor
        if self._num_results > 1:
            result = tuple[(Tensor,) * self._num_results]  # type: ignore[misc]

        def prototype() -> None: ...

        prototype.__signature__ = inspect.Signature([*parameters, *doubled], return_annotation=result)  # type: ignore[attr-defined]
        written = [name + _WRITTEN if name in self._doubled else name for name in self._writes]
        written += [_OUT] if _OUT in self._writes else []
        return torch.library.infer_schema(prototype, mutates_args=tuple(written))

    def call(self, arguments: Arguments) -> Any:
        """Adds the operator to the graph that is traced."""
        given = dict(arguments)
        written = [name for name in self._writes if arguments[name] is not None and self._writes[name](arguments)]
        for name in self._doubled:
            if self._writes[name](arguments):
                given[name + _WRITTEN], given[name] = given[name], None
        has_gradient = any(arguments[name] is not None and arguments[name].requires_grad for name in self._writes)
        with torch.no_grad() if has_gradient else contextlib.nullcontext():  # writes belong to no autograd graph
            if written and torch.compiler.is_compiling():
                place_written([arguments[name] for name in written], written)
            results = self._op(**given)
        kinds = self._returns(arguments)
        if self._num_results == 0:
            return None
        if self._num_results == 1:
            results = (results,)
        pairs = zip(kinds, results, strict=False)
        found = [None if kind is None else result if kind == NEW else arguments[kind] for kind, result in pairs]
        return found[0] if len(found) == 1 else tuple(found)

    def _execute(self, *values: Any, **named: Any) -> Any:
        arguments = self._bind(values, named)
        if self.public is None or torch.compiler.is_compiling() or modes.is_tracing():
            results = self._run(*arguments.values())
        else:
            results = self.public(**arguments)
        if self._num_results == 0:
            return None
        results = results if isinstance(results, tuple) else (results,)
        like = next(value for value in arguments.values() if isinstance(value, Tensor))
        nothing = [like.new_empty(0) for _ in range(self._num_results)]
        for place, (kind, result) in enumerate(zip(self._returns(arguments), results, strict=True)):
            if kind == NEW:
                nothing[place] = result
        return nothing[0] if self._num_results == 1 else tuple(nothing)

    def _without_gradient(self, *values: Any, **named: Any) -> Any:
        """Inference only: results belong to no autograd graph."""
        with torch._C._AutoDispatchBelowAutograd():
            return self._op(*values, **named)

    def _fake(self, *values: Any, **named: Any) -> Any:
        with modes.tracing():
            return self._execute(*values, **named)

    def _bind(self, values: tuple[Any, ...], named: Arguments) -> Arguments:
        """Maps arguments of the schema to those of the public function."""
        given = self._defaults | dict(zip(self._names, values, strict=False)) | named
        for name in self._doubled:
            written = given.pop(name + _WRITTEN, None)
            given[name] = written if written is not None else given[name]
        return {name: given[name] for name in self._names}


def _count_results(annotation: Any) -> int:
    if annotation is None:
        return 0
    arguments = get_args(annotation)
    return len(arguments) if getattr(annotation, "__origin__", None) is tuple else 1
