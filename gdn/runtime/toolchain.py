"""Tools that compiling a kernel needs, found without importing a DSL."""

import importlib.metadata
import shutil
from pathlib import Path

from gdn.runtime import env


def nvcc() -> Path | None:
    """The nvcc that TileLang would run: in CUDA_HOME, on PATH, in the nvidia-cuda-nvcc wheel, or in /usr/local/cuda."""
    home = env.toolkit_home()
    if home is not None:
        return _executable(home / "bin" / "nvcc")
    if (on_path := shutil.which("nvcc")) is not None:
        return Path(on_path)
    try:
        files = importlib.metadata.files("nvidia-cuda-nvcc") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    in_wheel = (Path(str(file.locate())) for file in files if file.name == "nvcc")
    return _executable(next(in_wheel, Path("/usr/local/cuda/bin/nvcc")))


def _executable(path: Path) -> Path | None:
    return path if shutil.which(str(path)) is not None else None


def host_compiler() -> Path | None:
    """C compiler that links a kernel into a shared library."""
    found = shutil.which("cc")
    return Path(found) if found is not None else None


def missing(backend: str) -> str | None:
    """Reason why a backend cannot compile on this machine, or None."""
    if backend == "tilelang" and nvcc() is None:
        return "requires nvcc to compile (on PATH, under CUDA_HOME, or from the wheel tilelang[nvcc]), got none"
    if host_compiler() is None:
        return "requires the host compiler cc to link kernels, got none on PATH"
    return None
