"""The cache of compiled kernels: keys, whole and broken entries, several processes, loading."""

import dataclasses
import json
import multiprocessing
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from gdn.runtime import compiled, env, packages, source, toolchain
from tests.runtime import fake_kernel
from tests.runtime.fake_kernel import CONFIG, Config, FakeProblem, compilations
from tests.runtime.processes import python

pytestmark = pytest.mark.usefixtures("plain_library")


def get(problem: FakeProblem, config: Config = CONFIG) -> compiled.Compiled:
    return compiled.get("recurrent", "tilelang", fake_kernel, problem, config)


def place_of(problem: FakeProblem, config: Config = CONFIG) -> Path:
    return compiled.ensure("recurrent", "tilelang", fake_kernel, problem, config)


def test_a_kernel_is_compiled_once_and_runs(problem: FakeProblem):
    before = compiled.compilations()
    kernel = get(problem)
    assert [kernel.functions[name](7) for name in ("first", "second")] == [7 * 32, 7 * 320]
    assert (kernel.problem, kernel.config) == (problem, CONFIG)
    assert get(problem) is kernel
    assert get(problem.sizes_only(1000)) is kernel  # sizes are no part of a kernel
    assert compiled.compilations() - before == 1 == compilations(problem)


@dataclasses.dataclass(frozen=True)
class LaunchConfig(Config):
    steps: int = dataclasses.field(default=0, metadata={"compiled": bool})  # a scalar of the launch


def test_a_scalar_of_the_launch_compiles_nothing_new(problem: FakeProblem):
    kernels = [get(problem, LaunchConfig(32, False, steps)) for steps in (0, 3, 4)]
    assert [kernel.config.steps for kernel in kernels] == [0, 3, 4]
    assert kernels[1].functions is kernels[2].functions and kernels[0].functions is not kernels[1].functions
    assert compilations(problem) == 2
    compiled.forget()
    get(problem, LaunchConfig(32, False, 5))
    assert compilations(problem) == 2


def test_another_process_would_find_it_on_disk(problem: FakeProblem):
    get(problem)
    compiled.forget()  # all that a new process lacks
    before = compiled.compilations()
    assert len(compiled._functions) == 0
    assert get(problem).functions["first"](1) == 32
    assert compiled.compilations() == before
    assert len(compiled._functions) == 1


def _in_a_process(problem: FakeProblem, barrier: Any, answers: Any) -> None:
    compiled.forget()
    before = compiled.compilations()
    barrier.wait(60)
    result = get(problem).functions["second"](3)
    answers.put((result, compiled.compilations() - before))


def test_of_processes_that_start_together_one_compiles(problem: FakeProblem):
    problem = dataclasses.replace(problem, seconds=0.5)
    context = multiprocessing.get_context("fork")  # starting Python anew takes longer than the test
    barrier, answers = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_in_a_process, args=(problem, barrier, answers)) for _ in range(4)]
    for process in processes:
        process.start()
    got = [answers.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert sorted(got) == [(960, 0), (960, 0), (960, 0), (960, 1)]
    assert compilations(problem) == 1


def test_a_new_process_compiles_nothing_and_imports_no_dsl(problem: FakeProblem, tmp_path: Path):
    place_of(problem)
    code = f"""
import ctypes, sys
from gdn.runtime import compiled, toolchain
from tests.runtime import fake_kernel
for backend in ("tilelang", "cute"):
    library = compiled.runtime_library(backend)
    assert library is not None, backend
toolchain.missing = lambda backend: None
problem = fake_kernel.FakeProblem("bfloat16", 128, {problem.journal!r}, 0.0, 1)
for backend in ("tilelang", "cute"):  # preloads the runtime library of either DSL
    compiled.load(backend, compiled.ensure("recurrent", "tilelang", fake_kernel, problem, fake_kernel.Config(32, False)))
kernel = compiled.get("recurrent", "tilelang", fake_kernel, problem, fake_kernel.Config(32, False))
assert kernel.functions["second"](3) == 960
assert not [name for name in sys.modules if name.split(".")[0] in ("tilelang", "cutlass")]
print(compiled.compilations())
"""
    assert python(code).stdout == "0\n" and compilations(problem) == 1


@pytest.mark.parametrize("damage", ["truncate", "flip", "no library", "no manifest", "half a manifest", "other format", "a file"])
def test_a_broken_entry_is_compiled_again(problem: FakeProblem, damage: str):
    place = place_of(problem)
    library = next(iter(compiled.libraries_of(place).values()))
    manifest = place / "manifest.json"
    if damage == "truncate":
        library.write_bytes(library.read_bytes()[:100])
    elif damage == "flip":
        content = bytearray(library.read_bytes())
        content[len(content) // 2] ^= 1
        library.write_bytes(content)
    elif damage == "no library":
        library.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "half a manifest":
        manifest.write_text(manifest.read_text()[:40])
    elif damage == "other format":
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 0}))
    else:
        shutil.rmtree(place)
        place.write_text("not a folder")
    assert not compiled.is_whole(place)
    assert get(problem).functions["first"](2) == 64
    assert compiled.is_whole(place) and compilations(problem) == 2
    assert not [path for path in place.parent.iterdir() if path.name.startswith(".")]  # nothing is left over


def test_what_changes_the_key(problem: FakeProblem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def key(op="recurrent", backend="tilelang", module=fake_kernel, problem=problem, config=CONFIG) -> str:
        return compiled.entry_key(op, backend, module, problem, config)

    keys = {
        key(),
        key(op="chunk"),
        key(backend="cute"),
        key(problem=dataclasses.replace(problem, head_dim=64)),
        key(problem=dataclasses.replace(problem, dtype="float16")),
        key(config=Config(tile=64, wide=False)),
        key(config=Config(tile=32, wide=True)),
    }
    module = types.ModuleType("somewhere")
    module.__file__ = str(tmp_path / "kernel.py")
    helper, stranger = tmp_path / "_helper.py", tmp_path / "other.py"
    for path, text in ((tmp_path / "kernel.py", "import _helper"), (helper, "b = 1"), (stranger, "c = 1")):
        path.write_text(text)
        source.forget()
        keys.add(key(module=module))
    assert len(keys) == 9  # the stranger, which it does not import, changed nothing
    helper.write_text("b = 2")
    source.forget()
    keys.add(key(module=module))
    for package in ("tilelang", "apache-tvm-ffi"):
        monkeypatch.setattr(packages, "version", lambda one, other=package: "99" if one.distribution == other else "1")
        keys.add(key(module=module))
    monkeypatch.setattr(compiled, "TARGET", "sm_90b")
    keys.add(key(module=module))
    assert len(keys) == 13
    assert key(problem=problem.sizes_only(5)) == key()
    source.forget()


def test_a_kernel_that_does_not_compile_leaves_no_entry(problem: FakeProblem):
    problem, config = dataclasses.replace(problem, head_dim=64), Config(tile=8, wide=True)
    for attempt in (1, 2):
        with pytest.raises(compiled.CompileError, match="recurrent: the tilelang kernel did not compile.*the compiler gave up"):
            get(problem, config)
        assert compilations(problem) == attempt
    assert not compiled.has_entries("recurrent", "tilelang")


def test_without_a_compiler(problem: FakeProblem, monkeypatch: pytest.MonkeyPatch):
    get(problem)
    monkeypatch.setattr(toolchain, "missing", lambda backend: "requires nvcc to compile, got none")
    compiled.forget()
    assert get(problem).functions["first"](1) == 32  # what is cached still runs
    assert compiled.has_entries("recurrent", "tilelang")
    with pytest.raises(compiled.CompileError, match="requires nvcc to compile, got none; `gdn doctor`"):
        get(problem, Config(tile=1, wide=False))
    assert compilations(problem) == 1


def test_a_cache_that_cannot_be_written(problem: FakeProblem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    monkeypatch.setenv("GDN_CACHE_DIR", str(blocked))
    env.reload()
    place = place_of(problem)
    assert compiled.is_whole(place) and blocked not in place.parents
    assert sum("cannot be written" in record.message for record in caplog.records) == 1
    assert place_of(problem) == place and compilations(problem) == 1


def test_the_default_place_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("GDN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    env.reload()
    assert compiled.cache_dir() == tmp_path / "gdn-kernels"


def test_a_dsl_that_is_only_on_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for folder in ("cu13/lib", "dsl_packages/cutlass"):
        (tmp_path / "root" / folder).mkdir(parents=True)
    library = tmp_path / "root/cu13/lib/libcute_dsl_runtime.so"
    library.touch()
    (tmp_path / "root/dsl_packages/cutlass/__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "root/dsl_packages")])
    for name in [name for name in sys.modules if name.split(".")[0] in ("cutlass", "nvidia_cutlass_dsl", "tilelang")]:
        monkeypatch.delitem(sys.modules, name)
    assert compiled.runtime_library("cute") == library
    assert compiled.runtime_library("tilelang") is None


def test_tilelang_in_another_folder_than_what_it_links_against(tmp_path: Path):
    """As with an environment over another one: the loader looks for z3 beside TileLang, and does not find it."""
    code = f"""
import sys
from pathlib import Path
import tvm_ffi
from gdn.runtime import compiled
whole = compiled.runtime_library("tilelang")
alone = Path({str(tmp_path)!r}, "site", "tilelang")
(alone / "lib").mkdir(parents=True)
for library in whole.parent.iterdir():
    (alone / "lib" / library.name).symlink_to(library)
(alone / "__init__.py").touch()
sys.path.insert(0, str(alone.parent))
assert compiled.runtime_library("tilelang").parent == alone / "lib"
compiled._preload("tilelang")
assert "tilelang" not in sys.modules and "z3" not in sys.modules
"""
    python(code)
