"""The compiled functions of the CuTe chunk kernel take what its launch hands them, as far as they can be called without a GPU."""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import tvm_ffi

from gdn.device import H100
from gdn.ops.delta_rule.inputs import chunk_inputs, chunk_problem, chunk_tensors
from gdn.ops.delta_rule.problem import ChunkParams, ChunkProblem
from gdn.runtime import compiled
from tests.compile import fake_cuda

chunk = pytest.importorskip("kernels_cute.chunk", reason="needs the CuTe DSL")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels would start, on addresses of the CPU")

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
    own = compiled.Compiled(load(problem, config, tmp_path), problem, config)
    with pytest.raises(RuntimeError, match="(?i)cuda"):
        chunk.launch(own, ChunkParams(*map(fake_cuda.on_device, params)))


IN_COVER = ("either", "token by token", "padded", "segments, clusters of no use")


def load(problem: ChunkProblem, config: Any, folder: Path) -> dict[str, Callable[..., None]]:
    ctypes.CDLL(str(compiled.runtime_library("cute")), mode=ctypes.RTLD_GLOBAL)
    functions = {}
    for name, library in chunk.compile(problem, config).items():
        (folder / f"{name}.so").write_bytes(library)
        functions[name] = tvm_ffi.load_module(str(folder / f"{name}.so"))[name]
    return functions


@pytest.mark.parametrize("call", [pytest.param(one, marks=pytest.mark.cover) if one in IN_COVER else one for one in CALLS])
def test_launch_fails_for_want_of_a_device_alone(call: str, tmp_path: Path) -> None:
    fields, changes = CALLS[call]
    sizes: dict[str, Any] = {"num_q_heads": 2, "num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 128, "head_v_dim": 128}
    problem = chunk_problem(**sizes | {"dtype": "bfloat16", "num_tokens": 300, "num_sequences": 2} | fields)
    config = replace(chunk.default_config(problem, H100), **changes)
    functions, refused = load(problem, config, tmp_path), []

    def calling(name: str) -> Callable[..., None]:
        def function(*arguments: Any) -> None:
            with pytest.raises(RuntimeError, match="(?i)cuda"):  # a TypeError or ValueError where an argument is not as declared
                functions[name](*map(fake_cuda.on_device, arguments))
            refused.append(name)

        return function

    kernel = compiled.Compiled({name: calling(name) for name in functions}, problem, config)
    arguments = chunk_inputs(problem, "cpu", 1, lengths=[100, 200], strided=True)
    chunk.launch(kernel, chunk_tensors(problem, arguments, fake_cuda.workspace(chunk.workspace_bytes(problem, config))))
    assert sorted(refused) == sorted(functions)
