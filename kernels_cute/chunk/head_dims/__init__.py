"""Head dims other than 64 and 128: the computation in their place, and the buffers around it.

    4 to 124    the chunk kernel with head dim 64 or 128 on q, k, v and states padded with zeros. That is exact: entries of
                k and q that are 0 leave norms, products and the other rows of a state alone, columns of v that are 0 stay
                0. The scale is the true head dim's.
    132 to 256  the recurrent kernel, token by token: there is no chunk kernel for a state of that size

States go through copies of their own, [states, HS, P, P] float32, in a pool whose slots are the sequences and after them the
checkpoints: there a mask is a zero state, and padding sequences have no slot. The copies: padding.py.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch

from gdn.ops.delta_rule.problem import ChunkParams, ChunkProblem, DeltaRuleProblem, RecurrentParams, RecurrentProblem
from gdn.problem import DTYPE_BYTES
from kernels_cute import recurrent
from kernels_cute.chunk import kernel as chunk
from kernels_cute.chunk.head_dims import copies
from kernels_cute.common import choice

LARGEST = 256
_ALIGNMENT = 256  # bytes


@functools.lru_cache(maxsize=256)
def padded(problem: ChunkProblem) -> ChunkProblem:
    """The problem with the head dim that is computed, on copies of its states."""
    dim = next(dim for dim in (*chunk.HEAD_DIMS, problem.head_k_dim) if problem.head_k_dim <= dim)
    copied = copies.has_state_copies(problem)
    indices = {"index_dtype": "int32" if copied else None, "has_final_indices": False, "has_mask": False}
    states = {"state_dtype": "float32", "has_initial_state": copied, "has_final_state": copied}
    return replace(problem, **states, **indices, head_k_dim=dim, head_v_dim=dim)


@functools.lru_cache(maxsize=256)
def stand_in(problem: ChunkProblem) -> ChunkProblem | RecurrentProblem:
    """The problem that is computed instead."""
    instead = padded(problem)
    if problem.head_k_dim <= 128:
        return instead
    shared = {f.name: getattr(instead, f.name) for f in fields(DeltaRuleProblem)} | problem.sizes()
    none = {"write_every_token": False, "has_accepted": False, "has_parent": False, "has_rounding": False}
    return RecurrentProblem(**shared, **none)


def kernel(problem: ChunkProblem) -> Any:
    """The module that serves the stand-in."""
    return chunk if problem.head_k_dim <= 128 else recurrent


def refusal(problem: ChunkProblem) -> str | None:
    """None where the problem is served, else why not."""
    k, v = problem.head_k_dim, problem.head_v_dim
    if k != v or k % 4 or not 4 <= k <= LARGEST:
        return f"requires K = V, a multiple of 4 up to {LARGEST}, got K={k}, V={v}"
    if k > 128 and problem.has_checkpoints:
        return f"requires head dims up to 128 with checkpoints, got {k}"
    if problem.checkpoint_state_dtype is not None:
        return f"requires head dims of 64 or 128 with checkpoint_states, got {k}"
    return chunk.refusal(problem)  # dtypes and heads


def note(problem: ChunkProblem) -> str:
    instead = stand_in(problem)
    if isinstance(instead, RecurrentProblem):
        return f"head dim {problem.head_k_dim}: computed token by token, by the recurrent kernel"
    return f"computed with head dim {instead.head_k_dim}: q, k, v and states are padded with zeros"


def workspace_bytes(problem: ChunkProblem, config: Any) -> int:
    """Bytes without the padded checkpoints, which `launch` allocates: the problem does not say how many a call has."""
    parts = _parts(problem, problem.num_tokens, problem.num_sequences).values()
    return sum(_bytes(*part) for part in parts) + kernel(problem).workspace_bytes(stand_in(problem), config)


def compile(problem: ChunkProblem, config: Any) -> dict[str, bytes]:
    from kernels_cute.chunk.head_dims import padding

    return kernel(problem).compile(stand_in(problem), config) | padding.compile(problem, padded(problem))


def launch_with(functions: Mapping[str, Callable[..., Any]], problem: ChunkProblem, config: Any, params: ChunkParams) -> None:
    instead = stand_in(problem)  # its static fields are those of every call
    num_sequences = params.cu_seqlens.shape[0] - 1
    parts, rest = _carve(_parts(problem, params.q.shape[1], num_sequences), params.workspace)
    states, slots, checkpoint_slots = parts.get("states"), parts.get("slots"), None
    if problem.has_checkpoints:
        # The one allocation in a launch: their number is known here only, see workspace_bytes.
        columns = params.checkpoint_offsets.shape[1]
        states = states.new_empty((num_sequences * (1 + columns), *states.shape[1:]))
        checkpoint_slots = slots.new_empty((num_sequences, columns))
    tokens = {name: parts.get(name, getattr(params, name)) for name in ("q", "k", "v", "out")}
    inner = params._replace(
        **tokens, initial_state=states, state_indices=slots, has_initial_state=None, final_state=states, final_state_indices=None,
        checkpoint_slots=checkpoint_slots, workspace=rest if rest is not None and rest.numel() else None, null_slot=-1,
    )  # fmt: skip
    null_slot = params.null_slot if problem.pooled else -1  # names slots of a pool alone
    if copies.PAD in functions:
        functions[copies.PAD](*copies.values(params, inner, null_slot, is_pad=True))
    between = {name: entry for name, entry in functions.items() if name not in (copies.PAD, copies.UNPAD)}
    if isinstance(instead, RecurrentProblem):
        choice.launch_with(between, _recurrent_params(inner))
    else:
        chunk.launch_with(between, instead, config, inner)
    if copies.UNPAD in functions:
        functions[copies.UNPAD](*copies.values(params, inner, null_slot, is_pad=False))


def _recurrent_params(p: ChunkParams) -> RecurrentParams:
    """Arguments of the recurrent kernel: no drafts, no rounding; a pool is its own final state."""
    own = RecurrentParams(**{name: getattr(p, name, None) for name in RecurrentParams._fields})
    return own if p.state_indices is None else own._replace(final_state=None)


def _parts(problem: ChunkProblem, num_tokens: int, num_sequences: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> dtype and shape of the buffers in the workspace; the stand-in's own workspace follows them."""
    instead = stand_in(problem)
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
