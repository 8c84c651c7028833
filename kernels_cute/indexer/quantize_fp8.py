"""e4m3 values with one scale per group: scale = max(amax, 1e-4) / 448, x_fp8 = x / scale to nearest even, saturated.

Tensors: x [L, G, group] bfloat16 | float16 -> x_fp8 [L, G, group] float8_e4m3fn, scale [L, G] float32.
`gdn.ops.indexer.problem.QuantizeFp8Params` is the contract. A group of lanes owns `rows` groups of values, which it loads
together; `rows.py` describes them in registers. The results are bit for bit the reference's.
"""

from dataclasses import dataclass

from gdn.device import DeviceSpec
from gdn.ops.indexer.problem import QuantizeFp8Problem
from kernels_cute.common import choice
from kernels_cute.common.choice import by_load, space
from kernels_cute.indexer import forms

launch, workspace_bytes = choice.launch, choice.no_workspace


@dataclass(frozen=True)
class Config:
    threads: int  # threads of a block
    rows: int  # groups of values per group of lanes: more bytes in flight, more registers, fewer blocks


def refusal(problem: QuantizeFp8Problem) -> str | None:
    if problem.num_groups < 1:
        return f"requires at least one group, got {problem.num_groups}"
    return forms.refusal(problem.group_dim, {"x": problem.dtype}, None, {})


def default_config(problem: QuantizeFp8Problem, device: DeviceSpec) -> Config:
    """The most rows that leave every SM a full load of threads, then blocks small enough to reach every SM."""
    threads_wanted = problem.num_tokens * problem.num_groups * forms.lanes_of(problem.group_dim)
    return by_load(Config, threads_wanted, device)


fits, configs = space(Config, threads=(32, 64, 128, 256), rows=(1, 2, 4, 8))


def compile(problem: QuantizeFp8Problem, config: Config) -> dict[str, bytes]:
    from kernels_cute.indexer.quantize_fp8_kernel import library

    return library(problem, config)
