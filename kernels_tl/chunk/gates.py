"""Macros for the gates of a chunk: one warp, two tokens per lane."""

from typing import Any, NamedTuple

import tilelang.language as T

from gdn.problems import ChunkProblem

LOG2_E = 1.4426950408889634
SOFTPLUS_THRESHOLD = 20.0
# A decay below exp(-128) is 0 in float32. Cutting g there keeps c small, so that its later differences keep their digits.
LOWEST_LOG_DECAY = -128.0


class GateMacros(NamedTuple):
    """The macros, in the order in which a warp calls them."""

    load: Any
    evaluate: Any
    sum_decays: Any


def gate_macros(problem: ChunkProblem) -> GateMacros:
    """The macros for a problem's gates; raw gates are evaluated: g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b)."""
    has_gate, has_beta = problem.gate_dtype is not None, problem.beta_dtype is not None
    raw_gate = has_gate and problem.use_gate
    raw_beta = has_beta and problem.use_beta_sigmoid

    @T.macro
    def load(tensors, begin, valid, lane, head, decays, strengths):
        # All loads come first, so that their latencies do not add up; past the end a lane loads the last token.
        for half in T.unroll(2):
            token = T.cast(begin + T.min(2 * lane + half, valid - 1), "int64")
            if has_gate:
                decays[half] = T.cast(tensors.g[token, head], "float32")
            if has_beta:
                strengths[half] = T.cast(tensors.beta[token, head], "float32")

    @T.macro
    def evaluate(tensors, is_valid, half, head, decays, strengths, log_decay: T.Ref, gate_input: T.Ref, strength: T.Ref):
        """log_decay and strength (beta) of one token; both 0 past the end. gate_input: scratch."""
        log_decay = 0.0
        strength = 0.0
        if is_valid:
            if has_gate:
                gate_input = decays[half]
                if raw_gate:
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
                if raw_beta:
                    strength = 1.0 / (1.0 + T.exp(-strength))

    @T.macro
    def sum_decays(lane, decays, running: T.Ref, received: T.Ref):
        """running = sum of the log decays up to the lane's second token. received: scratch."""
        running = decays[0] + decays[1]
        for level in T.unroll(5):
            received = T.shfl_up(running, 1 << level)
            if lane >= (1 << level):
                running = running + received

    return GateMacros(load, evaluate, sum_decays)
