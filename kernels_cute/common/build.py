"""Build of a CuTe DSL host function into a shared library that tvm-ffi loads.

Needs a host linker, no GPU and no nvcc. The runtime stores the library's bytes and calls its entry; loading them needs
libcute_dsl_runtime and no import of the DSL.
"""

import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream


def library(name: str, host: Any, *arguments: Any, options: str = "") -> bytes:
    """`host(*arguments, stream)`, a cute.jit function, as the bytes of a shared library with the entry `name`.

    arguments are fake tensors and typed scalars (cutlass.Float32(1.0)); the last parameter of host is the CUstream, which
    at launch is torch's current stream and is not passed.
    """
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    # Named here too: CUTE_DSL_ARCH comes too late where somebody has imported the DSL before this package.
    options = f"--enable-tvm-ffi --gpu-arch sm_90a {options}".strip()
    compiled = cute.compile(host, *arguments, stream, options=options)
    with tempfile.TemporaryDirectory() as folder:
        object_path, path = Path(folder) / "kernel.o", Path(folder) / "kernel.so"
        compiled.export_to_c(str(object_path), function_name=name)
        # Undefined symbols are resolved against libcute_dsl_runtime and libtvm_ffi, which the runtime loads first.
        subprocess.run(["cc", "-shared", "-o", str(path), str(object_path)], check=True, capture_output=True)
        return path.read_bytes()


def one_entry(name: str, host: Any, fakes: Any) -> dict[str, bytes]:
    """The library, for sm_90a, of an operator whose kernel is one entry; fakes: its Params."""
    return {name: library(name, host, *fakes)}


class Kernel:
    """A kernel of one problem and configuration, whose other attributes are compile-time constants, and its launch.

    A subclass names its Params (`class Split(Kernel, params=SplitParams)`) and has `kernel(params)` and `blocks(params)`, the
    number of blocks.
    """

    threads: int  # of a block
    limits: Mapping[str, int] = {}  # further options of the launch

    def __init_subclass__(cls, params: Any = None) -> None:
        cls.params = params

    @cute.jit
    def __call__(self, *values: Any):
        """values: the Params, flat, and the stream."""
        params, stream = self.params(*values[:-1]), values[-1]
        grid, block = [self.blocks(params), 1, 1], [self.threads, 1, 1]
        self.kernel(params).launch(grid=grid, block=block, stream=stream, **self.limits)
