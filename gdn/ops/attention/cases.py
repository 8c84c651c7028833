"""Sparse attention as cases: decode, and prefill of neighbouring queries, on a paged cache of shuffled blocks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gdn.core.tunable import Maker, Shape, StepCase, Tunable, Work, example, params_of, resized
from gdn.ops.attention import inputs
from gdn.ops.attention.problem import (
    AttentionPrefillParams,
    AttentionPrefillProblem,
    AttentionProblem,
    SparseDecodeParams,
    SparseDecodeProblem,
    SparsePrefillParams,
    SparsePrefillProblem,
)

_POSITIONS_PER_INDEX = 16  # of a context: 2048 of 32768


def _operands(make: Maker, problem: AttentionProblem, context: int, sequences: int, tokens: int) -> dict[str, Any]:
    """Caches of `sequences` contexts in shuffled blocks; every query token is one of the last of its sequence."""
    blocks = -(-context // problem.block_size)
    shape = (sequences * blocks, problem.block_size, problem.num_kv_heads, problem.head_dim)
    heads = (tokens, problem.num_heads, problem.head_dim)
    return {
        "q": make.normal(*heads, dtype=problem.dtype),
        "gate": make.normal(*heads, dtype=problem.dtype) if problem.has_gate else None,
        "kv_cache": tuple(make.normal(*shape, dtype=problem.dtype) for _ in range(2)),
        "block_tables": make.order(sequences * blocks, sequences * blocks, "int32").view(sequences, blocks),
        "query_start_loc": make.integers(torch.arange(sequences + 1, device=make.device) * (tokens // sequences), "int32"),
        "seq_lens": make.integers([context] * sequences, "int32"),
    }


def _work(arguments: dict[str, Any], kind: Any, make: Maker, problem: Any, function: str = "sparse_attention") -> Work:
    q = arguments["q"]
    out, lse = make.poisoned(*q.shape, dtype=problem.dtype), make.poisoned(*q.shape[:2], dtype="float32")
    caches = dict(zip(("k_cache", "v_cache"), arguments["kv_cache"], strict=True))
    params = params_of(kind, arguments, **caches, out=out, lse=lse, scale=problem.head_dim**-0.5)
    return Work(function, arguments, params, (out, lse))


def _case(make: Callable[..., Work], shape: Shape, device: torch.device, copies: int) -> StepCase:
    """A case whose selected positions the shape names."""
    return StepCase(partial(make, positions=shape.positions), shape, device, copies, verdict="close")


def _decode(make: Maker, problem: SparseDecodeProblem, lengths: Any, positions: str) -> Work:
    """Random positions in ascending order, or runs of neighbouring ones; dense: all positions."""
    tokens, sequences = problem.num_tokens, problem.num_sequences
    if problem.dense != (problem.index_dtype is None):
        raise ValueError(f"problem: expected selected positions or dense, got {problem.static_key()}")
    if problem.dense:
        arguments = _operands(make, problem, problem.k, sequences, tokens)
        arguments |= {"return_lse": True, "max_query_len": tokens // sequences}
        return _work(arguments, SparseDecodeParams, make, problem, "attention")
    context = problem.k * _POSITIONS_PER_INDEX
    run = 4 if positions == "runs of 4" else 1
    arguments = _operands(make, problem, context, sequences, tokens)
    ends = inputs.own_positions(arguments["query_start_loc"], arguments["seq_lens"], tokens) + 1
    indices = inputs.random_positions(ends, problem.k, run, make.generator)
    arguments |= {"topk_indices": indices.to(getattr(torch, str(problem.index_dtype))), "return_lse": True}
    return _work(arguments, SparseDecodeParams, make, problem)


def _prefill(make: Maker, problem: SparsePrefillProblem, lengths: Any, positions: str) -> Work:
    """The last tokens of one prompt, whose positions are kept from query to query or drawn anew."""
    context, tokens = problem.max_context_len, problem.num_tokens
    arguments = _operands(make, problem, context, problem.num_sequences, tokens)
    ends = inputs.own_positions(arguments["query_start_loc"], arguments["seq_lens"], tokens) + 1
    if positions == "90 % kept":
        indices = inputs.kept_positions(ends, problem.k, 0.9, make.generator)
    else:
        indices = inputs.random_positions(ends, problem.k, 1, make.generator)
    arguments |= {"topk_indices": indices.to(getattr(torch, str(problem.index_dtype))), "return_lse": True}
    arguments |= {"max_query_len": tokens // problem.num_sequences}
    return _work(arguments, SparsePrefillParams, make, problem)


def _dense_prefill(make: Maker, problem: AttentionPrefillProblem, lengths: Any) -> Work:
    """The last tokens of equal sequences."""
    sequences, context = problem.num_sequences, problem.max_context_len
    arguments = _operands(make, problem, context, sequences, problem.num_tokens)
    arguments |= {"return_lse": True, "max_query_len": problem.num_tokens // sequences}
    return _work(arguments, AttentionPrefillParams, make, problem, "attention")


def decode_shape(sequences: int, heads: tuple[int, int], positions: str = "random", drafts: int = 0) -> Shape:
    tokens = sequences * (1 + drafts)
    sizes: dict[str, Any] = {"num_heads": heads[0], "num_kv_heads": heads[1], "num_tokens": tokens, "num_sequences": sequences}
    problem = example("sparse_attention_decode", **sizes)
    steps = f", {1 + drafts} tokens each" if drafts else ""
    name = f"batch {sequences}, k {problem.k}, {heads[0]}/{heads[1]} heads, {positions}{steps}"
    return Shape(name, problem, positions=positions)


def prefill_shape(heads: tuple[int, int], positions: str) -> Shape:
    problem = example("sparse_attention_prefill", num_heads=heads[0], num_kv_heads=heads[1])
    name = f"{problem.num_tokens} x {problem.max_context_len}, k {problem.k}, {heads[0]}/{heads[1]} heads, {positions}"
    return Shape(name, problem, positions=positions)


def dense_shape(heads: tuple[int, int], tokens: int, context: int) -> Shape:
    sizes: dict[str, Any] = {"num_heads": heads[0], "num_kv_heads": heads[1], "num_tokens": tokens, "max_context_len": context}
    return Shape(f"{tokens} of {context}, {heads[0]}/{heads[1]} heads", example("attention_prefill", **sizes))


def _small(shape: Shape, **sizes: int) -> Shape:
    return resized(shape, (), num_heads=4, num_kv_heads=2, head_dim=16, k=8, **sizes)


def _peer_arguments(shape: Shape, device: torch.device, seed: int) -> dict[str, Any]:
    return _case(_prefill, shape, device, 1)._work(seed).arguments


sparse_attention_decode = Tunable(
    partial(_case, _decode),
    shapes=(
        decode_shape(64, (16, 2)), decode_shape(64, (8, 1)), decode_shape(1, (16, 2)), decode_shape(1, (8, 1)),
        decode_shape(16, (16, 2)),
        decode_shape(32, (16, 2)), decode_shape(128, (16, 2)), decode_shape(64, (16, 2), drafts=3),
    ),
    shown=(decode_shape(64, (16, 2), "runs of 4"),),
    small=lambda shape: _small(shape, num_tokens=3, num_sequences=3),
)  # fmt: skip

sparse_attention_prefill = Tunable(
    partial(_case, _prefill),
    shapes=(prefill_shape((16, 2), "90 % kept"),),
    shown=(prefill_shape((16, 2), "random"),),
    small=lambda shape: _small(shape, num_tokens=20, max_context_len=64),
    peer_arguments=_peer_arguments,
)

attention_prefill = Tunable(
    partial(StepCase, _dense_prefill, verdict="close"),
    shapes=tuple(
        dense_shape((16, 2), *sizes) for sizes in ((8192, 8192), (2048, 32768), (1024, 1024), (256, 32768), (16, 32768))
    ),
    small=lambda shape: resized(
        shape, (), num_heads=4, num_kv_heads=2, head_dim=128, num_tokens=20, num_sequences=2, max_context_len=64
    ),
)
