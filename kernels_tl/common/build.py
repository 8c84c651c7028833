"""Builds TileLang prim_funcs, and turns one into a shared library that tvm-ffi loads: `library(prim_func) -> bytes`.

Needs nvcc and a host compiler, no GPU. The runtime stores these bytes and calls the function of the same name; loading
them needs tilelang's libtilelang and no import of tilelang.
"""

import logging
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tilelang
import tilelang.language as T
from tvm.script.ir_builder import IRBuilder, tirx
from tvm.tirx import Buffer

logging.getLogger("tilelang").setLevel(logging.WARNING)  # it announces every compilation

TARGET = {"kind": "cuda", "arch": "sm_90a"}


def parameters(**types: Any) -> SimpleNamespace:
    """Declares the parameters of the prim_func whose body calls this first, in this order; those of type None do not exist.

    Every type is an object of its own: parameters of one type object would be one buffer.
    """
    declared = {name: None if type is None else tirx.arg(name, type) for name, type in types.items()}
    return SimpleNamespace(**declared)


def named(**values: Any) -> SimpleNamespace:
    """A kernel's buffers and tuples of buffers under their names, which its CUDA source shows; other values as they are."""
    for name, value in values.items():
        for position, buffer in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(buffer, Buffer):
                IRBuilder.name(f"{name}_{position}" if isinstance(value, tuple) else name, buffer)
    return SimpleNamespace(**values)


def variables(count: int, dtype: str = "int32", **options: Any) -> tuple[Any, ...]:
    """Variables of a thread; option init: their first value."""
    return tuple(T.alloc_var(dtype, **options) for _ in range(count))


def library(prim_func: Any, *, pass_configs: dict[Any, Any] | None = None, compile_flags: list[str] | None = None) -> bytes:
    """The prim_func, compiled for sm_90a, as the bytes of a shared library whose entry is the prim_func's name."""
    tilelang.disable_cache()  # gdn.runtime.compiled is the one cache
    options: dict[str, Any] = {"pass_configs": pass_configs, "compile_flags": compile_flags}
    kernel = tilelang.compile(prim_func, target=dict(TARGET), execution_backend="tvm_ffi", **options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.so"
        kernel.export_library(str(path))
        return path.read_bytes()
