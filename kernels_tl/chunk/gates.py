"""The gates of a chunk: one warp, two tokens per lane."""

from typing import Any

import tilelang.language as T

from kernels_tl.common import build

LOG2_E = 1.4426950408889634
SOFTPLUS_THRESHOLD = 20.0
# A decay below exp(-128) is 0 in float32. Cutting g there keeps c small, so that its later differences keep their digits.
LOWEST_LOG_DECAY = -128.0


def allocate_gates() -> Any:
    """Registers of a lane's two tokens."""
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
