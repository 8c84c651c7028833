"""What TileLang 0.1.12 makes of a kernel in silence, looked for in the kernels before TileLang lowers them."""

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from gdn.device import H100
from gdn.runtime import registry
from tests.compile import variants

pytest.importorskip("tilelang", reason="needs TileLang")

import tilelang.language as T
import tvm
from tvm import tirx

from kernels_tl.common import build
from kernels_tl.common.versions import IS_0_1_12, matrix_type, part_of_row, prim_func

OPERATORS = [op.name for op in registry.every() if "tilelang" in op.modules]


def visited(statement: Any, kind: type) -> Iterator[Any]:
    found: list[Any] = []
    tirx.stmt_functor.post_order_visit(statement, lambda node: found.append(node) if isinstance(node, kind) else None)
    yield from found


def changed_conditions(function: Any) -> list[str]:
    """Conditions of two ifs, one after the other, that the body of the first changes: before 0.1.15 the second is not asked."""
    found = []
    for block in visited(function.body, tirx.SeqStmt):
        for one, other in zip(list(block.seq), list(block.seq)[1:], strict=False):
            ifs = isinstance(one, tirx.IfThenElse) and isinstance(other, tirx.IfThenElse)
            if ifs and tvm.ir.structural_equal(one.condition, other.condition):
                read = [load.buffer.data for load in visited(one.condition, tirx.BufferLoad)]
                written = [store.buffer.data for store in visited(one.then_case, tirx.BufferStore)]
                if any(a.same_as(b) for a in read for b in written):
                    found.append(str(one.condition))
    return found


def rows_with_strides(function: Any) -> list[str]:
    """Global buffers with strides of which a bulk copy takes a part of one row: 0.1.12 ignores the strides."""
    found = []
    for call in visited(function.body, tirx.Call):
        if str(getattr(call.op, "name", "")) != "tl.tileop.tma_copy":
            continue
        for region in call.args[:2]:
            load, *sizes = (region.args[0], *region.args[2:])
            is_row = len(sizes) > 1 and all(str(size) == "1" for size in sizes[:-1])
            if is_row and load.buffer.scope() == "global" and load.buffer.strides:
                found.append(load.buffer.name)
    return found


def traced(op: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Any]]:
    """The functions of an operator's cover, each with its variant."""
    functions: list[Any] = []
    monkeypatch.setattr(build, "library", lambda function, **_: functions.append(function) or b"")
    module: Any = importlib.import_module(registry.operator(op).modules["tilelang"])
    for problem, config in variants.cover(op, module):
        functions.clear()
        module.compile(problem, config or module.default_config(problem, H100))
        yield from ((f"{function.attrs['global_symbol']} of {problem}, {config}", function) for function in functions)


@pytest.mark.low_end
@pytest.mark.cover
@pytest.mark.parametrize("op", OPERATORS)
def test_kernels(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count, failed = 0, []
    for name, function in traced(op, monkeypatch):
        count += 1
        failed += [f"{name}: {found}" for found in changed_conditions(function)]
        failed += [f"{name}: {found}" for found in rows_with_strides(function) if IS_0_1_12]
    assert count and not failed, "\n".join(failed)


def test_what_is_looked_for_is_found() -> None:
    def kernel(*, changes: bool, plain_row: bool) -> Any:
        stride = T.dynamic("stride", "int64")

        @prim_func
        def function():
            tensors = build.parameters(
                x=T.StridedTensor((T.dynamic("n"), 64), (stride, 1), "float32"),
                y=matrix_type(T.dynamic("m"), 64, T.dynamic("other", "int64"), "float32"),
            )
            with T.Kernel(1, threads=32):
                shared = T.alloc_shared((64,), "float32")
                full = T.alloc_barrier([32])
                live = T.alloc_var("bool", init=True)
                if live:
                    tensors.x[0, 0] = 1.0
                    if changes:
                        live = tensors.x[1, 0] > 0
                if live:
                    tensors.x[2, 0] = 1.0
                if plain_row:
                    T.tma_copy(tensors.x[3, 0:64], shared, barrier=full[0])
                else:
                    T.tma_copy(part_of_row(tensors.y, 3, stride, 0, 64), shared, barrier=full[0])

        return function

    wrong, right = kernel(changes=True, plain_row=True), kernel(changes=False, plain_row=False)
    assert changed_conditions(wrong) == ["live[0]"] and changed_conditions(right) == []
    assert rows_with_strides(wrong) == ["x"]
    assert rows_with_strides(right) == ([] if IS_0_1_12 else ["y"])
