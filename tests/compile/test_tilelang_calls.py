"""The compiled functions of the TileLang kernels take what their launches hand them, absent tensors left out.

As far as they can be called without a GPU; the recurrent kernel's are in test_recurrent_calls.py."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gdn.device import H100
from gdn.ops.attention.problem import SparseDecodeProblem
from gdn.ops.delta_rule.inputs import chunk_inputs, chunk_problem, chunk_tensors
from gdn.ops.indexer.problem import MqaLogitsParams, MqaLogitsProblem, PagedMqaLogitsParams, PagedMqaLogitsProblem
from gdn.problem import Problem
from tests.compile import fake_cuda
from tests.compile.attention_calls import params_of
from tests.compile.checks import slow

pytest.importorskip("tilelang", reason="needs TileLang")
pytestmark = fake_cuda.NO_GPU


def refused(module: Any, problem: Problem, config: Any, params: Any, folder: Path) -> set[str]:
    """Functions that a launch calls, all of them refused by the driver alone."""
    kernel = fake_cuda.compile_and_load(module, "tilelang", problem, config, folder)
    return set(fake_cuda.refused(module, kernel, params))


CHUNK: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {  # fields of the problem, of the configuration, functions
    "whole": ({"index_dtype": "int32", "has_mask": True, "use_gate": True, "gate_dtype": "bfloat16"}, {"split_chunks": 0}, 1),
    "either": (
        {"index_dtype": "int64", "has_final_indices": True, "has_checkpoints": True, "dtype": "float16", "beta_dtype": None},
        {"split_chunks": 2, "split_if_longest_exceeds": 150}, 5,
    ),
    "no state": ({"has_initial_state": False, "has_final_state": False, "gate_dtype": None}, {"split_chunks": 2}, 4),
    "heads of 64": ({"head_k_dim": 64, "head_v_dim": 64, "cu_seqlens_dtype": "int64"}, {"split_chunks": 0}, 2),
}  # fmt: skip


@pytest.mark.cover
@pytest.mark.parametrize("call", CHUNK)
def test_chunk(call: str, tmp_path: Path) -> None:
    chunk = importlib.import_module("kernels_tl.chunk")
    fields, changes, num_functions = CHUNK[call]
    sizes: dict[str, Any] = {"num_q_heads": 2, "num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 128, "head_v_dim": 128}
    problem = chunk_problem(**sizes | {"dtype": "bfloat16", "num_tokens": 300, "num_sequences": 2} | fields)
    config = replace(chunk.Config(), **changes)
    assert chunk.fits(problem, config, H100)
    arguments = chunk_inputs(problem, "cpu", 1, lengths=[100, 200], strided=True)
    params = chunk_tensors(problem, arguments, fake_cuda.workspace(chunk.workspace_bytes(problem, config)))
    if problem.has_checkpoints:  # contiguous, as the operator hands them on
        params = params._replace(checkpoint_slots=params.checkpoint_slots.contiguous())
    assert len(refused(chunk, problem, config, params, tmp_path)) == num_functions


LOGITS = {"num_kv_heads": 1, "relu": True, "clean": True, "out_dtype": "float32"}
BF16 = {"dtype": "bfloat16", "has_k_scale": False, "weights_dtype": None, "num_heads": 6, "head_dim": 64}
FP8 = {"dtype": "float8_e4m3fn", "has_k_scale": True, "weights_dtype": "bfloat16", "num_heads": 64, "head_dim": 128}


def _empty(dtype: str, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype))


@pytest.mark.parametrize("fields", [FP8, slow(BF16)], ids=["fp8", "bf16"])
def test_mqa_logits(fields: dict[str, Any], tmp_path: Path) -> None:
    module = importlib.import_module("kernels_tl.mqa_logits.ragged")
    problem = MqaLogitsProblem(**LOGITS | fields, packed=False, num_queries=70, num_keys=300, num_columns=300)
    p = problem
    ranges = (_empty("int32", 70), _empty("int32", 70))
    scale = _empty("float32", 300, 1) if p.has_k_scale else None
    weights = _empty(p.weights_dtype, 70, p.num_heads) if p.weights_dtype else None
    tensors = (_empty(p.dtype, 70, p.num_heads, p.head_dim), _empty(p.dtype, 300, 1, p.head_dim), scale, weights, *ranges)
    params = MqaLogitsParams(*tensors, _empty("float32", 70, 300), 0.5)
    refused(module, problem, module.default_config(problem, H100), params, tmp_path)


@pytest.mark.parametrize("fields", [FP8, slow(BF16)], ids=["fp8", "bf16"])
def test_paged_mqa_logits(fields: dict[str, Any], tmp_path: Path) -> None:
    module = importlib.import_module("kernels_tl.mqa_logits.paged")
    sizes = {"page_size": 16, "next_n": 2, "per_draft_lengths": False, "batch": 3, "max_context_len": 100}
    problem = PagedMqaLogitsProblem(**LOGITS | fields | sizes)
    p = problem
    cache = _empty("uint8", 9, 16 * (p.head_dim + 4)) if p.has_k_scale else _empty(p.dtype, 9, 16 * p.head_dim)
    weights = _empty(p.weights_dtype, 6, p.num_heads) if p.weights_dtype else None
    tensors = (_empty(p.dtype, 3, 2, p.num_heads, p.head_dim), cache, weights, _empty("int32", 3), _empty("int32", 3, 8))
    params = PagedMqaLogitsParams(*tensors, _empty("float32", 6, 100), 0.5)
    refused(module, problem, module.default_config(problem, H100), params, tmp_path)


DECODE: dict[str, tuple[dict[str, Any], int]] = {  # fields of the problem, splits
    "selected": ({"index_dtype": "int64", "has_topk_length": True, "num_tokens": 3, "num_sequences": 2, "k": 100}, 1),
    "split": (
        {"dtype": "float16", "num_heads": 6, "num_kv_heads": 2, "num_tokens": 3, "num_sequences": 2, "k": 300, "has_gate": True},
        4,
    ),
    "dense": ({"index_dtype": None, "dense": True, "num_tokens": 2, "num_sequences": 2, "k": 128}, 2),
    "one of everything": ({"num_heads": 1, "num_tokens": 1, "num_sequences": 1, "k": 1, "has_gate": True}, 1),
}  # fmt: skip


@pytest.mark.parametrize("call", [name if name == "one of everything" else slow(name) for name in DECODE])
def test_sparse_decode(call: str, tmp_path: Path) -> None:
    module = importlib.import_module("kernels_tl.attention.decode")
    fields, splits = DECODE[call]
    fixed = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 128, "dtype": "bfloat16", "block_size": 16, "index_dtype": "int32"}
    flags = {"has_topk_length": False, "has_gate": False, "heads_adjacent": False, "rows_aligned": True, "dense": False}
    p = SparseDecodeProblem(**fixed | flags | fields)
    config = module.Config(splits, 2)
    assert module.refusal(p) is None and module.fits(p, config, H100)
    params = params_of(p, module.workspace_bytes(p, config))
    # The first function fails at its launch: with parts, the merge is called all the same.
    assert refused(module, p, config, params, tmp_path) == {"sparse_decode"} | ({"merge_parts"} if splits > 1 else set())
