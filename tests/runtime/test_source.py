"""The hash of a kernel's sources: what changes it and what does not."""

import importlib
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from gdn.runtime import registry, source
from tests.runtime.processes import python

KERNEL = '''
"""Adds."""
from package import _shared
from package._build import library  # helper

def compile(problem, config):
    """Compiles."""
    from package import other
    from package._late import tail
    from gdn.ops.adding.problem import AddProblem
    return library(_shared.WIDTH, tail, "text")
'''
PROBLEMS = '''
from gdn.problem import Problem
from gdn.ops.other.problem import Base
class AddProblem(Problem):
    """Two tensors."""
    width: int
class OtherProblem(Problem):
    height: int
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A kernel package of its own, and leaves of its own."""
    files = {
        "package/__init__.py": "",
        "package/add.py": KERNEL,
        "package/_shared.py": "WIDTH = 1\n",
        "package/_build.py": "from . import _deep\ndef library(*a): return a\n",
        "package/_deep.py": "DEPTH = 1\n",
        "package/_late.py": "tail = 1\n",
        "package/other.py": "from package._of_other import X\n",
        "package/_of_other.py": "X = 1\n",
        "package/stranger.py": "Y = 1\n",
        "package/_stranger.py": "Z = 1\n",
        "gdn/ops/adding/problem.py": PROBLEMS,
        "gdn/ops/adding/tiles.py": "class Tiles: pass\n",
        "gdn/ops/other/problem.py": "class Base: pass\n",
        "gdn/problem.py": "class Problem: pass\n",
        "gdn/device.py": "H100 = 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(source, "ROOT", tmp_path)
    yield tmp_path
    source.forget()


def hash_of(folder: Path) -> str:
    source.forget()
    return source.source_hash(str(folder / "package" / "add.py"))


def is_changed(package: Path, file: str, old: str, new: str) -> bool:
    """Whether an edit of a file, which is empty where old is, changes the hash."""
    before, text = hash_of(package), (package / file).read_text()
    assert old in text
    (package / file).write_text(text.replace(old, new) if old else new)
    return hash_of(package) != before


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("package/add.py", '"text"', '"words"'),
        ("package/__init__.py", "", "import os"),
        ("package/_shared.py", "1", "2"),
        ("package/_build.py", "return a", "return list(a)"),
        ("package/_deep.py", "1", "2"),  # imported by what is imported, by a relative import
        ("package/_late.py", "1", "2"),  # imported inside a function
        ("package/other.py", "X", "X, Y"),  # a kernel that it runs, imported inside a function
        ("package/_of_other.py", "1", "2"),
        ("gdn/ops/adding/problem.py", "width: int", "width: bool"),
        ("gdn/ops/adding/problem.py", "height: int", "height: bool"),  # another problem of the family
        ("gdn/ops/other/problem.py", "pass", "depth = 1"),  # imported by the family's problems
        ("gdn/problem.py", "pass", "key = 1"),
    ],
)
def test_what_changes_the_hash(package: Path, file: str, old: str, new: str) -> None:
    assert is_changed(package, file, old, new)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("package/add.py", "  # helper", ""),
        ("package/add.py", '"""Adds."""', '"""Adds two tensors.\n\n    At length.\n    """'),
        ("package/add.py", '    """Compiles."""\n', ""),
        ("package/add.py", '_shared.WIDTH, tail, "text"', "\n        _shared.WIDTH,\n        tail,\n        'text',\n    "),
        ("package/stranger.py", "1", "2"),
        ("package/_stranger.py", "1", "2"),  # at a7eedda every `_*.py` of the folder counted
        ("gdn/ops/adding/problem.py", '"""Two tensors."""', '"""Two tensors of one width."""'),
        ("gdn/ops/adding/tiles.py", "pass", "width = 1"),  # imported by nobody
        ("gdn/device.py", "1", "2"),
    ],
)
def test_what_does_not_change_the_hash(package: Path, file: str, old: str, new: str) -> None:
    assert not is_changed(package, file, old, new)


def test_the_tiles_count_where_they_are_imported(package: Path) -> None:
    add, tiles = package / "package" / "add.py", package / "gdn" / "ops" / "adding" / "tiles.py"
    for statement in ("from gdn.ops.adding.tiles import Tiles as Config\n", "from gdn.ops.adding import tiles\n"):
        add.write_text(statement + KERNEL)
        tiles.write_text("class Tiles: pass\n")
        before = hash_of(package)
        tiles.write_text("class Tiles: width = 1\n")
        assert hash_of(package) != before


def test_a_module_without_a_package_takes_what_lies_next_to_it(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text("import _helper\n")
    (tmp_path / "_helper.py").write_text("b = 1\n")

    def hashed() -> str:
        source.forget()
        return source.source_hash(str(tmp_path / "kernel.py"))

    before = hashed()
    (tmp_path / "_helper.py").write_text("b = 2\n")
    assert hashed() != before
    source.forget()


@pytest.mark.parametrize(
    "text", ["x = None", "x = []", "x = 0", "x = False", "x = ''", "x = 1", "x = 1.0", "x = '1'", "x = [[]]"]
)
def test_constants_are_told_apart(package: Path, text: str) -> None:
    def hashed(line: str) -> str:
        (package / "package" / "_shared.py").write_text(f"WIDTH = 1\n{line}\n")
        return hash_of(package)

    others = {"x = None", "x = []", "x = 0", "x = False", "x = ''", "x = 1", "x = 1.0", "x = '1'", "x = [[]]"} - {text}
    assert hashed(text) not in {hashed(other) for other in others}


def _files() -> dict[str, Path]:
    modules = {module for operator in registry.every() for module in operator.modules.values()}
    return {module: path for module in sorted(modules) if (path := source._path(module, source.ROOT)) is not None}


def test_an_edit_of_one_family_leaves_the_others_alone() -> None:
    """A chunk kernel's helper is no part of the logits' hash, and the other way round; each is of its own package alone."""

    def closure(module: str) -> set[str]:
        return set(source._closure(module, source.ROOT))

    assert "kernels_cute.chunk.fused" in closure("kernels_cute.chunk")
    assert not any("chunk" in name or "topk" in name for name in closure("kernels_cute.mqa_logits.ragged"))
    assert not any("logits" in name for name in closure("kernels_cute.chunk"))
    assert "kernels_cute.recurrent" in closure("kernels_cute.chunk")  # it runs that kernel for other head dims
    assert len(_files()) == sum(len(operator.modules) for operator in registry.every())
    for module in _files():
        outside = {name for name in closure(module) if name.split(".")[0] != module.split(".")[0]}
        assert "gdn.problem" in outside and all(name.endswith((".problem", ".tiles")) for name in outside)


def test_hashing_every_kernel_imports_no_dsl_and_is_quick() -> None:
    code = f"""
        import sys, time
        from gdn.runtime import source
        start = time.process_time()
        hashes = [source.source_hash(file) for file in {[str(path) for path in _files().values()]}]
        assert time.process_time() - start < 6, time.process_time() - start  # 0.9 s; the machine may be busy
        assert len(set(hashes)) == len(hashes)
        found = [name for name in sys.modules if name.split(".")[0] in ("kernels_cute", "kernels_tl", "cutlass", "tilelang")]
        assert not found, found
    """
    python(textwrap.dedent(code))


@pytest.mark.parametrize("name", ["kernels_cute.topk", "kernels_tl.recurrent"])
def test_files_are_those_that_the_hash_reads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(importlib.import_module(name).__file__)
    source.forget()
    read: set[Path] = set()
    original = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.add(path.resolve()) or original(path))
    source.source_hash(file)
    assert read and read <= set(source.files(file))
    source.forget()


def test_content_hash_tells_files_apart(tmp_path: Path) -> None:
    first, second = tmp_path / "a.py", tmp_path / "b.py"
    first.write_text("ab")
    second.write_text("c")
    before = source.content_hash([first, second])
    assert before == source.content_hash([first, second]) != source.content_hash([second, first])
    first.write_text("a")
    second.write_text("bc")
    assert source.content_hash([first, second]) != before
    with pytest.raises(OSError, match="gone"):
        source.content_hash([tmp_path / "gone.py"])
