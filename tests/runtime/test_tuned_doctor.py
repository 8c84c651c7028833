"""Remarks of `gdn doctor` on tables: how many entries are stale, as a warning."""

from pathlib import Path

import pytest

from gdn.cli import doctor
from gdn.cli.doctor import Finding
from gdn.runtime import registry, source, tuned
from gdn.runtime.tuned import Entry, Group, Header, Table


def _write(folder: Path, *kernel_sources: str) -> None:
    header = Header(device="h100", op="chunk", backend="tilelang", runs={"2026-11-20": {}, "2026-11-22": {}})
    entries = [
        Entry(sizes={"n": n}, config={}, time_us=1.0, date=date, kernel_source=kernel_source)
        for n, (kernel_source, date) in enumerate(zip(kernel_sources, sorted(header.runs), strict=True))
    ]
    path = tuned.table_path(folder, "h100", "chunk", "tilelang")
    tuned.write(path, Table(header=header, groups=[Group(static={}, entries=entries)]))


def _found(subject: str) -> list[Finding]:
    return [finding for finding in doctor.diagnose() if finding.subject == subject]


def test_stale_entries_are_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("GDN_TUNED_DIR", str(tmp_path))
    current = source.source_hash(str(source.ROOT / "kernels_tl" / "chunk" / "__init__.py"))
    _write(tmp_path, current, "of another day")
    (finding,) = _found("GDN_TUNED_DIR")
    assert finding.level == "warn"
    assert finding.text.startswith("h100/chunk.tilelang.json: 2 entries, 2026-11-22, 1 stale: ") and "--restamp" in finding.text
    _write(tmp_path, current, current)
    (finding,) = _found("GDN_TUNED_DIR")
    assert (finding.level, finding.text) == ("ok", "h100/chunk.tilelang.json: 2 entries, 2026-11-22")


def test_a_table_of_a_kernel_that_is_not_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("GDN_TUNED_DIR", str(tmp_path))
    _write(tmp_path, "a", "b")
    monkeypatch.setattr(doctor.registry, "operator", lambda op: registry.Operator(op, None, ()))
    assert ", for a kernel that does not exist" in _found("GDN_TUNED_DIR")[0].text


def test_every_shipped_table_is_current():
    findings = _found("tuned tables")
    assert findings and {finding.level for finding in findings} == {"ok"}, [f.text for f in findings if f.level != "ok"]
