"""Decay and write strength from the raw gates:

    g = -exp(A_log) * softplus(a + dt_bias)        softplus(x) = log1p(exp(beta * x)) / beta while beta * x <= threshold
    beta_output = sigmoid(b)

Tensors: A_log, dt_bias [HV]; a, b [L, HV] of any strides; g, beta_output [L, HV] float32 contiguous: see
`gdn.problems.GatingParams`. A thread computes `heads` neighbouring heads of a row; the inputs are read element by element (their
strides are free and neighbours share sectors), the outputs are written at once.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from gdn.device import DeviceSpec
from gdn.problems import GatingParams, GatingProblem
from kernels_cute.common import build
from kernels_cute.common.memory import FLOAT_DTYPES, fake, pointer, store, unserved


@dataclass(frozen=True)
class Config:
    threads: int  # threads of a block
    heads: int  # neighbouring heads of a thread; 4 are one 16-byte store


def refusal(problem: GatingProblem) -> str | None:
    p = problem
    dtypes = {"a": p.a_dtype, "b": p.b_dtype, "A_log": p.A_log_dtype, "dt_bias": p.dt_bias_dtype}
    few = None if p.num_heads > 0 else f"requires at least one head, got {p.num_heads}"
    return unserved({FLOAT_DTYPES: dtypes}) or few


def default_config(problem: GatingProblem, device: DeviceSpec) -> Config:
    """16-byte stores where the number of heads allows them and there is enough work, else one thread per gate."""
    elements = problem.num_tokens * problem.num_heads
    wide = [heads for heads in (4, 2) if problem.num_heads % heads == 0 and elements >= heads * 256 * device.num_sms]
    return Config(128, wide[0] if wide else 1)


def _fakes(problem: GatingProblem) -> GatingParams:
    p, rows, heads = problem, cute.sym_int(), problem.num_heads
    A_log, a, b = fake(p.A_log_dtype, heads), fake(p.a_dtype, rows, heads), fake(p.b_dtype, rows, heads)
    outputs = [fake("float32", rows, heads, last=1) for _ in range(2)]
    return GatingParams(A_log, a, b, fake(p.dt_bias_dtype, heads), *outputs, beta=Float32(1.0), threshold=Float32(20.0))


class _Gating(build.Kernel, params=GatingParams):
    def __init__(self, problem: GatingProblem, config: Config) -> None:
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


fits, configs, compile, launch, workspace_bytes = build.step(
    _Gating, _fakes, Config, lambda p, config: p.num_heads % config.heads == 0, threads=(64, 128, 256), heads=(1, 2, 4)
)
