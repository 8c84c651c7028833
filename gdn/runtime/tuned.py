"""Tuned tables: schema, lookup of an entry, and writing by the autotuner.

A table is `<device>/<op>.<backend>.json`, below GDN_TUNED_DIR and then below the tables that ship with the package. A group
holds the entries that were measured on one set of static fields. It serves every problem of the same tune key
(`Problem.tune_fields`) for which the kernel's `fits` accepts the entry's configuration: dtypes of indices and gates, masks and
flags may differ.

Among the entries that serve, the nearest sizes win: the smallest sum over sizes of |log2((a + 1) / (b + 1))|, ties to the entry
with more static fields of the problem's own, then to the smaller sizes (compared in the order of their names). An entry beyond
the kernel's bound of that sum (`TUNED_WITHIN`, else WITHIN) does not serve: there the kernel's default does.

Every entry names the kernel source that was timed. An entry of another source is stale: its configuration still serves, its
time is no longer used.
"""

import dataclasses
import functools
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from gdn.problem import Problem
from gdn.runtime import log

SCHEMA = 2
SHIPPED = Path(__file__).resolve().parent.parent / "tuned"

# Default bound: a factor below two over all sizes together. Shapes are tuned at powers of two; a shape that is not in the table
# because its default is fastest must not be served by the neighbouring entry.
WITHIN = 0.9


# Plain dataclasses, which copy what they are given: a library of schemas would take a third of the time of `import gdn`.
@dataclasses.dataclass(kw_only=True)
class Header:
    """Origin of the numbers."""

    schema_version: int = SCHEMA
    device: str  # DeviceSpec.key
    op: str
    backend: str
    runs: dict[str, dict[str, str]]  # ISO date of a measurement -> versions: torch, the DSL, the driver, ...

    def __post_init__(self) -> None:
        _check("schema_version", type(self.schema_version) is int, "an int", self.schema_version)
        for name in ("device", "op", "backend"):
            _check_text(name, getattr(self, name))
        _check("runs", isinstance(self.runs, dict), "versions by date", self.runs)
        self.runs = dict(self.runs)
        for date, versions in self.runs.items():
            is_right = isinstance(versions, dict) and all(isinstance(one, str) for pair in versions.items() for one in pair)
            _check(f"runs[{date}]", isinstance(date, str) and is_right, "names and versions", versions)


@dataclasses.dataclass(kw_only=True)
class Entry:
    sizes: dict[str, int]  # >= 0
    config: dict[str, int | bool]
    time_us: float  # > 0
    error: float | None = None  # relative error against the reference in that measurement
    date: str  # of the measurement, ISO
    kernel_source: str  # source.source_hash of the kernel that was timed, or of a later one with the same machine code
    machine_code: str | None = None  # hash of the kernel's machine code; None where it could not be read

    def __post_init__(self) -> None:
        for name, values in (("sizes", self.sizes), ("config", self.config)):
            _check(name, isinstance(values, dict), "numbers by name", values)
            setattr(self, name, dict(values))
        for name, size in self.sizes.items():
            _check(f"sizes.{name}", type(size) is int and size >= 0, "an int >= 0", size)
        for name, value in self.config.items():
            _check(f"config.{name}", type(value) in (int, bool), "an int or a bool", value)
        is_time = type(self.time_us) in (int, float) and 0 < self.time_us < math.inf
        _check("time_us", is_time, "a finite number > 0", self.time_us)
        _check("error", self.error is None or type(self.error) in (int, float), "a number or None", self.error)
        for name in ("date", "kernel_source", "machine_code")[: 2 if self.machine_code is None else 3]:
            _check_text(name, getattr(self, name))


@dataclasses.dataclass(kw_only=True)
class Group:
    static: dict[str, Any]  # Problem.static_fields()
    entries: list[Entry]

    def __post_init__(self) -> None:
        _check("static", isinstance(self.static, dict), "fields by name", self.static)
        self.static, self.entries = dict(self.static), list(self.entries)


@dataclasses.dataclass(kw_only=True)
class Table:
    header: Header
    groups: list[Group]

    def __post_init__(self) -> None:
        self.groups = list(self.groups)

    def num_entries(self) -> int:
        return sum(len(group.entries) for group in self.groups)

    def num_stale(self, kernel_source: str) -> int:
        """Number of entries that were measured with another version of the kernel."""
        return sum(entry.kernel_source != kernel_source for group in self.groups for entry in group.entries)

    def plain(self) -> dict[str, Any]:
        """The table as JSON has it."""
        return dataclasses.asdict(self)


def _check(name: str, is_right: bool, expected: str, got: object) -> None:
    if not is_right:
        raise ValueError(f"{name}: expected {expected}, got {got!r}")


def _check_text(name: str, value: object) -> None:
    _check(name, isinstance(value, str), "text", value)


def _table(content: Mapping[str, Any]) -> Table:
    """A table of JSON's; ValueError with the place where a field is missing, unknown or of another kind."""

    def made(kind: Any, place: str, values: Any) -> Any:
        try:
            return kind(**values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{place}.{error}" if place else str(error)) from error

    groups = []
    for n, group in enumerate(content["groups"]):
        entries = [made(Entry, f"groups.{n}.entries.{m}", entry) for m, entry in enumerate(group["entries"])]
        groups.append(made(Group, f"groups.{n}", {**group, "entries": entries}))
    table: Table = made(Table, "", {**content, "header": made(Header, "header", content["header"]), "groups": groups})
    return table


def table_path(folder: Path, device: str, op: str, backend: str) -> Path:
    return folder / device / f"{op}.{backend}.json"


def read(path: Path) -> Table:
    """Reads a table; ValueError where the file is not a table of this schema."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content["header"]["schema_version"]
        found = _table(content) if version == SCHEMA else None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a tuned table: {error}") from error
    if found is None:
        raise ValueError(f"{path}: expected schema_version {SCHEMA}, got {version}")
    return found


def write(path: Path, table: Table) -> None:
    """Writes a table atomically: readers see the old or the new one. A table without entries is deleted."""
    groups = [group for group in table.groups if group.entries]
    dates = {entry.date for group in groups for entry in group.entries}
    runs = {date: versions for date, versions in sorted(table.header.runs.items()) if date in dates}
    table = Table(header=dataclasses.replace(table.header, runs=runs), groups=groups)
    if groups:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp") as folder:
            temporary = Path(folder, path.name)
            temporary.write_text(json.dumps(table.plain(), indent=1) + "\n", encoding="utf-8")
            os.chmod(temporary, 0o644)  # whatever the umask
            os.replace(temporary, path)
    else:
        path.unlink(missing_ok=True)
    forget()  # `prepare` sees the table after env.reload(): until then it keeps its decisions


@functools.cache
def _groups(path: Path) -> tuple[Group, ...]:
    """Groups of a file, parsed once; none where the file is not readable."""
    if not path.is_file():
        return ()
    try:
        return tuple(read(path).groups)
    except (ValueError, OSError) as error:
        log.once(f"tuned table skipped: {error}", logging.WARNING)
        return ()


def _defaults(problem: type[Problem]) -> dict[str, Any]:
    """The static fields that may be left out, with what they are then: those that came after tables were written."""
    every = dataclasses.fields(problem)  # type: ignore[arg-type]
    static = [f for f in every if "tunes" in f.metadata]
    return {f.name: f.default for f in static if f.default is not dataclasses.MISSING}


@functools.cache
def _by_tune_key(path: Path, problem: type[Problem]) -> Mapping[str, list[Group]]:
    """Groups of a file, by their values of the fields of the tune key. A field that a group lacks has its default."""
    found: dict[str, list[Group]] = {}
    names, defaults = problem.tune_names(), _defaults(problem)
    for group in (dataclasses.replace(one, static={**defaults, **one.static}) for one in _groups(path)):
        if missing := [name for name in names if name not in group.static]:
            log.once(f"{path}: entries skipped: their problem has no {', '.join(missing)}")
        else:
            found.setdefault(static_text({name: group.static[name] for name in names}), []).append(group)
    return found


def forget() -> None:
    """Drops all tables, so that files are read again."""
    _groups.cache_clear()
    _by_tune_key.cache_clear()


def static_text(static: Mapping[str, Any]) -> str:
    """Static fields as text, independent of their order and of JSON's formatting."""
    return json.dumps(dict(static), sort_keys=True)


def distance(a: Mapping[str, int], b: Mapping[str, int]) -> float:
    """Distance between two sets of the same sizes."""
    return sum(abs(math.log2((a[name] + 1) / (b[name] + 1))) for name in a)


def build_config(config_type: type, values: Mapping[str, int | bool]) -> Any | None:
    """Config of an entry, or None where its fields are not the kernel's."""
    return config_type(**values) if {f.name for f in dataclasses.fields(config_type)} == set(values) else None


@dataclasses.dataclass(frozen=True)
class Found:
    """An entry that serves a problem."""

    entry: Entry
    config: Any
    path: Path
    sizes: tuple[tuple[str, int], ...]  # the entry's, sorted by name
    static: str  # static fields of the measured problem, as static_text
    others: tuple[str, ...]  # names of the static fields in which the measured problem differs


def usable(path: Path, problem: Problem, config_type: type, fits: Callable[[Any], bool]) -> list[Found]:
    """Entries of a table that serve the problem, whatever its sizes."""
    groups = _by_tune_key(path, type(problem)).get(static_text(problem.tune_fields()), ())  # type: ignore[arg-type]
    return usable_of(groups, path, problem, config_type, fits)


def usable_of(
    groups: Iterable[Group], path: Path, problem: Problem, config_type: type, fits: Callable[[Any], bool]
) -> list[Found]:
    """Entries of these groups, which have the problem's tune key, that serve the problem.

    An entry is skipped, and logged, if its sizes have other names than the problem's, if its config has other fields than the
    kernel's Config, or if its config does not fit.
    """
    wanted, size_names = problem.static_fields(), problem.sizes().keys()
    found = []
    for group in groups:
        others = tuple(name for name, value in wanted.items() if group.static.get(name, ...) != value)
        for entry in group.entries:
            config = build_config(config_type, entry.config)
            if entry.sizes.keys() != size_names:
                log.once(f"{path}: entry skipped: its sizes are {sorted(entry.sizes)}, the problem's {sorted(size_names)}")
            elif config is None:
                log.once(f"{path}: entry skipped: {entry.config} are not the fields of the kernel's Config")
            elif not fits(config):
                log.once(f"{path}: entry skipped: {config} does not fit {problem.static_key()}")
            else:
                sizes = tuple(sorted(entry.sizes.items()))
                found.append(Found(entry, config, path, sizes, static_text(group.static), others))
    return found


def nearest_first(found: Iterable[Found], sizes: Mapping[str, int], within: float = math.inf) -> list[tuple[float, Found]]:
    """Entries within a distance of these sizes, with their distances, sorted by distance.

    Ties go to more static fields in common, then to smaller sizes.
    """
    measured = ((distance(one.entry.sizes, sizes), one) for one in found)
    near = [one for one in measured if one[0] <= within]
    return sorted(near, key=lambda item: (item[0], len(item[1].others), item[1].sizes))
