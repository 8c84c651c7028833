"""The compiled kernel of dense prefill: order of the machine code, registers of the roles, refusals, and a launch on tensors that
say they are on a GPU.
"""

import ctypes
import dataclasses
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from gdn.device import H100
from gdn.models import QWEN3_NEXT_80B
from gdn.ops.attention.problem import AttentionPrefillParams, AttentionPrefillProblem
from gdn.runtime import compiled, registry
from gdn.testing import machine_code
from tests.compile import fake_cuda

dense = pytest.importorskip("kernels_cute.attention.dense", reason="needs the CuTe DSL")

_libraries: dict[bool, dict[str, bytes]] = {}


def problem(**fields: Any) -> AttentionPrefillProblem:
    example: Any = registry.operator("attention_prefill").example(QWEN3_NEXT_80B, fp8=False)
    return dataclasses.replace(example, **fields)


def libraries(has_gate: bool = False) -> dict[str, bytes]:
    if has_gate not in _libraries:
        one = problem(has_gate=has_gate)
        _libraries[has_gate] = dense.compile(one, dense.default_config(one, H100))
    return _libraries[has_gate]


def instructions() -> list[str]:
    (kernel,) = machine_code.undecoded(libraries()[dense.ENTRY])
    lines = machine_code._disassemble(kernel.code, kernel.kernel.target).splitlines()
    return [line for line in lines if re.match(r"\s*/\*[0-9a-f]{4,}\*/", line)]


def test_softmax_runs_under_the_product_of_values() -> None:
    """In both loops all of a step's 2^x lie between the wait for the scores and the wait for P V."""
    lines = instructions()
    waits = [at for at, line in enumerate(lines) if "WARPGROUP.DEPBAR" in line]
    # Waits: of the first scores, a masked step's scores and P V, a whole step's, the last P V.
    assert len(waits) == 6
    for first, second in (waits[1:3], waits[3:5]):
        part = lines[first:second]
        count = {name: sum(name in line for line in part) for name in ("MUFU.EX2", "SYNCS.ARRIVE", "F2FP", "HGMMA")}
        # 40 scores and two factors a lane; the stage of keys is free, and no register of P is written.
        assert count == {"MUFU.EX2": 42, "SYNCS.ARRIVE": 1, "F2FP": 0, "HGMMA": 0}


def test_roles_keep_to_their_registers() -> None:
    tiles = importlib.import_module("kernels_cute.attention.dense.tiles")
    lines = instructions()
    (fewer,) = [at for at, line in enumerate(lines) if "USETMAXREG.DEALLOC" in line]
    (more,) = [at for at, line in enumerate(lines) if "USETMAXREG.TRY_ALLOC" in line]

    def most(part: list[str]) -> int:
        return max(int(number) for line in part for number in re.findall(r"\bR(\d+)\b", line))

    assert fewer < more and most(lines[fewer:more]) < tiles.COPY_REGISTERS <= most(lines[more:]) < tiles.MATH_REGISTERS
    assert 128 * tiles.COPY_REGISTERS + 256 * tiles.MATH_REGISTERS <= 168 * tiles.THREADS


def test_configurations() -> None:
    for dim, steps in ((256, {80}), (128, {128, 96})):
        one = problem(head_dim=dim)
        found = dense.configs(one, H100)
        assert {config.step for config in found} == steps
        assert dense.default_config(one, H100) in found
        for config in found:
            rows = dense.ROWS + (config.key_stages + config.value_stages) * config.step
            assert 2 * dim * rows + dense.TABLE_BYTES <= H100.shared_bytes_per_block
            # A part of a split tile lies where keys and values were.
            assert dense.ROWS * 4 * (dim + 8) <= 2 * dim * (rows - dense.ROWS)
        assert {config.splits for config in found} == {1, 2, 4, 8}


def test_refusals() -> None:
    assert dense.refusal(problem()) is None and dense.refusal(problem(num_heads=24, block_size=1344, dtype="float16")) is None
    for fields, word in (
        ({"head_dim": 64}, "head_dim"), ({"num_heads": 258}, "query heads"), ({"rows_aligned": False}, "16 bytes"),
        ({"dtype": "float32"}, "float16"), ({"num_heads": 3}, "query heads"), ({"block_size": 24}, "multiple of 16"),
    ):  # fmt: skip
        assert word in dense.refusal(problem(**fields)), fields


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernel would start, on addresses of the CPU")
@pytest.mark.parametrize("has_gate", [False, True], ids=["plain", "gated"])
def test_launch(has_gate: bool, tmp_path: Path) -> None:
    """Five tokens of three sequences, K and V of a position next to each other: refused by the driver alone."""
    import tvm_ffi

    ctypes.CDLL(str(compiled.runtime_library("cute")), mode=ctypes.RTLD_GLOBAL)
    dtype, dim = torch.bfloat16, 256
    k_cache, v_cache = torch.zeros(7, 16, 2, 2 * dim, dtype=dtype).split(dim, dim=3)
    params = AttentionPrefillParams(
        torch.zeros(5, 16, dim, dtype=dtype), k_cache, v_cache, torch.zeros(3, 9, dtype=torch.int32),
        torch.zeros(4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32),
        torch.zeros(5, 16, 2 * dim, dtype=dtype)[..., dim:] if has_gate else None,
        torch.zeros(5, 17, dim + 1, dtype=dtype)[:, :-1, :-1], torch.zeros(5, 16), 0.1,
    )  # fmt: skip
    (tmp_path / "kernel.so").write_bytes(libraries(has_gate)[dense.ENTRY])
    function = tvm_ffi.load_module(str(tmp_path / "kernel.so"))[dense.ENTRY]
    with pytest.raises(RuntimeError, match="(?i)cuda"):
        function(*map(fake_cuda.on_device, params))
    with pytest.raises((TypeError, ValueError), match="seq_lens|int32"):
        function(*map(fake_cuda.on_device, params._replace(seq_lens=params.seq_lens.long())))
