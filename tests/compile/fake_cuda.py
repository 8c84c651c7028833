"""CPU tensors that say they lie on a GPU: a compiled function checks them as it would a real call's, and fails where it would
launch. So argument order, ranks, dtypes, strides and alignments are tested without a GPU. With one, nothing here may be called.
"""

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import tvm_ffi

from gdn.problem import Problem
from gdn.runtime import compiled

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels would start, on addresses of the CPU")

_CUDA = (2, 0)  # kDLCUDA, device 0
_KINDS = {torch.bfloat16: 4, torch.float16: 2, torch.float32: 2, torch.int32: 0, torch.int64: 0, torch.uint8: 1, torch.bool: 6}
_KINDS[torch.float8_e4m3fn] = 10


class _Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("index", ctypes.c_int)]


class _Dtype(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Managed(ctypes.Structure):
    """DLManagedTensor of DLPack, without versions."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int),
        ("dtype", _Dtype),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_alive: list[Any] = []  # nobody frees what a capsule points to


class _OnDevice:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        x = self._tensor
        shape, strides = (ctypes.c_int64 * x.dim())(*x.shape), (ctypes.c_int64 * x.dim())(*x.stride())
        dtype = _Dtype(_KINDS[x.dtype], 8 * x.element_size(), 1)
        managed = _Managed(x.data_ptr(), _Device(*_CUDA), x.dim(), dtype, shape, strides, 0, None, None)
        _alive.append((managed, shape, strides, x))
        return _new_capsule(ctypes.addressof(managed), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA


def on_device(value: Any) -> Any:
    """A tensor as if on a GPU; anything else as it is."""
    return tvm_ffi.from_dlpack(_OnDevice(value)) if isinstance(value, torch.Tensor) else value


def load(libraries: Mapping[str, bytes], backend: str, folder: Path) -> dict[str, Callable[..., None]]:
    """The functions of libraries, by way of files in a folder."""
    ctypes.CDLL(str(compiled.runtime_library(backend)), mode=ctypes.RTLD_GLOBAL)
    functions = {}
    for name, library in libraries.items():
        (folder / f"{name}.so").write_bytes(library)
        functions[name] = tvm_ffi.load_module(str(folder / f"{name}.so"))[name]
    return functions


def compile_and_load(module: Any, backend: str, problem: Problem, config: Any, folder: Path) -> compiled.Compiled:
    return compiled.Compiled(load(module.compile(problem, config), backend, folder), problem, config)


def refused(module: Any, kernel: compiled.Compiled, params: Any) -> list[str]:
    """Launches on tensors that say they are on a GPU: every function is called, and each is refused by the driver alone.

    A TypeError, ValueError or another RuntimeError where an argument is not as declared. Returns the calls."""
    called: list[str] = []

    def calling(name: str) -> Callable[..., None]:
        def function(*arguments: Any) -> None:
            with pytest.raises(RuntimeError, match="(?i)cuda"):
                kernel.functions[name](*map(on_device, arguments))
            called.append(name)

        return function

    functions = {name: calling(name) for name in kernel.functions}
    module.launch(compiled.Compiled(functions, kernel.problem, kernel.config), params)
    assert set(called) == set(functions)
    return called


def workspace(num_bytes: int) -> torch.Tensor | None:
    """Address such as torch's allocator on a GPU gives: aligned to 256 bytes at least; None where there is none."""
    if num_bytes == 0:
        return None
    buffer = torch.empty(num_bytes + 256, dtype=torch.uint8)
    start = -buffer.data_ptr() % 256
    return buffer[start : start + num_bytes]
