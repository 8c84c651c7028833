"""Compiles one kernel variant and reads its machine code, in worker processes; and what else tests ask a DSL's compiler.

Dynamic shared memory is an argument of the launch and is in no cubin. It is read from what the DSLs' compilers were
given and made: TileLang's device module, and the host code of the CuTe DSL.
"""

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from gdn.problem import Problem
from gdn.testing import machine_code
from gdn.testing.machine_code import MachineCode, Undecoded


@dataclass(frozen=True)
class Report:
    """Machine code of one variant, over all its entries."""

    kernels: dict[str, list[MachineCode]]  # entry -> its kernel functions
    dynamic_shared_bytes: dict[str, int]  # entry -> the most that a launch of it asks for

    def count(self, pattern: str) -> int:
        return sum(kernel.count(pattern) for kernels in self.kernels.values() for kernel in kernels)


@dataclass(frozen=True)
class Unread:
    """A report whose instructions are still to be counted: `read` does so for many at once."""

    kernels: dict[str, list[Undecoded]]
    dynamic_shared_bytes: dict[str, int]


def read(reports: Sequence[Unread]) -> list[Report]:
    waiting = [kernel for report in reports for kernels in report.kernels.values() for kernel in kernels]
    found = iter(machine_code.decoded(waiting))
    return [
        Report({entry: [next(found) for _ in kernels] for entry, kernels in report.kernels.items()}, report.dynamic_shared_bytes)
        for report in reports
    ]


def inspect(module_name: str, problem: Problem, config: Any) -> Unread:
    """config None: the analytic default for an H100."""
    from gdn.device import H100

    if "cutlass" not in sys.modules:
        # Inherited from the process that started this one, it would hide a module that imports the DSL before the
        # package has set the target.
        os.environ.pop("CUTE_DSL_ARCH", None)
    module = importlib.import_module(module_name)
    if config is None:
        config = module.default_config(problem, H100)
    sizes: list[int] = []
    with _recording(module_name, sizes):
        libraries: dict[str, bytes] = module.compile(problem, config)
    if len(sizes) != len(libraries):
        raise AssertionError(f"{len(libraries)} entries were compiled by {len(sizes)} calls of the DSL's compiler")
    # A dict keeps its order, and entries are compiled one after the other.
    dynamic = dict(zip(libraries, sizes, strict=True))
    return Unread({entry: machine_code.undecoded(library) for entry, library in libraries.items()}, dynamic)


def traced(check: Callable[[Any, Any], None]) -> None:
    """Calls check(cute, cutlass) while a function is traced: layouts exist only then."""
    importlib.import_module("kernels_cute.common.build")  # sets the DSL's target before its first import
    import cutlass
    import cutlass.cute as cute

    done = []

    @cute.jit
    def trace() -> None:
        check(cute, cutlass)
        done.append(True)

    cute.compile(trace, options="--gpu-arch sm_90a")
    assert done == [True]


def listing(library: bytes) -> list[str]:
    """Instructions of a library's one kernel, a line each, in the order of the code."""
    (kernel,) = machine_code.undecoded(library)
    lines = machine_code._disassemble(kernel.code, kernel.kernel.target).splitlines()
    return [line for line in lines if re.match(r"\s*/\*[0-9a-f]{4,}\*/", line)]


def registers_of_roles(lines: list[str]) -> tuple[int, int]:
    """The highest register of the role that gives registers away, and then of the one that takes more."""
    (fewer,) = [at for at, line in enumerate(lines) if "USETMAXREG.DEALLOC" in line]
    (more,) = [at for at, line in enumerate(lines) if "USETMAXREG.TRY_ALLOC" in line]
    assert fewer < more

    def most(part: list[str]) -> int:
        return max(int(number) for line in part for number in re.findall(r"\bR(\d+)\b", line))

    return most(lines[fewer:more]), most(lines[more:])


@contextmanager
def _recording(module_name: str, sizes: list[int]) -> Iterator[None]:
    """Makes every compilation append its largest dynamic shared memory."""
    if module_name.startswith("kernels_tl."):
        import tilelang as dsl

        read = tilelang_shared_bytes
    else:
        # The package's own build module sets the DSL's target before its first import.
        importlib.import_module("kernels_cute.common.build")
        from cutlass import cute as dsl

        read = cute_shared_bytes
    original = dsl.compile

    def compile_and_record(*arguments: Any, **options: Any) -> Any:
        compiled = original(*arguments, **options)
        sizes.append(read(compiled))
        return compiled

    with mock.patch.object(dsl, "compile", compile_and_record):
        yield


def tilelang_shared_bytes(kernel: Any) -> int:
    """The most over the kernels of a JITKernel; one without dynamic shared memory carries no attribute."""
    functions = list(kernel.artifact.device_mod.functions.values())
    assert functions, "TileLang made no device function"
    found = [0]
    for function in functions:
        parameters = str(function.attrs["tirx.kernel_launch_params"])
        if "tirx.use_dyn_shared_memory" in parameters:
            found.append(int(function.attrs["dyn_shared_memory_buf"]))
    return max(found)


# Host code fills a launch configuration {grid, block, dynamic shared bytes (i64), stream, ...}: field 2 is ours.
_CONFIGURATION = r"!llvm.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
_FIELD = re.compile(rf"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : \(!llvm\.ptr\) -> !llvm\.ptr, {_CONFIGURATION}")


def cute_shared_bytes(compiled: Any) -> int:
    """The most over the launches in the host code of a compiled cute.jit function; a size that is no constant raises."""
    text = str(compiled.ir_module)
    found = []
    for function in re.split(r"(?m)^\s*llvm\.func ", text):  # value names are unique inside a function only
        for pointer in _FIELD.findall(function):
            for value in re.findall(rf"llvm\.store (%\w+), {re.escape(pointer)} : i64", function):
                constant = re.search(rf"{re.escape(value)} = llvm\.mlir\.constant\((\d+) : i64\)", function)
                if constant is None:
                    raise AssertionError("dynamic shared memory is not a constant of the host code")
                found.append(int(constant[1]))
    if not found:
        raise AssertionError("no launch configuration in the host code")
    return max(found)
