"""Tables as the tuner keeps them: nothing is lost, what is stale is stamped anew or left, repeats of the default go."""

import datetime
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune import cases, shapes, tables, tuning, workers
from autotune.shapes import Shape
from autotune.workers import Outcome
from gdn.device import H100
from gdn.runtime import KernelCandidate, env, tuned
from gdn.testing import machine_code
from tests.autotune import fake_kernel, fake_writer
from tests.autotune.fake_gpu import KERNEL, OTHER, SHAPE
from tests.autotune.fake_kernel import Config

DAY = datetime.date(2030, 1, 1)  # of a later run
LONGER = shapes.shapes("chunk", "16/32 32768")[0]


@pytest.fixture
def folder(tmp_path: Path, switch: Callable[..., Any]) -> Path:
    switch(GDN_TUNED_DIR=str(tmp_path), GDN_CACHE_DIR=str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake kernel's libraries hold no cubin: their bytes count as machine code. Compiles in this process."""

    def code_hash(libraries: Sequence[bytes]) -> str:
        return hashlib.sha256(b"".join(libraries)).hexdigest()

    def run(function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], **_: Any) -> Iterator[Outcome]:
        for index, task in enumerate(tasks):
            try:
                yield Outcome(index, function(*task), None, 0.0)
            except Exception as error:
                yield Outcome(index, None, str(error), 0.0)

    monkeypatch.setattr(machine_code, "code_hash", code_hash)
    monkeypatch.setattr(tables.workers, "run", run)


def _winner(shape: Shape, tile: int, time_us: float, split: bool = True) -> tuning.Winner:
    return tuning.Winner(shape, Config(tile, split), time_us, error=0.004, default_us=None)


def _write(folder: Path, *winners: tuning.Winner, versions: dict[str, str] | None = None) -> Path:
    return tables.write_winners(folder, H100, KERNEL, winners, versions or {"torch": "2"})


def _lookup(shape: Shape) -> list[tuple[Config, float]]:
    """Entries in the order in which the runtime looks a problem up: nearest sizes first."""
    candidate = KernelCandidate("chunk", "tilelang", KERNEL.module_name)
    return [(item.config, item.time_us) for item in candidate.tuned(shape.problem, H100)]


def _entries(path: Path) -> dict[tuple[int, int], tuned.Entry]:
    """Entries by heads and tokens."""
    found = {}
    for group in tuned.read(path).groups:
        for entry in group.entries:
            found[group.static["num_k_heads"], entry.sizes["num_tokens"]] = entry
    return found


def test_the_runtime_reads_what_the_tuner_writes(folder: Path) -> None:
    path = _write(folder, _winner(SHAPE, 7, 49.0), _winner(LONGER, 8, 400.0))
    assert path == folder / "h100" / "chunk.tilelang.json"
    assert _lookup(SHAPE) == [(Config(7, True), 49.0)]
    assert _lookup(LONGER) == [(Config(8, True), 400.0)]
    assert _lookup(OTHER) == []
    # A later run replaces its shapes and keeps the others.
    _write(folder, _winner(SHAPE, 6, 45.0), _winner(OTHER, 7, 20.0))
    assert _lookup(SHAPE) == [(Config(6, True), 45.0)]
    assert _lookup(LONGER) == [(Config(8, True), 400.0)]
    assert _lookup(OTHER) == [(Config(7, True), 20.0)]


def test_entries_of_another_source_stay_and_say_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuning one shape of a kernel that had changed erased all the others at a7eedda."""
    _write(folder, _winner(SHAPE, 7, 49.0), _winner(LONGER, 8, 400.0), versions={"torch": "1"})
    before = KERNEL.source
    monkeypatch.setattr(tuning.source, "source_hash", lambda file: "changed")
    path = _write(folder, _winner(OTHER, 7, 20.0))
    entries = _entries(path)
    assert {key: entry.kernel_source for key, entry in entries.items()} == {
        (16, 4096): before, (16, 32768): before, (4, 8192): "changed"
    }  # fmt: skip
    assert tuned.read(path).num_stale("changed") == 2
    assert _lookup(SHAPE) == [(Config(7, True), 49.0)]  # its tiles serve on
    monkeypatch.setattr(tables.datetime, "date", SimpleNamespace(today=lambda: DAY))
    _write(folder, _winner(SHAPE, 6, 45.0), versions={"torch": "3"})
    table = tuned.read(path)
    assert table.header.runs["2030-01-01"] == {"torch": "3"} and len(table.header.runs) == 2
    assert {entry.date for entry in _entries(path).values()} == set(table.header.runs)


def test_a_winner_that_is_in_the_table_keeps_its_day(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command writes what an earlier one measured."""
    path = _write(folder, _winner(SHAPE, 7, 49.0))
    before = path.read_bytes()
    monkeypatch.setattr(tables.datetime, "date", SimpleNamespace(today=lambda: DAY))
    _write(folder, _winner(SHAPE, 7, 49.0), versions={"torch": "3"})
    assert path.read_bytes() == before
    _write(folder, _winner(SHAPE, 7, 48.0), versions={"torch": "3"})
    assert {entry.date for entry in _entries(path).values()} == {"2030-01-01"}


def test_a_winner_that_is_the_default_is_no_entry(folder: Path) -> None:
    path = _write(folder, _winner(SHAPE, 7, 49.0), _winner(OTHER, 7, 20.0))
    _write(folder, _winner(SHAPE, fake_kernel.DEFAULT, 48.0, split=False))  # replaces, and is not kept
    assert set(_entries(path)) == {(4, 8192)}
    _write(folder, _winner(OTHER, fake_kernel.DEFAULT, 19.0, split=False))
    assert not path.exists()


@pytest.mark.cover
def test_two_processes_that_write_at_once_lose_nothing(folder: Path) -> None:
    """Each reads the table, adds an entry, and writes it, 20 times over."""
    tasks = [(str(folder), first, 20) for first in (1000, 2000)]
    outcomes = list(workers.run(fake_writer.write_entries, tasks, workers=2, timeout_s=120))
    assert [outcome.failure for outcome in outcomes] == [None, None]
    table = tuned.read(tuned.table_path(folder, "h100", "chunk", "tilelang"))
    assert sorted(entry.sizes["num_tokens"] for entry in table.groups[0].entries) == [*range(1000, 1020), *range(2000, 2020)]


def test_the_machine_code_of_the_default_is_not_read(folder: Path, readable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most shapes keep it, and their entries go."""
    read: list[Any] = []
    monkeypatch.setattr(tables, "code_of", lambda kernel, problem, config: read.append(config))
    _write(folder, _winner(SHAPE, 7, 49.0), _winner(OTHER, fake_kernel.DEFAULT, 20.0, split=False))
    assert read == [Config(7, True)]


# --- restamp ---------------------------------------------------------------------------------------------------------


def _stale(path: Path, *, machine_code: bool = True) -> None:
    """Makes the tables look as if the kernel had changed since its entries were measured."""
    table = tuned.read(path)
    for group in table.groups:
        for entry in group.entries:
            entry.kernel_source = "of another day"
            entry.machine_code = entry.machine_code if machine_code else None
    tuned.write(path, table)


def _edit(path: Path, **fields: Any) -> None:
    """Other fields of the first entry."""
    table = tuned.read(path)
    for name, value in fields.items():
        setattr(table.groups[0].entries[0], name, value)
    tuned.write(path, table)


def _restamp(path: Path) -> tables.Restamped:
    return tables.restamp(path, KERNEL, num_workers=1, timeout_s=60)


def test_unchanged_machine_code_is_stamped_anew(folder: Path, readable: None) -> None:
    path = _write(folder, _winner(SHAPE, 7, 49.0), _winner(OTHER, 7, 20.0))
    before = _entries(path)
    assert all(entry.machine_code for entry in before.values())
    _stale(path)
    found = _restamp(path)
    assert (found.stamped, found.left) == (2, [])
    assert _entries(path) == before  # times and dates of the measurement too
    assert _restamp(path) == tables.Restamped()  # nothing to do


def test_machine_code_that_was_not_recorded_is_recorded(folder: Path, readable: None) -> None:
    """The machine that timed an entry may have had no disassembler."""
    path = _write(folder, _winner(SHAPE, 7, 49.0))
    before = _entries(path)
    _edit(path, machine_code=None)
    found = _restamp(path)
    assert (found.stamped, found.recorded, found.left) == (0, 1, [])
    assert _entries(path) == before


def test_changed_machine_code_stays_stale(folder: Path, readable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(folder, _winner(SHAPE, 7, 49.0), _winner(OTHER, 6, 20.0))
    _stale(path)
    original = fake_kernel.compile

    def changed(problem: Any, config: Config) -> dict[str, bytes]:
        return original(problem, replace(config, split=not config.split)) if config.tile == 7 else original(problem, config)

    monkeypatch.setattr(fake_kernel, "compile", changed)
    monkeypatch.setattr(tables.compiled, "entry_key", lambda *_: f"other {_[-1].tile}")  # as the new source has
    found = _restamp(path)
    assert found.stamped == 1
    assert found.left == ["num_tokens 4096, num_sequences 1: its machine code has changed"]
    assert tuned.read(path).num_stale(KERNEL.source) == 1


def test_a_field_that_the_kernel_has_no_more_goes_where_the_machine_code_is_the_same(folder: Path, readable: None) -> None:
    path = _write(folder, _winner(SHAPE, 7, 49.0))
    before = _entries(path)
    _edit(path, config={"tile": 7, "split": True, "paired": True})
    assert _lookup(SHAPE) == []  # until then it does not serve
    _stale(path)
    assert _restamp(path).stamped == 1
    assert _entries(path) == before
    _edit(path, config={"split": True})  # the kernel has a field that the entry lacks
    _stale(path)
    assert "the kernel no longer takes {'split': True}" in _restamp(path).left[0]


def test_what_cannot_be_compared_stays_stale_and_says_why(folder: Path, readable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(folder, _winner(SHAPE, 7, 49.0))
    _stale(path, machine_code=False)
    assert _restamp(path).left == ["num_tokens 4096, num_sequences 1: its machine code was not recorded"]
    path = _write(folder, _winner(SHAPE, 7, 49.0))
    _stale(path)
    monkeypatch.setattr(fake_kernel, "fits", lambda problem, config, device: config.tile < 7)
    (why,) = _restamp(path).left
    assert "the kernel no longer takes {'tile': 7, 'split': True}" in why
    monkeypatch.setattr(fake_kernel, "fits", lambda problem, config, device: True)
    _edit(path, config={"tile": fake_kernel.RAISES, "split": True})
    (why,) = _restamp(path).left
    assert "did not compile" in why and "tile does not divide" in why
    assert tuned.read(path).num_stale(KERNEL.source) == 1


def test_an_entry_that_another_writer_adds_during_a_restamp_stays(
    folder: Path, readable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _write(folder, _winner(SHAPE, 7, 49.0))
    _stale(path)
    run = tables.workers.run

    def writing(*arguments: Any, **options: Any) -> Iterator[Outcome]:
        yield from run(*arguments, **options)
        _write(folder, _winner(OTHER, 7, 20.0))

    monkeypatch.setattr(tables.workers, "run", writing)
    assert _restamp(path).stamped == 1
    assert set(_entries(path)) == {(16, 4096), (4, 8192)}
    assert tuned.read(path).num_stale(KERNEL.source) == 0


def test_machine_code_that_cannot_be_read_is_not_recorded(folder: Path) -> None:
    assert _entries(_write(folder, _winner(SHAPE, 7, 49.0)))[16, 4096].machine_code is None


# --- stale entries as shapes -----------------------------------------------------------------------------------------


def test_stale_entries_become_shapes(folder: Path) -> None:
    unknown = Shape("mine", replace(SHAPE.problem, num_tokens=100, num_sequences=3))  # type: ignore[call-arg]
    path = _write(folder, _winner(SHAPE, 7, 49.0), _winner(unknown, 7, 9.0), _winner(OTHER, 7, 20.0))
    assert tables.stale_shapes(path, KERNEL) == []
    _stale(path)
    found = {shape.problem: shape for shape in tables.stale_shapes(path, KERNEL)}
    assert found[SHAPE.problem] is SHAPE and found[OTHER.problem] is OTHER
    made = found[unknown.problem]
    assert made.lengths == (33, 33, 34) and "num_tokens 100" in made.name
    assert tables.stale_shapes(folder / "none.json", KERNEL) == []


def test_a_stale_entry_of_fold_states_is_timed_with_tokens_to_fold(folder: Path) -> None:
    """Its sizes have no tokens: the states of its case were once as new as their sequences, so that nothing was folded."""
    (kernel,) = tuning.kernels("fold_states", None)
    known = shapes.shapes("fold_states")[0]
    problem: Any = replace(known.problem, num_sequences=5)  # type: ignore[call-arg]
    entry = tuned.Entry(sizes=problem.sizes(), config={}, time_us=1.0, date="2026-11-20", kernel_source="of another day")
    path = tuned.table_path(folder, "h100", "fold_states", kernel.backend)
    header = tuned.Header(device="h100", op="fold_states", backend=kernel.backend, runs={"2026-11-20": {}})
    tuned.write(path, tuned.Table(header=header, groups=[tuned.Group(static=problem.static_fields(), entries=[entry])]))
    (shape,) = tables.stale_shapes(path, kernel)
    assert shape.problem == problem and len(shape.lengths) == 5
    case: Any = cases.make(cases.tunable("fold_states").small(shape), torch.device("cpu"), H100)
    given = case._work(seed=0).arguments
    written = given["state_tokens"][given["state_indices"].long()]
    left = given["num_computed_tokens"] - written
    assert bool((left >= 1).all()) and bool((left <= problem.fold_every).all()) and len(set(shape.lengths)) > 1


# --- repeats of the default ------------------------------------------------------------------------------------------


def _table(folder: Path, *rows: tuple[int, int, bool]) -> Path:
    """Entries of SHAPE's fields: (num_tokens, tile, split)."""
    path = tuned.table_path(folder, "h100", "chunk", "tilelang")
    entries = [
        tuned.Entry(
            sizes={"num_tokens": tokens, "num_sequences": 1},
            config={"tile": tile, "split": split},
            time_us=1.0,
            date="2026-11-20",
            kernel_source=KERNEL.source,
        )
        for tokens, tile, split in rows
    ]
    header = tuned.Header(device="h100", op="chunk", backend="tilelang", runs={"2026-11-20": {}})
    groups = [tuned.Group(static=SHAPE.problem.static_fields(), entries=entries)]
    tuned.write(path, tuned.Table(header=header, groups=groups))
    return path


def _kept(path: Path) -> list[int]:
    return [entry.sizes["num_tokens"] for entry in tuned.read(path).groups[0].entries]


DEFAULT = (fake_kernel.DEFAULT, False)


def test_entries_that_repeat_the_default_are_dropped(folder: Path) -> None:
    path = _table(folder, (1, *DEFAULT), (64, 7, True), (4096, *DEFAULT))
    assert tables.prune(path, KERNEL) == 2
    assert _kept(path) == [64]
    assert tables.prune(path, KERNEL) == 0
    path = _table(folder, (1, *DEFAULT))
    assert tables.prune(path, KERNEL) == 1 and not path.exists()


def test_an_entry_that_keeps_its_neighbour_away_stays(folder: Path) -> None:
    """60 lies near 64, whose tiles would serve it; 80 near 64 too, and 85 near 80 and 64; 500 near none."""
    path = _table(folder, (60, *DEFAULT), (64, 7, True), (80, *DEFAULT), (500, *DEFAULT))
    assert tables.prune(path, KERNEL) == 1
    assert _kept(path) == [60, 64, 80]
    for tokens, tiles in ((60, Config(*DEFAULT)), (64, Config(7, True)), (80, Config(*DEFAULT))):
        shape = replace(SHAPE, problem=replace(SHAPE.problem, num_tokens=tokens))  # type: ignore[call-arg]
        assert _lookup(shape)[0][0] == tiles


def test_pruning_changes_no_choice_of_tiles(folder: Path) -> None:
    rows = [(2**n * 3, *(DEFAULT if n % 3 else (7, True))) for n in range(12)]
    path = _table(folder, *rows)

    def choices() -> list[Config]:
        env.reload()
        found = []
        for tokens, *_ in rows:
            problem: Any = replace(SHAPE.problem, num_tokens=tokens)  # type: ignore[call-arg]
            near = _lookup(replace(SHAPE, problem=problem))
            found.append(near[0][0] if near else fake_kernel.default_config(problem, H100))
        return found

    before = choices()
    assert tables.prune(path, KERNEL) == 7  # of 8: 6 tokens lie near 3, which has other tiles
    assert choices() == before
