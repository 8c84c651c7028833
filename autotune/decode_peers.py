"""Other libraries on the shapes of the recurrent operator: FlashInfer's decode kernels, where installed.

They do what ours does: raw gates, the L2 norm and a pool of states, V first, that is updated in place. q, k and v come
without gaps, so that the time is the kernel's.
"""

import importlib
from collections.abc import Mapping
from typing import Any

from autotune.peers import Outputs, Peer
from gdn.problems import RecurrentProblem


def peers(library: str, problem: RecurrentProblem, arguments: Mapping[str, Any]) -> list[Peer]:
    """The ways to call a library, none where it has no kernel for the problem. ImportError where it is not installed.

    arguments: of gdn.fused_recurrent_gated_delta_rule, every sequence with the same number of tokens. Their pool is used.
    """
    if library != "FlashInfer":
        return []
    if not _served(problem):
        return []
    options = flashinfer_arguments(problem, arguments)
    module = importlib.import_module("flashinfer.gdn_decode")
    decode = module.gated_delta_rule_mtp if problem.write_every_token else module.gated_delta_rule_decode_pretranspose

    def call() -> Outputs:
        out, pool = decode(**options)
        return out, pool

    return [Peer(library, "", True, call, True)]


def _served(problem: RecurrentProblem) -> bool:
    """Whether the library has a call that reads and writes what ours does: drafts scattered over the pool are float32's."""
    return (
        problem.pooled
        and problem.state_v_first
        and problem.use_gate
        and problem.use_beta_sigmoid
        and problem.use_qk_l2norm
        and problem.has_final_state
        and not (problem.has_final_indices or problem.has_parent or problem.has_rounding)
        and problem.num_tokens % problem.num_sequences == 0
        and problem.write_every_token == (problem.num_tokens > problem.num_sequences)
        and (problem.state_dtype == "float32" or not problem.write_every_token)
    )


def flashinfer_arguments(problem: RecurrentProblem, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Of gated_delta_rule_mtp for drafts (a slot for each token), else of gated_delta_rule_decode_pretranspose."""
    batch = problem.num_sequences

    def rows(name: str) -> Any:  # [batch, tokens of a sequence, heads, ...]
        return arguments[name][0].unflatten(0, (batch, -1)).contiguous()

    slots = arguments["ssm_state_indices"][:batch]
    options: dict[str, Any] = {
        "q": rows("q"), "k": rows("k"), "v": rows("v"), "a": rows("g"), "b": rows("beta"), "A_log": arguments["A_log"].float(),
        "dt_bias": arguments["dt_bias"], "scale": problem.head_k_dim**-0.5, "use_qk_l2norm": True,
        "initial_state": arguments["initial_state"],
    }  # fmt: skip
    options["output"] = options["v"].new_empty(options["v"].shape)
    if not problem.write_every_token:
        return options | {"state": None, "initial_state_indices": slots}
    read = slots[:, 0]
    if problem.has_accepted:
        read = slots.gather(1, arguments["num_accepted_tokens"][:batch, None].long() - 1)[:, 0]
    return options | {
        "initial_state_indices": read.contiguous(),
        "ssm_state_indices": slots.int().contiguous(),
        "disable_state_update": False,
    }
