"""Which versions of other packages are taken: the ranges of pyproject.toml, the tested set, and the engines that share both."""

import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gdn.runtime import packages

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DEPENDENCIES = {one.name: one for one in map(Requirement, PROJECT["dependencies"])}
EXTRAS = [Requirement(one) for of_extra in PROJECT["optional-dependencies"].values() for one in of_extra]
SHARED = (*packages.DSLS.values(), packages.TVM_FFI)

# What the engines' own metadata asks for, of the packages that they share with this project.
ENGINES = {
    "vLLM 0.33.0": (
        "torch==2.14.0", "tilelang==0.1.12", "nvidia-cutlass-dsl==4.8.0", "apache-tvm-ffi==0.1.11", "quack-kernels==0.6.5",
        "transformers>=5.16.1,<5.21",
    ),
    "SGLang 0.5.23": (
        "torch==2.14.1", "tilelang==0.1.12", "nvidia-cutlass-dsl==4.8.0", "apache-tvm-ffi==0.1.11", "transformers==5.19.0",
    ),
}  # fmt: skip

# The metadata of these packages: versions, and what each asks for of the others.
_CUTE_LIBS = [f"nvidia-cutlass-dsl-libs-{part}" for part in ("base", "core", "cu12", "cu13")]
_CUTE_VERSIONS = ("4.7.1", "4.8.0", "4.8.1")
RECORDED: dict[tuple[str, str], tuple[str, ...]] = {
    **{("torch", version): () for version in ("2.8.0", "2.11.0", "2.13.0", "2.14.0", "2.14.1", "2.15.0")},
    ("tilelang", "0.1.11"): ("apache-tvm-ffi<=0.1.11,>=0.1.10", "torch"),
    ("tilelang", "0.1.12"): ("apache-tvm-ffi<=0.1.11,>=0.1.10", "torch"),
    **{("tilelang", f"0.1.{patch}"): ("apache-tvm-ffi<0.1.13,>=0.1.11", "torch") for patch in (13, 14, 15)},
    **{("nvidia-cutlass-dsl", version): tuple(f"{lib}=={version}" for lib in _CUTE_LIBS) for version in _CUTE_VERSIONS},
    **{(lib, version): () for lib in _CUTE_LIBS for version in _CUTE_VERSIONS},
    **{("apache-tvm-ffi", version): () for version in ("0.1.10", "0.1.11", "0.1.12", "0.1.13.post3")},
    ("quack-kernels", "0.6.5"): ("nvidia-cutlass-dsl>=4.7", "apache-tvm-ffi<0.2,>=0.1.6", "torch"),
    **{("transformers", version): () for version in ("5.19.0", "5.20.2", "5.24.0")},
}


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engines_versions_lie_in_the_ranges(engine: str) -> None:
    pins = {one.name: next(iter(one.specifier)).version for one in map(Requirement, ENGINES[engine]) if "==" in str(one)}
    shared = {name: version for name, version in pins.items() if name in DEPENDENCIES}
    assert {"torch", *(package.distribution for package in SHARED)} == shared.keys()
    outside = [f"{name} {version}" for name, version in shared.items() if not DEPENDENCIES[name].specifier.contains(version)]
    assert outside == []


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of wheels without content: the recorded metadata, this project's own, and whatever else it asks for."""
    folder = tmp_path_factory.mktemp("wheels")
    for (name, version), needs in RECORDED.items():
        _wheel(folder, name, version, needs)
    known = {name for name, _ in RECORDED}
    for name, requirement in DEPENDENCIES.items():
        if name not in known:
            _wheel(folder, name, next(iter(requirement.specifier)).version, ())
    _wheel(folder, PROJECT["name"], "0.2.0", PROJECT["dependencies"])
    return folder


def _wheel(folder: Path, name: str, version: str, needs: Iterable[str]) -> None:
    file, made = name.replace("-", "_"), f"{name.replace('-', '_')}-{version}"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", "Provides-Extra: cu13"]
    lines += [f"Requires-Dist: {one}" for one in needs]
    with zipfile.ZipFile(folder / f"{made}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{made}.dist-info/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{made}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{made}.dist-info/RECORD", "")
        wheel.writestr(f"{file}/__init__.py", "")


def _resolve(index: Path, *requirements: str) -> tuple[str, Mapping[str, str]]:
    """pip's messages, and the versions that its resolver chose; empty where it found none."""
    command = (sys.executable, "-m", "pip", "install", "--isolated", "--dry-run", "--ignore-installed", "--no-index")
    environment = {"PIP_CONFIG_FILE": "/dev/null", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [*command, "--find-links", str(index), PROJECT["name"], *requirements], capture_output=True, text=True, env=environment
    )
    line = re.search(r"^Would install (.*)$", done.stdout, re.MULTILINE)
    chosen = dict(one.rsplit("-", 1) for one in line[1].split()) if line is not None else {}
    return done.stdout + done.stderr, {canonicalize_name(name): version for name, version in chosen.items()}


@pytest.mark.parametrize("engine", ENGINES)
def test_pip_resolves_the_project_beside_an_engine(engine: str, index: Path) -> None:
    """pip's own resolver on recorded metadata: the registry would send the wheels themselves, hundreds of MB."""
    messages, chosen = _resolve(index, *ENGINES[engine])
    assert chosen, messages
    assert all(chosen[one.name] in one.specifier for one in map(Requirement, ENGINES[engine]))
    assert PROJECT["name"] in chosen


def test_alone_pip_takes_the_high_ends(index: Path) -> None:
    _, chosen = _resolve(index)
    tested = _pins("constraints.txt")
    assert {name: chosen[name] for name in (package.distribution for package in SHARED)}.items() <= tested.items()
    messages, none = _resolve(index, "tilelang==0.1.11")
    assert not none and "ResolutionImpossible" in messages


def _pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_the_tested_set_has_every_direct_dependency_inside_its_range() -> None:
    tested = _pins("constraints.txt")
    for one in (*DEPENDENCIES.values(), *EXTRAS):
        assert one.name in tested and one.specifier.contains(tested[one.name]), one.name


def test_both_ends_of_the_ranges_are_tested() -> None:
    """gdn.runtime.packages, which refuses other versions, says the same as pyproject.toml."""
    low, high = _pins("constraints-low.txt"), _pins("constraints.txt")
    for package in SHARED:
        requirement = DEPENDENCIES[package.distribution]
        assert str(requirement.specifier) == str(Requirement(f"x{package.served}").specifier)
        assert low[package.distribution] == package.least
        assert requirement.specifier.contains(high[package.distribution]) and high[package.distribution] != package.least
    assert {version for name, version in low.items() if name.startswith("nvidia-cutlass-dsl")} == {packages.DSLS["cute"].least}


def test_the_quack_of_the_tests_is_the_engines() -> None:
    assert f"quack-kernels=={_pins('constraints-quack.txt')['quack-kernels']}" in ENGINES["vLLM 0.33.0"]
