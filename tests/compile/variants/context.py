"""Variants of the kernels between the passes of context parallel."""

from collections.abc import Collection, Sequence
from typing import Any

from gdn.ops.context.problem import ContextStartProblem, ContextTotalProblem
from gdn.problem import Problem
from tests.compile.expectations import NO_REUSE, TENSOR_CORES, Expectation
from tests.compile.variants.base import HEAD_DIMS, Row, Variants, always, example, problem_of, spread

_COMPOSING_AXES: dict[str, Sequence[Any]] = {
    "num_state_heads": [32, 6],
    "dims": [(128, 128), (64, 64), (64, 128), (128, 64)],  # K, V
    "state_v_first": [False, True],
}
_INDICES = ["int32", "int64", None]


def _total_problem(row: Row) -> Problem | None:
    rank, pool = ("is_first", "has_summaries"), ("state_dtype", "index_dtype", "has_mask")
    fields = spread(row, dims=HEAD_DIMS, rank=rank, pool=pool)
    return problem_of("context_total", fields) if fields["is_first"] or fields["state_dtype"] is None else None


def _start_problem(row: Row) -> Problem | None:
    form, final = ("has_segments", "is_cut", "ends_here"), ("final_dtype", "index_dtype", "final_index_dtype")
    fields = spread(row, dims=HEAD_DIMS, form=form, final=final)
    if fields["final_dtype"] is None and not fields["has_segments"] or fields["ends_here"] and fields["index_dtype"] is None:
        return None  # nothing to do; the states are returned as they are
    return problem_of("context_start", fields)


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


context_parts = Variants(
    {
        "cu_seqlens_dtype": _INDICES,
        "index_dtype": _INDICES,
        "has_segments": [False, True],
    },
    lambda row: example("context_parts", **row),
    always(Expectation({"STG": 2}, none_of=NO_REUSE)),
)
context_total = Variants(
    {
        **_COMPOSING_AXES,
        "rank": [(True, True), (False, True), (True, False)],  # is the first, has summaries
        # Dtype of the states, of their indices, and whether there is a mask.
        "pool": [(None, None, False), ("float32", None, False), ("float32", "int32", True), ("bfloat16", "int64", False)],
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
