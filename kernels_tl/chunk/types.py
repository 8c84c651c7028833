"""Parameter types, slots and states, which the launches of the chunk kernel share.

A chunk slot is a row of the workspace. Sequence n owns the slots from `cu_seqlens[n] // 64 + n` on: consecutive sequences
never overlap, `ceil(L / 64) + N` slots are enough, and finding the sequence of a slot needs no prefix sum over lengths.
Segment slots are the same with the tokens of a segment in place of 64.
"""

from typing import Any

import tilelang.language as T

from gdn.ops.delta_rule.problem import ChunkProblem
from kernels_tl.chunk.constants import CHUNK, HALF, NUM_VECTORS, TRANSITION_DTYPE
from kernels_tl.chunk.sizes import MOST_RANKED, num_tiles
from kernels_tl.common import build


def declare(problem: ChunkProblem, names: str) -> Any:
    """The parameters of these names, first in a prim_func; None for those that the problem leaves out."""
    types = _types(problem, T.dynamic("num_tokens"))
    return build.parameters(**{name: types[name] for name in names.split()})


def _types(p: ChunkProblem, num_tokens: Any) -> dict[str, Any]:
    """Types of the parameters under their public names, and of the parts of the workspace."""
    heads, K, V = p.num_state_heads, p.head_k_dim, p.head_v_dim
    slots, segment_slots = T.dynamic("num_slots"), T.dynamic("num_segment_slots")

    def strided(name: str, shape: tuple[Any, ...], dtype: str | None, inner: tuple[int, ...] = ()) -> Any:
        """Strides are free but for the inner ones; no dtype: no such parameter."""
        free = (T.dynamic(f"{name}_stride_{dim}", "int64") for dim in range(len(shape) - len(inner)))
        return None if dtype is None else T.StridedTensor(shape, (*free, *inner), dtype)

    def tokens(name: str, num_heads: int, dim: int) -> Any:
        return strided(name, (num_tokens, num_heads, dim), p.dtype, (1,))

    def rows(name: str, dtype: str | None) -> Any:
        return strided(name, (T.dynamic(f"{name}_rows"),), dtype)

    def state(name: str, dtype: str | None) -> Any:
        dims = (V, K) if p.state_v_first else (K, V)
        return strided(name, (T.dynamic(f"{name}_slots", "int64"), heads, *dims), dtype, (dims[1], 1))

    def checkpoints(dtype: str | None) -> Any:
        return T.Tensor((T.dynamic("checkpoint_rows"), columns), dtype) if p.has_checkpoints else None

    def per_head() -> Any:
        return T.Tensor((heads,), "float32") if p.gate_dtype is not None and p.use_gate else None

    columns, final_dtype = T.dynamic("num_checkpoints"), p.state_dtype if p.pooled else "float32"
    return {
        "q": tokens("q", p.num_q_heads, K),
        "k": tokens("k", p.num_k_heads, K),
        "v": tokens("v", p.num_v_heads, V),
        "g": strided("g", (num_tokens, heads), p.gate_dtype),
        "beta": strided("beta", (num_tokens, heads), p.beta_dtype),
        "A_log": per_head(),
        "dt_bias": per_head(),
        "initial_state": state("initial_state", p.state_dtype if p.has_initial_state else None),
        "state_indices": rows("state_indices", p.index_dtype),
        "has_initial_state": rows("has_initial_state", "bool" if p.has_mask else None),
        "final_state": state("final_state", final_dtype if p.has_final_state else None),
        "final_state_indices": rows("final_state_indices", p.index_dtype if p.has_final_indices else None),
        "cu_seqlens": T.Tensor((T.dynamic("num_cu_seqlens"),), p.cu_seqlens_dtype),
        "checkpoint_offsets": checkpoints("int32"),
        "checkpoint_slots": checkpoints(p.checkpoint_index_dtype),
        "checkpoint_states": state("checkpoint_states", p.checkpoint_state_dtype),
        "out": tokens("out", heads, V),
        "tiles": T.Tensor((slots, heads, num_tiles(p), CHUNK, CHUNK), p.dtype),  # R and Z of every chunk
        "vectors": T.Tensor((slots, heads, NUM_VECTORS, CHUNK), "float32"),  # row factors of every chunk
        "segment_starts": T.Tensor((segment_slots, heads, V, K), "float32"),  # the state that each segment starts from, V first
        # Each segment's transition, [K before, K after] as two summands.
        "transitions": T.Tensor((segment_slots, heads, 2, K, K), TRANSITION_DTYPE),
        "scale": T.float32(),
        "null_slot": T.int32(),
        "split_chunks": T.int32(),
        "split_if_longest_exceeds": T.int32(),
    }


@T.macro
def find_segment(cu_seqlens, slot, split_chunks, place):
    """Finds a segment slot: place[0] = its sequence, place[1] = the position of its segment; place: two local int32.

    The sequence is the last n with cu_seqlens[n] // (64 * segment) + n <= slot. Slots after its last segment are unused.
    """
    place[0] = 0
    place[1] = T.max(cu_seqlens.shape[0] - 2, 0)
    while place[0] < place[1]:
        middle = (place[0] + place[1] + 1) // 2
        if T.cast(cu_seqlens[middle], "int32") // (split_chunks * CHUNK) + middle <= slot:
            place[0] = middle
        else:
            place[1] = middle - 1
    place[1] = slot - T.cast(cu_seqlens[place[0]], "int32") // (split_chunks * CHUNK) - place[0]


@T.macro
def find_ranked(cu_seqlens, rank, lengths, chosen):
    """chosen[0] = the sequence of this rank by length, the longest first; by position if there are too many to rank.

    Every thread of the block calls it, MOST_RANKED at least; lengths [MOST_RANKED] and chosen [1]: shared int32.
    """
    tx = T.get_thread_binding()
    ahead = T.alloc_var("int32", init=0)
    num_sequences = cu_seqlens.shape[0] - 1
    if num_sequences > 1 and num_sequences <= MOST_RANKED:
        if tx < num_sequences:
            lengths[tx] = T.cast(cu_seqlens[tx + 1] - cu_seqlens[tx], "int32")
        T.sync_threads()
        if tx < num_sequences:
            for other in T.serial(num_sequences):
                # Equal lengths are ranked by position: ranks are a permutation.
                if lengths[other] > lengths[tx] or (lengths[other] == lengths[tx] and other < tx):
                    ahead += 1
            if ahead == rank:
                chosen[0] = tx
    elif tx == 0:
        chosen[0] = rank
    T.fence_proxy_async()
    T.sync_threads()  # bulk copies write where the lengths are


@T.macro
def exit_unless_chosen(decides, cuts, tensors):
    """Ends a launch which the lengths of the call do not choose.

    With `decides`, a call launches kernels for whole sequences and kernels for segments (`cuts`); the latter work if the longest
    sequence has more than split_if_longest_exceeds tokens. Without `decides` nothing happens.
    """
    if decides:
        cu_seqlens, most = tensors.cu_seqlens, tensors.split_if_longest_exceeds
        longest = T.alloc_var("int32", init=0)
        for sequence in T.serial(cu_seqlens.shape[0] - 1):
            longest = T.max(longest, T.cast(cu_seqlens[sequence + 1] - cu_seqlens[sequence], "int32"))
        if (longest <= most) if cuts else (longest > most):
            T.thread_return()


@T.macro
def load_state(problem, source, slot, head, column_begin, registers):
    """V columns of a given state into the halves of S^T."""
    for half, fragment in enumerate(registers.state):
        for i, j in T.Parallel(registers.columns, HALF):
            if problem.state_v_first:
                fragment[i, j] = T.cast(source[slot, head, column_begin + i, HALF * half + j], "float32")
            else:
                fragment[i, j] = T.cast(source[slot, head, HALF * half + j, column_begin + i], "float32")


@T.macro
def store_state(problem, target, slot, head, column_begin, registers):
    """V columns of S^T to a slot."""
    for half, fragment in enumerate(registers.state):
        for i, j in T.Parallel(registers.columns, HALF):
            if problem.state_v_first:
                target[slot, head, column_begin + i, HALF * half + j] = T.cast(fragment[i, j], target.dtype)
            else:
                target[slot, head, HALF * half + j, column_begin + i] = T.cast(fragment[i, j], target.dtype)
