"""Operators: for each one its public functions, kernel modules, switches, and the modules that describe it.

An operator is one record of its family, `OPERATORS` of `gdn.ops.<family>`; `import gdn` hands all of them in. Everything else
that goes by operator (the GDN_BACKEND_<OP> switch, `gdn explain`, the tuner, the tables' names, the benchmark, the compile tests)
is found through its record. Modules are named by strings: nothing is imported until it is needed.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from gdn.models import ModelShape
from gdn.problem import Problem

Backend = Literal["tilelang", "cute", "reference"]  # of every public function's `backend`
BACKENDS: tuple[Backend, ...] = get_args(Backend)
KERNEL_BACKENDS = tuple(backend for backend in BACKENDS if backend != "reference")


@dataclass(frozen=True)
class Preference:
    """A serving-stack switch and the backend that each of its values asks for."""

    switch: str  # the variable's name
    backends: Mapping[str, str]  # parsed value as text ("true", "cute", ...) -> backend; other values ask for nothing


@dataclass(frozen=True)
class Statement:
    """Built-in order of an operator's kernels, in a region of its problems: a measured statement about which is faster.

    It decides wherever no table does: at sizes that were never tuned, and on devices without a table. `python -m autotune choice`
    times the statements: run it after changing a kernel's speed, and write the numbers into the record.
    """

    order: tuple[str, ...]  # backends, the fastest first
    measured: str  # device, date, what was timed and the result
    where: str = "everywhere"  # the region in words
    holds: Callable[[Problem], bool] = lambda problem: True  # whether a problem is in the region


CUTE_FIRST = ("cute", "tilelang")


@dataclass(frozen=True)
class Family:
    """Modules that describe a family's operators. Each has one attribute per operator, under the operator's name, but `calls`."""

    cases: str  # gdn.core.tunable.Tunable: shapes to tune and measure, inputs, the verdict on a result
    variants: str  # tests.compile.variants.Variants: axes of dtypes and flags to compile for, expected instructions
    examples: str  # function of a model's shapes and `fp8`: the problem of a serving engine's call
    calls: str = ""  # for the tests: CALLS, of each public function a maker of calls; "" where none is public


@dataclass(frozen=True)
class Operator:
    """Record of one operator. `name` is the problem's `op`, the table's file name and the suffix of GDN_BACKEND_<NAME>."""

    name: str
    family: Family | None  # None for an operator without kernels of its own
    functions: tuple[str, ...]  # public functions of gdn that run it; one that deals its calls to two operators is in both
    modules: Mapping[str, str] = field(default_factory=dict)  # kernel backend -> module
    preferences: tuple[Preference, ...] = ()
    composed_of: tuple[str, ...] = ()  # operators that this one calls, and whose kernels it therefore runs
    measured: tuple[Statement, ...] = ()  # which of two kernels is faster; the first statement that holds for a problem counts

    @property
    def switch(self) -> str:
        """Environment variable that orders a backend for this operator alone."""
        return f"GDN_BACKEND_{self.name.upper()}"

    def statement(self, problem: Problem) -> Statement | None:
        """Statement that holds for the problem; None where only one kernel exists."""
        return next((one for one in self.measured if one.holds(problem)), None)

    def described(self, part: Literal["cases", "variants", "examples"]) -> Any:
        """The operator's attribute of a module of its family; LookupError where it has no family or the module lacks it."""
        if self.family is None:
            raise LookupError(f"{self.name}: expected an operator with kernels, got one that has none")
        place = getattr(self.family, part)
        try:
            return getattr(importlib.import_module(place), self.name)
        except AttributeError as error:
            raise LookupError(f"{self.name}: expected {place}.{self.name}, which describes the operator") from error

    def example(self, model: ModelShape, *, fp8: bool) -> Problem | None:
        """The operator's problem on a model's shapes; None where it has no kernels."""
        if self.family is None:
            return None
        problem: Problem = self.described("examples")(model, fp8)
        return problem


def modules(name: str, *backends: str) -> dict[str, str]:
    """Kernel modules of an operator. name: the module within each backend's package."""
    packages = {"tilelang": "kernels_tl", "cute": "kernels_cute"}
    return {backend: f"{packages[backend]}.{name}" for backend in backends}


def family(name: str, variants: str) -> Family:
    """Modules of a family in gdn.ops. variants: the module of tests.compile.variants, and of tests.described."""
    places = (f"gdn.ops.{name}.cases", f"tests.compile.variants.{variants}", f"gdn.ops.{name}.examples")
    return Family(*places, f"tests.described.{variants}")


ANY_BACKEND: dict[str, str] = {backend: backend for backend in BACKENDS}

# Filled by `import gdn`, with the records of all families.
OPERATORS: dict[str, Operator] = {}
# Operators that other parts of gdn run and nobody calls. No switch orders their backend, and nothing tunes them.
INTERNAL: dict[str, Operator] = {}


def add(records: Iterable[Operator]) -> None:
    """Takes records. ValueError where a name is taken."""
    for record in records:
        if record.name in OPERATORS or record.name in INTERNAL:
            raise ValueError(f"{record.name}: expected one record of this name, got two")
        (OPERATORS if record.functions else INTERNAL)[record.name] = record


def every() -> list[Operator]:
    """Public and internal operators."""
    return [*OPERATORS.values(), *INTERNAL.values()]


def with_kernels() -> list[Operator]:
    """The public operators that have kernels of their own."""
    return [operator for operator in OPERATORS.values() if operator.modules]


def operator(name: str) -> Operator:
    """The operator of this name, internal ones too, or the first one of the public function of this name."""
    return INTERNAL[name] if name in INTERNAL else operators(name)[0]


def operators(name: str) -> list[Operator]:
    """The operator of this name, or those that the public function of this name deals its calls to."""
    if name in OPERATORS:
        return [OPERATORS[name]]
    found = [candidate for candidate in OPERATORS.values() if name in candidate.functions]
    if found:
        return found
    raise ValueError(f"op: expected one of {', '.join(OPERATORS)} or a public function of gdn, got {name!r}")
