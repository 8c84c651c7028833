"""Head dims that the chunk kernel does not have: what is computed in their place, and with which buffers around it.

    4 to 124    the chunk kernel with head dim 64 or 128 on q, k, v and states padded with zeros. That is exact: entries of
                k and q that are 0 leave norms, products and the other rows of a state alone, columns of v that are 0 stay
                0. The scale is the true head dim's.
    132 to 256  the recurrent kernel, token by token: there is no chunk kernel for a state of that size

States go through copies of their own, [places, HS, P, P] float32, in a pool whose slots are the sequences and after them the
checkpoints: there a mask is a zero state, and padding sequences have no slot. The copies: _chunk_padding.py.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from gdn.problems import DTYPE_BYTES, ChunkProblem, DeltaRuleProblem, RecurrentParams, RecurrentProblem
from kernels_cute.chunk.head_dims import padding

LARGEST = 256
_ALIGNMENT = 256  # bytes


@dataclass(frozen=True)
class Inner:
    """A compiled kernel's attributes, of the stand-in."""

    functions: Mapping[str, Callable[..., Any]]
    problem: DeltaRuleProblem
    config: Any


def stand_in(problem: ChunkProblem) -> ChunkProblem | RecurrentProblem:
    """The problem that is computed instead."""
    has_states = padding.has_state_copies(problem)
    states = {
        "state_dtype": "float32",
        "index_dtype": "int32" if has_states else None,
        "has_initial_state": has_states,
        "has_final_state": has_states,
        "has_final_indices": False,
    }
    if problem.head_k_dim <= 128:
        dim = 64 if problem.head_k_dim <= 64 else 128
        return replace(problem, **states, has_mask=False, head_k_dim=dim, head_v_dim=dim)
    shared = {f.name: getattr(problem, f.name) for f in fields(DeltaRuleProblem)} | problem.sizes() | states
    none = {"write_every_token": False, "has_accepted": False, "has_parent": False, "has_rounding": False}
    return RecurrentProblem(**shared, **none)


def kernel(problem: ChunkProblem) -> Any:
    """The module that serves the stand-in."""
    from kernels_cute import (
        chunk,
        recurrent,  # not above: chunk asks this module what to do
    )

    return chunk if problem.head_k_dim <= 128 else recurrent


def note(problem: ChunkProblem) -> str:
    instead = stand_in(problem)
    if isinstance(instead, RecurrentProblem):
        return f"head dim {problem.head_k_dim}: computed token by token, by the recurrent kernel"
    return f"computed with head dim {instead.head_k_dim}: q, k, v and states are padded with zeros"


def workspace_bytes(problem: ChunkProblem, config: Any) -> int:
    """Without the copies of checkpoints: how many a call has, its problem does not say."""
    parts = _parts(problem, problem.num_tokens, problem.num_sequences).values()
    inner: int = kernel(problem).workspace_bytes(stand_in(problem), config)
    return sum(_bytes(dtype, shape) for dtype, shape in parts) + inner


def compile(problem: ChunkProblem, config: Any) -> dict[str, bytes]:
    instead = stand_in(problem)
    libraries: dict[str, bytes] = kernel(problem).compile(instead, config)
    return libraries | padding.compile(problem, instead.head_k_dim)


def launch(
    compiled: Any,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    A_log: Any,
    dt_bias: Any,
    initial_state: Any,
    state_indices: Any,
    has_initial_state: Any,
    final_state: Any,
    final_state_indices: Any,
    cu_seqlens: Any,
    checkpoint_offsets: Any,
    checkpoint_slots: Any,
    out: Any,
    workspace: Any,
    scale: float,
    null_slot: int,
) -> None:
    """As the chunk kernel's, with at least one token and one sequence."""
    problem: ChunkProblem = compiled.problem
    instead = _of_any_size(problem)
    parts, rest = _carve(_parts(problem, q.shape[1], cu_seqlens.shape[0] - 1), workspace)
    inner_q, inner_k, inner_v = parts.get("q", q), parts.get("k", k), parts.get("v", v)
    inner_out, states, slots = parts.get("out", out), parts.get("states"), parts.get("slots")
    targets = None
    if problem.has_checkpoints:
        # From torch's allocator as the workspace is: see workspace_bytes.
        count, columns = cu_seqlens.shape[0] - 1, checkpoint_offsets.shape[1]
        states = states.new_empty((count * (1 + columns), *states.shape[1:]))
        targets = slots.new_empty((count, columns))
    if not problem.pooled:
        null_slot = -1  # names slots of a pool alone

    def present(tensor: Any, condition: bool = True) -> Any:
        return tensor if condition and tensor is not None else cu_seqlens

    if padding.PAD in compiled.functions:
        compiled.functions[padding.PAD](
            q[0],
            k[0],
            v[0],
            inner_q[0],
            inner_k[0],
            inner_v[0],
            cu_seqlens,
            present(initial_state, problem.has_initial_state),
            present(state_indices, problem.pooled),
            present(has_initial_state, problem.has_mask),
            present(states),
            present(slots),
            present(targets),
            null_slot,
        )
    tokens = (inner_q, inner_k, inner_v, g, beta)
    inner = Inner(compiled.functions, instead, compiled.config)
    if isinstance(instead, RecurrentProblem):
        params = RecurrentParams(
            *tokens, A_log, dt_bias, states, slots, None, None, None, cu_seqlens, None, None, inner_out, scale, -1
        )
        kernel(problem).launch(inner, params)
    else:
        kernel(problem).launch(
            inner, *tokens, A_log, dt_bias, states, slots, None, states, None, cu_seqlens, checkpoint_offsets, targets, inner_out,
            rest, scale, -1,
        )  # fmt: skip
    if padding.UNPAD in compiled.functions:
        stores = problem.has_final_state
        compiled.functions[padding.UNPAD](
            inner_out[0],
            out[0],
            cu_seqlens,
            present(states, stores),
            present(final_state, stores),
            present(state_indices, problem.pooled),
            present(final_state_indices, problem.has_final_indices),
            present(checkpoint_offsets, problem.has_checkpoints),
            present(checkpoint_slots, problem.has_checkpoints),
            null_slot,
        )


_of_any_size = functools.lru_cache(maxsize=256)(stand_in)  # its static fields are those of every call


def _parts(problem: ChunkProblem, num_tokens: int, num_sequences: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> dtype and shape of the buffers in the workspace; the stand-in's own workspace follows them."""
    instead = _of_any_size(problem)
    dim, heads = instead.head_k_dim, problem.num_state_heads
    parts: dict[str, tuple[str, tuple[int, ...]]] = {}
    if dim != problem.head_k_dim:
        counts = {"q": problem.num_q_heads, "k": problem.num_k_heads, "v": problem.num_v_heads, "out": heads}
        parts |= {name: (problem.dtype, (1, num_tokens, count, dim)) for name, count in counts.items()}
    if instead.pooled:
        places = 0 if problem.has_checkpoints else num_sequences
        parts |= {"states": ("float32", (places, heads, dim, dim)), "slots": ("int32", (num_sequences,))}
    return parts


def _bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return -(-math.prod(shape) * DTYPE_BYTES[dtype] // _ALIGNMENT) * _ALIGNMENT


def _carve(parts: dict[str, tuple[str, tuple[int, ...]]], workspace: Any) -> tuple[dict[str, Any], Any]:
    """The buffers as tensors, and what is left of the workspace; None where the call needs none."""
    if workspace is None:
        return {}, None
    tensors, offset = {}, 0
    for name, (dtype, shape) in parts.items():
        size = math.prod(shape) * DTYPE_BYTES[dtype]
        tensors[name] = workspace[offset : offset + size].view(getattr(torch, dtype)).view(shape)
        offset += _bytes(dtype, shape)
    return tensors, workspace[offset:]
