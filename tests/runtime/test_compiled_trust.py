"""Entries that the kernel cache loads: only those that nobody else could have written; and how kernels run without a cache."""

import errno
import json
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import pytest

from gdn.runtime import cache_folder, compiled, env
from tests.runtime import fake_kernel
from tests.runtime.fake_kernel import CONFIG, FakeProblem, compilations
from tests.runtime.processes import python

ME, OTHER = 4321, 12345
LEVELS = ("root", "operator", "entry", "manifest", "library")


@pytest.fixture(autouse=True)
def private_folder(plain_library: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of this process, in a place where it can be listed."""
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    monkeypatch.setattr(cache_folder, "_scratch", {os.getpid(): private})


def place_of(problem: FakeProblem) -> Path:
    return compiled.ensure("recurrent", "tilelang", fake_kernel, problem, CONFIG)


def runs(problem: FakeProblem) -> bool:
    compiled.forget()
    kernel = compiled.get("recurrent", "tilelang", fake_kernel, problem, CONFIG)
    return kernel.functions["second"](3) == 960


def level(place: Path, name: str) -> Path:
    library = next(iter(compiled.libraries_of(place).values()))
    return dict(zip(LEVELS, (compiled.cache_dir(), place.parent, place, place / "manifest.json", library), strict=True))[name]


def tree(folder: Path) -> dict[str, tuple[int, int, int]]:
    found = {path: os.lstat(path) for path in [folder, *folder.rglob("*")]}
    return {str(path): (status.st_mode, status.st_mtime_ns, status.st_size) for path, status in found.items()}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if (record.name, record.levelno) == ("gdn", logging.WARNING)]


def assert_private(problem: FakeProblem, tmp_path: Path, caplog: pytest.LogCaptureFixture, word: str) -> None:
    """The kernel runs from the private folder, compiled once more for all later uses; one warning says why."""
    before, count = tree(compiled.cache_dir()), compilations(problem)
    assert runs(problem) and runs(problem)
    assert tmp_path / "private" in place_of(problem).parents
    assert compilations(problem) == count + 1
    assert tree(compiled.cache_dir()) == before  # neither loaded from nor written to
    (message,) = warnings_of(caplog)
    assert message.startswith("kernel cache: ") and word in message and "GDN_CACHE_DIR" in message


def test_folders_are_their_owners_alone_whatever_the_umask(problem: FakeProblem, tmp_path: Path, switch: Callable[..., Any]):
    switch(GDN_CACHE_DIR=str(tmp_path / "new" / "cache"))
    before = os.umask(0)
    try:
        place = place_of(problem)
    finally:
        os.umask(before)
    for path in [tmp_path / "new", *(tmp_path / "new").rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    assert place_of(problem) == place and compilations(problem) == 1


@pytest.mark.parametrize("mode", [0o020, 0o002], ids=["group", "others"])
@pytest.mark.parametrize("name", LEVELS)
def test_what_others_may_write_is_not_loaded(
    problem: FakeProblem, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, mode: int
):
    path = level(place_of(problem), name)
    path.chmod(path.stat().st_mode | mode)
    assert_private(problem, tmp_path, caplog, f"{path} may be written by its group or others")


def owned_by(monkeypatch: pytest.MonkeyPatch, owner: int, *paths: Path) -> None:
    """Makes this process's user the owner of everything but these paths."""
    monkeypatch.setattr(os, "geteuid", lambda: ME)
    with_status(monkeypatch, stat.ST_UID, lambda path, follow, _: owner if path in paths else ME)


def with_status(monkeypatch: pytest.MonkeyPatch, field: int, value: Callable[[Path, bool, int], int]) -> None:
    """Files have another value of a field of their status: of the path, whether a link is followed, and the true value."""
    true_status = cache_folder._status

    def status(path: Path, follow: bool) -> os.stat_result:
        found = list(true_status(path, follow))
        found[field] = value(path, follow, found[field])
        return os.stat_result(found)

    monkeypatch.setattr(cache_folder, "_status", status)


@pytest.mark.parametrize("name", LEVELS)
def test_what_belongs_to_another_user_is_not_loaded(
    problem: FakeProblem, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str
):
    path = level(place_of(problem), name)
    owned_by(monkeypatch, OTHER, path)
    assert_private(problem, tmp_path, caplog, f"{path} belongs to user {OTHER}")


@pytest.mark.parametrize("owner", [0, ME], ids=["root", "own"])
def test_what_belongs_to_root_or_to_the_user_is_loaded(
    problem: FakeProblem, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, owner: int
):
    place = place_of(problem)
    owned_by(monkeypatch, owner, *(level(place, name) for name in LEVELS))
    assert runs(problem) and place_of(problem) == place and compilations(problem) == 1
    assert not warnings_of(caplog)


def test_the_root_may_be_a_link_and_nothing_below_it(
    problem: FakeProblem, tmp_path: Path, caplog: pytest.LogCaptureFixture, switch: Callable[..., Any]
):
    place = place_of(problem)
    link = tmp_path / "link"
    link.symlink_to(compiled.cache_dir())
    switch(GDN_CACHE_DIR=str(link))
    assert runs(problem) and compilations(problem) == 1 and not warnings_of(caplog)
    moved = tmp_path / "moved"
    place.rename(moved)
    place.symlink_to(moved)
    assert_private(problem, tmp_path, caplog, f"{link / place.parent.name / place.name} is a symbolic link")


def test_a_root_linked_by_another_user_is_not_used(
    problem: FakeProblem, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    place_of(problem)
    link = tmp_path / "link"
    link.symlink_to(compiled.cache_dir())
    monkeypatch.setenv("GDN_CACHE_DIR", str(link))
    env.reload()
    monkeypatch.setattr(os, "geteuid", lambda: ME)
    with_status(monkeypatch, stat.ST_UID, lambda path, follow, _: OTHER if path == link and not follow else ME)
    assert_private(problem, tmp_path, caplog, f"{link} belongs to user {OTHER}")


def test_a_file_system_that_gives_its_files_to_everybody(
    problem: FakeProblem, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """No folder is there yet, so nothing is distrusted before they are made."""

    def mode(path: Path, follow: bool, true: int) -> int:
        return true | (0o777 if compiled.cache_dir() in (path, *path.parents) else 0)

    with_status(monkeypatch, stat.ST_MODE, mode)
    assert runs(problem) and runs(problem) and compilations(problem) == 1
    (message,) = warnings_of(caplog)
    assert f"{compiled.cache_dir()} may be written by its group or others (mode 0777)" in message
    assert not list(compiled.cache_dir().rglob("*.so"))


def failing(true_function: Callable[..., Any], root: Path, code: int) -> Callable[..., Any]:
    """os.open, os.mkdir or os.replace on a file system that takes no more."""

    def function(path: Any, *args: Any, **kwargs: Any) -> Any:
        writes = true_function is not os.open or args[0] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes and root in (Path(path), *Path(path).parents):
            raise OSError(code, os.strerror(code), str(path))
        return true_function(path, *args, **kwargs)

    return function


def freeze(monkeypatch: pytest.MonkeyPatch, root: Path, code: int) -> None:
    for name in ("open", "mkdir", "replace"):
        monkeypatch.setattr(os, name, failing(getattr(os, name), root, code))


def test_a_read_only_cache_serves_whole_entries_and_nothing_is_written(
    problem: FakeProblem, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    place = place_of(problem)
    before = tree(compiled.cache_dir())
    freeze(monkeypatch, compiled.cache_dir(), errno.EROFS)
    assert runs(problem) and place_of(problem) == place and compilations(problem) == 1
    assert not warnings_of(caplog) and tree(compiled.cache_dir()) == before


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT], ids=lambda code: errno.errorcode[code])
def test_a_kernel_that_a_read_only_cache_lacks(
    problem: FakeProblem, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, code: int
):
    compiled.cache_dir().mkdir(mode=0o700)
    freeze(monkeypatch, compiled.cache_dir(), code)
    assert_private(problem, tmp_path, caplog, f"{compiled.cache_dir()} cannot be written ({os.strerror(code)})")


def test_a_disk_that_fills_up_while_an_entry_is_written(
    problem: FakeProblem, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    true_write = cache_folder.write_private

    def write(path: Path, content: bytes) -> None:
        if compiled.cache_dir() in path.parents:
            true_write(path, content[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        true_write(path, content)

    monkeypatch.setattr(cache_folder, "write_private", write)
    assert runs(problem) and runs(problem)
    assert compilations(problem) == 1  # what was compiled is kept, not compiled again
    assert not [path for path in compiled.cache_dir().rglob("*") if path.is_file() and path.suffix != ".lock"]
    (message,) = warnings_of(caplog)
    assert "cannot be written (No space left on device)" in message


def test_a_file_system_without_locks(
    problem: FakeProblem, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    true_lock = filelock.FileLock

    def lock(path: Path, mode: int) -> Any:
        if compiled.cache_dir() in path.parents:
            raise NotImplementedError("FileSystem does not appear to support flock")
        return true_lock(path, mode=mode)

    monkeypatch.setattr(filelock, "FileLock", lock)
    assert runs(problem) and compilations(problem) == 1
    (message,) = warnings_of(caplog)
    assert "cannot be written (FileSystem does not appear to support flock)" in message


def test_nowhere_to_write(problem: FakeProblem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    freeze(monkeypatch, tmp_path, errno.EROFS)
    with pytest.raises(compiled.CompileError, match="recurrent: the tilelang kernel can be written neither into .* nor into"):
        place_of(problem)


def test_a_manifest_names_no_file_outside_its_entry(problem: FakeProblem):
    place = place_of(problem)
    manifest = json.loads((place / "manifest.json").read_text())
    library = place / manifest["libraries"]["first"]["file"]
    library.rename(place.parent / library.name)
    manifest["libraries"]["first"]["file"] = f"../{library.name}"
    (place / "manifest.json").write_text(json.dumps(manifest))
    assert not compiled.is_whole(place)


def test_entries_that_would_not_be_loaded_do_not_count(problem: FakeProblem):
    place = place_of(problem)
    assert compiled.has_entries("recurrent", "tilelang")
    place.chmod(0o770)
    assert not compiled.has_entries("recurrent", "tilelang")


def test_private_folders_end_with_their_process(tmp_path: Path):
    """One per process, forked ones included, which must not remove their parent's."""
    code = """
import multiprocessing, os
from gdn.runtime import cache_folder

def child(answers):
    (cache_folder.scratch() / "kernel").touch()
    answers.put((str(cache_folder.scratch()), oct(os.stat(cache_folder.scratch()).st_mode)))

own = cache_folder.scratch()
assert cache_folder.scratch() == own
context = multiprocessing.get_context("fork")
answers = context.Queue()
process = context.Process(target=child, args=(answers,))
process.start()
theirs, mode = answers.get(timeout=60)
process.join(60)
assert own.is_dir() and str(own) != theirs and mode.endswith("700") and not os.path.exists(theirs), theirs
print(own)
"""
    assert Path(python(code, TMPDIR=str(tmp_path)).stdout.strip()).parent == tmp_path and not list(tmp_path.glob("gdn-kernels-*"))
