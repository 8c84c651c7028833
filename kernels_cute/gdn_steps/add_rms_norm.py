"""Residual sum s = residual + x * (1 + layer_scale) and its RMS norm s / sqrt(mean(s * s) + eps) * gain over the last dim, in
float32; the gain is 1 + weight or weight, and s is rounded to the dtype of x before the norm. Without a residual s is x.

Tensors: x, residual [L, D], normed, total [L, D] contiguous, weight, layer_scale [D]. See
`gdn.ops.layer_step.problem.AddRmsNormParams`. A block owns `rows` rows; a thread holds `chunks` accesses of 8 elements of each.
All of x and residual is loaded before anything is summed; the sums cross a warp by shuffles and the block through shared memory,
once.
"""

from dataclasses import dataclass

from gdn.device import DeviceSpec
from gdn.ops.layer_step.problem import AddRmsNormProblem
from kernels_cute.common import choice
from kernels_cute.common.choice import FLOAT_DTYPES, HALF_DTYPES, space, unserved
from kernels_cute.gdn_steps.accesses import VECTOR, row_chunks

launch, workspace_bytes = choice.launch, choice.no_workspace


_MOST_ELEMENTS = 64  # elements of the sums in a thread's registers, all rows together


@dataclass(frozen=True)
class Config:
    threads: int  # threads of a block
    rows: int  # rows of a block: more bytes in flight, more registers, fewer blocks


def refusal(problem: AddRmsNormProblem) -> str | None:
    if problem.dim % VECTOR or not VECTOR <= problem.dim <= 16384:
        return f"requires a last dim that is a multiple of {VECTOR} up to 16384, got {problem.dim}"
    vectors = {"weight": problem.weight_dtype, "layer_scale": problem.layer_scale_dtype}
    return unserved({HALF_DTYPES: {"x": problem.dtype}, FLOAT_DTYPES: vectors})


def _threads(problem: AddRmsNormProblem, chunks: int) -> int:
    """Fewest threads, whole warps, that cover a row in `chunks` accesses each."""
    return -(-problem.dim // (VECTOR * 32 * chunks)) * 32


def default_config(problem: AddRmsNormProblem, device: DeviceSpec) -> Config:
    """Fewest accesses a thread with up to 512 threads; several rows where every SM gets several blocks of them."""
    chunks = row_chunks(problem, 512)
    allowed = [rows for rows in (4, 2) if 2 * rows * chunks * VECTOR <= _MOST_ELEMENTS]
    rows = next((rows for rows in allowed if problem.num_tokens >= 8 * rows * device.num_sms), 1)
    return Config(_threads(problem, chunks), rows)


fits, configs = space(
    Config,
    lambda p, c: c.rows * (n := row_chunks(p, c.threads)) * VECTOR <= _MOST_ELEMENTS and c.threads == _threads(p, n),
    threads=range(32, 1025, 32),
    rows=(1, 2, 4),
)


def compile(problem: AddRmsNormProblem, config: Config) -> dict[str, bytes]:
    from kernels_cute.gdn_steps.add_rms_norm_kernel import library

    return library(problem, config)
