"""Operands, products and registers that the warp roles of the chunk kernels share.

Shared-memory tiles are pieces of 64 columns, [rows][64] of 16-bit elements in 128-byte rows swizzled over 8 rows; a wider tile is
its pieces one after the other. `address` is the same map for accesses that state addresses themselves.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from kernels_cute.chunk.shape import CHUNK, ROW_BYTES, WARPGROUP
from kernels_cute.common import ptx


def by_rows(dtype: Any, rows: int, columns: int, *outer: int) -> cute.ComposedLayout:
    """(rows, columns, *outer): an operand whose contraction runs along columns, and the copy engine's target."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    return cute.tile_to_shape(atom, (rows, columns, *outer), order=tuple(range(2 + len(outer))))


def by_columns(dtype: Any, rows: int, columns: int, *outer: int) -> cute.ComposedLayout:
    """(columns, rows, *outer): the bytes of `by_rows`, as an operand whose contraction runs along rows."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, dtype)
    return cute.tile_to_shape(atom, (columns, rows, *outer), order=(1, 0, *range(2, 2 + len(outer))))


def address(piece: Any, row: Any, unit: Any) -> Any:
    """Address of the 16 bytes `unit` (8 columns) of a row; piece: the piece's first byte."""
    return piece + row * ROW_BYTES + ((unit ^ (row & 7)) << 4)


def tiled_mma(dtype: Any, columns: int, by_columns: bool = False) -> Any:
    """The tiled m64 x columns x k16 instruction of one warpgroup, with A in registers; by_columns: of B."""
    major = OperandMajorMode.MN if by_columns else OperandMajorMode.K
    source = warpgroup.OperandSource.RMEM
    return cute.make_tiled_mma(warpgroup.MmaF16BF16Op(dtype, Float32, (64, columns, 16), source, OperandMajorMode.K, major))


def smem_mma(dtype: Any, columns: int) -> Any:
    """The tiled instruction of `tiled_mma` with A in shared memory too, by rows."""
    major = OperandMajorMode.K
    op = warpgroup.MmaF16BF16Op(dtype, Float32, (64, columns, 16), warpgroup.OperandSource.SMEM, major, major)
    return cute.make_tiled_mma(op)


def smem_operand_a(mma: Any, field: Any, layout: Any) -> Any:
    """A shared-memory A operand of smem_mma, (MMA, rows, k steps, *outer)."""
    thread = mma.get_slice(0)
    return mma.make_fragment_A(thread.partition_A(field.get_tensor(layout.outer, swizzle=layout.inner)))


def smem_operand_b(mma: Any, field: Any, layout: Any) -> Any:
    """A shared-memory B operand, (MMA, columns, k steps, *outer)."""
    thread = mma.get_slice(0)
    return mma.make_fragment_B(thread.partition_B(field.get_tensor(layout.outer, swizzle=layout.inner)))


def accumulators(mma: Any, columns: int) -> Any:
    return cute.make_rmem_tensor(mma.partition_shape_C((64, columns)), Float32)


def register_operand(dtype: Any, mma: Any, columns: int) -> tuple[Any, Any]:
    """An A operand of 64 rows in registers, and its words."""
    operand = cute.make_rmem_tensor(mma.partition_shape_A((64, columns)), dtype)
    return operand, cute.recast_tensor(operand, Int32)


def multiply(mma: Any, sums: Any, left: Any, right: Any, clear: bool) -> None:
    """sums (+)= left right; operands (MMA, rows, k steps)."""
    for step in range(cute.size(right, mode=[2])):
        multiply_step(mma, sums, left, right, step, clear and step == 0)


def multiply_step(mma: Any, sums: Any, left: Any, right: Any, step: int, clear: bool) -> None:
    """One k step of 16."""
    mma.set(warpgroup.Field.ACCUMULATE, not clear)
    cute.gemm(mma, sums, left[None, None, step], right[None, None, step], sums)


@cute.jit
def select(condition: Any, value: Any, other: Any):
    result = other
    if condition:
        result = value
    return result


def exp2_clamped(exponent: Any) -> Any:
    """2 ** exponent; above the diagonal, where the result is thrown away, the exponent may be positive."""
    return cute.math.exp2(cute.arch.fmin(exponent, Float32(0.0)), fastmath=True)


def load_factors(vector: Any) -> list[Any]:
    """A row of vectors, as pairs for the columns of this lane."""
    return [ptx.load_pair(vector + n * 32) for n in range(CHUNK // 8)]


def sync_warpgroup(barrier: Any) -> None:
    cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)


def set_registers(spec: Any, count: int) -> None:
    """Raises or lowers a thread's registers from those at launch: 65536 over the threads, in steps of 8."""
    if count > 65536 // spec.threads // 8 * 8:
        cute.arch.setmaxregister_increase(count)
    else:
        cute.arch.setmaxregister_decrease(count)
