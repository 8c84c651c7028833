"""Top-k: configurations fit at every size, and rows beyond a configuration run with the entry that takes any."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gdn.device import H100
from gdn.ops.indexer.problem import TopkParams, TopkProblem
from gdn.testing import machine_code

topk = pytest.importorskip("kernels_cute.topk", reason="needs the CuTe DSL")

PROBLEM = TopkProblem("float32", None, "int32", "score", k=2048, num_rows=64, num_columns=32768)
COLUMNS = (0, 1, 2048, 2049, 8192, 32768, 32769, 65536, 131072, 131073, 2**20)


@pytest.mark.parametrize("columns", COLUMNS)
def test_configurations_fit(columns: int) -> None:
    problem = replace(PROBLEM, num_columns=columns)
    default, found = topk.default_config(problem, H100), topk.configs(problem, H100)
    assert topk.refusal(problem) is None
    assert topk.fits(problem, default, H100) and default in found and default.max_columns >= columns
    assert len(found) == len(set(found)) and all(topk.fits(problem, config, H100) for config in found)


@pytest.mark.parametrize("k", [1, 2048, 4096])
@pytest.mark.parametrize("columns", COLUMNS)
def test_tiles_of_other_sizes_suit_where_the_list_has_room(columns: int, k: int) -> None:
    problem = replace(PROBLEM, num_columns=columns, k=k)
    default = topk.default_config(problem, H100)
    assert topk.suits(problem, default, H100) and topk.fits(problem, default, H100)
    few = replace(default, list_entries=4096)
    assert topk.suits(problem, few, H100) == (k < 4096 or columns <= 4096)


@pytest.mark.parametrize(("dtype", "most"), [("float32", 4), ("bfloat16", 8)])
def test_bfloat16_has_more_in_flight_in_as_few_registers(dtype: str, most: int) -> None:
    found = topk.configs(replace(PROBLEM, dtype=dtype), H100)
    assert max(config.unroll for config in found if config.threads * config.blocks_per_sm == 2048) == most


@pytest.mark.cover
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_groups_of_long_rows_do_not_spill(dtype: str) -> None:
    """Tokens of groups take registers: three choices at once, which no cover of pairs holds."""
    problem = replace(PROBLEM, dtype=dtype, sorted_by="index", num_rows=4096, ratio=4, position_dtype="int64")
    config = topk.default_config(problem, H100)
    for library in topk.compile(problem, config).values():
        assert not any(kernel.spills for kernel in machine_code.kernels(library)), config


@pytest.mark.parametrize(("field", "value"), [("dtype", "float16"), ("num_columns", 2**20 + 1), ("k", 4097), ("ratio", 1025)])
def test_refusals(field: str, value: Any) -> None:
    assert f"got {value}" in (topk.refusal(replace(PROBLEM, **{field: value})) or "")


@pytest.mark.parametrize(("columns", "entry"), [(1, topk.ENTRY), (32768, topk.ENTRY), (32769, topk.ANY_ENTRY)])
def test_the_tensors_decide_which_entry_runs(columns: int, entry: str) -> None:
    called: list[tuple[str, tuple[Any, ...]]] = []
    names = (topk.ENTRY, topk.ANY_ENTRY)
    functions = {name: lambda *tensors, name=name: called.append((name, tensors)) for name in names}
    compiled = SimpleNamespace(functions=functions, problem=PROBLEM, config=topk.default_config(PROBLEM, H100))
    logits, ends, out = torch.zeros(3, columns), torch.zeros(3, dtype=torch.int32), torch.zeros(3, 5, dtype=torch.int32)
    topk.launch(compiled, TopkParams(logits, None, ends, None, out))
    ((name, tensors),) = called
    assert name == entry and [id(one) for one in tensors[:5]] == [id(one) for one in (logits, None, ends, None, out)]
    assert tensors[5:] == (0, -1, 1)


@pytest.mark.parametrize("change", [{"k": 0}, {"num_columns": 0}])
def test_groups_are_at_least_one(change: dict[str, int]) -> None:
    assert topk.refusal(replace(PROBLEM, **change)) is None
    assert "at least 1" in (topk.refusal(replace(PROBLEM, ratio=4, position_dtype="int64", **change)) or "")


def test_nothing_to_read_is_written_without_a_launch() -> None:
    out = torch.zeros(3, 5, dtype=torch.int32)
    topk.launch(SimpleNamespace(functions={}), TopkParams(torch.zeros(3, 0), None, None, None, out))
    assert bool((out == -1).all())
