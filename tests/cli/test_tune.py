"""`gdn tune`: the tuner's own command, and only the tuner that was installed with gdn."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from autotune import cli as autotune_cli
from autotune import tune_command
from gdn.cli import app, doctor
from gdn.runtime import source


def gdn(*arguments: str) -> Any:
    return CliRunner().invoke(app.app, list(arguments), env={"COLUMNS": "80"})


def tuner() -> doctor.Finding:
    (found,) = [finding for finding in doctor.diagnose() if finding.subject == "tuner"]
    return found


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Another package of the tuner's name, which Python finds first."""
    found = tmp_path / "autotune" / "__init__.py"
    found.parent.mkdir()
    found.write_text("raise SystemExit('another package was imported')\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "autotune"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    return found


def test_it_runs_the_tuner_with_all_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options before and after the operator arrive as they were given, and the status comes back."""
    given = []

    def kernels(op: str | None, backend: str | None) -> list[Any]:
        given.append((op, backend))
        return []

    monkeypatch.setattr(tune_command, "_kernels", kernels)
    for arguments in (["chunk", "--backend", "cute"], ["--backend", "cute", "chunk"]):
        result = gdn("tune", *arguments, "--compile-only", "--json")
        assert result.exit_code == 0 and '"complete": true' in result.stdout, result.output
    assert given == [("chunk", "cute")] * 2


def test_its_help_and_its_errors_are_the_tuners() -> None:
    result = gdn("tune", "--help")
    own = CliRunner().invoke(autotune_cli.app, ["tune", "--help"], prog_name="gdn", env={"COLUMNS": "80"})
    assert result.exit_code == 0 and result.output == own.output and "Usage: gdn tune [OPTIONS] [op]" in result.output
    for arguments, word in (([], "op: expected one of chunk"), (["chunk", "--nothing"], "No such option: --nothing")):
        result = gdn("tune", *arguments)
        (line,) = result.stderr.splitlines()
        assert result.exit_code == 2 and word in line


def test_another_package_of_its_name_is_not_run(other: Path) -> None:
    result = gdn("tune", "chunk")
    (line,) = result.stderr.splitlines()
    assert result.exit_code == 2
    assert f"The tuner is {source.ROOT / 'autotune'}, but Python finds another package of the name autotune first" in line
    assert str(other) in line
    assert tuner().level == "warn" and str(other) in tuner().text
    assert gdn("--help").exit_code == 0


def test_a_folder_of_its_name_is_no_package(monkeypatch: pytest.MonkeyPatch, other: Path) -> None:
    other.unlink()
    assert tuner() == doctor.Finding("tuner", "ok", str(source.ROOT / "autotune"))


def test_without_the_tuner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "autotune", ModuleType("autotune"))  # made by hand: it has no file
        assert "cannot be imported" in tuner().text
    monkeypatch.setattr(source, "ROOT", tmp_path)
    result = gdn("tune", "chunk")
    assert result.exit_code == 2 and f"expected the package autotune next to gdn, in {tmp_path}" in result.stderr
