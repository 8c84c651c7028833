"""Causal depthwise convolution of packed prompts, with its windows in a pool of slots. The formula: `convolution`.

Tensors: x, out [L, dim] bfloat16 | float16; weight [dim, width]; bias [dim]; conv_states [slots, dim, columns], oldest
input first: see `gdn.ops.layer_step.problem.Conv1dParams`. Tiles, their numbers, and why no block reads a slot that another one
writes are in DESIGN.md. Blocks whose number falls between sequences are idle.
"""

from dataclasses import dataclass

from gdn.device import DeviceSpec
from gdn.ops.layer_step.problem import Conv1dProblem
from kernels_cute.common import choice
from kernels_cute.common.choice import space
from kernels_cute.conv1d.shape import THREADS, refusal, slices, threads_fit

__all__ = [
    "TUNED_WITHIN", "Config", "compile", "configs", "default_config", "fits", "launch", "refusal",
    "workspace_bytes",
]  # fmt: skip

launch, workspace_bytes = choice.launch, choice.no_workspace


# How close a tuned entry's sizes must be (see gdn.runtime.tuned). A thread walks its rows one batch after the other: with the
# tiles of a long prompt, a short one would run on few threads, each with many trips to memory.
TUNED_WITHIN = 0.5


@dataclass(frozen=True)
class Config:
    threads: int  # threads per block, 8 channels each
    rows: int  # tokens per block: more of them re-read fewer rows, fewer make more blocks
    batch: int  # rows of x that a thread loads at once: more bytes in flight, more registers
    min_threads_per_sm: int = 384  # resident threads that registers must allow: at most 65536 / min_threads_per_sm a thread


def _allows(problem: Conv1dProblem, config: Config) -> bool:
    if config.min_threads_per_sm == 512 and config.batch == 4 and (problem.bias_dtype is not None or not problem.silu):
        return False  # a few values spill
    return threads_fit(problem, config.threads)


def default_config(problem: Conv1dProblem, device: DeviceSpec) -> Config:
    """The longest tiles, then the widest blocks, that leave every SM two rounds of resident threads."""
    # float16 with a bias: 4 rows take all of the 168 registers, and were not timed.
    batch = 2 if problem.dtype == "float16" and problem.bias_dtype is not None else 4
    threads = 128
    while not threads_fit(problem, threads):
        threads //= 2
    wanted = 2 * 384 * device.num_sms
    for rows in (32, 16, 8):
        if -(-problem.num_tokens // rows) * slices(problem.dim, threads) * threads >= wanted:
            return Config(threads, rows, batch)
    return Config(min(threads, 64), 8, batch)


fits, configs = space(Config, _allows, threads=THREADS, rows=(8, 16, 32, 64, 128), batch=(2, 4), min_threads_per_sm=(384, 512))


def compile(problem: Conv1dProblem, config: Config) -> dict[str, bytes]:
    from kernels_cute.conv1d.prefill_kernel import library

    return library(problem, config)
