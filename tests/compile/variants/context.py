"""Variants of the kernels between the passes of context parallel."""

from collections.abc import Collection, Sequence
from typing import Any

from gdn.ops.context.problem import ContextPartsProblem, ContextStartProblem, ContextTotalProblem
from gdn.problem import Problem
from tests.compile.expectations import NO_REUSE, TENSOR_CORES, Expectation
from tests.compile.variants.base import Row, Variants, example

_COMPOSING_AXES: dict[str, Sequence[Any]] = {
    "num_state_heads": [32, 6],
    "dims": [(128, 128), (64, 64), (64, 128), (128, 64)],  # K, V
    "state_v_first": [False, True],
}
_INDICES = ["int32", "int64", None]


def _composing(row: Row) -> dict[str, Any]:
    K, V = row["dims"]
    return {"head_k_dim": K, "head_v_dim": V, **{name: row[name] for name in ("num_state_heads", "state_v_first")}}


def _total_problem(row: Row) -> Problem | None:
    is_first, has_summaries = row["rank"]
    problem: Problem = example("context_total", **_composing(row), **row["pool"], is_first=is_first, has_summaries=has_summaries)
    return problem if is_first or row["pool"]["state_dtype"] is None else None


def _pool(dtype: str | None, index: str | None, has_mask: bool) -> Row:
    return {"state_dtype": dtype, "index_dtype": index, "has_mask": has_mask}


def _start_problem(row: Row) -> Problem | None:
    final_dtype, index_dtype, final_index_dtype = row["final"]
    final = {"final_dtype": final_dtype, "index_dtype": index_dtype, "final_index_dtype": final_index_dtype}
    has_segments, is_cut, ends_here = row["form"]
    if final_dtype is None and not has_segments or ends_here and index_dtype is None:
        return None  # nothing to do; the states are returned as they are
    problem: Problem = example(
        "context_start", **_composing(row), **final, has_segments=has_segments, is_cut=is_cut, ends_here=ends_here
    )
    return problem


def _products(problem: Any) -> Expectation:
    """A piece of P once: 32 entries of the sum for each of a thread's values. No product by itself, which would be rounded."""
    values = 4 * problem.head_k_dim // 16
    none_of = (*TENSOR_CORES, "ATOMS", "FMUL")
    # X's entries and P's by fours.
    return Expectation({"FFMA": 32 * values, "LDGSTS": 4, "LDS.128": 8 * (4 + values // 4)}, none_of=none_of)


def _total_code(problem: ContextTotalProblem, backend: str, entries: Collection[str]) -> Expectation:
    return _products(problem) if problem.has_summaries else Expectation({"STG.E.128": 1}, none_of=(*TENSOR_CORES, "FFMA"))


def _start_code(problem: ContextStartProblem, backend: str, entries: Collection[str]) -> Expectation:
    return Expectation({"LDG": 1}, none_of=(*NO_REUSE, "FFMA")) if problem.ends_here else _products(problem)


def _parts_code(problem: ContextPartsProblem, backend: str, entries: Collection[str]) -> Expectation:
    return Expectation({"STG": 2}, none_of=NO_REUSE)


context_parts = Variants(
    {
        "cu_seqlens_dtype": _INDICES,
        "index_dtype": _INDICES,
        "has_segments": [False, True],
    },
    lambda row: example("context_parts", **row),
    _parts_code,
)
context_total = Variants(
    {
        **_COMPOSING_AXES,
        "rank": [(True, True), (False, True), (True, False)],  # is the first, has summaries
        "pool": [
            _pool(None, None, False),
            _pool("float32", None, False),
            _pool("float32", "int32", True),
            _pool("bfloat16", "int64", False),
        ],
    },
    _total_problem,
    _total_code,
)
context_start = Variants(
    {
        **_COMPOSING_AXES,
        # Writes the states before segments, of several ones, ends here.
        "form": [(True, True, False), (True, False, False), (False, False, False), (False, False, True)],
        "final": [
            (None, None, None),
            ("float32", None, None),
            ("float32", "int32", "int64"),
            ("float32", "int64", None),
            ("bfloat16", "int64", "int32"),
        ],
    },
    _start_problem,
    _start_code,
)
