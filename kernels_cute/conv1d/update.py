"""Causal depthwise convolution of a decode step, with its windows in a pool of slots. The formula: `convolution`.

Tensors: x, out [L, dim] bfloat16 | float16; weight [dim, width]; bias [dim]; conv_state [slots, dim, columns], oldest input
first: see `gdn.ops.layer_step.problem.Conv1dUpdateParams`. A block owns one sequence and `threads * 8` channels: why windows may
overlap their own shifted copy, and how a draft tree finds its inputs, is in DESIGN.md.
"""

from dataclasses import dataclass
from itertools import compress

from gdn.device import DeviceSpec
from gdn.ops.layer_step.problem import Conv1dUpdateProblem
from kernels_cute.common import choice
from kernels_cute.common.choice import space
from kernels_cute.conv1d import shape
from kernels_cute.conv1d.shape import THREADS, slices, threads_fit

__all__ = ["TUNED_WITHIN", "Config", "compile", "configs", "default_config", "fits", "launch", "refusal", "workspace_bytes"]

launch, workspace_bytes = choice.launch, choice.no_workspace


# How close a tuned entry's sizes must be (see gdn.runtime.tuned): up to 1.7 times as many tokens and sequences, or as few. The
# wide blocks of a large batch would leave most SMs idle with a small one.
TUNED_WITHIN = 1.5


@dataclass(frozen=True)
class Config:
    threads: int  # threads per block, 8 channels each
    batch: int  # rows of x that a thread loads at once: all tokens of a sequence, or a few


def refusal(problem: Conv1dUpdateProblem) -> str | None:
    if problem.has_parent and not problem.has_columns:
        return "requires a slot per node with parent_token, got one per sequence"
    return shape.refusal(problem)


def _allows(problem: Conv1dUpdateProblem, config: Config) -> bool:
    if config.batch > 1 and (problem.cu_seqlens_dtype is None or problem.has_parent):
        return False  # one token at a time
    return threads_fit(problem, config.threads)


def default_config(problem: Conv1dUpdateProblem, device: DeviceSpec) -> Config:
    """Up to 4 tokens of a sequence at once, and the widest blocks that leave two per SM."""
    per_sequence = problem.num_tokens / max(problem.num_sequences, 1)
    batch = 4 if per_sequence > 2 else 2 if per_sequence > 1 else 1
    space = configs(problem, device)
    feasible = [config for config in space if config.batch == batch or problem.has_parent] or space
    least = 2 * device.num_sms
    enough = [c.threads <= 128 and problem.num_sequences * slices(problem.dim, c.threads) >= least for c in feasible]
    return max(compress(feasible, enough), key=lambda config: config.threads, default=feasible[0])


fits, configs = space(Config, _allows, threads=THREADS, batch=(1, 2, 4))


def compile(problem: Conv1dUpdateProblem, config: Config) -> dict[str, bytes]:
    from kernels_cute.conv1d.update_kernel import library

    return library(problem, config)
