"""Gated delta rule, token by token: decode, speculative decoding and short ragged sequences.

Per state head, S [K, V] float32 in registers over all tokens of a sequence, a = exp(g): the steps of `common.delta_rule`.

Tensors: q [1, L, Hq, K], k [1, L, Hk, K], v and out [1, L, heads, V] bfloat16 | float16; g, beta [1, L, HS]; state
[slots, HS, V, K] or [slots, HS, K, V] float32 | bfloat16. `gdn.ops.delta_rule.problem.RecurrentParams` has the contract of each.

A block owns (sequence, state head, block_v columns of V). Data flow of the form with a prefetch of the next token's inputs and of
the one without (`single_token`), places of the state, choice of tiles: DESIGN.md.
"""

from gdn.device import DeviceSpec
from gdn.ops.delta_rule import tiles as recurrent_tiles
from gdn.ops.delta_rule.problem import RecurrentProblem
from gdn.ops.delta_rule.tiles import TUNED_WITHIN, Config, configs, default_config, fits, refusal
from kernels_cute.common import choice

__all__ = [
    "TUNED_WITHIN", "Config", "compile", "configs", "default_config", "fits", "launch", "refusal", "suits", "workspace_bytes",
]  # fmt: skip

launch, workspace_bytes = choice.launch, choice.no_workspace


def suits(problem: RecurrentProblem, config: Config, device: DeviceSpec) -> bool:
    """Return whether tiles tuned at other sizes may be used here. Without a prefetch each further token waits for its loads,
    which the stores of the state hide K first."""
    is_covered = not problem.state_v_first and problem.write_every_token
    return config.prefetch_next_token or recurrent_tiles.is_single(problem) or is_covered


def compile(problem: RecurrentProblem, config: Config) -> dict[str, bytes]:
    from kernels_cute.recurrent.library import library

    return library(problem, config)
