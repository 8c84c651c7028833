"""Variants of the top-k kernel."""

from collections.abc import Collection

from gdn.ops.indexer.problem import TopkProblem
from gdn.problem import Problem
from tests.compile.expectations import TENSOR_CORES, Expectation
from tests.compile.variants.base import Row, Variants, problem_of, spread


def _problem(row: Row) -> Problem:
    return problem_of("topk", spread(row, bounds=("starts_dtype", "ends_dtype"), groups=("ratio", "position_dtype")))


def _code(problem: TopkProblem, backend: str, entries: Collection[str]) -> Expectation:
    # Rows in 16-byte accesses, samples by four scores, and counts whose lanes of one bin are added up by the hardware.
    loads = {"LDG.128": 2} | ({} if problem.dtype == "float32" else {"LDG.64": 1})
    return Expectation({**loads, "ATOMS.POPC.INC": 1, "UBLKPF": 1}, none_of=TENSOR_CORES)


topk = Variants(
    {
        "dtype": ["float32", "bfloat16"],
        "bounds": [(None, None), ("int32", "int32"), (None, "int64"), ("int64", None)],  # dtypes of starts and ends
        "sorted_by": ["index", "score"],
        "k": [2048, 4096],
        "num_columns": [32768, 2048, 131072],  # each compiles other tiles
        "groups": [(1, None), (4, "int64"), (3, "int32")],  # ratio and dtype of positions
    },
    _problem,
    _code,
)
