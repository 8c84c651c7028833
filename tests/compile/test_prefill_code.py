"""The compiled kernels of the sparse prefill: order of the machine code, registers of the roles, and launches on tensors that say
they are on a GPU.
"""

import importlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gdn.device import H100
from gdn.runtime import compiled
from tests.compile import fake_cuda, inspection
from tests.compile.attention_calls import params_of
from tests.compile.test_prefill_tiles import problem

prefill = pytest.importorskip("kernels_cute.attention.prefill", reason="needs the CuTe DSL")

CALLS: dict[str, dict[str, Any]] = {
    "main": {},
    "packed": {"dtype": "float16", "index_dtype": "int64", "has_topk_length": True, "head_dim": 128, "block_size": 20},
    "gated": {"has_gate": True},
    "one head": {"num_heads": 1, "num_kv_heads": 1},
}
_libraries: dict[str, dict[str, bytes]] = {}


def libraries(call: str) -> dict[str, bytes]:
    if call not in _libraries:
        one = problem(**CALLS[call])
        _libraries[call] = prefill.compile(one, prefill.default_config(one, H100))
    return _libraries[call]


def instructions(call: str = "main") -> list[str]:
    return inspection.listing(libraries(call)[prefill.ATTEND])


def between(lines: list[str], name: str) -> Iterator[list[str]]:
    """Instructions between two neighbouring occurrences."""
    places = [at for at, line in enumerate(lines) if name in line]
    return (lines[low + 1 : high] for low, high in zip(places, places[1:], strict=False))


def test_softmax_runs_under_the_product_of_values() -> None:
    """All of a step's 2^x lie between the wait for the scores and the wait for P V. ptxas likes to take the second wait first."""
    (step,) = [part for part in between(instructions(), "WARPGROUP.DEPBAR") if not any("HGMMA" in line for line in part)]
    count = {name: sum(name in line for line in step) for name in ("MUFU.EX2", "FMNMX", "SYNCS.ARRIVE", "F2FP")}
    # 32 scores and two factors a lane; the stage of keys is free, and no register of P is written.
    assert count == {"MUFU.EX2": 34, "FMNMX": 36, "SYNCS.ARRIVE": 1, "F2FP": 0}


def test_products_are_not_waited_for_one_by_one() -> None:
    """Waits: of the first scores, a step's scores, a step's P V, the last P V."""
    lines = instructions()
    waits = [line for line in lines if "WARPGROUP.DEPBAR" in line]
    assert len(waits) == 4
    # gsb0 closes a group of products.
    assert sum("HGMMA" in line and "gsb0" in line for line in lines) == 4


def test_gates_are_asked_for_before_any_is_used() -> None:
    """A lane's 32 words of each of its two rows, one load after the other."""
    kinds = [match[1] for line in instructions("gated") if (match := re.search(r"\b(LDG|MUFU|SHFL)\b", line))]
    runs = [len(list(group)) for kind, group in itertools.groupby(kinds) if kind == "LDG"]
    assert runs.count(32) == 2


@pytest.mark.parametrize("call", ["main", "gated"])
def test_copy_warps_keep_to_their_registers(call: str) -> None:
    tiles = importlib.import_module("kernels_cute.attention.prefill.tiles").PrefillTiles(
        problem(), prefill.default_config(problem(), H100)
    )
    copy, math = inspection.registers_of_roles(instructions(call))
    assert copy < tiles.copy_registers <= math < tiles.math_registers
    threads = {"copy": 128, "math": 256}
    assert threads["copy"] * tiles.copy_registers + threads["math"] * tiles.math_registers <= 168 * sum(threads.values())


def launched(call: str, folder: Path, **changes: Any) -> set[str]:
    """Entries that were called, all refused by the driver alone."""
    one = problem(**CALLS[call])
    config = prefill.default_config(one, H100)
    kernel = compiled.Compiled(fake_cuda.load(libraries(call), "cute", folder), one, config)
    params = params_of(one, prefill.workspace_bytes(one, config))._replace(**changes)
    return set(fake_cuda.refused(prefill, kernel, params))


@fake_cuda.NO_GPU
@pytest.mark.parametrize("call", [name if name == "main" else pytest.param(name, marks=pytest.mark.cover) for name in CALLS])
def test_launch(call: str, tmp_path: Path) -> None:
    assert launched(call, tmp_path) == {prefill.UNIONS, prefill.ATTEND}


@fake_cuda.NO_GPU
def test_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError)):
        launched("main", tmp_path, topk_length=torch.zeros(5, dtype=torch.int32))
