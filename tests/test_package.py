"""What is installed: licence and change log in the distributions, an editable install that type checkers see."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

import gdn

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGES = ("gdn", "kernels_tl", "kernels_cute", "autotune")
FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt")
APACHE_2 = "3b83ef96387f14655fc854ddc3c6bd57"  # MD5 of the licence's text as apache.org serves it


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources: building writes next to them."""
    folder = tmp_path_factory.mktemp("sources")
    for package in (*PACKAGES, "benchmarks"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, folder)
    return folder


def build(tree: Path, kind: str) -> Path:
    """Builds the distribution with the hook that pip calls."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}('dist-{kind}')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = (tree / f"dist-{kind}").iterdir()
    return made


def test_the_licence_is_the_licence() -> None:
    assert hashlib.md5((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_2


def test_the_change_log_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (\S+)$", text, re.MULTILINE)
    assert versions[0] == gdn.__version__ and versions == sorted(versions, reverse=True)
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        assert len(section.splitlines()) > 2, f"nothing changed in {section}"


def test_the_source_distribution(tree: Path) -> None:
    made = build(tree, "sdist")
    with tarfile.open(made) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert made.name == f"gdn_kernels-{gdn.__version__}.tar.gz"
    files = {"LICENSE", "CHANGELOG.md", "README.md", "constraints.txt", "gdn/py.typed", "autotune/cli.py"}
    assert names >= files | {f"benchmarks/{path.name}" for path in (ROOT / "benchmarks").glob("*.py")}


def test_the_wheel(tree: Path) -> None:
    with zipfile.ZipFile(build(tree, "wheel")) as file:
        names = set(file.namelist())
        folder = f"gdn_kernels-{gdn.__version__}.dist-info"
        metadata = Parser().parsestr(file.read(f"{folder}/METADATA").decode())
        licence = file.read(f"{folder}/licenses/LICENSE")
    assert hashlib.md5(licence).hexdigest() == APACHE_2
    assert (metadata["License-Expression"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")
    assert (metadata["Version"], metadata["Author"]) == (gdn.__version__, "gdn-kernels contributors")
    assert metadata.get_all("Project-URL") is None and metadata["Home-page"] is None
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, folder}
    assert {"gdn/py.typed", "gdn/tuned/h100/chunk.cute.json", "autotune/__main__.py", "kernels_tl/chunk/__init__.py"} <= names
    assert {f"gdn/integrations/recorded/{path.name}" for path in (ROOT / "gdn/integrations/recorded").glob("*.json")} <= names


def test_an_editable_install_is_a_path(tree: Path) -> None:
    """Import hooks, which setuptools would choose for several packages, hide them from mypy, pyright and editors."""
    with zipfile.ZipFile(build(tree, "editable")) as file:
        hooks = [name for name in file.namelist() if "finder" in name]
        (path,) = [file.read(name).decode().strip() for name in file.namelist() if name.endswith(".pth")]
    assert not hooks and Path(path).samefile(tree)


def test_matplotlib_is_an_extra() -> None:
    plain, extras = PROJECT["dependencies"], PROJECT["optional-dependencies"]
    assert not [one for one in plain if one.startswith("matplotlib")]
    assert any(one.startswith("matplotlib") for one in extras["plots"]) and set(extras["plots"]) <= set(extras["test"])


@pytest.mark.cover  # pip and mypy: 30 s
def test_mypy_sees_the_types_of_an_editable_install(tree: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "test_environment.pth").write_text(sysconfig.get_paths()["purelib"])  # torch and mypy
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}

    def run(*command: str) -> str:
        options: Any = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 300}
        done = subprocess.run([python, "-m", *command], **options)
        return f"{done.returncode}\n{done.stdout}{done.stderr}"

    installed = run("pip", "install", "-q", "--no-deps", "--no-build-isolation", "--ignore-installed", "-e", str(tree))
    assert installed.startswith("0\n"), installed
    (tmp_path / "user.py").write_text(
        "import gdn\nimport gdn.layers\n\nreveal_type(gdn.topk_indices)\nreveal_type(gdn.layers.HybridModel.greedy_tokens)\n"
    )
    seen = run("mypy", "--config-file=", "--strict", "--follow-imports=silent", "--no-error-summary", "user.py")
    assert seen.startswith("0\n") and seen.count("Revealed type is") == 2 and '"Any"' not in seen, seen
    assert "logits: torch._tensor.Tensor, k: " in seen, seen
