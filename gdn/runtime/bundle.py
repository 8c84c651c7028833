"""Folders of compiled kernels that `gdn compile` builds: whole, checksummed, and loaded without a compiler.

Such a folder is a kernel cache (`compiled`), named by GDN_CACHE_DIR, with an index in `bundle.json`: the entry of every kernel by
what was asked for, the checksum of every entry's manifest (which has those of its libraries), the versions that the kernels were
built with, and the command that builds the folder again. It holds no paths, so it can be moved and copied.

What a process does for its first call, where the kernel is in the folder:

    choice      imports the kernel's module, which imports no DSL; the hash of its sources comes from the index
    search      one look-up in the index; the kernel's sources are read and compared, not parsed
    loading     checksums of the manifest and the libraries, then tvm-ffi opens them next to the DSL's runtime library

The index is believed where gdn and tvm-ffi have the versions that it names. Of it those kernels are loaded whose DSL has its
version too, those of the CuTe DSL also CUDA, and whose sources are those they were built from, byte for byte: a machine that
lacks one DSL loads the kernels of the other. Nothing in it is believed that another user could have written (`cache_folder`). A
folder or an entry that is not believed is named; GDN_COMPILE says whether the kernel is then compiled.
"""

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdn.runtime import cache_folder, packages, source

NAME = "bundle.json"
FORMAT = 2
# Versions on which the kernels of one backend alone depend. CUDA is that of the CuTe DSL's runtime library.
_BACKENDS = {package.distribution: backend for backend, package in packages.DSLS.items()} | {"CUDA": "cute"}


class Unusable(Exception):
    """Reason why a folder's index is not believed, naming the folder."""


@dataclass(frozen=True)
class Sources:
    """Sources of a kernel module as they were when the folder was built."""

    source_hash: str  # source.source_hash of the module
    files: tuple[str, ...]  # relative to the root of gdn
    content: str  # source.content_hash of these

    @functools.cached_property
    def are_here(self) -> bool:
        """Whether the files here are the same, byte for byte."""
        try:
            return source.content_hash(source.ROOT / name for name in self.files) == self.content
        except OSError:
            return False


@dataclass(frozen=True)
class Bundle:
    """A folder whose index is believed."""

    root: Path
    entries: Mapping[str, tuple[str, str]]  # kernel -> name of its entry below the root, SHA-256 of the entry's manifest
    sources: Mapping[str, Sources]  # of kernel modules
    command: str  # builds the folder again
    unserved: Mapping[str, str]  # backends whose DSL is another here, and the reason

    def source_of(self, module: str) -> str | None:
        """Hash of a kernel module's sources; None where the index does not know those that are here."""
        known = self.sources.get(module)
        return known.source_hash if known is not None and known.are_here else None

    def place(self, kernel: str, backend: str, module: str) -> Path | None:
        """Folder of a kernel's entry; None where the index lacks it.

        backend, module: of the kernel. ValueError where the entry does not serve, Unusable where none of this backend does.
        """
        if kernel not in self.entries:
            return None
        if backend in self.unserved:
            raise Unusable(self.unserved[backend])
        if self.source_of(module) is None:
            raise ValueError(f"{self.root / NAME} was built from other sources of {module} than these")
        name, digest = self.entries[kernel]
        place = self.root / name
        try:
            found = hashlib.sha256((place / "manifest.json").read_bytes()).hexdigest()
        except OSError as error:
            raise ValueError(f"{place / 'manifest.json'} cannot be read ({error.strerror or error})") from error
        if found != digest:
            raise ValueError(f"{place / 'manifest.json'} does not match the index of its folder")
        return place


def kernel_key(op: str, backend: str, static: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """A kernel in the index: what is asked for, without the sources and versions, which are those of the whole folder."""
    parts = {"op": op, "backend": backend, "problem": dict(static), "config": dict(config)}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def find(root: Path, versions: Mapping[str, str]) -> Bundle | None:
    """The folder's index, read once a process; None where the folder has none. versions: of this process.

    Raises Unusable where the index must not be believed.
    """
    found = _read(root, tuple(sorted(versions.items())))
    if isinstance(found, str):
        raise Unusable(found)
    return found


@functools.cache
def _read(root: Path, versions: tuple[tuple[str, str], ...]) -> Bundle | str | None:
    """The index, or the reason why it is not believed."""
    path = root / NAME
    try:
        if not path.exists():
            return None
    except OSError as error:  # the folder cannot be searched
        return f"{path} cannot be read ({error.strerror or error})"
    if (reason := cache_folder.distrust(root, root)) is not None:
        return reason
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        digest = content.pop("sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{path} is not a whole index ({type(error).__name__}: {error})"
    if digest != _digest(content):
        return f"{path} is not a whole index: its checksum differs"
    if content.get("format") != FORMAT:
        return f"{path} is not a whole index of format {FORMAT}, but of format {content.get('format')}"
    unserved = {}
    for what, here in versions:
        if (built := content["versions"].get(what)) != here:
            reason = f"{path} was built with {what} {built}, here is {here}"
            if what not in _BACKENDS:
                return reason
            unserved[_BACKENDS[what]] = reason
    entries = {kernel: (name, digest) for kernel, (name, digest) in content["kernels"].items()}
    sources = {name: Sources(one["hash"], tuple(one["files"]), one["content"]) for name, one in content["sources"].items()}
    return Bundle(root, entries, sources, content["command"], unserved)


def write(root: Path, versions: Mapping[str, str], entries: Mapping[str, str], sources: Mapping[str, str], command: str) -> None:
    """Writes the index of a folder whose entries are there.

    Kernels of the index that is there, of another model for example, stay in it where it is believed and no source has changed.
    entries: kernel -> name of its entry below the root. sources: kernel module -> its file.
    """
    import filelock  # here, since a process that only reads an index needs none

    with filelock.FileLock(root / f".{NAME}.lock", mode=0o600):  # another build of this folder may end at the same time
        forget()  # what it has written since is to stay
        _write(root, versions, entries, sources, command)
    forget()


def _write(root: Path, versions: Mapping[str, str], entries: Mapping[str, str], sources: Mapping[str, str], command: str) -> None:
    before = _read(root, tuple(sorted(versions.items())))
    known: dict[str, dict[str, Any]] = {}
    if isinstance(before, Bundle) and not before.unserved and all(one.are_here for one in before.sources.values()):
        known = {name: _plain(one) for name, one in before.sources.items()}
        left = {kernel: name for kernel, (name, _) in before.entries.items() if (root / name / "manifest.json").is_file()}
        entries = {**left, **entries}
    digests = {
        kernel: (name, hashlib.sha256((root / name / "manifest.json").read_bytes()).hexdigest())
        for kernel, name in sorted(entries.items())
    }
    content: dict[str, Any] = {
        "format": FORMAT, "versions": dict(versions), "command": command, "kernels": digests,
        "sources": known | {name: _plain(_sources(file)) for name, file in sources.items()},
    }  # fmt: skip
    content = json.loads(json.dumps(content))  # tuples become lists, as a reader gets them
    temporary = root / f".{NAME}.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    cache_folder.write_private(temporary, json.dumps({**content, "sha256": _digest(content)}, indent=1).encode())
    os.replace(temporary, root / NAME)


def forget() -> None:
    """Drops what was read, so that folders are read again."""
    _read.cache_clear()


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sources(file: str) -> Sources:
    """A kernel module's sources as they are now."""
    paths = source.files(file)
    names = tuple(os.path.relpath(path, source.ROOT) for path in paths)
    return Sources(source.source_hash(file), names, source.content_hash(paths))


def _plain(sources: Sources) -> dict[str, Any]:
    """Sources as the index has them."""
    return {"hash": sources.source_hash, "files": list(sources.files), "content": sources.content}
