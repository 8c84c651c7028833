"""Folders of the kernel cache that only their owner can write, and the private folder that replaces a cache.

An entry of the kernel cache is machine code that this process will run. Folders are therefore created for their owner only
(0700, files 0600). Nothing is loaded that belongs to a user other than this one or root, or that its group or others may
write; the same holds for every folder above it up to the cache's root.
"""

import multiprocessing.util
import os
import shutil
import stat
import tempfile
from pathlib import Path

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def _status(path: Path, follow: bool) -> os.stat_result:
    return os.stat(path, follow_symlinks=follow)


class Distrusted(PermissionError):
    """A folder in which another user could write what this process would run."""


def distrust(root: Path, entry: Path) -> str | None:
    """Reason why an entry below a cache's root must not be loaded, naming the path; None if it may be, or does not exist."""
    folder = root
    try:
        is_link = root.is_symlink()  # to another folder, unless the link is another user's
        reason = (_foreign(root, _status(root, False)) if is_link else None) or _distrust(root, follow=is_link)
        for part in entry.relative_to(root).parts:
            folder = folder / part
            reason = reason or _distrust(folder)
        for file in () if reason else sorted(entry.iterdir()):
            reason = reason or _distrust(file)
    except (FileNotFoundError, NotADirectoryError):  # nothing to load, and the folders above were checked
        return None
    except OSError as error:
        return f"{error.filename} cannot be examined ({error.strerror})"
    return reason


def _distrust(path: Path, follow: bool = False) -> str | None:
    status = _status(path, follow)
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a symbolic link"
    if status.st_mode & _WRITABLE_BY_OTHERS:
        return f"{path} may be written by its group or others (mode {stat.S_IMODE(status.st_mode):04o})"
    return _foreign(path, status)


def _foreign(path: Path, status: os.stat_result) -> str | None:
    if status.st_uid in (os.geteuid(), 0):
        return None
    return f"{path} belongs to user {status.st_uid}, not to this process's user {os.geteuid()} or root"


def make_private(folder: Path) -> None:
    """Creates a folder, and missing folders above it, for their owner only."""
    if folder.is_dir():
        return
    make_private(folder.parent)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:  # another process created it, or it is not a folder
        if not folder.is_dir():
            raise


def write_private(path: Path, content: bytes) -> None:
    """Writes a new file that only its owner can read or write, whatever the umask."""
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(content)


def is_writable(folder: Path) -> bool:
    """Whether entries can be written into the folder, which is created if missing."""
    try:
        make_private(folder)
        with tempfile.TemporaryFile(dir=folder):  # permission bits do not show read-only or full file systems
            return True
    except OSError:
        return False


_scratch: dict[int, Path] = {}  # per process id: a forked child must not use a folder that its parent removes


def existing_scratch() -> Path | None:
    """The private folder of this process, where it has created one."""
    return _scratch.get(os.getpid())


def scratch() -> Path:
    """Private folder of this process, removed when it ends, for kernels that the cache cannot take."""
    folder = existing_scratch()
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="gdn-kernels-"))  # 0700
        folder = _scratch.setdefault(os.getpid(), folder)
        # Also runs at the end of a multiprocessing process, where atexit does not, and never in a forked child.
        multiprocessing.util.Finalize(None, shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}, exitpriority=0)
    return folder
