"""The journal of a kernel's search: one JSON line for each step of a candidate, from which the same command goes on."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import filelock
import pydantic

STARTED, INTERRUPTED, DROPPED, TIMED, JUDGED = "started", "interrupted", "dropped", "timed", "judged"
_MOST_STARTS = 2  # of a candidate that never ended


@dataclass(frozen=True)
class Record:
    """Latest state of one candidate."""

    state: str  # started | interrupted | dropped | timed
    why: str = ""  # reason, for a dropped candidate
    time_us: float | None = None
    error: float | None = None


@dataclass(frozen=True)
class Judged:
    """The configuration that a shape keeps, the fastest or the default, and what it was judged by."""

    config: dict[str, Any]
    time_us: float
    error: float
    default_us: float | None  # in the same rounds; None where the default did not run
    gain: float | None  # median over the rounds; None where the default is kept, or did not run
    timed: int  # candidates of the shape that had been timed


class _Line(pydantic.BaseModel, extra="forbid"):
    source: str
    static: str
    sizes: dict[str, int]
    config: dict[str, bool | int]
    state: Literal["started", "interrupted", "dropped", "timed", "judged"]
    why: str = ""
    time_us: float | None = None
    error: float | None = None
    default_us: float | None = None
    gain: float | None = None
    timed: int = 0

    @pydantic.model_validator(mode="after")
    def _check(self) -> "_Line":
        if self.state in (TIMED, JUDGED) and (self.time_us is None or self.error is None):
            raise ValueError(f"a line that is {self.state} has a time_us and an error")
        return self

    def judged(self) -> Judged:
        assert self.time_us is not None and self.error is not None
        return Judged(dict(self.config), self.time_us, self.error, self.default_us, self.gain, self.timed)


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
        self._judged: dict[str, Judged] = {}
        *lines, last = path.read_bytes().split(b"\n") if path.is_file() else [b""]
        for number, text in enumerate(lines, start=1):
            self._read(text, number)
        if last:  # its writer was killed
            warn(f"{path}:{len(lines) + 1}: the last line was cut off, and is dropped")
            with path.open("r+b") as file:  # or the next line would be written behind it
                file.truncate(path.stat().st_size - len(last))

    def _read(self, text: bytes, number: int) -> None:
        try:
            line = _Line.model_validate_json(text)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False)[0]
            what = ": ".join([*([".".join(map(str, first["loc"]))] if first["loc"] else []), first["msg"]])
            raise ValueError(f"{self.path}:{number}: expected a line of a journal of the tuner: {what}") from error
        if line.source != self._source:
            return
        if line.state == JUDGED:
            self._judged[_key(line.static, line.sizes)] = line.judged()
        else:
            self._note(_key(line.static, line.sizes, line.config), Record(line.state, line.why, line.time_us, line.error))

    def _note(self, key: str, record: Record) -> None:
        self._starts[key] = self._starts.get(key, 0) + 1 if record.state == STARTED else 0
        self._records[key] = record

    def find(self, static: str, sizes: Mapping[str, int], config: Mapping[str, Any]) -> Record | None:
        """Record of a candidate that is done with: timed, or dropped."""
        key = _key(static, sizes, config)
        found = self._records.get(key)
        if found is not None and found.state == STARTED and self._starts[key] >= _MOST_STARTS:
            return Record(DROPPED, why=f"the tuner ended {_MOST_STARTS} times while it was timed")
        return found if found is not None and found.state in (DROPPED, TIMED) else None

    def find_judged(self, static: str, sizes: Mapping[str, int]) -> Judged | None:
        return self._judged.get(_key(static, sizes))

    def add(self, static: str, sizes: Mapping[str, int], config: Mapping[str, Any], record: Record) -> None:
        self._note(_key(static, sizes, config), record)
        self._write(static, sizes, {"config": dict(config), **vars(record)})

    def judge(self, static: str, sizes: Mapping[str, int], judged: Judged) -> None:
        self._judged[_key(static, sizes)] = judged
        self._write(static, sizes, {"state": JUDGED, **asdict(judged)})

    def _write(self, static: str, sizes: Mapping[str, int], fields: dict[str, Any]) -> None:
        line = json.dumps({"source": self._source, "static": static, "sizes": dict(sizes), **fields})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")


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
