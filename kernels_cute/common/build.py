"""Build of a CuTe DSL host function into a shared library that tvm-ffi loads, and its launch.

Needs a host linker, no GPU and no nvcc. The runtime stores the library's bytes and calls its entry; loading them needs
libcute_dsl_runtime and no import of the DSL.
"""

import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
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
    """The library, for sm_90a, of an operator whose kernel is one entry; fakes: its Params."""
    return {name: library(name, host, *fakes)}


def launch(compiled: Any, params: Any) -> None:
    """Launches a kernel of `one_entry`."""
    (function,) = compiled.functions.values()
    function(*params)


def no_workspace(problem: Any, config: Any) -> int:
    return 0


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


def step(
    kernel: Callable[[Any, Any], Any],
    fakes: Callable[[Any], Any],
    config_type: Callable[..., Any],
    allows: Callable[[Any, Any], bool] = lambda problem, config: True,
    **choices: Sequence[int],
) -> tuple[Callable[..., Any], ...]:
    """The runtime's contract for an operator whose kernel is one entry: fits, configs, compile, launch, workspace_bytes.

    kernel: of a problem and a configuration. fakes: Params of fake tensors and scalars to compile for. choices: values of each
    field of a configuration; allows: what else decides whether one fits.
    """

    def fits(problem: Any, config: Any, device: Any) -> bool:
        return all(getattr(config, name) in values for name, values in choices.items()) and allows(problem, config)

    def configs(problem: Any, device: Any) -> list[Any]:
        space = [config_type(*values) for values in product(*choices.values())]
        return [config for config in space if fits(problem, config, device)]

    def compile(problem: Any, config: Any) -> dict[str, bytes]:
        return one_entry(problem.op, kernel(problem, config), fakes(problem))

    return fits, configs, compile, launch, no_workspace


def by_load(config: Callable[[int, int], Any], wanted: int, device: Any, rows: Sequence[int] = (4, 2), load: int = 1024) -> Any:
    """Configuration (threads of a block, rows of a thread): the most rows that leave every SM `load` of the wanted threads, one a
    row and element, then blocks small enough to reach every SM."""
    for count in rows:
        if wanted >= count * load * device.num_sms:
            return config(128, count)
    return config(128 if wanted >= 256 * device.num_sms else 32, 1)
