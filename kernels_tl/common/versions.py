"""What differs between the versions of TileLang that the project serves, 0.1.12 to 0.1.15: the tracer, `select`, and matrices.

Before 0.1.15 two `if` with the same condition, one after the other, become one: the body of the first may not change what the
condition reads (`tests/compile/test_tilelang_versions.py` looks for that).
"""

from collections.abc import Callable, Iterator
from typing import Any

import tilelang
import tilelang.language as T
from tilelang.language.eager import builder

IS_0_1_15 = hasattr(builder, "PythonLoopFrame")  # or later
IS_0_1_12 = tilelang.__version__.startswith("0.1.12")


class _Builder(builder.Builder):
    """The tracer of an earlier version, which knows loops of the kernel alone, made to know Python's loops too."""

    def ctx_for(self, it: Any) -> Iterator[Any]:
        if not isinstance(it, (tuple, enumerate, zip)):
            yield from super().ctx_for(it)
            return
        for element in it:
            bound = dict(self.name_inside_frame)
            yield element
            self.name_inside_frame = bound  # what the body binds, its next pass binds anew


def _traced(function: Callable[[], None]) -> Any:
    tracer = _Builder()
    with tracer.prim_func(function.__name__):
        builder.mutate(function).gen(tracer)()
    return tracer.get()


def prim_func(function: Callable[[], None]) -> Any:
    """T.prim_func of a function without parameters, which `build.parameters` declares. Loops over tuples are Python's.

    The body of a loop over a range is traced once and runs as a loop of the kernel. That of a loop over a tuple, of buffers for
    example, is traced once for each element. TileLang does so from 0.1.15 on.
    """
    return T.prim_func(function) if IS_0_1_15 else _traced(function)


def select(condition: Any, value: Any, other: Any) -> Any:
    """The value where the condition holds, else the other one; both are evaluated.

    Before 0.1.15 the CUDA source of T.Select does not compile where it is vectorized.
    """
    return T.Select(condition, value, other) if IS_0_1_15 else T.if_then_else(condition, value, other)


# A matrix in global memory of any row stride, of which bulk copies take parts of a row. In 0.1.12 such a copy takes the rows for
# rows without a gap: there the kernel takes all rows as one line (`launch.as_line`), and counts the stride itself.


def matrix_type(rows: Any, columns: int, stride: Any, dtype: str) -> Any:
    return T.Tensor((T.dynamic("line"),), dtype) if IS_0_1_12 else T.StridedTensor((rows, columns), (stride, 1), dtype)


def part_of_row(matrix: Any, row: Any, stride: Any, begin: Any, count: int) -> Any:
    """Columns [begin, begin + count) of a row. stride: between rows, as the matrix has it."""
    if not IS_0_1_12:
        return matrix[row, begin : begin + count]
    first = T.cast(row, "int64") * stride + begin
    return matrix[first : first + count]
