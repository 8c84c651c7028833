"""Launches that a compiled library would make, without a GPU: the functions by which it reaches the driver are replaced.

A program of its own (python -m tests.compile.record_launches LIBRARY ENTRY COUNT ..., arguments pickled on stdin): in a process
that has loaded the runtime, the runtime's functions would be taken. A launch is a line of JSON: grid, block, bytes of shared
memory, and of its first COUNT arguments the first 12 bytes (an address or a number, then a size). The counts are taken in turn.
"""

import ctypes
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import tvm_ffi

from gdn.runtime import compiled
from tests.compile import fake_cuda

_SOURCE = r"""
#include <stddef.h>
#include <stdio.h>
typedef struct { unsigned grid[3], block[3]; size_t shared; void *stream, *attributes; unsigned count; } Config;
int counts[8], num_counts, launches;
int _cudaLaunchKernelEx(const Config *c, void *kernel, void **given) {
    const unsigned a = c->grid[0], b = c->block[0];
    printf("{\"grid\": %u, \"block\": %u, \"shared\": %zu, \"arguments\": [", a, b, c->shared);
    const int count = counts[launches++ % num_counts];
    for (int i = 0; i < count; ++i) {
        const long *words = given[i];
        printf("%s[%ld, %d]", i ? ", " : "", words[0], (int)words[1]);
    }
    printf("]}\n");
    return fflush(stdout);
}
int _cudaGetDevice(int *device) { return *device = 0; }
int _cudaSetDevice(int device) { return 0; }
int _cudaDeviceGetAttribute(int *value, int which, int device) { *value = 232448; return 0; }
int _cudaFuncSetAttribute(void *function, int which, int value) { return 0; }
int _cudaKernelSetAttributeForDevice(void *kernel, int which, int value, int device) { return 0; }
int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) { *kernel = library; return 0; }
int _cudaLibraryLoadData(void **library) { *library = library; return 0; }
int _cuKernelGetAttribute(int *value) { return *value = 0; }
int cuda_dialect_init_library_once(void **library) { *library = library; return 0; }
int cuda_dialect_unload_library_once(void **library) { return 0; }
"""


def _aligned(value: Any) -> Any:
    """A tensor at an address such as a GPU's allocator gives."""
    if not isinstance(value, torch.Tensor):
        return value
    size = value.untyped_storage().nbytes() - value.storage_offset() * value.element_size()
    memory = fake_cuda.workspace(int(size))
    assert memory is not None
    whole = memory.view(value.dtype)
    return whole.as_strided(value.shape, value.stride(), whole.storage_offset())


def main() -> None:
    library, entry, *counts = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        source, driver = Path(folder) / "driver.c", Path(folder) / "driver.so"
        source.write_text(_SOURCE)
        subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", str(driver), str(source)], check=True)
        loaded = ctypes.CDLL(str(driver), mode=ctypes.RTLD_GLOBAL)
    (ctypes.c_int * 8).in_dll(loaded, "counts")[: len(counts)] = [int(count) for count in counts]
    ctypes.c_int.in_dll(loaded, "num_counts").value = len(counts)
    ctypes.CDLL(str(compiled.runtime_library("cute")), mode=ctypes.RTLD_GLOBAL)
    function = tvm_ffi.load_module(library)[entry]
    values = pickle.loads(sys.stdin.buffer.read())
    function(*(fake_cuda.on_device(_aligned(value)) for value in values))


if __name__ == "__main__":
    main()
