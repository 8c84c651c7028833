"""Gated RMS norm: x / sqrt(mean(x * x) + eps) * weight * gate(z) over the last dim, in float32; gate silu or sigmoid.

Tensors: x, z [L, HV, V], out [L, HV, V] contiguous, weight [V]. See `gdn.ops.layer_step.problem.RmsNormGatedParams`.
A group of `lanes` threads owns `rows` rows (a row: one head of one token) and holds `chunks` accesses of each; all of x
and z is loaded before anything is summed, and the sums cross the group by shuffles.
"""

from dataclasses import dataclass

from gdn.device import DeviceSpec
from gdn.ops.layer_step.problem import RmsNormGatedProblem
from kernels_cute.common import choice
from kernels_cute.common.choice import FLOAT_DTYPES, HALF_DTYPES, by_load, space, unserved
from kernels_cute.gdn_steps.accesses import row_parts

launch, workspace_bytes = choice.launch, choice.no_workspace


_MOST_ELEMENTS = 64  # elements of x in a thread's registers


@dataclass(frozen=True)
class Config:
    threads: int  # threads of a block
    rows: int  # rows per group of threads: more bytes in flight, more registers, fewer blocks


def refusal(problem: RmsNormGatedProblem) -> str | None:
    if problem.head_dim % 4 or not 4 <= problem.head_dim <= 1024:
        return f"requires a last dim that is a multiple of 4 up to 1024, got {problem.head_dim}"
    others = {"z": problem.z_dtype, "weight": problem.weight_dtype}
    return unserved({HALF_DTYPES: {"x": problem.dtype}, FLOAT_DTYPES: others})


def default_config(problem: RmsNormGatedProblem, device: DeviceSpec) -> Config:
    """The most rows per group that leave every SM two full loads of threads, then the most threads per block."""
    _, lanes, elements = row_parts(problem)
    rows = [rows for rows in (4, 2) if rows * elements <= _MOST_ELEMENTS]
    return by_load(Config, problem.num_tokens * problem.num_heads * lanes, device, rows, load=2048)


fits, configs = space(
    Config, lambda p, config: config.rows * row_parts(p)[2] <= _MOST_ELEMENTS, threads=(32, 64, 128, 256), rows=(1, 2, 4, 8)
)


def compile(problem: RmsNormGatedProblem, config: Config) -> dict[str, bytes]:
    from kernels_cute.gdn_steps.rms_norm_gated_kernel import library

    return library(problem, config)
