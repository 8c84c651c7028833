"""Launches of decode attention on tensors that say they are on a GPU: argument order, ranks, dtypes and strides."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from gdn.device import H100
from gdn.problems import SparseDecodeParams
from tests.compile.test_recurrent_calls import launch
from tests.compile.test_sparse_decode import problem_of

CALLS: dict[str, dict[str, Any]] = {
    "one sequence": {"dense": False},
    "pieces": {"dtype": "float16", "index_dtype": "int64", "has_topk_length": True, "heads_adjacent": False, "block_size": 272},
    "dense": {"dense": True, "index_dtype": None},
}


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
        torch.zeros(5, problem.num_heads, problem.head_dim, dtype=dtype), torch.zeros(5, problem.num_heads),
        torch.zeros(workspace_bytes, dtype=torch.uint8) if workspace_bytes else None, 0.1,
    )  # fmt: skip


@pytest.mark.parametrize(("backend", "call"), [*(("cute", call) for call in CALLS), ("tilelang", "one sequence")])
def test_launch(backend: str, call: str, tmp_path: Path) -> None:
    module = importlib.import_module(
        {"cute": "kernels_cute.attention.decode", "tilelang": "kernels_tl.attention.decode"}[backend]
    )
    problem = problem_of(5, **CALLS[call])
    params = params_of(problem, module.workspace_bytes(problem, module.default_config(problem, H100)))
    with pytest.raises(RuntimeError, match="(?i)cuda"):
        launch(module, backend, problem, params, tmp_path)


def test_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    module = pytest.importorskip("kernels_cute.attention.decode", reason="needs the CuTe DSL")
    problem = problem_of(5)
    with pytest.raises((TypeError, ValueError)):
        launch(module, "cute", problem, params_of(problem, 0)._replace(topk_indices=None), tmp_path)
