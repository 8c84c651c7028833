"""Turns a TileLang prim_func into a shared library that tvm-ffi loads: `library(prim_func) -> bytes`.

Needs nvcc and a host compiler, no GPU. The runtime stores these bytes and calls the function of the same name; loading
them needs tilelang's libtilelang and no import of tilelang.
"""

import logging
import tempfile
from pathlib import Path
from typing import Any

import tilelang

logging.getLogger("tilelang").setLevel(logging.WARNING)  # it announces every compilation

TARGET = {"kind": "cuda", "arch": "sm_90a"}


def library(prim_func: Any, *, pass_configs: dict[Any, Any] | None = None, compile_flags: list[str] | None = None) -> bytes:
    """The prim_func, compiled for sm_90a, as the bytes of a shared library whose entry is the prim_func's name."""
    tilelang.disable_cache()  # gdn.runtime.compiled is the one cache
    kernel = tilelang.compile(
        prim_func,
        target=dict(TARGET),
        execution_backend="tvm_ffi",
        pass_configs=pass_configs,
        compile_flags=compile_flags,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.so"
        kernel.export_library(str(path))
        return path.read_bytes()
