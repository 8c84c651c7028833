"""Launches of decode attention on tensors that say they are on a GPU: argument order, ranks, dtypes and strides."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from gdn.device import H100
from gdn.ops.attention.problem import SparseDecodeParams
from tests.compile import fake_cuda
from tests.compile.test_sparse_decode import problem_of

pytestmark = fake_cuda.NO_GPU
MODULES = {"cute": "kernels_cute.attention.decode", "tilelang": "kernels_tl.attention.decode"}
CALLS: dict[str, dict[str, Any]] = {
    "one sequence": {"dense": False},
    "pieces": {
        "dtype": "float16", "index_dtype": "int64", "has_topk_length": True, "heads_adjacent": False, "block_size": 272,
        "has_gate": True,
    },
    "dense": {"dense": True, "index_dtype": None},
}  # fmt: skip


def params_of(problem: Any, workspace_bytes: int) -> SparseDecodeParams:
    """Five tokens of three sequences; K and V of a head next to each other where the heads are apart."""
    dtype, shape = getattr(torch, problem.dtype), (7, problem.block_size, problem.num_kv_heads, problem.head_dim)
    k_cache, v_cache = torch.zeros(2, *shape, dtype=dtype)
    if not problem.heads_adjacent:
        k_cache, v_cache = torch.zeros(*shape[:3], 2 * shape[3], dtype=dtype).split(shape[3], dim=3)
    indices = None if problem.dense else torch.zeros(5, 2048, dtype=getattr(torch, problem.index_dtype))
    return SparseDecodeParams(
        torch.zeros(5, problem.num_heads, problem.head_dim, dtype=dtype), k_cache, v_cache, indices,
        torch.zeros(3, 9, dtype=torch.int32), torch.zeros(4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32),
        torch.zeros(5, dtype=torch.int32) if problem.has_topk_length else None,
        torch.zeros(5, problem.num_heads, 2 * shape[3], dtype=dtype)[..., shape[3] :] if problem.has_gate else None,
        torch.zeros(5, problem.num_heads, problem.head_dim, dtype=dtype), torch.zeros(5, problem.num_heads),
        torch.zeros(workspace_bytes, dtype=torch.uint8) if workspace_bytes else None, 0.1,
    )  # fmt: skip


def refused(backend: str, problem: Any, folder: Path, **changes: Any) -> set[str]:
    """Functions that a launch of the default calls, all refused by the driver alone."""
    module = importlib.import_module(MODULES[backend])
    config = module.default_config(problem, H100)
    kernel = fake_cuda.compile_and_load(module, backend, problem, config, folder)
    return set(fake_cuda.refused(module, kernel, params_of(problem, module.workspace_bytes(problem, config))._replace(**changes)))


@pytest.mark.parametrize(
    ("backend", "call"),
    [*(("cute", call) for call in CALLS), pytest.param("tilelang", "one sequence", marks=pytest.mark.cover)],
)
def test_launch(backend: str, call: str, tmp_path: Path) -> None:
    pytest.importorskip(MODULES[backend], reason="needs the DSL")
    found = refused(backend, problem_of(5, **CALLS[call]), tmp_path)
    assert len(found) == (2 if backend == "tilelang" else 1)  # parts, and their merge


@pytest.mark.parametrize(("fields", "missing"), [({}, "topk_indices"), ({"has_gate": True}, "gate")])
def test_a_missing_tensor_is_refused(fields: dict[str, Any], missing: str, tmp_path: Path) -> None:
    pytest.importorskip(MODULES["cute"], reason="needs the DSL")
    with pytest.raises((TypeError, ValueError)):
        refused("cute", problem_of(5, **fields), tmp_path, **{missing: None})
