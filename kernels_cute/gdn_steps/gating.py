"""Decay and write strength from the raw gates:

    g = -exp(A_log) * softplus(a + dt_bias)        softplus(x) = log1p(exp(beta * x)) / beta while beta * x <= threshold
    beta_output = sigmoid(b)

Tensors: A_log, dt_bias [HV]; a, b [L, HV] of any strides; g, beta_output [L, HV] float32 contiguous: see
`gdn.ops.layer_step.problem.GatingParams`. A thread computes `heads` neighbouring heads of a row; the inputs are read element by
element (their strides are free and neighbours share sectors), the outputs are written at once.
"""

from dataclasses import dataclass

from gdn.device import DeviceSpec
from gdn.ops.layer_step.problem import GatingProblem
from kernels_cute.common import choice
from kernels_cute.common.choice import FLOAT_DTYPES, space, unserved

launch, workspace_bytes = choice.launch, choice.no_workspace


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


fits, configs = space(Config, lambda p, config: p.num_heads % config.heads == 0, threads=(64, 128, 256), heads=(1, 2, 4))


def compile(problem: GatingProblem, config: Config) -> dict[str, bytes]:
    from kernels_cute.gdn_steps.gating_kernel import library

    return library(problem, config)
