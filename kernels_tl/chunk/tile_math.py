"""Constants, layouts and macros that `chunk_prepare` and the makers of the one launch share: gates, norms, small products."""

from typing import Any

import tilelang.language as T

from gdn.ops.delta_rule.problem import ChunkProblem
from kernels_tl.chunk.constants import CHUNK, HALF
from kernels_tl.common import build

LOG2_E = 1.4426950408889634
SOFTPLUS_THRESHOLD = 20.0
# A decay below exp(-128) is 0 in float32. Cutting g there keeps c small, so that its later differences keep their digits.
LOWEST_LOG_DECAY = -128.0
NORM_EPS = 1e-6
BLOCK = 16  # rows of a diagonal block of I + L, inverted by forward substitution in float32
# float16 with normalised keys: X times this, so that norms up to 1e4 keep its digits and zero norms (|k|^-1 = 1e3) its range.
HALF_SCALE = 32.0
SHORT = {"float16": "fp16", "bfloat16": "bf16"}  # as products of single warps name them


def scales_of(problem: ChunkProblem) -> tuple[bool, float]:
    """Whether X has |k_j| at its columns, so that its diagonal is 1, and the number that it is multiplied with."""
    if not problem.use_qk_l2norm:
        return False, 1.0
    return (True, 1.0) if problem.dtype == "bfloat16" else (False, HALF_SCALE)


def inverse_dtype(problem: ChunkProblem) -> str:
    """Dtype of L: with normalised keys it is at most beta, and float16 holds it with three bits more than bfloat16."""
    return "float16" if problem.use_qk_l2norm else problem.dtype


def mma(dtype: str, sums: Any, begin: int, left: Any, left_begin: int, right: Any, right_begin: int) -> Any:
    """sums[begin ..] [16, 8] += left [16, 16] right [16, 8], each as the lanes of a warp hold it."""
    operands = (left.data, left_begin, right.data, right_begin, sums.data, begin)
    return T.ptx_mma("float32", "m16n8k16", "row", "col", SHORT[dtype], SHORT[dtype], "fp32", *operands, T.bool(False))


def right_operands() -> Any:
    """The layout of [64, 64] whose rows, 8 of a warp at a time, are right operands of m16n8k16.

    The same registers as of a left operand, in another order: transposing 8 rows moves nothing.
    """

    def thread(row: Any, column: Any) -> Any:
        return row // 16 * 32 + row % 8 * 4 + column % 8 // 2

    def register(row: Any, column: Any) -> Any:
        return column // 16 * 8 + row % 16 // 8 * 4 + column % 16 // 8 * 2 + column % 2

    return T.Fragment([CHUNK, HALF], forward_thread_fn=thread, forward_index_fn=register)


@T.macro
def square_rows(dtype, sums, left, right):
    """sums [2][16, 8] += the products of each warp's 16 rows [16, 64] with the upper and with the lower 8 of them.

    The diagonals of the two blocks of 8 rows are the squared norms. The other half of each product is not used.
    """
    for step in T.unroll(HALF // 16):
        for n in T.unroll(2):
            mma(dtype, sums, 4 * n, left, 8 * step, right, 8 * step + 4 * n)


@T.macro
def read_squares(sums, lane, squares):
    """squares = the squared norms of the lane's two rows plus NORM_EPS, out of such diagonals."""
    # Row lane // 4 of each block of 8: one of its four lanes holds the diagonal.
    squares[0] = T.Select(lane // 4 % 2 == 0, sums[0], sums[1])
    squares[1] = T.Select(lane // 4 % 2 == 0, sums[6], sums[7])
    for side in T.unroll(2):
        squares[side] = T.shfl_sync(squares[side], lane // 4 * 4 + lane // 8) + NORM_EPS


def allocate_gates() -> Any:
    """Registers for the gates of a chunk: one warp, two tokens per lane."""
    return build.named(
        decays=T.alloc_local((2,), "float32"),  # log decays
        strengths=T.alloc_local((2,), "float32"),  # beta
        running=T.alloc_local((1,), "float32"),  # sum of the log decays up to the second token
    )


@T.macro
def make_gates(problem, tensors, begin, valid, lane, head, gates):
    """Log decays and beta of a chunk, both 0 past the end, and the sums of the decays.

    Raw gates are evaluated: g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b).
    """
    log_decay, gate_input, strength = build.variables(3, "float32", init=0.0)
    has_gate, has_beta = problem.gate_dtype is not None, problem.beta_dtype is not None
    decays, strengths, running = gates.decays, gates.strengths, gates.running
    # All loads come first, so that their latencies do not add up; past the end a lane loads the last token.
    for half in T.unroll(2):
        token = T.cast(begin + T.min(2 * lane + half, valid - 1), "int64")
        if has_gate:
            decays[half] = T.cast(tensors.g[token, head], "float32")
        if has_beta:
            strengths[half] = T.cast(tensors.beta[token, head], "float32")
    for half in T.unroll(2):
        log_decay = 0.0
        strength = 0.0
        if 2 * lane + half < valid:
            if has_gate:
                gate_input = decays[half]
                if problem.use_gate:
                    gate_input = gate_input + tensors.dt_bias[head]
                    if gate_input <= SOFTPLUS_THRESHOLD:
                        gate_input = T.log1p(T.exp(gate_input))
                    log_decay = -T.exp(tensors.A_log[head]) * gate_input
                else:
                    log_decay = gate_input
                if log_decay < LOWEST_LOG_DECAY:
                    log_decay = LOWEST_LOG_DECAY
            strength = 1.0
            if has_beta:
                strength = strengths[half]
                if problem.use_beta_sigmoid:
                    strength = 1.0 / (1.0 + T.exp(-strength))
        strengths[half] = strength
        decays[half] = log_decay
    running[0] = decays[0] + decays[1]
    for level in T.unroll(5):
        gate_input = T.shfl_up(running[0], 1 << level)
        if lane >= (1 << level):
            running[0] = running[0] + gate_input
