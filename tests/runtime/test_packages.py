"""Versions of the DSLs: those of the files that an import takes, which of them are served, and what happens with others."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gdn.cli import doctor
from gdn.device import H100
from gdn.models import QWEN3_NEXT_80B
from gdn.runtime import candidates, compiled, env, packages, registry, select, toolchain

TILELANG, CUTE = packages.DSLS["tilelang"], packages.DSLS["cute"]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """path(*names) makes folders of tmp_path, as made by `put`, the whole import path."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("cutlass", "nvidia_cutlass_dsl", "tilelang")]:
        monkeypatch.delitem(sys.modules, name)

    def set_path(*names: str) -> None:
        packages.version.cache_clear()
        monkeypatch.setattr(sys, "path", [str(tmp_path / name) for name in names])

    yield set_path
    packages.version.cache_clear()


def put(folder: Path, module: str, distribution: str, *versions: str, text: str = "") -> None:
    """A package of this text, and the metadata of each version beside it."""
    (folder / module).mkdir(parents=True)
    (folder / module / "__init__.py").write_text(text)
    for version in versions:
        metadata = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")


def of_tilelang() -> str:
    return compiled.versions("tilelang")["tilelang"]


def test_the_version_is_that_of_the_files_that_are_imported(path: Callable[..., None], tmp_path: Path) -> None:
    """Metadata of another copy, on the same path, says nothing about them."""
    put(tmp_path / "low", "tilelang", "tilelang", "0.1.12")
    put(tmp_path / "high", "tilelang", "tilelang", "0.1.15")
    put(tmp_path / "bare", "tilelang", "tilelang")
    found = {}
    for names in (("low", "high"), ("high", "low"), ("bare", "low"), ("bare", "high"), ("bare",)):
        path(*names)
        found[names] = of_tilelang()
    assert found["low", "high"] == "0.1.12" and found["high", "low"] == "0.1.15"
    bare = {found[names] for names in found if names[0] == "bare"}
    assert len(bare) == 1 and bare.pop().startswith("files ")
    path()
    assert of_tilelang() == "not installed"


def test_files_without_metadata_or_with_several_are_told_apart(path: Callable[..., None], tmp_path: Path) -> None:
    """Both ends unpacked over each other: the metadata of both lies there. The texts are of equal length."""
    put(tmp_path / "a", "tilelang", "tilelang", text='__version__ = "0.1.12"')
    put(tmp_path / "b", "tilelang", "tilelang", text='__version__ = "0.1.15"')
    put(tmp_path / "both", "tilelang", "tilelang", "0.1.12", "0.1.15", text='__version__ = "0.1.15"')
    found = {}
    for name in ("a", "b", "both"):
        path(name)
        found[name] = of_tilelang()
    assert all(version.startswith("files ") for version in found.values())
    assert found["a"] != found["b"] == found["both"]


def test_the_cute_dsl_lies_in_an_inner_folder(path: Callable[..., None], tmp_path: Path) -> None:
    put(tmp_path / "nvidia_cutlass_dsl" / "dsl_packages", "cutlass", "other")
    put(tmp_path, "somewhere", "nvidia-cutlass-dsl", "4.8.0")
    path("nvidia_cutlass_dsl/dsl_packages")
    assert compiled.versions("cute")["nvidia-cutlass-dsl"] == "4.8.0"


@pytest.mark.parametrize(
    ("package", "version", "is_served"),
    [
        (TILELANG, "0.1.11", False), (TILELANG, "0.1.12", True), (TILELANG, "0.1.15.post1", True), (TILELANG, "0.1.16", False),
        (TILELANG, "0.2.0", False), (CUTE, "4.7.1", False), (CUTE, "4.8.0", True), (CUTE, "4.8.12", True), (CUTE, "4.9.0", False),
        (CUTE, "4.10.0", False), (CUTE, "files 0123456789abcdef", True), (CUTE, None, True),
    ],
)  # fmt: skip
def test_which_versions_are_served(package: Any, version: str | None, is_served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "version", lambda asked: version)
    expected = None if is_served else f"requires {package.distribution} {package.served}, got {version}"
    assert packages.unserved(package) == expected


@pytest.fixture
def old_tilelang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "version", lambda package: "0.1.11" if package is TILELANG else package.least)
    monkeypatch.setattr(toolchain, "missing", lambda backend: None)
    candidates.cache_clear()
    yield
    candidates.cache_clear()


REFUSED = "requires tilelang >=0.1.12,<0.1.16, got 0.1.11"


@pytest.mark.usefixtures("old_tilelang")
def test_the_other_dsl_runs() -> None:
    problem = registry.operator("chunk").example(QWEN3_NEXT_80B, fp8=True)
    choice = select.choose(problem, H100, candidates("chunk"), env.current())
    assert choice.backend == "cute" and dict(choice.refusals) == {"tilelang": REFUSED}
    with pytest.raises(ValueError, match=f"which {REFUSED}"):
        select.choose(problem, H100, candidates("chunk"), env.current(), "tilelang")


@pytest.mark.usefixtures("old_tilelang")
def test_the_doctor_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {finding.subject: finding for finding in doctor.diagnose()}
    expected = doctor.Finding("tilelang", "warn", f"{REFUSED}: its kernels refuse, and the other DSL's run")
    assert found["tilelang"] == expected
    assert found["cute"].level == found["tvm-ffi"].level == "ok"
    monkeypatch.setattr(packages, "version", lambda package: "0.1.13" if package is packages.TVM_FFI else package.least)
    assert [finding.level for finding in doctor.diagnose() if finding.subject == "tvm-ffi"] == ["warn"]
