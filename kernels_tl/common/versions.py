"""What differs between the versions of TileLang that the project serves, 0.1.12 to 0.1.15: `prim_func` and `select`."""

from collections.abc import Callable, Iterator
from typing import Any

import tilelang.language as T
from tilelang.language.eager import builder

IS_0_1_15 = hasattr(builder, "PythonLoopFrame")  # or later


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
