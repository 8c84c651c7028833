"""Interleaved input projections, taken apart: a permutation of whole heads, row by row.

Tensors: mixed_qkvz [L, H * (2 * K + 2 * r * V)] with groups [q (K) | k (K) | v (r * V) | z (r * V)], mixed_ba [L, 2 * HV]
with groups [b (r) | a (r)] -> mixed_qkv [L, 2 * H * K + HV * V] = [all q | all k | all v], z [L, HV * V], b, a [L, HV].
See `gdn.ops.layer_step.problem.SplitParams`.

A thread owns one 16-byte piece of a row. It computes the piece's target once and moves the piece in `rows` rows, which it
loads together. The last slice of blocks of every row tile moves b and a, element by element.
"""

from dataclasses import dataclass

from gdn.device import DeviceSpec
from gdn.ops.layer_step.problem import SplitProblem
from kernels_cute.common import choice
from kernels_cute.common.choice import FLOAT_DTYPES, HALF_DTYPES, space, unserved
from kernels_cute.gdn_steps.accesses import row_pieces

launch, workspace_bytes = choice.launch, choice.no_workspace


@dataclass(frozen=True)
class Config:
    threads: int  # threads of a block
    rows: int  # rows per block: more bytes in flight per thread, fewer blocks


def refusal(problem: SplitProblem) -> str | None:
    if problem.head_k_dim % 4 or problem.head_v_dim % 4:
        return f"requires head dims that are multiples of 4, got K={problem.head_k_dim}, V={problem.head_v_dim}"
    return unserved({HALF_DTYPES: {"mixed_qkvz": problem.dtype}, FLOAT_DTYPES: {"mixed_ba": problem.ba_dtype}})


def default_config(problem: SplitProblem, device: DeviceSpec) -> Config:
    """The most rows per thread that leave every SM two full loads of threads."""
    threads = 128
    per_row = row_pieces(problem, threads)[1] * threads
    for rows in (8, 4, 2):
        if -(-problem.num_tokens // rows) * per_row >= 2 * 1024 * device.num_sms:
            return Config(threads, rows)
    return Config(threads, 1)


fits, configs = space(Config, threads=(64, 128, 256), rows=(1, 2, 4, 8, 16))


def compile(problem: SplitProblem, config: Config) -> dict[str, bytes]:
    from kernels_cute.gdn_steps.split_kernel import library

    return library(problem, config)
