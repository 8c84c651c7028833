"""Launches of decode attention on tensors that say they are on a GPU: argument order, ranks, dtypes and strides."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from gdn.device import H100
from tests.compile import fake_cuda
from tests.compile.attention_calls import params_of
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
