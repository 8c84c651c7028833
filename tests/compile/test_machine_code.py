"""The figures that the other tests here rely on, read from kernels whose figures are known."""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from gdn.testing import machine_code
from gdn.testing.machine_code import MachineCodeError
from tests.compile import inspection


def _build(package: str, compile_: Callable[[], bytes]) -> tuple[machine_code.MachineCode, int]:
    sizes: list[int] = []
    with inspection._recording(f"{package}.tiny", sizes):
        library = compile_()
    (kernel,) = machine_code.kernels(library)
    # Many at once: the same figures, target and counts, whichever comes before.
    assert machine_code.decoded(machine_code.undecoded(library) * 3) == [kernel] * 3
    (dynamic,) = sizes
    return kernel, dynamic


@pytest.mark.cover
def test_tilelang_kernel() -> None:
    from kernels_tl.common import build
    from tests.compile import tiny_tl

    kernel, dynamic = _build("kernels_tl", lambda: build.library(tiny_tl.matmul()))
    assert (kernel.name, kernel.target, kernel.max_threads) == ("tiny_matmul_kernel", "sm_90a", 128)
    assert dynamic == (64 + 128) * 128 * 2
    assert kernel.static_shared_bytes <= 1024  # at most barriers
    assert 64 < kernel.registers <= 255  # 64 of them accumulate
    assert (kernel.spills, kernel.stack_bytes) == (0, 0)
    assert kernel.count("HGMMA") + kernel.count("HMMA") > 0
    assert kernel.count("QGMMA") == 0


@pytest.mark.cover
def test_spills_are_seen() -> None:
    from kernels_tl.common import build
    from tests.compile import tiny_tl

    # 256 rows of accumulators on 128 threads are 256 registers a thread, more than there are.
    kernel, _ = _build("kernels_tl", lambda: build.library(tiny_tl.matmul(rows=256)))
    assert kernel.registers >= 250
    assert kernel.spills > 0
    assert kernel.stack_bytes > 0


def test_cute_kernel() -> None:
    tiny_cute = importlib.import_module("tests.compile.tiny_cute")
    kernel, dynamic = _build("kernels_cute", tiny_cute.reverse)
    assert (kernel.target, kernel.max_threads) == ("sm_90a", 128)
    assert dynamic == 4 * tiny_cute.SHARED_FLOATS
    assert kernel.static_shared_bytes == 0
    assert 0 < kernel.registers <= 32
    assert (kernel.spills, kernel.stack_bytes) == (0, 0)
    assert kernel.count("LDG") == kernel.count("STG") == kernel.count("LDS") == kernel.count("STS") == 1
    assert kernel.count("LDG.128") == 0


def test_the_target_does_not_depend_on_who_imports_the_dsl_first() -> None:
    code = (
        "import cutlass\n"
        "from gdn.testing import machine_code\n"
        "from tests.compile import tiny_cute\n"
        "print([kernel.target for kernel in machine_code.kernels(tiny_cute.reverse())])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "CUTE_DSL_ARCH"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "['sm_90a']", done.stderr


def test_the_target_without_the_disassembler_is_the_disassemblers() -> None:
    library = importlib.import_module("tests.compile.tiny_cute").reverse()
    general = library.replace(b"\x02\x09\x01\x00", b"\x02\x09\x00\x00")  # .nv.compat: not for one architecture alone
    for one, target in ((library, "sm_90a"), (general, "sm_90")):
        (kernel,) = machine_code.undecoded(one)
        assert kernel.kernel.target == target and len(kernel.code) > 0
        (cubin,) = machine_code._cubins(one)
        assert machine_code._target_by_nvdisasm(cubin) == target


def test_machine_code_that_is_not_all_shown_raises() -> None:
    library = importlib.import_module("tests.compile.tiny_cute").reverse()
    (kernel,) = machine_code.undecoded(library)
    broken = replace(kernel, code=kernel.code + bytes(range(8)))
    with pytest.raises(MachineCodeError, match="nvdisasm"):
        machine_code.decoded([broken, kernel])


def test_a_library_without_a_cubin_raises() -> None:
    with pytest.raises(MachineCodeError, match="no cubin"):
        machine_code.kernels(b"\x7fELF" + bytes(200))


def test_a_cubin_that_is_cut_off_raises() -> None:
    header = bytearray(64)
    header[:4] = b"\x7fELF"
    header[18:20] = (190).to_bytes(2, "little")
    header[40:48] = (64).to_bytes(8, "little")  # section headers after the end
    header[58:64] = (64).to_bytes(2, "little") + (1).to_bytes(2, "little") + bytes(2)
    with pytest.raises(MachineCodeError, match="cut off"):
        machine_code.kernels(bytes(header))


@pytest.mark.parametrize(("pattern", "count"), [
    ("LDG", 5), ("LDG.128", 3), ("LDG.E.128", 3), ("LDG.CONSTANT.128", 2), ("LD", 0),
    ("LDG.!128", 2), ("LDG.128.!CONSTANT", 1),
])  # fmt: skip
def test_count(pattern: str, count: int) -> None:
    opcodes = machine_code.Counter({"LDG.E.128.CONSTANT": 2, "LDG.E.128": 1, "LDG.E": 2, "STG.E.128": 7})
    kernel = machine_code.MachineCode("k", "sm_90a", 8, 128, 0, 0, opcodes)
    assert kernel.count(pattern) == count
