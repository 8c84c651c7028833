"""Tuned tables: their schema, how an entry is found, and how the autotuner writes one.

A table is `<device>/<op>.<backend>.json`, below GDN_TUNED_DIR and then below the tables that ship with the package. A
group holds the entries of one set of static fields; a group serves a problem whose static fields are exactly its own.
Among a group's entries the nearest sizes win: the smallest sum over sizes of |log2((a + 1) / (b + 1))|, ties to the
smaller sizes (compared in the order of their names). A kernel that takes another design for other sizes bounds that sum
(`TUNED_WITHIN`): beyond it its own default serves.
"""

import dataclasses
import functools
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from gdn.runtime import log

SCHEMA = 1
SHIPPED = Path(__file__).resolve().parent.parent / "tuned"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Header(_Strict):
    """Where the numbers come from."""

    schema_version: int = SCHEMA
    device: str  # DeviceSpec.key
    op: str
    backend: str
    date: str  # ISO, of the measurement
    versions: dict[str, str]  # torch, the DSL, the driver, ...
    kernel_source: str  # compiled.source_hash of the kernel that was timed


class Entry(_Strict):
    sizes: dict[str, int]
    config: dict[str, int | bool]
    time_us: float
    error: float | None = None  # relative error against the reference when it was timed


class Group(_Strict):
    static: dict[str, Any]  # Problem.static_fields()
    entries: list[Entry]


class Table(_Strict):
    header: Header
    groups: list[Group]


def table_path(folder: Path, device: str, op: str, backend: str) -> Path:
    return folder / device / f"{op}.{backend}.json"


def read(path: Path) -> Table:
    """The table of a file; ValueError where it is none of this schema."""
    try:
        table = Table.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        raise ValueError(f"{path}: not a tuned table: {error}") from error
    if table.header.schema_version != SCHEMA:
        raise ValueError(f"{path}: expected schema_version {SCHEMA}, got {table.header.schema_version}")
    return table


def write(path: Path, table: Table) -> None:
    """Writes a table so that a reader sees the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(table.model_dump(mode="json"), indent=1) + "\n"
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner reads
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    forget()  # `prepare` sees the table after env.reload(): until then it keeps its decisions


@functools.cache
def _groups(path: Path) -> tuple[str, Mapping[str, tuple[Entry, ...]]]:
    """(kernel source hash, static fields as text -> entries) of a file, parsed once; no entries where it is not readable."""
    if not path.is_file():
        return "", {}
    try:
        table = read(path)
    except (ValueError, OSError) as error:
        log.once(f"tuned table passed over: {error}", logging.WARNING)
        return "", {}
    grouped: dict[str, tuple[Entry, ...]] = {}
    for group in table.groups:
        key = static_text(group.static)
        grouped[key] = grouped.get(key, ()) + tuple(group.entries)
    return table.header.kernel_source, grouped


def forget() -> None:
    """Files are read again at the next lookup."""
    _groups.cache_clear()


def static_text(static: Mapping[str, Any]) -> str:
    """Static fields as text that depends on neither their order nor on how JSON wrote them."""
    return json.dumps(dict(static), sort_keys=True)


def distance(a: Mapping[str, int], b: Mapping[str, int]) -> float:
    """How far apart two sets of the same sizes are."""
    return sum(abs(math.log2((a[name] + 1) / (b[name] + 1))) for name in a)


def build_config(config_type: type, values: Mapping[str, int | bool]) -> Any | None:
    """The Config of an entry, or None where the kernel's fields are no longer the entry's."""
    expected = {f.name for f in dataclasses.fields(config_type)}
    if expected != set(values):
        return None
    return config_type(**values)


@dataclasses.dataclass(frozen=True)
class Found:
    entry: Entry
    config: Any
    path: Path
    kernel_source: str


def usable(
    folders: Sequence[Path],
    device: str,
    op: str,
    backend: str,
    static: Mapping[str, Any],
    size_names: frozenset[str],
    config_type: type,
    fits: Callable[[Any], bool],
) -> list[Found]:
    """The entries for these static fields, of the first folder that has any that can be used.

    An entry that names other sizes than the problem, whose config has other fields than the kernel's Config, or whose
    config does not fit, counts as missing, and the log says so.
    """
    key = static_text(static)
    for folder in folders:
        path = table_path(folder, device, op, backend)
        kernel_source, groups = _groups(path)
        found = []
        for entry in groups.get(key, ()):
            config = build_config(config_type, entry.config)
            if entry.sizes.keys() != size_names:
                log.once(f"{path}: entry passed over, its sizes are {sorted(entry.sizes)}, the problem's {sorted(size_names)}")
            elif config is None:
                log.once(f"{path}: entry passed over, {entry.config} are not the fields of the kernel's Config")
            elif not fits(config):
                log.once(f"{path}: entry passed over, {config} does not fit")
            else:
                found.append(Found(entry, config, path, kernel_source))
        if found:
            return found
    return []


def nearest_first(found: Iterable[Found], sizes: Mapping[str, int], within: float = math.inf) -> list[Found]:
    """Those at most so far from these sizes, sorted by distance; ties to the smaller sizes."""
    measured = [(distance(item.entry.sizes, sizes), sorted(item.entry.sizes.items()), item) for item in found]
    near = [one for one in measured if one[0] <= within]
    return [item for _, _, item in sorted(near, key=lambda one: one[:2])]
