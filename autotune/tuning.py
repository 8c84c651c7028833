"""Kernels by name, their configurations for shapes, and the compilation of one."""

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from autotune.shapes import Shape
from gdn.device import DeviceSpec
from gdn.problem import Problem
from gdn.runtime import KernelCandidate, compiled, registry, source
from gdn.testing import machine_code


@dataclass(frozen=True)
class Kernel:
    """One kernel module, by name, so that it can be pickled for worker processes."""

    op: str
    backend: str
    module_name: str

    @property
    def module(self) -> Any:
        return importlib.import_module(self.module_name)

    @property
    def source(self) -> str:
        return source.source_hash(self.module.__file__)


def kernels(op: str, backend: str | None) -> list[Kernel]:
    """Kernels of an operator, all or a backend's. ValueError where there is no such kernel."""
    modules = registry.operator(op).modules
    found = [Kernel(op, name, module) for name, module in modules.items() if backend in (None, name)]
    if not found:
        raise ValueError(f"backend: expected one of {', '.join(modules) or 'none (no kernel yet)'} for {op}, got {backend!r}")
    return found


def compile_one(kernel: Kernel, problem: Problem, config: Any) -> str | None:
    """Fills the disk cache; runs in a worker process. Returns what the kernel spills, None where it spills nothing."""
    place = compiled.ensure(kernel.op, kernel.backend, kernel.module, problem, config)
    for path in compiled.libraries_of(place).values():
        try:
            found = machine_code.kernels(path.read_bytes())
        except machine_code.MachineCodeError:  # no disassembler on this machine: the tests inspect every shipped entry
            continue
        for one in found:
            if one.spilled is not None:
                return f"{one.name} spills: {one.spilled}"
    return None


@dataclass
class Candidate:
    """One configuration of one compile key."""

    problem: Problem
    config: Any
    failure: str | None = None  # why it did not compile
    spills: str | None = None  # what; no table may name it, but where it is the default, others are compared with it
    is_done: bool = False  # compiled, or failed to


@dataclass
class Plan:
    """Candidates of one kernel: the configurations of each shape, and each of them once per compile key."""

    kernel: Kernel
    refusals: dict[str, str] = field(default_factory=dict)  # shape name -> why the kernel does not serve it
    shapes: dict[str, Shape] = field(default_factory=dict)  # by name, those that the kernel serves
    configs: dict[str, list[Any]] = field(default_factory=dict)  # shape name -> configurations, the default first
    known: dict[str, int] = field(default_factory=dict)  # shape name -> how many of these are the default and the table's
    candidates: dict[tuple[str, Any], Candidate] = field(default_factory=dict)


def plan(
    kernel: Kernel, shapes: Iterable[Shape], spec: DeviceSpec, limit: int | None = None, *, stored_only: bool = False
) -> Plan:
    """Candidates of a kernel for some shapes.

    limit: most configurations of a shape. From a larger space it takes the default, the table's configuration for exactly these
    sizes, and an even sample of the rest. stored_only: the default and the table's configuration alone.
    """
    made = Plan(kernel)
    for shape in shapes:
        refusal = kernel.module.refusal(shape.problem)
        if refusal is not None:
            made.refusals[shape.name] = refusal
            continue
        # The table's configuration for exactly these sizes, which a sample of the space could miss.
        entries = KernelCandidate(kernel.op, kernel.backend, kernel.module_name).tuned(shape.problem, spec)
        shipped = [found.config for found in entries if found.sizes == tuple(sorted(shape.problem.sizes().items()))]
        first = list(dict.fromkeys([kernel.module.default_config(shape.problem, spec), *shipped]))
        space = [] if stored_only else dict.fromkeys(kernel.module.configs(shape.problem, spec))
        others = [config for config in space if config not in first]
        others = _coarse_first(_spread(others, None if limit is None else max(0, limit - len(first))))
        made.shapes[shape.name], made.known[shape.name] = shape, len(first[:limit])
        made.configs[shape.name] = first[:limit] + others
    # The first of every shape, then the second of every shape: after a budget that ends early every shape has candidates.
    for rank in range(max(map(len, made.configs.values()), default=0)):
        for name, configs in made.configs.items():
            if rank < len(configs):
                problem = made.shapes[name].problem
                made.candidates.setdefault((problem.static_key(), configs[rank]), Candidate(problem, configs[rank]))
    return made


def _spread(configs: list[Any], wanted: int | None) -> list[Any]:
    """At most `wanted` of the configurations, at even distances."""
    if wanted is None or len(configs) <= wanted:
        return configs
    return [configs[index * len(configs) // wanted] for index in range(wanted)]


def _coarse_first(configs: list[Any]) -> list[Any]:
    """The configurations in an order whose beginning is a sample of the whole: place by place, with its bits turned round."""
    bits = max(1, (len(configs) - 1).bit_length())
    return [configs[n] for n in sorted(range(len(configs)), key=lambda n: f"{n:0{bits}b}"[::-1])]


def code_key(item: Any) -> tuple[Any, ...]:
    """The machine code of an item with a problem and a config: configurations may differ in scalars of the launch alone."""
    return (item.problem.op, item.problem.static_key(), *compiled.compiled_fields(item.config).items())


def by_code(items: Iterable[Any]) -> list[list[Any]]:
    """Items with a problem and a config, by machine code."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for item in items:
        found.setdefault(code_key(item), []).append(item)
    return list(found.values())


@dataclass(frozen=True)
class Winner:
    """The configuration that a shape keeps."""

    shape: Shape
    config: Any
    time_us: float
    error: float
    default_us: float | None  # time of the analytic choice, in turns with the winner's; None where it did not run
    gain: float | None = None  # share of the default's time that is saved; None where the default is kept, or did not run
