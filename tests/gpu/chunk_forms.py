"""The forms in which chunk kernels run: a backend and the fields that choose the form, with lengths around the form's borders."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from gdn.ops.delta_rule.inputs import chunk_problem
from gdn.ops.delta_rule.problem import ChunkProblem
from tests.gpu import cases
from tests.gpu.conftest import Force

SEGMENT = 2  # chunks, so 128 tokens

Options = dict[str, Any]  # of chunk_inputs
PLAIN: Options = {"lengths": [65, 0, 1, 63, 64, 200, 0, 130], "null_sequences": [4]}
ITEMS: Options = {"lengths": [65, 0, 1, 63, 64, 200, 0, 130, 321, 64, 0], "null_sequences": [4, 7], "padded_tokens": 70}
# 0 to 6 chunks and some: no chunk, and each set's first chunk, is the last one somewhere.
FOURS: Options = {
    "lengths": [0, 1, 63, 64, 65, 128, 129, 192, 200, 256, 257, 0, 320, 384, 700], "null_sequences": [6], "padded_tokens": 200,
}  # fmt: skip
# Around the borders of segments: nothing, one token, one segment and a token less or more, several.
SEGMENTS: Options = {"lengths": [0, 1, 127, 128, 129, 64, 256, 700, 0, 257, 384], "null_sequences": [6], "padded_tokens": 200}
TILELANG_SEGMENTS: Options = {
    "lengths": [0, 1, 127, 128, 129, 0, 255, 256, 257, 70, 640, 1, 900], "null_sequences": [4, 8], "padded_tokens": 70,
}  # fmt: skip


@dataclass(frozen=True)
class Form:
    backend: str
    ragged: Options
    fields: dict[str, int] | None = None  # of the configuration; None: what the operator takes
    not_stored: int = 3  # a sequence whose final state has no slot, where final states have slots of their own


def _four_sm(clusters: int, groups: int) -> Form:
    fields = {"stages": 3, "split_chunks": 0, "prefetch": 0, "num_persistent_clusters": 0}
    return Form("cute", FOURS, fields | {"num_four_sm_clusters": clusters, "max_l2_ring_groups": groups}, 7)


def _key_head(clusters: int) -> Form:
    fields = {"split_chunks": 0, "prefetch": 0, "stages": 2, "state_heads": 2, "num_persistent_clusters": clusters}
    return Form("cute", ITEMS, fields)


FORMS: dict[str, Form] = {
    "cute": Form("cute", PLAIN),
    "tilelang": Form("tilelang", PLAIN),
    # CuTe: a cluster of two SMs per work tile, or clusters that take one work tile after the other.
    "clusters": Form("cute", PLAIN, {"split_chunks": 0}),
    **{f"items-{n}": Form("cute", ITEMS, {"split_chunks": 0, "num_persistent_clusters": n}) for n in (1, 3)},
    # Two state heads of a key head a cluster.
    **{f"key-head-{n}": _key_head(n) for n in (1, 3, 66)},
    # Most sequences and heads in clusters of four SMs, and next to them: all in fours, and more of them than run at once; some in
    # either form; as many in fours as the GPU has room for; one alone in a four.
    "fours": _four_sm(1, 1),
    "both": _four_sm(7, 1000),
    "full": _four_sm(30, 1000),
    "ring": _four_sm(1, 1000),
    # TileLang in one launch, with clusters of two to four blocks.
    **{f"tilelang-{n}": Form("tilelang", ITEMS, {"split_chunks": 0, "cluster_size": n}) for n in (2, 3, 4)},
    # Sequences in segments of this many chunks.
    **{f"segments-{n}": Form("cute", SEGMENTS, {"split_chunks": n}, 7) for n in (1, SEGMENT, 3, 16)},
    **{f"tilelang-segments-{n}": Form("tilelang", TILELANG_SEGMENTS, {"split_chunks": n}) for n in (1, SEGMENT, 3, 7, 16)},
}
DEFAULTS = ("cute", "tilelang")
FOUR_SM = ("fours", "both", "full", "ring")
ONE_LAUNCH = ("tilelang-2", "tilelang-3", "tilelang-4")
IN_SEGMENTS = (f"segments-{SEGMENT}", f"tilelang-segments-{SEGMENT}")


def take(name: str, force: Force, **changes: int) -> Form:
    """The chunk operator runs in this form from now on. changes: of its fields."""
    form = FORMS[name]
    if form.fields is not None:
        force(**form.fields | changes)
    return form


def _shares_keys(problem: ChunkProblem) -> bool:
    groups = [problem.num_state_heads // heads for heads in (problem.num_q_heads, problem.num_k_heads)]
    return all(group % 2 == 0 for group in groups)


PROBLEMS = cases.chunk_problems()
WIDE = [problem for problem in PROBLEMS if problem.head_v_dim == 128]  # four SMs, and TileLang's one launch, serve these
KEY_HEAD = [problem for problem in WIDE if _shares_keys(problem)]
OWN_STATES = chunk_problem(
    head_k_dim=128, head_v_dim=128, dtype="bfloat16", has_mask=True, state_v_first=True, state_dtype="bfloat16",
    use_qk_l2norm=False,
)  # fmt: skip

# Head dims that the kernel computes as another: up to 128 padded, above as the recurrence.
HEAD_DIMS = [4, 12, 36, 60, 68, 100, 124, 132, 192, 256]
HEAD_DIM_STATES: list[dict[str, Any]] = [
    {"index_dtype": "int32", "has_mask": True, "state_v_first": True},
    {"has_initial_state": False, "has_final_state": False, "dtype": "float16"},
    {"index_dtype": "int64", "state_dtype": "bfloat16", "has_final_indices": True, "has_mask": True, "use_qk_l2norm": False},
    {"has_mask": True, "state_dtype": "bfloat16", "state_v_first": True, "gate_dtype": "bfloat16", "use_gate": True},
    {"has_initial_state": False, "gate_dtype": None, "cu_seqlens_dtype": "int64", "num_q_heads": 4, "num_v_heads": 2},
    {"index_dtype": "int32", "state_v_first": True, "beta_dtype": "bfloat16", "use_beta_sigmoid": True, "num_v_heads": 6},
]


def of_head_dim(dim: int, **fields: Any) -> ChunkProblem:
    return chunk_problem(**{"dtype": "bfloat16", "head_k_dim": dim, "head_v_dim": dim, **fields})


def each(names: Iterable[str], problems: Iterable[ChunkProblem]) -> list[Any]:
    """Parameters: every problem in every form."""
    problems = list(problems)
    return [pytest.param(name, problem, id=f"{name}-{cases.name(problem)}") for name in names for problem in problems]
