"""The compiled functions of the CuTe chunk kernel take what its launch hands them, as far as they can be called without a GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gdn.device import H100
from gdn.ops.delta_rule.inputs import chunk_inputs, chunk_problem, chunk_tensors
from tests.compile import fake_cuda

chunk = pytest.importorskip("kernels_cute.chunk", reason="needs the CuTe DSL")
pytestmark = fake_cuda.NO_GPU

FOUR_SM = {"stages": 3, "prefetch": 0, "num_persistent_clusters": 0, "num_four_sm_clusters": 1, "max_l2_ring_groups": 10}
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # fields of the problem, and of the configuration
    "whole": ({"index_dtype": "int32", "has_mask": True, "use_gate": True, "gate_dtype": "bfloat16"}, {}),
    "either": (
        {"index_dtype": "int64", "dtype": "float16", "beta_dtype": None},
        FOUR_SM | {"split_chunks": 2, "split_if_longest_exceeds": 150},
    ),
    "padded": ({"head_k_dim": 60, "head_v_dim": 60, "has_final_state": False}, {}),
    "segments, clusters of no use": ({"index_dtype": "int32"}, {"split_chunks": 2, "num_persistent_clusters": 66}),
    "token by token": ({"head_k_dim": 132, "head_v_dim": 132, "index_dtype": "int32", "has_mask": True}, {}),
    "token by token, no copies": (
        {"head_k_dim": 132, "head_v_dim": 132, "has_initial_state": False, "has_final_state": False},
        {},
    ),
}


@pytest.mark.cover
def test_checkpoint_states_without_a_pool(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_q_heads": 2, "num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 64, "head_v_dim": 64}
    fields = {"has_final_state": False, "has_checkpoints": True, "checkpoint_state_dtype": "float32"}
    problem = chunk_problem(**sizes | {"dtype": "bfloat16", "num_tokens": 300, "num_sequences": 2} | fields)
    config = chunk.default_config(problem, H100)
    workspace = fake_cuda.workspace(chunk.workspace_bytes(problem, config))
    params = chunk_tensors(problem, chunk_inputs(problem, "cpu", 1, lengths=[100, 200], strided=True), workspace)
    params = params._replace(
        checkpoint_offsets=torch.zeros(2, 1, dtype=torch.int32), checkpoint_slots=torch.zeros(2, 1, dtype=torch.int64),
        checkpoint_states=torch.zeros(5, 2, 4, 64, 64)[:, 0],
    )  # fmt: skip
    fake_cuda.refused(chunk, fake_cuda.compile_and_load(chunk, "cute", problem, config, tmp_path), params)


IN_COVER = ("whole", "either", "token by token", "padded", "segments, clusters of no use")


@pytest.mark.parametrize("call", [pytest.param(one, marks=pytest.mark.cover) if one in IN_COVER else one for one in CALLS])
def test_launch_fails_for_want_of_a_device_alone(call: str, tmp_path: Path) -> None:
    fields, changes = CALLS[call]
    sizes: dict[str, Any] = {"num_q_heads": 2, "num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 128, "head_v_dim": 128}
    problem = chunk_problem(**sizes | {"dtype": "bfloat16", "num_tokens": 300, "num_sequences": 2} | fields)
    config = replace(chunk.default_config(problem, H100), **changes)
    kernel = fake_cuda.compile_and_load(chunk, "cute", problem, config, tmp_path)
    arguments = chunk_inputs(problem, "cpu", 1, lengths=[100, 200], strided=True)
    params = chunk_tensors(problem, arguments, fake_cuda.workspace(chunk.workspace_bytes(problem, config)))
    assert sorted(fake_cuda.refused(chunk, kernel, params)) == sorted(kernel.functions)
