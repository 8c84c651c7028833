"""Kernel of add_rms_norm.py, which has its formulas and tensors: the arguments to compile for, and the body."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from gdn.ops.layer_step.problem import AddRmsNormParams, AddRmsNormProblem
from kernels_cute.common import build
from kernels_cute.common.memory import fake, load, pointer, store
from kernels_cute.gdn_steps.accesses import VECTOR, row_chunks


def _fakes(problem: AddRmsNormProblem) -> AddRmsNormParams:
    added = problem.dtype if problem.has_residual else None
    shape = (cute.sym_int(), problem.dim)
    x, residual, normed, total = [fake(dtype, *shape, last=1) for dtype in (problem.dtype, added, problem.dtype, added)]
    weight, scale = [fake(dtype, problem.dim, last=1) for dtype in (problem.weight_dtype, problem.layer_scale_dtype)]
    return AddRmsNormParams(x, residual, weight, scale, normed, total, eps=Float32(1e-6))


class _AddRmsNorm(build.Kernel, params=AddRmsNormParams):
    def __init__(self, problem: AddRmsNormProblem, config: Any) -> None:
        self.threads, self.rows, self.dim = config.threads, config.rows, problem.dim
        self.gain_offset, self.warps = float(problem.zero_centred), config.threads // 32
        self.chunks = row_chunks(problem, config.threads)
        self.elements = self.chunks * VECTOR  # of a row, in a thread

    def blocks(self, params: AddRmsNormParams) -> Any:
        return Int32((params.x.shape[0] + self.rows - 1) // self.rows)

    @cute.kernel
    def kernel(self, params: AddRmsNormParams):
        first, thread = Int64(cute.arch.block_idx()[0]) * self.rows, cute.arch.thread_idx()[0]
        count = Int64(params.x.shape[0])
        dtype = params.x.element_type
        rSum = self.load_rows(params.x, dtype, first, count, thread)
        rGain = self.load_rows(params.weight, Float32, Int64(0), Int64(1), thread)
        if cutlass.const_expr(params.residual is not None):
            rResidual = self.load_rows(params.residual, dtype, first, count, thread)
            if cutlass.const_expr(params.layer_scale is not None):
                rScale = self.load_rows(params.layer_scale, Float32, Int64(0), Int64(1), thread)
            for i in cutlass.range_constexpr(self.rows * self.elements):
                added = rSum[i].to(Float32)
                if cutlass.const_expr(params.layer_scale is not None):
                    added = added * (1.0 + rScale[i % self.elements])
                rSum[i] = (added + rResidual[i].to(Float32)).to(dtype)
            self.store_rows(rSum, params.total, first, count, thread)
        rFactors = self.factors(rSum, thread, params.eps)
        for i in cutlass.range_constexpr(self.rows * self.elements):
            gain = rGain[i % self.elements] + self.gain_offset
            rSum[i] = (rSum[i].to(Float32) * rFactors[i // self.elements] * gain).to(dtype)
        self.store_rows(rSum, params.normed, first, count, thread)

    @cute.jit
    def factors(self, rSum: cute.Tensor, thread: Int32, eps: Float32):
        """1 / sqrt(mean(s * s) + eps) of every row, in all threads."""
        sSums = cutlass.utils.SmemAllocator().allocate_tensor(Float32, cute.make_layout(self.warps * self.rows), 16)
        rSquares = cute.make_rmem_tensor(self.rows, Float32)
        rSquares.fill(0.0)
        for i in cutlass.range_constexpr(self.rows * self.elements):
            rSquares[i // self.elements] += rSum[i].to(Float32) * rSum[i].to(Float32)
        for step in cutlass.range_constexpr(5):
            for u in cutlass.range_constexpr(self.rows):
                rSquares[u] += cute.arch.shuffle_sync_bfly(rSquares[u], offset=1 << step)
        if thread % 32 == 0:
            for u in cutlass.range_constexpr(self.rows):
                sSums[u * self.warps + thread // 32] = rSquares[u]
        cute.arch.sync_threads()
        for u in cutlass.range_constexpr(self.rows):
            total = Float32(0.0)
            for w in cutlass.range_constexpr(self.warps):
                total += sSums[u * self.warps + w]
            rSquares[u] = cute.math.rsqrt(total * (1.0 / self.dim) + eps)
        return rSquares

    @cute.jit
    def load_rows(self, gX: cute.Tensor, dtype: Any, first: Int64, count: Int64, thread: Int32):
        """This thread's part of the block's rows [L, D], or of a vector [D]; zeros past D."""
        once = cutlass.const_expr(cute.rank(gX) == 2)
        rows = cutlass.const_expr(self.rows if once else 1)
        align = cutlass.const_expr(min(16, VECTOR * gX.element_type.width // 8))
        rX = cute.make_rmem_tensor(rows * self.elements, dtype)
        rX.fill(0.0)
        for u in cutlass.range_constexpr(rows):
            row = cutlass.min(first + u, count - 1)
            for c in cutlass.range_constexpr(self.chunks):
                column = (c * self.threads + thread) * VECTOR
                if column < self.dim:
                    source = pointer(gX, row * gX.stride[0] + column, align)
                    load(source, VECTOR, rX, u * self.elements + c * VECTOR, once)
        return rX

    @cute.jit
    def store_rows(self, rX: cute.Tensor, gX: cute.Tensor, first: Int64, count: Int64, thread: Int32):
        for u in cutlass.range_constexpr(self.rows):
            for c in cutlass.range_constexpr(self.chunks):
                column = (c * self.threads + thread) * VECTOR
                if first + u < count and column < self.dim:
                    target = pointer(gX, (first + u) * self.dim + column, 2 * VECTOR)
                    store(rX, u * self.elements + c * VECTOR, VECTOR, target)


def library(problem: AddRmsNormProblem, config: Any) -> dict[str, bytes]:
    return build.one_entry(problem.op, _AddRmsNorm(problem, config), _fakes(problem))
