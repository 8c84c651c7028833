"""Journal of a search: the outcome of every candidate, one JSON line each, from which an interrupted run resumes.

A line is written before a candidate runs on the GPU and one after; a candidate with only the first took the process down
with it and is not tried again. Lines of another kernel source are passed over.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STARTED, DROPPED, TIMED = "started", "dropped", "timed"


@dataclass(frozen=True)
class Record:
    """Latest state of one candidate."""

    state: str  # started | dropped | timed
    why: str = ""  # reason, for a dropped candidate
    time_us: float | None = None
    error: float | None = None


class Journal:
    def __init__(self, path: Path, kernel_source: str) -> None:
        self.path, self._source = path, kernel_source
        self._records: dict[str, Record] = {}
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        self._before = "\n" if text and not text.endswith("\n") else ""  # an interruption may have cut the last line off
        for line in text.splitlines():
            self._take(line)

    def _take(self, line: str) -> None:
        try:
            fields = json.loads(line)
        except json.JSONDecodeError:  # the line that an interruption cut off
            return
        if fields.pop("source") != self._source:
            return
        key = _key(fields.pop("static"), fields.pop("sizes"), fields.pop("config"))
        self._records[key] = Record(**fields)

    def find(self, static: str, sizes: Mapping[str, int], config: Mapping[str, Any]) -> Record | None:
        """Record of a candidate. One that was started and never finished counts as dropped."""
        found = self._records.get(_key(static, sizes, config))
        if found is not None and found.state == STARTED:
            return Record(DROPPED, why="took the tuner's process down in an earlier run")
        return found

    def add(self, static: str, sizes: Mapping[str, int], config: Mapping[str, Any], record: Record) -> None:
        self._records[_key(static, sizes, config)] = record
        line = {"source": self._source, "static": static, "sizes": dict(sizes), "config": dict(config), **vars(record)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{self._before}{json.dumps(line)}\n")
        self._before = ""


def _key(static: str, sizes: Mapping[str, int], config: Mapping[str, Any]) -> str:
    return json.dumps([static, dict(sizes), dict(config)], sort_keys=True)
