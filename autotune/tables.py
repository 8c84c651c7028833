"""Maintenance of tuned tables: add winners, restamp entries of unchanged machine code, drop entries that repeat the default."""

import datetime
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import filelock

from autotune import cases, tuning, workers
from autotune import shapes as shape_list
from autotune.shapes import Shape
from autotune.tuning import Kernel, Winner
from gdn import runtime
from gdn.device import H100, SPECS, DeviceSpec
from gdn.models import QWEN3_NEXT_80B
from gdn.problem import Problem
from gdn.runtime import compiled, registry, tuned
from gdn.testing import machine_code


@dataclass(frozen=True)
class Row:
    """An entry of a table, with its problem and configuration."""

    group: tuned.Group
    entry: tuned.Entry
    problem: Problem
    config: Any  # None where the kernel's Config cannot be made of the entry's fields


def rows(kernel: Kernel, table: tuned.Table) -> Iterator[Row]:
    """The entries of a kernel's table, except those whose fields the problem no longer has."""
    kind: Any = type(registry.operator(kernel.op).example(QWEN3_NEXT_80B, fp8=True))
    for group in table.groups:
        for entry in group.entries:
            try:
                problem = kind(**group.static, **entry.sizes)
            except TypeError:
                continue
            # Without fields that the Config no longer has: at run time such an entry does not serve, and whether its tiles are
            # the same without them, its machine code shows (`restamp`).
            config_type, config = kernel.module.Config, None
            names = {one.name for one in fields(config_type)}
            with suppress(TypeError):  # a new field without a default
                config = config_type(**{name: value for name, value in entry.config.items() if name in names})
            yield Row(group, entry, problem, config)


def paths(folder: Path, kernel: Kernel) -> list[Path]:
    """The kernel's tables in a folder, one per device."""
    return sorted(folder.glob(f"*/{kernel.op}.{kernel.backend}.json"))


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """Keeps other writers of a table waiting while it is read, changed and written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path.with_name(f".{path.name}.lock")):
        yield


def write_winners(folder: Path, spec: DeviceSpec, kernel: Kernel, winners: Sequence[Winner], versions: dict[str, str]) -> Path:
    """Puts the winners into the kernel's table, where they replace the entries of their own problems alone.

    A winner that the default would choose anyway is left out, and the entry that it replaces is removed.
    """
    path = tuned.table_path(folder, spec.key, kernel.op, kernel.backend)
    today = datetime.date.today().isoformat()
    codes: dict[Problem, str | None] = {}  # before the lock: this may compile
    for winner in winners:
        problem = winner.shape.problem
        if winner.config != kernel.module.default_config(problem, spec):  # those are hardly ever kept
            codes[problem] = code_of(kernel, problem, winner.config)
    with _held(path):
        before = tuned.read(path) if path.is_file() else None
        runs = {**(before.header.runs if before is not None else {}), today: versions}
        header = tuned.Header(device=spec.key, op=kernel.op, backend=kernel.backend, runs=runs)
        groups = {tuned.static_text(group.static): group for group in (before.groups if before is not None else [])}
        for winner in winners:
            problem = winner.shape.problem
            static = problem.static_fields()
            group = groups.setdefault(tuned.static_text(static), tuned.Group(static=static, entries=[]))
            others = [entry for entry in group.entries if entry.sizes != problem.sizes()]
            entry = tuned.Entry(
                sizes=problem.sizes(), config=asdict(winner.config), time_us=round(winner.time_us, 3),
                error=float(f"{winner.error:.2e}"), date=today, kernel_source=kernel.source, machine_code=codes.get(problem),
            )  # fmt: skip
            if not any(replace(one, date=today) == entry for one in group.entries):  # else it keeps the day of its measurement
                group.entries = sorted([*others, entry], key=lambda one: sorted(one.sizes.items()))
        table = tuned.Table(header=header, groups=list(groups.values()))
        tuned.write(path, pruned(kernel, table, spec)[0])
    return path


def code_of(kernel: Kernel, problem: Problem, config: Any) -> str | None:
    """Hash of a kernel's machine code, compiled if the disk cache lacks it; None where it cannot be read."""
    place = compiled.ensure(kernel.op, kernel.backend, kernel.module, problem, config)
    libraries = sorted(compiled.libraries_of(place).items())
    try:
        return machine_code.code_hash([path.read_bytes() for _, path in libraries])
    except machine_code.MachineCodeError:
        return None


@dataclass
class Restamped:
    """Outcome of a restamp: the number of restamped entries, and the reasons of those left stale."""

    stamped: int = 0
    recorded: int = 0  # machine code of entries that are of the present source
    left: list[str] = field(default_factory=list)  # reason why each other entry stays stale


def restamp(path: Path, kernel: Kernel, *, num_workers: int, timeout_s: float) -> Restamped:
    """Compiles the stale entries of a table; those with the machine code that was timed then name the present source.

    Entries of the present source whose machine code was not recorded (no disassembler where they were timed) get it.
    """
    table, found = tuned.read(path), Restamped()
    every = list(rows(kernel, table))
    unrecorded = [row for row in every if row.entry.kernel_source == kernel.source and row.entry.machine_code is None]
    stale = [row for row in every if row.entry.kernel_source != kernel.source]
    legal = [row for row in stale if _is_legal(kernel, row, table.header.device)]
    found.left += [f"{_label(row)}: the kernel no longer takes {row.entry.config}" for row in stale if row not in legal]
    found.left += [f"{_label(row)}: its machine code was not recorded" for row in legal if row.entry.machine_code is None]
    known = [row for row in legal if row.entry.machine_code is not None]
    known += [row for row in unrecorded if _is_legal(kernel, row, table.header.device)]
    old = {id(row.entry): replace(row.entry) for row in known}
    kinds = tuning.by_code(known)
    tasks = [(kernel, kind[0].problem, kind[0].config) for kind in kinds]
    for outcome in workers.run(code_of, tasks, workers=num_workers, timeout_s=timeout_s):
        for row in kinds[outcome.index]:
            if outcome.failure is not None:
                found.left.append(f"{_label(row)}: did not compile: {outcome.failure}")
            elif row.entry.machine_code is None:
                row.entry.machine_code = outcome.value
                found.recorded += outcome.value is not None
            elif outcome.value != row.entry.machine_code:
                found.left.append(f"{_label(row)}: its machine code has changed")
            else:
                row.entry.kernel_source = kernel.source
                row.entry.config = asdict(row.config)
                found.stamped += 1
    if found.stamped or found.recorded:
        _put(path, [(row.group.static, old[id(row.entry)], row.entry) for row in known])
    return found


def _put(path: Path, changed: list[tuple[dict[str, Any], tuned.Entry, tuned.Entry]]) -> None:
    """Puts entries where they were, by static fields; what another writer has put there in the meantime stays."""
    with _held(path):
        table = tuned.read(path)
        for group in table.groups:
            for static, before, after in changed:
                if static == group.static:
                    group.entries = [after if entry == before else entry for entry in group.entries]
        tuned.write(path, table)


def _is_legal(kernel: Kernel, row: Row, device: str) -> bool:
    served = row.config is not None and kernel.module.refusal(row.problem) is None
    return served and bool(kernel.module.fits(row.problem, row.config, SPECS.get(device, H100)))


def _label(row: Row) -> str:
    return ", ".join(f"{name} {value}" for name, value in row.entry.sizes.items())


def stale_shapes(path: Path, kernel: Kernel) -> list[Shape]:
    """Shapes for the problems of a table's stale entries: the tuner's own shapes where it has them."""
    if not path.is_file():
        return []
    known = {shape.problem: shape for shape in shape_list.shapes(kernel.op, measured=True, tuned=True)}
    stale = (row for row in rows(kernel, tuned.read(path)) if row.entry.kernel_source != kernel.source)
    shapes = []
    for number, row in enumerate(stale):
        made = Shape(f"entry {number}: {_label(row)}", row.problem, cases.lengths_of(row.problem))
        shapes.append(known.get(row.problem, made))
    return shapes


def pruned(kernel: Kernel, table: tuned.Table, spec: DeviceSpec) -> tuple[tuned.Table, int]:
    """The table without the entries that repeat the default, and their number.

    An entry that repeats the default stays where another entry would otherwise serve its problem, with other tiles.
    """
    repeats = [row for row in rows(kernel, table) if row.config == kernel.module.default_config(row.problem, spec)]
    while True:
        dropped = [id(row.entry) for row in repeats]
        kept = ((group.static, [entry for entry in group.entries if id(entry) not in dropped]) for group in table.groups)
        groups = [tuned.Group(static=static, entries=entries) for static, entries in kept]
        needed = [row for row in repeats if _serves(kernel, groups, row.problem, spec) not in (None, row.config)]
        if not needed:
            break
        repeats = [row for row in repeats if row not in needed]
    return tuned.Table(header=table.header, groups=[group for group in groups if group.entries]), len(repeats)


def _serves(kernel: Kernel, groups: list[tuned.Group], problem: Problem, spec: DeviceSpec) -> Any:
    """The tiles that these entries have for a problem, None where no entry serves it."""
    key = problem.tune_fields()
    own = [group for group in groups if {name: group.static.get(name, ...) for name in key} == key]
    module = kernel.module
    usable = tuned.usable_of(own, Path(kernel.op), problem, module.Config, lambda config: module.fits(problem, config, spec))
    near = runtime.near_enough(module, problem, usable, spec)
    return near[0][1].config if near else None


def prune(path: Path, kernel: Kernel) -> int:
    """Drops the entries of a table that repeat the default, and the table if none is left; returns their number."""
    with _held(path):
        table = tuned.read(path)
        made, count = pruned(kernel, table, SPECS.get(table.header.device, H100))
        if count:
            tuned.write(path, made)
    return count
