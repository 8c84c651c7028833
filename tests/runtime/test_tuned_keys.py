"""The tune key of every problem: what changes the best tiles is in it, and what does not is not."""

import dataclasses
from typing import Any

import pytest

from gdn.ops.delta_rule.problem import ChunkProblem, RecurrentProblem
from gdn.ops.indexer.problem import MqaLogitsProblem, PagedMqaLogitsProblem
from gdn.problem import Problem
from tests.problems import KINDS


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_field_decides(kind: Any) -> None:
    names = {f.name for f in dataclasses.fields(kind)}
    sizes = {f.name for f in dataclasses.fields(kind) if f.metadata.get("size")}
    assert kind.tune_names() and set(kind.tune_names()) <= names - sizes


# What serving code varies without a thought for tiles.
_NEVER = ("cu_seqlens_dtype", "index_dtype", "gate_dtype", "beta_dtype", "weights_dtype", "weight_dtype", "slot_dtype")
_FLAGS = ("has_mask", "has_checkpoints", "has_final_indices", "has_accepted", "has_rounding", "use_gate", "use_qk_l2norm", "relu")
_FLAGS += ("use_beta_sigmoid", "clean", "packed", "per_draft_lengths", "silu", "sigmoid", "has_initial_state", "has_final_state")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_index_and_gate_dtypes_masks_and_flags_are_not_in_it(kind: Any) -> None:
    assert not set(kind.tune_names()) & {*_NEVER, *_FLAGS}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (ChunkProblem, ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "dtype", "state_dtype", "state_v_first")),
        (RecurrentProblem, ("num_v_heads", "state_dtype", "state_v_first", "write_every_token", "has_parent")),
        (MqaLogitsProblem, ("num_heads", "num_kv_heads", "head_dim", "dtype", "out_dtype")),
        (PagedMqaLogitsProblem, ("num_heads", "head_dim", "dtype", "out_dtype", "page_size", "next_n")),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_heads_dims_layouts_and_large_dtypes_are_in_it(kind: Any, names: tuple[str, ...]) -> None:
    assert set(names) <= set(kind.tune_names())


def test_problems_of_one_tune_key() -> None:
    problem = MqaLogitsProblem(16, 1, 128, "bfloat16", False, "bfloat16", True, True, "float32", False, 4096, 32768, 32768)
    other = dataclasses.replace(problem, weights_dtype="float32", relu=False, packed=True, num_queries=7)
    assert other.tune_key() == problem.tune_key() and other.static_key() != problem.static_key()
    assert problem.tune_key() == "num_heads=16,num_kv_heads=1,head_dim=128,dtype=bfloat16,out_dtype=float32"
    assert dataclasses.replace(problem, out_dtype="bfloat16").tune_key() != problem.tune_key()
    assert isinstance(problem, Problem) and problem.tune_fields()["num_heads"] == 16
