"""Calls of every operator for the tests of torch.library: by a number of tokens, and seeded ones in all their forms."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import gdn
from gdn.ops.attention.attention import _dense
from gdn.ops.attention.sparse_attention import attend
from gdn.ops.delta_rule.inputs import chunk_inputs, chunk_problem, recurrent_inputs, recurrent_problem
from tests.described import plain
from tests.ops.spoiling.call import Call
from tests.ops.spoiling.calls import OPERATORS, good_call
from tests.ops.test_decode_launch import arguments_of
from tests.ops.test_prefill_launch import prefill_arguments

Arguments = dict[str, Any]
INT32 = torch.int32

# Forms of other operators: no operators of their own.
COMPOSED = {"fp8_mqa_logits", "fp8_paged_mqa_logits"}
REGISTERED = [name for name in OPERATORS if name not in COMPOSED]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def _bytes(pages: int) -> torch.Tensor:
    return torch.zeros(pages, 16, 20, dtype=torch.uint8)


def _conv_fn(tokens: int) -> Arguments:
    return {
        "x": _random(tokens, 12), "weight": _random(12, 4), "conv_states": _random(9, 12, 3),
        "query_start_loc": torch.tensor([0, 2, tokens]), "cache_indices": torch.tensor([1, 2]),
    }  # fmt: skip


def _conv_update(tokens: int) -> Arguments:
    slots = torch.arange(tokens, dtype=INT32)
    return {"x": _random(tokens, 12), "weight": _random(12, 4), "conv_state": _random(99, 12, 3), "conv_state_indices": slots}


def _logits(tokens: int) -> Arguments:
    return {
        "q": _random(tokens, 4, 16), "k": _random(tokens + 3, 16), "weights": _random(tokens, 4),
        "cu_seqlen_ks": torch.zeros(tokens, dtype=INT32), "cu_seqlen_ke": torch.arange(tokens, dtype=INT32),
    }  # fmt: skip


def _pages(tokens: int) -> Arguments:
    return {
        "q": _random(tokens, 1, 4, 16), "cache": _random(99, 16, 16), "weights": _random(tokens, 4),
        "context_lens": torch.arange(tokens, dtype=INT32), "block_tables": torch.zeros(tokens, 2, dtype=INT32),
    }  # fmt: skip


def _summary(tokens: int) -> Arguments:
    given = chunk_inputs(chunk_problem(has_initial_state=False), lengths=[tokens, 2])
    return {name: x for name, x in given.items() if name not in ("output_final_state", "scale")}


def _rope(tokens: int) -> Arguments:
    return {"positions": torch.arange(tokens), "cos_sin": _random(64, 8), "k_norm": _random(16), "rotary_dim": 8}


def _prepare(tokens: int) -> Arguments:
    return {
        "q": _random(tokens, 4, 16), "k": _random(tokens, 16), "weights": _random(tokens, 4), "q_norm": _random(16),
        "cache": _bytes(99), "slot_mapping": torch.arange(tokens), **_rope(tokens), "v": _random(tokens, 16),
        "v_cache": _bytes(99),
    }  # fmt: skip


def _compress(tokens: int) -> Arguments:
    return {
        "raw_k": _random(tokens, 16), "ring": _random(3, 8, 16), "cache": _bytes(99), **_rope(tokens),
        "ring_slots": torch.ones(tokens, dtype=INT32), "slot_mapping": torch.arange(tokens) // 4,
    }  # fmt: skip


def _gather(tokens: int) -> Arguments:
    tables = torch.zeros(2, 4, dtype=INT32)
    return {"cache": _bytes(9), "block_tables": tables, "cu_seqlens": torch.tensor([0, 3, tokens]), "num_rows": tokens}


def _attention(tokens: int) -> Arguments:
    return {
        "q": _random(tokens, 4, 16), "kv_cache": _random(2, 99, 16, 2, 16),
        "topk_indices": torch.arange(4, dtype=INT32).repeat(tokens, 1), "block_tables": torch.arange(4, dtype=INT32)[None],
        "query_start_loc": torch.tensor([0, tokens]), "seq_lens": torch.tensor([tokens]), "gate": _random(tokens, 4, 16),
    }  # fmt: skip


def _split(tokens: int) -> Arguments:
    sizes = {"num_heads_qk": 2, "num_heads_v": 4, "head_qk": 8, "head_v": 8}
    return {"mixed_qkvz": _random(tokens, 96), "mixed_ba": _random(tokens, 8), **sizes}


def _fold(tokens: int) -> Arguments:
    return {
        "ssm_state": _random(9, 4, 8, 8).float(), "state_indices": torch.arange(tokens, dtype=INT32),
        "ring": -_random(9, 8, 52).float().abs(), "state_tokens": torch.zeros(9, dtype=INT32),
        "num_computed_tokens": torch.arange(tokens), "num_k_heads": 2, "fold_every": 3,
    }  # fmt: skip


def _accept(tokens: int) -> Arguments:
    return {
        "ring": _random(9, 16, 12).float(), "conv_state": _random(9, 12, 18), "state_indices": torch.tensor([3], dtype=INT32),
        "parent_token": torch.arange(tokens, dtype=INT32) // 2 - 1, "accepted_nodes": torch.tensor([1], dtype=INT32),
        "num_computed_tokens": torch.tensor([5]), "num_accepted_tokens": torch.ones(1, dtype=INT32),
        "query_start_loc": torch.tensor([0, tokens]), "conv_width": 4,
    }  # fmt: skip


BY_TOKENS: dict[str, Callable[[int], Arguments]] = {
    **{name: partial(plain.call, name, dtype=torch.bfloat16) for name in REGISTERED},
    "chunk_gated_delta_rule": lambda n: chunk_inputs(chunk_problem(index_dtype="int32"), lengths=[n, 2]),
    "chunk_summary": _summary,
    "fused_recurrent_gated_delta_rule": lambda n: recurrent_inputs(recurrent_problem(index_dtype="int32"), lengths=[n, 2]),
    "gated_delta_rule": lambda n: chunk_inputs(chunk_problem(index_dtype="int32"), lengths=[n, 2]),
    "fused_gdn_decode": arguments_of,
    "fold_states": _fold,
    "accept_draft_tree": _accept,
    "fused_gdn_prefill": prefill_arguments,
    "fused_gdn_gating": lambda n: {"A_log": _random(4), "a": _random(n, 4), "b": _random(n, 4), "dt_bias": _random(4)},
    "fused_qkvzba_split_reshape_cat": _split,
    "causal_conv1d_fn": _conv_fn,
    "causal_conv1d_update": _conv_update,
    "add_rms_norm": lambda n: {"x": _random(n, 16), "residual": _random(n, 16), "weight": _random(16)},
    "rms_norm_gated": lambda n: {"x": _random(n, 4, 16), "z": _random(n, 4, 16), "weight": _random(16)},
    "quantize_fp8": lambda n: {"x": _random(n, 128)},
    "write_indexer_cache": lambda n: {"k": _random(n, 16), "cache": _bytes(99), "slot_mapping": torch.arange(n)},
    "prepare_indexer": _prepare,
    "compress_indexer_keys": _compress,
    "gather_indexer_cache": _gather,
    "expand_topk_groups": lambda n: {"group_indices": torch.zeros(n, 4, dtype=INT32), "positions": torch.arange(n)},
    "mqa_logits": _logits,
    "paged_mqa_logits": lambda n: _pages(n) | {"max_context_len": 20 + n},
    "topk_indices": lambda n: {"logits": _random(n, 40), "k": 8},
    "indexer_topk": lambda n: _logits(n) | {"topk": 4},
    "paged_indexer_topk": lambda n: _pages(n) | {"topk": 4},
    "attention": lambda n: {key: value for key, value in _attention(n).items() if key != "topk_indices"},
    "sparse_attention": _attention,
}


def seeded(name: str, seed: int) -> Call:
    """A small good call. The number of gathered rows is given: without values it could not be read."""
    call = good_call(name, seed)
    if name == "gather_indexer_cache":
        call.arguments.setdefault("num_rows", int(call.arguments["cu_seqlens"][-1]))
    return call


def of_schema(name: str, arguments: Arguments) -> tuple[Any, Arguments]:
    """The registered operator, and its arguments: one that a call may write is another argument where this call does."""
    public: Any = getattr(gdn, name)
    if name in ("sparse_attention", "attention"):
        public, (keys, values) = attend if name == "sparse_attention" else _dense, arguments["kv_cache"]
        missing = dict.fromkeys(public.operator.signature.parameters) | {"return_lse": False, **arguments}
        unknown = ("kv_cache", "return_lse") if name == "sparse_attention" else ("kv_cache",)
        arguments = {key: value for key, value in missing.items() if key not in unknown}
        arguments |= {"k_cache": keys, "v_cache": values}
    bound = public.operator.signature.bind(**arguments)
    bound.apply_defaults()
    given = dict(bound.arguments)
    for argument, condition in public.operator.writes.items():
        written = argument + "_written"
        if any(one.name == written for one in getattr(torch.ops.gdn, name).default._schema.arguments):
            given |= {written: None}
            if condition(bound.arguments):
                given |= {written: given[argument], argument: None}
    return getattr(torch.ops.gdn, name).default, given
