"""Shares of a thread and a block in the convolution, and what is served."""

from gdn.ops.layer_step.problem import ConvolutionProblem
from kernels_cute.common.choice import FLOAT_DTYPES, HALF_DTYPES, unserved

CHANNELS = 8  # neighbouring channels of a thread
WORDS = CHANNELS // 2  # 32-bit words of two values in a thread's part of a row
THREADS = (32, 64, 128, 256)  # of a block


def refusal(problem: ConvolutionProblem) -> str | None:
    if problem.dim < 1 or problem.dim % CHANNELS:
        return f"requires channels in multiples of {CHANNELS}, got dim={problem.dim}"
    if not 2 <= problem.width <= 4:
        return f"requires a width of 2 to 4, got {problem.width}"
    others = {"weight": problem.weight_dtype, "bias": problem.bias_dtype, "the conv state": problem.state_dtype}
    return unserved({HALF_DTYPES: {"x": problem.dtype}, FLOAT_DTYPES: others})


def threads_fit(problem: ConvolutionProblem, threads: int) -> bool:
    """Whether blocks of this size are allowed: at most half of the threads are idle."""
    return threads in THREADS and (threads == THREADS[0] or threads * CHANNELS < 2 * problem.dim)


def slices(dim: int, threads: int) -> int:
    """Number of blocks that share the channels of a row."""
    return -(-dim // (threads * CHANNELS))
