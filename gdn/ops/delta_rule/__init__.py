"""The gated delta rule: its chunk and its recurrent form, both in one call, and replay decode."""

from gdn.ops.delta_rule.problem import RecurrentProblem
from gdn.problem import Problem
from gdn.runtime.registry import CUTE_FIRST, Operator, Preference, Statement, family, modules

_DELTA_RULE, _REPLAY = family("delta_rule", "delta_rule"), family("delta_rule", "replay")
_BLADNN = Preference("VLLM_GDN_USE_BLADNN", {"true": "cute", "false": "tilelang"})


def _is_rounded_batch(problem: Problem) -> bool:
    if not isinstance(problem, RecurrentProblem) or not problem.has_rounding:
        return False
    return problem.num_tokens <= problem.num_sequences and problem.num_sequences * problem.num_state_heads >= 1024


OPERATORS = (
    Operator(
        "chunk", _DELTA_RULE, ("chunk_gated_delta_rule",), modules("chunk", "cute", "tilelang"), (_BLADNN,),
        measured=(
            Statement(
                CUTE_FIRST,
                "H100, 2026-11-22, tuned medians: TileLang takes 1.11 to 1.47 times as long, on all 12 shapes of the benchmark",
            ),
        ),
    ),
    Operator(
        "recurrent", _DELTA_RULE, ("fused_recurrent_gated_delta_rule",), modules("recurrent", "cute", "tilelang"), (_BLADNN,),
        measured=(
            Statement(
                ("tilelang", "cute"),
                "H100, 2026-11-22, one token each, defaults: CuTe takes 1.05 to 1.09 times as long at 32 to 512 sequences of "
                "32 heads",
                "stochastic rounding, one token a sequence, 1024 states or more", _is_rounded_batch,
            ),
            # TileLang is faster by 0.17 us of 2.6 (one sequence, 8 heads), and by 1 to 3.4 % on float32 pools of 128 or more
            # sequences. There the tables decide, with times of both kernels; the difference is too small to generalise to other
            # devices.
            Statement(
                CUTE_FIRST, "H100, 2026-11-21, tuned medians: TileLang takes 0.94 to 1.21 times as long, over 26 shapes"
            ),
        ),
    ),
    Operator("chunk_summary", _DELTA_RULE, ("chunk_summary",), modules("chunk.summaries", "cute")),
    Operator("gated_delta_rule", None, ("gated_delta_rule",), composed_of=("chunk", "recurrent")),
)  # fmt: skip

REPLAY_OPERATORS = (
    Operator("fold_states", _REPLAY, ("fold_states",), modules("replay.fold_states", "cute")),
    Operator("accept_draft_tree", _REPLAY, ("accept_draft_tree",), modules("replay.accept_draft_tree", "cute")),
)
