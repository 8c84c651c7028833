"""The linters, so that the test command holds them too."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def _run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


def test_ruff() -> None:
    _run(sys.executable, "-m", "ruff", "check", ".")
    _run(sys.executable, "-m", "ruff", "format", "--check", ".")


def test_mypy() -> None:
    _run(sys.executable, "-m", "mypy")


def test_import_contracts() -> None:
    # The command line of import-linter; the package has no __main__.
    _run(sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()")
