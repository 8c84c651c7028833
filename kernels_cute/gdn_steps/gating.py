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

launch, workspace_bytes = build.launch, build.no_workspace


@dataclass(frozen=True)
class Config:
    threads: int  # threads of a block
    heads: int  # neighbouring heads of a thread; 4 are one 16-byte store


def refusal(problem: GatingProblem) -> str | None:
    """None where this kernel serves the problem, else why not."""
    p = problem
    dtypes = {"a": p.a_dtype, "b": p.b_dtype, "A_log": p.A_log_dtype, "dt_bias": p.dt_bias_dtype}
    few = None if p.num_heads > 0 else f"requires at least one head, got {p.num_heads}"
    return unserved(FLOAT_DTYPES, dtypes) or few


def fits(problem: GatingProblem, config: Config, device: DeviceSpec) -> bool:
    """Whether the configuration can be compiled and launched."""
    return config.threads in (64, 128, 256) and config.heads in (1, 2, 4) and problem.num_heads % config.heads == 0


configs = build.every_feasible(Config, fits, (64, 128, 256), (1, 2, 4))


def default_config(problem: GatingProblem, device: DeviceSpec) -> Config:
    """16-byte stores where the number of heads allows them and there is enough work, else one thread per gate."""
    elements = problem.num_tokens * problem.num_heads
    wide = [heads for heads in (4, 2) if problem.num_heads % heads == 0 and elements >= heads * 256 * device.num_sms]
    return Config(128, wide[0] if wide else 1)


def compile(problem: GatingProblem, config: Config) -> dict[str, bytes]:
    """The one kernel, built for sm_90a."""
    p, rows, heads = problem, cute.sym_int(), problem.num_heads
    A_log, a, b = fake(p.A_log_dtype, heads), fake(p.a_dtype, rows, heads), fake(p.b_dtype, rows, heads)
    outputs = [fake("float32", rows, heads, last=1) for _ in range(2)]
    fakes = GatingParams(A_log, a, b, fake(p.dt_bias_dtype, heads), *outputs, beta=Float32(1.0), threshold=Float32(20.0))
    return build.one_entry("gating", _Gating(problem, config), fakes)


class _Gating:
    """The kernel of one problem and configuration; attributes are compile-time constants."""

    def __init__(self, problem: GatingProblem, config: Config) -> None:
        self.threads, self.heads = config.threads, config.heads
        self.row_threads = problem.num_heads // config.heads

    @cute.jit
    def __call__(self, *values: Any):
        params, stream = GatingParams(*values[:-1]), values[-1]
        # In 64 bits: tokens times heads may exceed 2**31.
        blocks = (Int64(params.a.shape[0]) * self.row_threads + self.threads - 1) // self.threads
        self.kernel(params).launch(grid=[Int32(blocks), 1, 1], block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, params: GatingParams):
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
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
