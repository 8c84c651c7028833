"""FlashInfer's prefill and decode kernels.

The decode kernels do what the recurrent operator does: raw gates, the L2 norm, and a pool of states (V first) that is updated
in place. q, k and v come without gaps, so that the time is the kernel's.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from autotune.peers import Call, Outputs, Peer, operands
from gdn.problems import ChunkProblem, RecurrentProblem


def chunk(problem: ChunkProblem, arguments: Mapping[str, Any]) -> list[Peer]:
    """The prefill kernel with and without the norm, each with the split of sequences that it chooses and without a split."""
    x = operands(problem, arguments)
    prefill = importlib.import_module("flashinfer.gdn_prefill").chunk_gated_delta_rule
    alpha, final = x.g.exp(), torch.empty_like(x.state)

    def calls(norm: bool, split: Any) -> Call:
        def call() -> Outputs:
            found = prefill(
                x.q, x.k, x.v, alpha, x.beta, x.scale, x.state, True, x.cu_seqlens,
                use_qk_l2norm_in_kernel=norm, output_state=final, use_cp=split,
            )  # fmt: skip
            return found[0], found[1]

        return call

    splits = (("its split", "auto"), ("no split", False))
    return [Peer(name, norm, calls(norm, split), True) for norm in (True, False) for name, split in splits]


def recurrent(problem: RecurrentProblem, arguments: Mapping[str, Any]) -> list[Peer]:
    """The decode kernel, or the kernel for drafts; none where neither does what the problem asks for.

    Every sequence has the same number of tokens. The pool in `arguments` is updated.
    """
    if not _served(problem):
        return []
    options = decode_arguments(problem, arguments)
    module = importlib.import_module("flashinfer.gdn_decode")
    decode = module.gated_delta_rule_mtp if problem.write_every_token else module.gated_delta_rule_decode_pretranspose

    def call() -> Outputs:
        out, pool = decode(**options)
        return out, pool

    return [Peer("", True, call, True)]


def _served(problem: RecurrentProblem) -> bool:
    """Whether the library has a call that reads and writes the same: it scatters drafts over float32 pools alone."""
    required = (
        problem.pooled, problem.state_v_first, problem.use_gate, problem.use_beta_sigmoid, problem.use_qk_l2norm,
        problem.has_final_state, not (problem.has_final_indices or problem.has_parent or problem.has_rounding),
        problem.num_tokens % problem.num_sequences == 0,
        problem.write_every_token == (problem.num_tokens > problem.num_sequences),
        problem.state_dtype == "float32" or not problem.write_every_token,
    )  # fmt: skip
    return all(required)


def decode_arguments(problem: RecurrentProblem, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of gated_delta_rule_mtp for drafts (a slot for each token), else of gated_delta_rule_decode_pretranspose."""
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
    written = {"ssm_state_indices": slots.int().contiguous(), "disable_state_update": False}
    return options | {"initial_state_indices": read.contiguous()} | written
