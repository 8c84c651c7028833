"""The variants of the delta-rule operators that run on the GPU: a pairwise cover, so that few kernels are compiled.

No CUDA here: the problems can be listed, and their kernels compiled, without a GPU.
"""

from dataclasses import replace
from typing import Any

from gdn.ops.delta_rule.inputs import chunk_problem, recurrent_problem
from gdn.ops.delta_rule.problem import ChunkProblem, RecurrentProblem
from tests.compile.pairwise import pairwise

Row = dict[str, Any]

_AXES: dict[str, Any] = {
    "heads": [(2, 2, 2), (2, 2, 4), (2, 2, 6), (2, 2, 8), (4, 2, 2)],  # query, key, value: GVA ratios 1..4, and GQA
    "head_dim": [128, 64],
    "dtype": ["bfloat16", "float16"],
    "gate": [("float32", False), (None, False), ("bfloat16", True)],  # dtype, raw
    "beta": [("float32", False), (None, False), ("bfloat16", True)],
    "cu_seqlens_dtype": ["int32", "int64"],
    "state_v_first": [False, True],
    "use_qk_l2norm": [True, False],
}

_CHUNK_STATES: list[Row] = [
    {"has_initial_state": False, "has_final_state": True},
    {"state_dtype": "bfloat16", "has_final_state": False},
    {"index_dtype": "int32", "has_mask": True},
    {"index_dtype": "int64", "state_dtype": "bfloat16", "has_final_indices": True},
]
_RECURRENT_STATES: list[Row] = [
    {},
    {"index_dtype": "int32", "has_final_indices": True},
    {"index_dtype": "int64", "state_dtype": "bfloat16"},
    {"index_dtype": "int32", "state_dtype": "bfloat16", "write_every_token": True, "has_accepted": True},
]

# The production layout: what the tests of behaviour (graphs, repeats, hard inputs) run on.
MAIN: Row = {
    "num_q_heads": 2, "num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 128, "head_v_dim": 128, "dtype": "bfloat16",
    "state_v_first": True, "index_dtype": "int32",
}  # fmt: skip
MAIN_CHUNK = chunk_problem(**MAIN, has_mask=True)
MAIN_RECURRENT = recurrent_problem(**MAIN)
MAIN_SPECULATIVE = recurrent_problem(**MAIN, write_every_token=True, has_accepted=True, has_final_indices=True)
MAIN_VERIFY = recurrent_problem(**MAIN, write_every_token=True, has_accepted=True, has_final_state=False)


def _fields(row: Row) -> Row:
    num_q_heads, num_k_heads, num_v_heads = row["heads"]
    return {
        "num_q_heads": num_q_heads, "num_k_heads": num_k_heads, "num_v_heads": num_v_heads,
        "head_k_dim": row["head_dim"], "head_v_dim": row["head_dim"], "dtype": row["dtype"],
        "gate_dtype": row["gate"][0], "use_gate": row["gate"][1],
        "beta_dtype": row["beta"][0], "use_beta_sigmoid": row["beta"][1],
        "cu_seqlens_dtype": row["cu_seqlens_dtype"], "state_v_first": row["state_v_first"],
        "use_qk_l2norm": row["use_qk_l2norm"], **row["state"],
    }  # fmt: skip


def chunk_problems() -> list[ChunkProblem]:
    cover = [chunk_problem(**_fields(row)) for row in pairwise(_AXES | {"state": _CHUNK_STATES})]
    return [*cover, replace(MAIN_CHUNK, num_q_heads=1, num_k_heads=1, num_v_heads=8)]


def recurrent_problems() -> list[RecurrentProblem]:
    return [recurrent_problem(**_fields(row)) for row in pairwise(_AXES | {"state": _RECURRENT_STATES})]


def name(problem: ChunkProblem | RecurrentProblem) -> str:
    """Short, for test ids."""
    heads = f"{problem.num_q_heads}.{problem.num_k_heads}.{problem.num_v_heads}"
    flags = [key for key, value in problem.static_fields().items() if value is True]
    gates = f"g={problem.gate_dtype}-beta={problem.beta_dtype}-index={problem.index_dtype}-cu={problem.cu_seqlens_dtype}"
    return f"{heads}-{problem.head_k_dim}-{problem.dtype}-{problem.state_dtype}-{gates}-{'+'.join(flags)}"
