"""Tuned tables: schema, tune keys, nearest sizes, entries that no longer serve."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from gdn.problem import COMPILES, TUNES, Problem
from gdn.runtime import tuned
from gdn.runtime.tuned import Entry, Group, Header, Table


@dataclasses.dataclass(frozen=True)
class Config:
    tile: int
    wide: bool


STATIC = {"dtype": "bfloat16", "head_dim": 128, "gate_dtype": None, "relu": True}
TUNE_FIELDS = ("dtype", "head_dim")


def problem_of(static: dict[str, Any], sizes: dict[str, int]) -> Any:
    """A problem with these fields and sizes: of the static ones, TUNE_FIELDS are part of the tune key."""
    kinds = {name: TUNES if name in TUNE_FIELDS else COMPILES for name in static}
    fields: list[Any] = [(name, object, dataclasses.field(metadata=kind)) for name, kind in kinds.items()]
    fields += [(name, int, dataclasses.field(metadata={"size": True})) for name in sizes]
    return dataclasses.make_dataclass("Fake", fields, bases=(Problem,), frozen=True)(**static, **sizes)


@pytest.fixture(autouse=True)
def fresh_tables():
    tuned.forget()
    yield
    tuned.forget()


RUNS = {"2026-11-20": {"torch": "2.11"}}


def table(*entries: Entry, static: dict[str, Any] = STATIC) -> Table:
    header = Header(device="h100", op="recurrent", backend="cute", runs=RUNS)
    return Table(header=header, groups=[Group(static=static, entries=list(entries))])


def entry(tile: int, time_us: float = 1.0, wide: bool = False, **sizes: int) -> Entry:
    config: dict[str, int | bool] = {"tile": tile, "wide": wide}
    return Entry(sizes=sizes, config=config, time_us=time_us, error=1e-3, date="2026-11-20", kernel_source="ab")


def store(folder: Path, content: Table) -> Path:
    path = tuned.table_path(folder, "h100", "recurrent", "cute")
    tuned.write(path, content)
    return path


def look(folder: Path, static: dict[str, Any] = STATIC, fits=lambda config: True, **sizes: int) -> list[int]:
    path = tuned.table_path(folder, "h100", "recurrent", "cute")
    found = tuned.usable(path, problem_of(static, sizes), Config, fits)
    return [item.config.tile for _, item in tuned.nearest_first(found, sizes)]


def test_what_is_written_is_read(tmp_path: Path):
    content = table(entry(8, tokens=1), entry(16, tokens=64))
    path = store(tmp_path, content)
    assert path == tmp_path / "h100" / "recurrent.cute.json"
    assert tuned.read(path) == content
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no temporary file stays
    assert json.loads(path.read_text())["header"]["schema_version"] == tuned.SCHEMA


def test_what_is_empty_is_not_kept(tmp_path: Path):
    content = table(entry(8, tokens=1))
    content.groups.append(Group(static={**STATIC, "dtype": "float16"}, entries=[]))
    content.header.runs["2026-11-01"] = {"torch": "2.10"}  # of entries that are gone
    path = store(tmp_path, content)
    assert tuned.read(path) == table(entry(8, tokens=1))
    store(tmp_path, table())
    assert not path.exists()
    store(tmp_path, table())  # nor was it there


def test_stale_entries_are_counted():
    content = table(entry(8, tokens=1), entry(16, tokens=64))
    content.groups[0].entries[1].kernel_source = "cd"
    assert (content.num_entries(), content.num_stale("ab"), content.num_stale("ef")) == (2, 1, 2)


def test_a_write_that_fails_leaves_the_old_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = store(tmp_path, table(entry(8, tokens=1)))

    def broken(source: object, target: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(tuned.os, "replace", broken)
    with pytest.raises(OSError, match="disk full"):
        tuned.write(path, table(entry(99, tokens=1)))
    assert tuned.read(path).groups[0].entries[0].config["tile"] == 8
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_nearest_sizes_in_log_space(tmp_path: Path):
    store(tmp_path, table(entry(1, tokens=1), entry(2, tokens=64), entry(3, tokens=4096)))
    assert look(tmp_path, tokens=64)[0] == 2
    assert look(tmp_path, tokens=0)[0] == 1
    assert look(tmp_path, tokens=10)[0] == 1  # log2(11 / 2) = 2.46 to 1 token, log2(65 / 11) = 2.56 to 64
    assert look(tmp_path, tokens=11)[0] == 2  # 2.58 and 2.44
    assert look(tmp_path, tokens=10**9) == [3, 2, 1]


def test_distances_add_up_and_ties_go_to_the_smaller(tmp_path: Path):
    store(tmp_path, table(entry(1, tokens=63, rows=15), entry(2, tokens=15, rows=15), entry(3, tokens=15, rows=63)))
    assert look(tmp_path, tokens=63, rows=63) == [1, 3, 2]  # 1 and 3 are as far: 1 has fewer rows
    assert look(tmp_path, tokens=31, rows=15) == [2, 1, 3]
    assert tuned.distance({"a": 1, "b": 3}, {"a": 3, "b": 1}) == 2.0


def test_entries_beyond_the_bound_do_not_serve(tmp_path: Path):
    path = store(tmp_path, table(entry(1, tokens=63, rows=0), entry(2, tokens=63, rows=1)))
    found = tuned.usable(path, problem_of(STATIC, {"tokens": 1, "rows": 1}), Config, lambda config: True)

    def tiles(within: float, **sizes: int) -> list[int]:
        return [item.config.tile for _, item in tuned.nearest_first(found, sizes, within)]

    assert tiles(1.0, tokens=63, rows=0) == [1, 2]  # rows 0 and 1 are log2(2) apart
    assert tiles(0.99, tokens=63, rows=0) == [1]
    assert tiles(0.25, tokens=70, rows=1) == [2]
    assert tiles(0.25, tokens=127, rows=1) == []


def test_fields_of_the_tune_key_must_be_equal(tmp_path: Path):
    store(tmp_path, table(entry(8, tokens=1)))
    assert look(tmp_path, tokens=1) == [8]
    assert look(tmp_path, tokens=1, static=dict(reversed(STATIC.items()))) == [8]  # in any order
    for name, other in (("head_dim", 64), ("dtype", "float16")):
        assert look(tmp_path, tokens=1, static={**STATIC, name: other}) == []


def test_other_static_fields_do_not_veto(tmp_path: Path):
    store(tmp_path, table(entry(8, tokens=1)))
    other = {**STATIC, "gate_dtype": "float32", "relu": False}
    assert look(tmp_path, tokens=1, static=other) == [8]
    assert look(tmp_path, tokens=1, static={**STATIC, "more": 1}) == [8]  # a field that is newer than the entry
    assert look(tmp_path, tokens=1, static=other, fits=lambda config: config.tile < 8) == []  # legality is the kernel's
    path = tuned.table_path(tmp_path, "h100", "recurrent", "cute")
    (found,) = tuned.usable(path, problem_of(other, {"tokens": 1}), Config, lambda config: True)
    assert found.others == ("gate_dtype", "relu")


def test_of_equal_sizes_the_entry_with_more_of_the_problems_own_fields_wins(tmp_path: Path):
    content = table(entry(1, tokens=64), entry(2, tokens=4))
    content.groups.append(Group(static={**STATIC, "relu": False}, entries=[entry(3, tokens=64)]))
    store(tmp_path, content)
    assert look(tmp_path, tokens=64) == [1, 3, 2]
    assert look(tmp_path, tokens=64, static={**STATIC, "relu": False}) == [3, 1, 2]
    assert look(tmp_path, tokens=5, static={**STATIC, "relu": False})[0] == 2  # nearer sizes come first


def test_entries_of_a_problem_without_the_fields_of_the_tune_key(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "gdn")
    store(tmp_path, table(entry(8, tokens=1), static={"dtype": "bfloat16"}))
    assert look(tmp_path, tokens=1) == []
    assert "entries skipped: their problem has no head_dim" in caplog.text


def test_entries_that_no_longer_serve_are_passed_over_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "gdn")
    old = entry(1, tokens=1)
    del old.config["wide"]
    other_sizes = entry(2, rows=1)
    store(tmp_path, table(old, other_sizes, entry(200, tokens=1), entry(16, tokens=999)))
    for _ in range(2):
        assert look(tmp_path, tokens=1, fits=lambda config: config.tile <= 128) == [16]
    messages = [record.message for record in caplog.records]
    assert len(messages) == 3
    for word in ("are not the fields", "its sizes are ['rows']", "does not fit"):
        assert sum(word in message for message in messages) == 1


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"header": {}}', '{"header": null, "groups": []}'], ids=["empty", "cut", "list", "bare", "null"]
)
def test_a_file_that_is_no_table(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture):
    path = store(tmp_path, table(entry(8, tokens=1)))
    path.write_text(text)
    tuned.forget()
    with pytest.raises(ValueError, match="not a tuned table"):
        tuned.read(path)
    assert look(tmp_path, tokens=1) == []
    assert "tuned table skipped" in caplog.text


def test_another_schema_version(tmp_path: Path):
    path = store(tmp_path, table(entry(8, tokens=1)))
    content = json.loads(path.read_text())
    content["header"]["schema_version"] = tuned.SCHEMA + 1
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"expected schema_version {tuned.SCHEMA}, got {tuned.SCHEMA + 1}"):
        tuned.read(path)


def test_flags_and_numbers_keep_their_types(tmp_path: Path):
    path = store(tmp_path, table(entry(1, wide=True, tokens=1)))
    (found,) = tuned.usable(path, problem_of(STATIC, {"tokens": 1}), Config, lambda config: True)
    assert found.config == Config(1, True) and found.config.wide is True and type(found.config.tile) is int


def test_shipped_tables_are_tables():
    for path in tuned.SHIPPED.glob("*/*.json"):
        content = tuned.read(path)
        assert path == tuned.table_path(tuned.SHIPPED, content.header.device, content.header.op, content.header.backend)
        assert all(group.entries for group in content.groups)


@pytest.mark.parametrize(("change", "message"), [
    ({"sizes": {"tokens": -1}}, "groups.0.entries.0.sizes.tokens"), ({"time_us": -1.0}, "groups.0.entries.0.time_us"),
    ({"time_us": math.nan}, "groups.0.entries.0.time_us"), ({"sizes": {"tokens": 1.5}}, "groups.0.entries.0.sizes.tokens"),
])  # fmt: skip
def test_an_entry_of_impossible_numbers_is_named(
    change: dict[str, Any], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The table is left out, with the place of the entry; a call goes on with the default tiles."""
    path = store(tmp_path, table(entry(1, tokens=64)))
    content = json.loads(path.read_text(encoding="utf-8"))
    content["groups"][0]["entries"][0] |= change
    path.write_text(json.dumps(content), encoding="utf-8")
    tuned.forget()
    assert look(tmp_path, tokens=64) == []
    assert str(path) in caplog.text and message in caplog.text
