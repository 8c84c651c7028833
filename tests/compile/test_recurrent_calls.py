"""The compiled recurrent and decode kernels take what their launch hands them, None for absent tensors included.

As far as they can be called without a GPU."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.cases import Shape
from gdn.device import H100
from gdn.ops.delta_rule.inputs import recurrent_inputs, recurrent_problem, recurrent_tensors
from gdn.ops.layer_step import cases as decode
from gdn.problem import Problem
from tests.compile import fake_cuda
from tests.compile.test_decode_config import DRAFTS, MAIN

pytestmark = fake_cuda.NO_GPU

HEADS: dict[str, Any] = {"num_q_heads": 2, "num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 64, "head_v_dim": 64}
RECURRENT: dict[str, dict[str, Any]] = {
    "pool": {"index_dtype": "int32", "use_gate": True, "gate_dtype": "bfloat16"},
    "no state": {"has_initial_state": False, "has_final_state": False, "gate_dtype": None, "beta_dtype": None},
    "new state": {"cu_seqlens_dtype": "int64"},
    "tree": {"index_dtype": "int64", "write_every_token": True, "has_accepted": True, "has_parent": True},
    "noise": {"index_dtype": "int32", "state_dtype": "bfloat16", "has_rounding": True, "has_final_indices": True},
    "intermediate states": {"index_dtype": "int64", "has_final_state": False, "intermediate_dtype": "bfloat16"},
}


def launch(module: Any, backend: str, problem: Problem, params: Any, folder: Path) -> None:
    """A launch of the default, which the driver alone refuses."""
    kernel = fake_cuda.compile_and_load(module, backend, problem, module.default_config(problem, H100), folder)
    fake_cuda.refused(module, kernel, params)


SLOW = (
    "no state",
    "new state",
    "noise",
    "tree",
    "intermediate states",
)  # with TileLang, whose compiler takes several times as long
FORMS = [(call, "cute") for call in RECURRENT] + [
    pytest.param(call, "tilelang", marks=[pytest.mark.cover] if call in SLOW else []) for call in RECURRENT
]


@pytest.mark.parametrize(("call", "backend"), FORMS)
def test_recurrent(call: str, backend: str, tmp_path: Path) -> None:
    module = pytest.importorskip({"cute": "kernels_cute.recurrent", "tilelang": "kernels_tl.recurrent"}[backend])
    problem = recurrent_problem(**HEADS | {"dtype": "bfloat16"} | RECURRENT[call])
    params = recurrent_tensors(problem, recurrent_inputs(problem, lengths=[1, 2, 3], strided=True))
    if problem.intermediate_dtype is not None:  # a gap after each row
        kept = torch.zeros(5, 4 * 64 * 64 * 3 + 8, dtype=torch.bfloat16)[:, :-8].unflatten(1, (3, 4, 64, 64))
        params = params._replace(intermediate_states=kept, intermediate_indices=torch.arange(6)[::2])
    launch(module, backend, problem, params, tmp_path)


@pytest.mark.parametrize("name", ["q", "g", "state_indices"])
def test_a_missing_tensor_is_refused(name: str, tmp_path: Path) -> None:
    module = pytest.importorskip("kernels_cute.recurrent", reason="needs the CuTe DSL")
    problem = recurrent_problem(**HEADS | {"dtype": "bfloat16", "index_dtype": "int32"})
    params = recurrent_tensors(problem, recurrent_inputs(problem, lengths=[1, 2, 3]))
    with pytest.raises((TypeError, ValueError)):
        launch(module, "cute", problem, params._replace(**{name: None}), tmp_path)


@pytest.mark.parametrize("form", ["single", "drafts", "intermediate states"])
def test_decode(form: str, tmp_path: Path) -> None:
    pytest.importorskip("cutlass", reason="needs the CuTe DSL")
    problem, lengths = (DRAFTS, (3, 3)) if form == "drafts" else (MAIN, (1, 1))
    params = decode.gdn_decode.case(Shape(form, problem, lengths), torch.device("cpu"), 1)._work(seed=0).params
    if form == "intermediate states":
        kept, rows = torch.zeros(3, 2, *params.ssm_state.shape[1:]), torch.arange(2, dtype=params.state_indices.dtype)
        params = params._replace(intermediate_states=kept, intermediate_indices=rows)
        problem = replace(MAIN, intermediate_dtype="float32")
    launch(importlib.import_module("kernels_cute.gdn_decode"), "cute", problem, params, tmp_path)
