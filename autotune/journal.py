"""The journal of a kernel's search: one JSON line for each step of a candidate, from which the same command goes on."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final, Literal

import filelock
import pydantic
from pydantic.dataclasses import dataclass

State = Literal["started", "interrupted", "dropped", "timed", "judged"]
STARTED: Final = "started"
INTERRUPTED: Final = "interrupted"
DROPPED: Final = "dropped"
TIMED: Final = "timed"
JUDGED: Final = "judged"
_MOST_STARTS = 2  # of a candidate that never ended
_EXACTLY = pydantic.ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_EXACTLY)
class Record:
    """Latest state of one candidate; or, judged, what its shape keeps it by."""

    state: State
    why: str = ""  # reason, for a dropped candidate
    time_us: float | None = None
    error: float | None = None
    default_us: float | None = None  # in the same rounds; None where the default did not run
    gain: float | None = None  # median over the rounds; None where the default is kept, or did not run
    timed: int = 0  # candidates of the shape that had been timed when it was judged

    @pydantic.model_validator(mode="after")
    def _check(self) -> "Record":
        if self.state in (TIMED, JUDGED) and (self.time_us is None or self.error is None):
            raise ValueError(f"a line that is {self.state} has a time_us and an error")
        return self


@dataclass(frozen=True, kw_only=True, config=_EXACTLY)
class _Line(Record):
    """A record as it is stored, with its candidate."""

    source: str
    static: str
    sizes: dict[str, int]
    config: dict[str, bool | int]

    def record(self) -> Record:
        return Record(**{one.name: getattr(self, one.name) for one in fields(Record)})


_LINE = pydantic.TypeAdapter(_Line)


class Journal:
    """The outcome of every candidate of a search, and the verdict on every shape.

    A line is written before a candidate runs on the GPU and one after. A candidate with only the first was cut off by the end
    of the tuner, and is tried again; a second time it is dropped, since it may have taken the machine down. One that the user
    interrupted is always tried again. Lines of another kernel source are passed over.

    A last line that was cut off is dropped, with a message to `warn`. ValueError, with the place, where another line is not of a
    journal: what it said is lost, so its candidates would be judged without it.
    """

    def __init__(self, path: Path, kernel_source: str, warn: Callable[[str], None] = lambda message: None) -> None:
        self.path, self._source = path, kernel_source
        self._records: dict[str, Record] = {}
        self._starts: dict[str, int] = {}  # since the last end
        self._judged: dict[str, tuple[dict[str, Any], Record]] = {}
        *lines, last = path.read_bytes().split(b"\n") if path.is_file() else [b""]
        for number, text in enumerate(lines, start=1):
            self._read(text, number)
        if last:  # its writer was killed
            warn(f"{path}:{len(lines) + 1}: the last line was cut off, and is dropped")
            with path.open("r+b") as file:  # or the next line would be written behind it
                file.truncate(path.stat().st_size - len(last))

    def _read(self, text: bytes, number: int) -> None:
        try:
            line = _LINE.validate_json(text)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False)[0]
            what = ": ".join([*([".".join(map(str, first["loc"]))] if first["loc"] else []), first["msg"]])
            raise ValueError(f"{self.path}:{number}: expected a line of a journal of the tuner: {what}") from error
        if line.source == self._source:
            self._note(line.static, line.sizes, line.config, line.record())

    def _note(self, static: str, sizes: Mapping[str, int], config: Mapping[str, Any], record: Record) -> None:
        if record.state == JUDGED:
            self._judged[_key(static, sizes)] = dict(config), record
            return
        key = _key(static, sizes, config)
        self._starts[key] = self._starts.get(key, 0) + 1 if record.state == STARTED else 0
        self._records[key] = record

    def find(self, static: str, sizes: Mapping[str, int], config: Mapping[str, Any]) -> Record | None:
        """Record of a candidate that is done with: timed, or dropped."""
        key = _key(static, sizes, config)
        found = self._records.get(key)
        if found is not None and found.state == STARTED and self._starts[key] >= _MOST_STARTS:
            return Record(DROPPED, why=f"the tuner ended {_MOST_STARTS} times while it was timed")
        return found if found is not None and found.state in (DROPPED, TIMED) else None

    def find_judged(self, static: str, sizes: Mapping[str, int]) -> tuple[dict[str, Any], Record] | None:
        """The configuration that a shape keeps."""
        return self._judged.get(_key(static, sizes))

    def add(self, static: str, sizes: Mapping[str, int], config: Mapping[str, Any], record: Record) -> None:
        self._note(static, sizes, config, record)
        line = {"source": self._source, "static": static, "sizes": dict(sizes), "config": dict(config), **asdict(record)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(line)}\n")


def _key(static: str, sizes: Mapping[str, int], config: Mapping[str, Any] | None = None) -> str:
    return json.dumps([static, dict(sizes), None if config is None else dict(config)], sort_keys=True)


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Keeps other tuners from a journal. ValueError where one has it: two would time on one GPU, and disturb each other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path.with_name(f".{path.name}.lock"), timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise ValueError(f"journals: another tuner is at work on {path}; wait for it, or name another folder") from None
    try:
        yield
    finally:
        lock.release()
