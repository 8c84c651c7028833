"""Folders of kernels that are built ahead: found without sources and compiler, and named where they must not be believed."""

import hashlib
import json
import logging
import re
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from gdn.runtime import bundle, compiled, env, source
from tests.runtime import fake_kernel
from tests.runtime.fake_kernel import CONFIG, Config, FakeProblem, compilations

OTHER = Config(tile=64, wide=False)
COMMAND = "gdn compile --model tiny --tp 2"
pytestmark = pytest.mark.usefixtures("plain_library")


def entry(folder: Path, problem: FakeProblem, config: Config) -> dict[str, str]:
    """Builds a kernel into a folder: its key, and where it lies."""
    name = compiled.build(folder, "recurrent", "tilelang", fake_kernel, problem, config)
    return {bundle.kernel_key("recurrent", "tilelang", problem.static_fields(), compiled.compiled_fields(config)): name}


SOURCES = {fake_kernel.__name__: fake_kernel.__file__}


@pytest.fixture
def folder(problem: FakeProblem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one kernel, built elsewhere and moved; it is the process's cache."""
    built, moved = tmp_path / "built", tmp_path / "moved"
    bundle.write(built, compiled.bundle_versions(), entry(built, problem, CONFIG), SOURCES, COMMAND)
    built.rename(moved)
    Path(problem.journal).unlink()
    monkeypatch.setenv("GDN_CACHE_DIR", str(moved))
    return moved


def mode(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("GDN_COMPILE", value)
    env.reload()
    compiled.forget()


def run(problem: FakeProblem, config: Config = CONFIG) -> int:
    kernel = compiled.get("recurrent", "tilelang", fake_kernel, problem, config)
    return int(kernel.functions["first"](1))


def test_a_moved_folder_serves_its_kernels_without_sources(
    folder: Path, problem: FakeProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode(monkeypatch, "off")
    monkeypatch.setattr(source, "source_hash", lambda file: pytest.fail("a source was parsed"))
    assert run(problem) == 32
    known = json.loads((folder / bundle.NAME).read_text())["sources"][fake_kernel.__name__]
    assert compiled.source_of(fake_kernel) == known["hash"]
    assert compilations(problem) == 0


def test_a_kernel_that_is_not_there_names_the_command(
    folder: Path, problem: FakeProblem, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mode(monkeypatch, "off")
    with pytest.raises(compiled.MissingKernel, match=f"in no cache.*GDN_COMPILE=off.*`{COMMAND} -o {folder}`"):
        run(problem, OTHER)
    assert compilations(problem) == 0
    mode(monkeypatch, "warn")
    with caplog.at_level(logging.WARNING, "gdn"):
        assert run(problem, OTHER) == 64
    assert "compiled now (GDN_COMPILE=warn)" in caplog.text and "tile=64" in caplog.text and COMMAND in caplog.text
    caplog.clear()
    compiled.forget()
    with caplog.at_level(logging.WARNING, "gdn"):
        assert run(problem, OTHER) == 64  # from the folder, which is a cache too
    assert not caplog.records and compilations(problem) == 1


def test_a_second_build_keeps_the_kernels_of_the_first_unless_sources_changed(folder: Path, problem: FakeProblem) -> None:
    """Two models in one folder: both are in its index, which names the last command."""
    first = bundle.find(folder, compiled.bundle_versions())
    assert first is not None
    (key,) = first.entries
    other = entry(folder, problem, OTHER)

    def entries() -> set[str]:
        bundle.write(folder, compiled.bundle_versions(), other, SOURCES, "second")
        found = bundle.find(folder, compiled.bundle_versions())
        assert found is not None and found.command == "second"
        return set(found.entries)

    assert entries() == {key, *other}
    damage(folder, "other sources")
    bundle.forget()
    assert entries() == set(other)


def test_builds_that_end_at_the_same_time_keep_each_other_s_kernels(folder: Path, problem: FakeProblem) -> None:
    """What another process wrote since this one read the index stays."""
    own, path = compiled.bundle_versions(), folder / bundle.NAME
    known = bundle.find(folder, own)
    assert known is not None
    first = path.read_bytes()
    path.unlink()
    bundle.forget()
    assert bundle.find(folder, own) is None
    path.write_bytes(first)  # by the other one
    other = entry(folder, problem, OTHER)
    bundle.write(folder, own, other, SOURCES, "second")
    found = bundle.find(folder, own)
    assert found is not None and set(found.entries) == {*known.entries, *other}


def test_a_folder_that_cannot_be_searched(
    folder: Path, problem: FakeProblem, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same as one that is not believed, whoever asks."""
    exists = Path.exists

    def refused(self: Path, *given: Any, **named: Any) -> bool:
        if self.name == bundle.NAME:
            raise PermissionError(13, "Permission denied")
        return exists(self, *given, **named)

    monkeypatch.setattr(Path, "exists", refused)
    mode(monkeypatch, "auto")
    with caplog.at_level(logging.WARNING, "gdn"):
        assert run(problem) == 32
    assert "bundle.json cannot be read (Permission denied)" in caplog.text
    mode(monkeypatch, "off")
    with pytest.raises(compiled.MissingKernel, match="cannot be read"):
        run(problem)


@pytest.mark.parametrize("kind", ["another's other DSL", "another's other CUDA"])
def test_a_dsl_that_the_kernel_does_not_need(
    folder: Path, problem: FakeProblem, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:  # fmt: skip
    """A folder serves where the other DSL is missing, or another version; the next build starts it anew."""
    damage(folder, kind)
    mode(monkeypatch, "off")
    assert run(problem) == 32 and compilations(problem) == 0
    own = compiled.bundle_versions()
    found = bundle.find(folder, own)
    assert found is not None and found.unserved.keys() == {"cute"}
    bundle.write(folder, own, {}, {}, "second")
    found = bundle.find(folder, own)
    assert found is not None and not found.unserved and not found.entries


def test_without_a_folder_off_names_the_general_command(problem: FakeProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    mode(monkeypatch, "off")
    with pytest.raises(compiled.MissingKernel, match="`gdn compile --model NAME -o DIR`"):
        run(problem)


def test_warn_says_nothing_of_a_kernel_that_is_found(
    folder: Path, problem: FakeProblem, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mode(monkeypatch, "warn")
    with caplog.at_level(logging.WARNING, "gdn"):
        assert run(problem) == 32
    assert not caplog.records


def index(folder: Path, **changes: Any) -> None:
    """Rewrites the index with other contents and a right checksum."""
    path = folder / bundle.NAME
    content = {**json.loads(path.read_text()), **changes}
    del content["sha256"]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**content, "sha256": digest}))


OTHER_VERSIONS = {
    "other gdn": {"gdn": "0.0.1"},
    "other DSL": {"tilelang": "0.0.1"},
    "another's other DSL": {"nvidia-cutlass-dsl": "not installed"},
    "another's other CUDA": {"CUDA": "11"},
    "other tvm-ffi": {"apache-tvm-ffi": "0.0.1"},
}


def damage(folder: Path, kind: str) -> None:
    """Spoils a folder in one way."""
    manifest = next(folder.glob("*/*/manifest.json"))
    library, path = next(manifest.parent.glob("*.so")), folder / bundle.NAME
    if kind == "truncated library":
        library.write_bytes(library.read_bytes()[:-1])
    elif kind == "changed library":
        content = bytearray(library.read_bytes())
        content[len(content) // 2] ^= 1
        library.write_bytes(content)
    elif kind == "no library":
        library.unlink()
    elif kind == "changed manifest":
        manifest.write_text(manifest.read_text() + " ")
    elif kind == "no entry":
        shutil.rmtree(manifest.parent)
    elif kind == "truncated index":
        path.write_text(path.read_text()[:-40])
    elif kind == "changed index":
        path.write_text(path.read_text().replace(COMMAND, "rm -rf /"))
    elif kind == "index of another kind":
        path.write_text("[1]")
    elif kind == "other format":
        index(folder, format=0)
    elif kind in OTHER_VERSIONS:
        index(folder, versions=compiled.bundle_versions() | OTHER_VERSIONS[kind])
    elif kind == "other sources":
        known = json.loads(path.read_text())["sources"][fake_kernel.__name__]
        index(folder, sources={fake_kernel.__name__: {**known, "content": "0" * 64}})
    elif kind == "writable by others":
        folder.chmod(0o777)
    else:
        manifest.parent.chmod(stat.S_IMODE(manifest.parent.stat().st_mode) | stat.S_IWGRP)


DAMAGES = {
    "truncated library": r"\.so: does not match its manifest",
    "changed library": r"\.so: does not match its manifest",
    "no library": r"No such file.*\.so",
    "changed manifest": r"manifest\.json does not match the index",
    "no entry": r"manifest\.json cannot be read",
    "truncated index": r"bundle\.json is not a whole index",
    "changed index": r"bundle\.json is not a whole index.*checksum",
    "index of another kind": r"bundle\.json is not a whole index \(TypeError",
    "other format": r"bundle\.json is not a whole index of format 2, but of format 0",
    "other gdn": r"built with gdn 0\.0\.1, here is",
    "other DSL": r"built with tilelang 0\.0\.1, here is",
    "other tvm-ffi": r"built with apache-tvm-ffi 0\.0\.1, here is",
    "other sources": r"built from other sources of tests\.runtime\.fake_kernel",
    "writable by others": r"may be written by its group or others",
    "entry writable by the group": r"may be written by its group or others",
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_off_raises_for_a_folder_that_must_not_be_believed(
    folder: Path, problem: FakeProblem, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    damage(folder, kind)
    mode(monkeypatch, "off")
    with caplog.at_level(logging.WARNING, "gdn"), pytest.raises(compiled.MissingKernel, match=DAMAGES[kind]):
        run(problem)
    assert str(folder) in caplog.text and compilations(problem) == 0


@pytest.mark.parametrize("value", ["auto", "warn"])
@pytest.mark.parametrize("kind", DAMAGES)
def test_such_a_folder_is_named_and_its_kernel_compiled(
    folder: Path, problem: FakeProblem, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, value: str
) -> None:
    damage(folder, kind)
    if kind.startswith("other") or "index" in kind:  # the entry is whole; with another version its key would be another
        monkeypatch.setattr(compiled, "FORMAT", compiled.FORMAT + 1)
    mode(monkeypatch, value)
    with caplog.at_level(logging.WARNING, "gdn"):
        assert run(problem) == 32
    assert re.search(DAMAGES[kind], caplog.text) and str(folder) in caplog.text
    assert compilations(problem) == (0 if kind == "changed manifest" else 1)  # its libraries are those of the manifest
    assert ("compiled now" in caplog.text) == (value == "warn" and kind != "changed manifest")
