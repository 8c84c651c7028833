"""From a CuTe DSL host function to a shared library that tvm-ffi loads, and its launch.

Needs a host linker, no GPU and no nvcc. The runtime stores the library's bytes and calls its entry; loading them needs
libcute_dsl_runtime and no import of the DSL.
"""

import subprocess
import tempfile
from collections.abc import Callable, Sequence
from itertools import product
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
    """The library of an operator whose kernel is one entry; fakes: its Params."""
    return {name: library(name, host, *fakes)}


def launch(compiled: Any, params: Any) -> None:
    """Launches a kernel of `one_entry`."""
    (function,) = compiled.functions.values()
    function(*params)


def every_feasible(config_type: Any, fits: Callable[..., bool], *axes: Sequence[int]) -> Callable[[Any, Any], list[Any]]:
    """The `configs` of a kernel: every combination of the fields' values that fits."""

    def configs(problem: Any, device: Any) -> list[Any]:
        space = [config_type(*values) for values in product(*axes)]
        return [config for config in space if fits(problem, config, device)]

    return configs


def no_workspace(problem: Any, config: Any) -> int:
    return 0
