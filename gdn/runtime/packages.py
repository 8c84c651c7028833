"""The packages that compile and load kernels: where they lie, which version they are, and which versions are served.

Nothing is imported. A version is that of the files which an import would take, not of any metadata on the path: two versions may
lie on one path, or be unpacked over each other.
"""

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Package:
    """A distribution, the module that an import takes from it, and the versions that are served, as in pyproject.toml."""

    distribution: str
    module: str
    least: str
    below: str

    @property
    def served(self) -> str:
        return f">={self.least},<{self.below}"


DSLS = {
    "tilelang": Package("tilelang", "tilelang", "0.1.12", "0.1.16"),
    "cute": Package("nvidia-cutlass-dsl", "cutlass", "4.8.0", "4.9"),
}
TVM_FFI = Package("apache-tvm-ffi", "tvm_ffi", "0.1.11", "0.1.13")


def folders(module: str) -> list[Path]:
    """Folders of a top-level module; none where it is not installed."""
    try:
        spec = importlib.util.find_spec(module)  # a top-level module: imports nothing
    except (ImportError, ValueError):
        return []
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []


@functools.cache
def version(package: Package) -> str | None:
    """Version of the files that an import takes; "files <digest>" where no metadata, or several, lie beside them.

    None where the package is not installed.
    """
    folder = next(iter(folders(package.module)), None)
    if folder is None:
        return None
    root = folder.parents[2] if folder.parent.name == "dsl_packages" else folder.parent  # the CuTe DSL's inner folder
    found = {one.version for one in importlib.metadata.distributions(name=package.distribution, path=[str(root)])}
    return found.pop() if len(found) == 1 else f"files {_digest(folder)}"


def shown(package: Package) -> str | None:
    """The version for a person: without metadata that of the loaded module, "?" where none is loaded."""
    found = version(package)
    if found is None or _is_known(found):
        return found
    return str(getattr(sys.modules.get(package.module), "__version__", "?"))


def _digest(folder: Path) -> str:
    """Of the names and sizes of all files, and of the text of Python's."""
    digest = hashlib.sha256()
    for place, inner, names in os.walk(folder):
        inner[:] = sorted(name for name in inner if name != "__pycache__")
        for name in sorted(names):
            path = Path(place, name)
            digest.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
            if path.suffix == ".py":
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def unserved(package: Package) -> str | None:
    """Reason why the installed version is not served, or None; a version that is not known counts as served."""
    found = version(package)
    if found is None or not _is_known(found) or _numbers(package.least) <= _numbers(found) < _numbers(package.below):
        return None
    return f"requires {package.distribution} {package.served}, got {found}"


def _is_known(version: str) -> bool:
    return version[0].isdigit()


def _numbers(text: str) -> list[int]:
    """Numbers of a release, to compare; a pre-release counts as its release."""
    release = re.match(r"\d+(\.\d+)*", text)
    return [int(number) for number in release[0].split(".")] if release is not None else []
