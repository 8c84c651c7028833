"""Which copies surround a kernel of another head dim than the call's, and their arguments; what they do: padding.py."""

from typing import Any, NamedTuple

from gdn.ops.delta_rule.problem import ChunkParams, ChunkProblem

PAD, UNPAD = "gdn_cute_chunk_pad", "gdn_cute_chunk_unpad"


class CopyParams(NamedTuple):
    """Arguments of the copies in or out. A tensor that the copies in that direction do not have is None."""

    q: Any  # [1, L, heads, D], as k and v; on the way out the padded output [1, L, HS, P] alone
    k: Any
    v: Any
    q_copy: Any  # [1, L, heads, P], as k_copy and v_copy; on the way out the output [1, L, HS, D] alone
    k_copy: Any
    v_copy: Any
    cu_seqlens: Any
    initial_state: Any  # read; on the way out the padded states [N + N C, HS, P, P] float32
    final_state: Any  # written; on the way in the padded states, [N or more, HS, P, P]
    state_indices: Any
    has_initial_state: Any  # in only
    final_state_indices: Any  # out only
    slots: Any  # [N] int32, written on the way in: the sequence's number, or -1 for a padding sequence
    checkpoint_offsets: Any  # out only
    checkpoint_slots: Any  # [N, C]; on the way in int32, written: the checkpoints' places N + n C + c in the padded states
    null_slot: Any


def needed(problem: ChunkProblem, dim: int) -> list[str]:
    """The copies around a call with head dim `dim` that have anything to copy."""
    has_states, tokens_differ = has_state_copies(problem), dim != problem.head_k_dim
    return [PAD] * (tokens_differ or has_states) + [UNPAD] * (tokens_differ or problem.has_final_state)


def has_state_copies(problem: ChunkProblem) -> bool:
    return problem.pooled or problem.has_initial_state or problem.has_final_state


def values(p: ChunkParams, inner: ChunkParams, null_slot: Any, is_pad: bool) -> CopyParams:
    """The launch of the copies in or out. inner: the call that is computed instead."""
    if is_pad:
        return CopyParams(
            *(p.q, p.k, p.v, inner.q, inner.k, inner.v, p.cu_seqlens, p.initial_state, inner.initial_state, p.state_indices),
            *(p.has_initial_state, None, inner.state_indices, None, inner.checkpoint_slots, null_slot),
        )
    return CopyParams(
        *(inner.out, None, None, p.out, None, None, p.cu_seqlens, None if p.final_state is None else inner.final_state),
        *(p.final_state, p.state_indices, None, p.final_state_indices, None, p.checkpoint_offsets, p.checkpoint_slots, null_slot),
    )
