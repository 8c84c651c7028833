"""One small call of every reference function: what the tests of all of them draw from."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gdn.ops.delta_rule.inputs import chunk_inputs, chunk_problem, recurrent_inputs, recurrent_problem
from tests.described import plain
from tests.references import NAMES

Arguments = dict[str, Any]
FP8 = torch.float8_e4m3fn
TOKENS = 3


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _fp8(*shape: int, seed: int = 0) -> torch.Tensor:
    return randn(*shape, seed=seed).to(FP8)


def _chunk() -> Arguments:
    problem = chunk_problem(index_dtype="int32", has_mask=True, has_final_indices=True, has_checkpoints=True)
    return chunk_inputs(problem, lengths=[70, 5])


def _summary() -> Arguments:
    given = chunk_inputs(chunk_problem(has_initial_state=False), lengths=[70, 5])
    del given["output_final_state"]
    return given


def _recurrent() -> Arguments:
    return recurrent_inputs(recurrent_problem(index_dtype="int32", write_every_token=True, has_accepted=True), lengths=[3, 2])


def _step() -> Arguments:
    problem = chunk_problem(index_dtype="int32", has_mask=True, has_final_indices=True, has_checkpoints=True)
    return chunk_inputs(problem, lengths=[3, 1, 70, 5]) | {"lengths_host": (3, 1, 70, 5)}


def _conv_update() -> Arguments:
    return {
        "x": randn(2, 6, 3), "conv_state": randn(5, 6, 5, seed=3), "weight": randn(6, 4, seed=1),
        "conv_state_indices": torch.tensor([[3, 2, 4], [1, 0, 0]]), "num_accepted_tokens": torch.tensor([2, 1]),
    }  # fmt: skip


def _ragged() -> Arguments:
    return {
        "q": _fp8(6, 4, 32), "k": _fp8(20, 2, 32, seed=1), "weights": randn(6, 4, seed=2),
        "cu_seqlen_ks": torch.arange(6), "cu_seqlen_ke": torch.arange(6) + 12, "k_scale": randn(20, 2, seed=3).exp(),
    }  # fmt: skip


def _plain(name: str) -> Arguments:
    return plain.call(name, TOKENS, torch.float32)


# The plain call of each one; by hand where a test needs a form, a length or a slot of its own.
CALLS: dict[str, Callable[[], Arguments]] = {
    **{name: partial(_plain, name) for name in NAMES},
    "chunk_gated_delta_rule": _chunk,
    "chunk_summary": _summary,
    "fused_recurrent_gated_delta_rule": _recurrent,
    "gated_delta_rule": _step,
    "causal_conv1d_update": _conv_update,
    "mqa_logits": _ragged,
    "indexer_topk": lambda: {**_ragged(), "topk": 5},
    "attention": lambda: {**_plain("attention"), "return_lse": True},
    "sparse_attention": lambda: {**_plain("sparse_attention"), "return_lse": True},
}


def copied(arguments: Arguments) -> Arguments:
    """The arguments with tensors of their own, strides kept."""
    return {
        key: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x) if isinstance(x, torch.Tensor) else x
        for key, x in arguments.items()
    }


def tensors_of(result: Any) -> list[torch.Tensor]:
    """The tensors of a result, which is None, a tensor, or a tuple of tensors and None."""
    parts = result if isinstance(result, tuple) else (result,)
    return [part for part in parts if isinstance(part, torch.Tensor)]
