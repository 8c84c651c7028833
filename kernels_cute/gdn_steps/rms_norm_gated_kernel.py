"""Kernel of rms_norm_gated.py, which has its formulas and tensors: the arguments to compile for, and the body."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64

from gdn.ops.layer_step.problem import RmsNormGatedParams, RmsNormGatedProblem
from kernels_cute.common import build
from kernels_cute.common.memory import fake, load, pointer, sigmoid, store
from kernels_cute.gdn_steps.accesses import row_parts


def _fakes(problem: RmsNormGatedProblem) -> RmsNormGatedParams:
    shape = (cute.sym_int(), problem.num_heads, problem.head_dim)
    x, z, out = [fake(dtype, *shape, last=1) for dtype in (problem.dtype, problem.z_dtype, problem.dtype)]
    return RmsNormGatedParams(x, z, fake(problem.weight_dtype, problem.head_dim, last=1), out, eps=Float32(1e-6))


class RmsNormGated(build.Kernel, params=RmsNormGatedParams):
    def __init__(self, problem: RmsNormGatedProblem, config: Any) -> None:
        self.threads, self.rows = config.threads, config.rows
        self.heads, self.dim, self.sigmoid = problem.num_heads, problem.head_dim, problem.sigmoid
        self.vector, self.lanes, self.elements = row_parts(problem)
        self.chunks = self.elements // self.vector
        self.mask = self.elements * self.lanes != self.dim
        self.block_rows = config.threads // self.lanes * config.rows

    def blocks(self, params: RmsNormGatedParams) -> Any:
        return Int32((Int64(params.x.shape[0]) * self.heads + self.block_rows - 1) // self.block_rows)

    @cute.kernel
    def kernel(self, params: RmsNormGatedParams):
        block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        lane = thread % self.lanes
        groups = cutlass.const_expr(self.threads // self.lanes)
        # The groups of a block take neighbouring rows, so that a block reads contiguous memory.
        first = Int64(block) * self.block_rows + thread // self.lanes
        count = Int64(params.x.shape[0]) * self.heads
        rX = cute.make_rmem_tensor(self.rows * self.elements, params.x.element_type)
        rZ = cute.make_rmem_tensor(self.rows * self.elements, params.z.element_type)
        rWeight = cute.make_rmem_tensor(self.elements, Float32)
        rSums = cute.make_rmem_tensor(self.rows, Float32)
        rX.fill(0.0)
        rZ.fill(0.0)
        rWeight.fill(0.0)
        for u in cutlass.range_constexpr(self.rows):
            row = first + u * groups
            if row >= count:
                row = count - 1
            self.load_row(params.x, row, lane, rX, u * self.elements)
            self.load_row(params.z, row, lane, rZ, u * self.elements)
        for c in cutlass.range_constexpr(self.chunks):
            column = (c * self.lanes + lane) * self.vector
            if column < self.dim:
                self.load_piece(params.weight, Int64(column), rWeight, c * self.vector, False)

        rSums.fill(0.0)
        for u in cutlass.range_constexpr(self.rows):
            for i in cutlass.range_constexpr(self.elements):
                value = rX[u * self.elements + i].to(Float32)
                rSums[u] += value * value
        for step in cutlass.range_constexpr(self.lanes.bit_length() - 1):
            for u in cutlass.range_constexpr(self.rows):
                rSums[u] += cute.arch.shuffle_sync_bfly(rSums[u], offset=1 << step)

        rOut = cute.make_rmem_tensor(self.elements, Float32)
        for u in cutlass.range_constexpr(self.rows):
            factor = cute.math.rsqrt(rSums[u] * (1.0 / self.dim) + params.eps)
            for i in cutlass.range_constexpr(self.elements):
                value = rX[u * self.elements + i].to(Float32)
                gate = rZ[u * self.elements + i].to(Float32)
                weighted = value * factor * rWeight[i] * sigmoid(gate)
                if cutlass.const_expr(not self.sigmoid):
                    weighted = weighted * gate
                rOut[i] = self.finish(weighted, rSums[u])
            row = first + u * groups
            if row < count:
                for c in cutlass.range_constexpr(self.chunks):
                    column = (c * self.lanes + lane) * self.vector
                    if column < self.dim:
                        target = pointer(params.out, self.offset_in_out(params.out, row) + column, 2 * self.vector)
                        store(rOut, c * self.vector, self.vector, target)

    def offset_of(self, gX: cute.Tensor, row: Int64) -> Int64:
        """Number of elements before a row of x or z."""
        token = row // self.heads
        return token * gX.stride[0] + (row - token * self.heads) * gX.stride[1]

    def offset_in_out(self, gOut: cute.Tensor, row: Int64) -> Int64:
        return row * self.dim

    def finish(self, value: Float32, squares: Float32) -> Float32:
        """The result, from the formula's value and the sum of squares of the row."""
        return value

    @cute.jit
    def load_row(self, gX: cute.Tensor, row: Int64, lane: Int32, rX: cute.Tensor, start: Constexpr):
        offset = self.offset_of(gX, row)
        for c in cutlass.range_constexpr(self.chunks):
            column = (c * self.lanes + lane) * self.vector
            is_live = Boolean(True)
            if cutlass.const_expr(self.mask):
                is_live = column < self.dim
            if is_live:
                self.load_piece(gX, offset + column, rX, start + c * self.vector, True)

    @cute.jit
    def load_piece(self, gX: cute.Tensor, offset: Int64, rX: cute.Tensor, start: Constexpr, once: Constexpr):
        # A float32 row takes two accesses: 16 bytes are known of its alignment.
        align = cutlass.const_expr(min(16, self.vector * gX.element_type.width // 8))
        load(pointer(gX, offset, align), self.vector, rX, start, once)


def library(problem: RmsNormGatedProblem, config: Any) -> dict[str, bytes]:
    return build.one_entry(problem.op, RmsNormGated(problem, config), _fakes(problem))
