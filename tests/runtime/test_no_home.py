"""A user id without an entry and without HOME: kernels are compiled into the process's private folder, and nothing raises."""

import pwd
import tempfile
from pathlib import Path
from typing import Any

import platformdirs
import pytest

import gdn.runtime
from gdn.cli import doctor
from gdn.ops.delta_rule.problem import ChunkProblem
from gdn.runtime import cache_folder, compiled, env, toolchain
from tests.runtime import fake_kernel
from tests.runtime.fake_kernel import Config, FakeProblem


@pytest.fixture(autouse=True)
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_entry(user: int) -> Any:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    for name in ("HOME", "XDG_CACHE_HOME", "GDN_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolchain, "missing", lambda backend: None)
    env.reload()


def place_of(folder: Path) -> Path:
    problem = FakeProblem("bfloat16", 128, str(folder / "journal"), 0.0, 1)
    return compiled.ensure("recurrent", "tilelang", fake_kernel, problem, Config(tile=32, wide=False))


def test_the_cache_is_the_private_folder(caplog: pytest.LogCaptureFixture) -> None:
    root = compiled.cache_dir()
    assert root == compiled.cache_dir() == cache_folder.existing_scratch() and root.is_absolute()
    (said,) = [record.message for record in caplog.records]
    assert "has no home folder" in said and "GDN_CACHE_DIR names another cache" in said


def test_kernels_are_compiled_into_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = place_of(tmp_path)
    assert compiled.is_whole(place) and place == place_of(tmp_path) and compiled.cache_dir() in place.parents
    assert sum("has no home folder" in record.message for record in caplog.records) == 1
    assert len((tmp_path / "journal").read_text().splitlines()) == 1
    assert not compiled.has_entries("recurrent", "tilelang")  # none that another process would find


def test_no_folder_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(**_: Any) -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(cache_folder, "_scratch", {})
    monkeypatch.setattr(tempfile, "mkdtemp", none)
    with pytest.raises(compiled.CompileError, match="neither into a user cache .*no home folder.* nor into a temporary"):
        place_of(tmp_path)


@pytest.mark.parametrize("answer", ["~/.cache/gdn-kernels", KeyError("uid not found")], ids=["unexpanded", "KeyError"])
def test_other_versions_of_platformdirs(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def user_cache_dir(name: str) -> str:
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    monkeypatch.setattr(platformdirs, "user_cache_dir", user_cache_dir)
    assert compiled.kept_cache() is None and compiled.cache_dir() == cache_folder.existing_scratch()


def test_a_switch_names_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("GDN_CACHE_DIR", str(tmp_path / "cache"))
    env.reload()
    assert compiled.cache_dir() == tmp_path / "cache" and tmp_path / "cache" in place_of(tmp_path).parents
    assert not caplog.records


def test_doctor_warns() -> None:
    findings = doctor.diagnose()
    (found,) = [finding for finding in findings if finding.subject == "kernel cache"]
    assert found.level == "warn" and "has no home folder" in found.text and "GDN_CACHE_DIR" in found.text
    assert {"tuned tables", "hosts"} <= {one.subject for one in findings[findings.index(found) :]}  # it goes on


@pytest.mark.parametrize("name", ["GDN_CACHE_DIR", "GDN_TUNED_DIR"])
@pytest.mark.parametrize("value", ["~/x", "~no-such-user/x"])
def test_a_tilde_that_cannot_be_expanded_names_its_switch(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    expected = f"^{name}: expected a path, without ~ where the user has no home folder, got '{value}'$"
    with pytest.raises(ValueError, match=expected):
        env.reload()
    (found,) = [finding for finding in doctor.diagnose() if finding.subject == "switches"]
    assert found.level == "fail" and found.text.startswith(f"{name}: expected a path")


def test_a_dsl_that_needs_a_home_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """TileLang asks for the home folder while it is imported; the other DSL's kernel then serves the call."""

    def needs_home(name: str) -> Any:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(gdn.runtime.importlib, "import_module", needs_home)
    problem: Any = ChunkProblem.__new__(ChunkProblem)
    reason = gdn.runtime.KernelCandidate("chunk", "tilelang", "kernels_tl.chunk").refusal(problem)
    assert reason == "requires kernels_tl.chunk to be importable, got RuntimeError: Could not determine home directory."
