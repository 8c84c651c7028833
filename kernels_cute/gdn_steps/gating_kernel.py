"""Kernel of gating.py, which has its formulas and tensors: the arguments to compile for, and the body."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from gdn.ops.layer_step.problem import GatingParams, GatingProblem
from kernels_cute.common import build
from kernels_cute.common.memory import fake, pointer, store


def _fakes(problem: GatingProblem) -> GatingParams:
    p, rows, heads = problem, cute.sym_int(), problem.num_heads
    A_log, a, b = fake(p.A_log_dtype, heads), fake(p.a_dtype, rows, heads), fake(p.b_dtype, rows, heads)
    outputs = [fake("float32", rows, heads, last=1) for _ in range(2)]
    return GatingParams(A_log, a, b, fake(p.dt_bias_dtype, heads), *outputs, beta=Float32(1.0), threshold=Float32(20.0))


class _Gating(build.Kernel, params=GatingParams):
    def __init__(self, problem: GatingProblem, config: Any) -> None:
        self.threads, self.heads = config.threads, config.heads
        self.row_threads = problem.num_heads // config.heads

    def blocks(self, params: GatingParams) -> Any:
        # In 64 bits: tokens times heads may exceed 2**31.
        return Int32((Int64(params.a.shape[0]) * self.row_threads + self.threads - 1) // self.threads)

    @cute.kernel
    def kernel(self, params: GatingParams):
        block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        item = Int64(block) * self.threads + thread
        row = Int32(item // self.row_threads)
        head = Int32(item % self.row_threads) * self.heads
        if row < params.a.shape[0]:
            rG = cute.make_rmem_tensor(self.heads, Float32)
            rBeta = cute.make_rmem_tensor(self.heads, Float32)
            for i in cutlass.range_constexpr(self.heads):
                x = params.a[row, head + i].to(Float32) + params.dt_bias[head + i].to(Float32)
                softplus = x
                if params.beta * x <= params.threshold:
                    softplus = cute.math.log1p(cute.math.exp(params.beta * x)) / params.beta
                rG[i] = -cute.math.exp(params.A_log[head + i].to(Float32)) * softplus
                rBeta[i] = 1.0 / (1.0 + cute.math.exp(-params.b[row, head + i].to(Float32)))
            offset = Int64(row) * params.g.stride[0] + head
            store(rG, 0, self.heads, pointer(params.g, offset, 4 * self.heads))
            store(rBeta, 0, self.heads, pointer(params.beta_output, offset, 4 * self.heads))


def library(problem: GatingProblem, config: Any) -> dict[str, bytes]:
    return build.one_entry(problem.op, _Gating(problem, config), _fakes(problem))
