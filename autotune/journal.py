"""The journal of a kernel's search: one JSON line for each step of a candidate, from which the same command goes on."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pydantic

STARTED, INTERRUPTED, DROPPED, TIMED = "started", "interrupted", "dropped", "timed"


@dataclass(frozen=True)
class Record:
    """Latest state of one candidate."""

    state: str  # started | interrupted | dropped | timed
    why: str = ""  # reason, for a dropped candidate
    time_us: float | None = None
    error: float | None = None


class _Line(pydantic.BaseModel, extra="forbid"):
    source: str
    static: str
    sizes: dict[str, int]
    config: dict[str, bool | int]
    state: Literal["started", "interrupted", "dropped", "timed"]
    why: str = ""
    time_us: float | None = None
    error: float | None = None

    def record(self) -> Record:
        return Record(self.state, self.why, self.time_us, self.error)


class Journal:
    """The outcome of every candidate of a search.

    A line is written before a candidate runs on the GPU and one after; a candidate with only the first took the process down
    with it and is not tried again. One that the user interrupted is. Lines of another kernel source are passed over.

    A last line that was cut off is dropped, with a message to `warn`. ValueError, with the place, where another line is not of a
    journal: what it said is lost, so its candidates would be judged without it.
    """

    def __init__(self, path: Path, kernel_source: str, warn: Callable[[str], None] = lambda message: None) -> None:
        self.path, self._source = path, kernel_source
        self._records: dict[str, Record] = {}
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
            field = ".".join(map(str, first["loc"]))
            what = f"{field}: {first['msg']}" if field else first["msg"]
            raise ValueError(f"{self.path}:{number}: expected a line of a journal of the tuner: {what}") from error
        if line.source == self._source:
            self._records[_key(line.static, line.sizes, line.config)] = line.record()

    def find(self, static: str, sizes: Mapping[str, int], config: Mapping[str, Any]) -> Record | None:
        """Record of a candidate that is done with. One that was started and never finished counts as dropped."""
        found = self._records.get(_key(static, sizes, config))
        if found is not None and found.state == INTERRUPTED:
            return None
        if found is not None and found.state == STARTED:
            return Record(DROPPED, why="took the tuner's process down in an earlier run")
        return found

    def add(self, static: str, sizes: Mapping[str, int], config: Mapping[str, Any], record: Record) -> None:
        self._records[_key(static, sizes, config)] = record
        line = {"source": self._source, "static": static, "sizes": dict(sizes), "config": dict(config), **vars(record)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(line)}\n")


def _key(static: str, sizes: Mapping[str, int], config: Mapping[str, Any]) -> str:
    return json.dumps([static, dict(sizes), dict(config)], sort_keys=True)
