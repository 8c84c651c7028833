"""What the launches of the chunk kernel share: tile constants, parameter types, and where slots lie.

A chunk slot is a row of the workspace. Sequence n owns the slots from `cu_seqlens[n] // 64 + n` on: consecutive sequences
never overlap, `ceil(L / 64) + N` slots are enough, and finding the sequence of a slot needs no prefix sum over lengths.
Segment slots are the same thing with the tokens of a segment in place of 64.
"""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from gdn.problems import ChunkProblem

CHUNK = 64  # tokens of a chunk; the tile of every matmul and the rows of a wgmma
HALF = 64  # columns of K and Q in one shared tile: 128 bytes, a row of the swizzle
TILE_R = 0  # places of the per-chunk tiles in the workspace, see _chunk_prepare: R,
TILE_Z = 1  # Z's lower 64 columns,
TILE_Z_HIGH = 2  # and the upper ones, where K = 128
NUM_VECTORS = 3  # rows of the per-chunk vectors in the workspace:
ROW_STATE_KEY = 0  # exp(c) * |k|^-1: factor of K S
ROW_STATE_QUERY = 1  # exp(c) * |q|^-1 * scale: factor of Q S
ROW_LAST = 2  # element 0: exp(c_last), the decay of the whole chunk
MOST_RANKED = 256  # sequences that a block of so many threads ranks by length
TRANSITION_DTYPE = "bfloat16"  # of a segment's transition, whatever the tokens are: keys that are not normalised make it large


@dataclass(frozen=True)
class Tensors:
    """A kernel's parameters under their public names, handed to its roles; None: the kernel has no such parameter.

    Parameters that the problem leaves out are stand-ins (`cu_seqlens_tensor`) and are not read.
    """

    q: Any = None
    k: Any = None
    v: Any = None
    g: Any = None
    beta: Any = None
    A_log: Any = None
    dt_bias: Any = None
    initial_state: Any = None
    state_indices: Any = None
    has_initial_state: Any = None
    final_state: Any = None
    final_state_indices: Any = None
    cu_seqlens: Any = None
    checkpoint_offsets: Any = None
    checkpoint_slots: Any = None
    out: Any = None
    tiles: Any = None  # workspace: R and Z of every chunk
    vectors: Any = None  # workspace: row factors of every chunk
    segment_starts: Any = None  # workspace: the state that each segment starts from
    transitions: Any = None  # workspace: each segment's transition
    scale: Any = None
    null_slot: Any = None


def num_slots(num_tokens: int, num_sequences: int, chunks: int = 1) -> int:
    """Slots of pieces of so many chunks that a call needs at most, whatever the lengths are."""
    return -(-num_tokens // (CHUNK * chunks)) + num_sequences


@T.macro
def find_segment(cu_seqlens, bounds, slot, segment, place):
    """Of a segment slot: place[0] = its sequence, place[1] = the position of its segment; place: two local int32.

    The sequence is the last n with cu_seqlens[n] // (64 * segment) + n <= slot. What lies behind its segments is nobody's.
    """
    place[0] = 0
    place[1] = T.max(bounds - 2, 0)
    while place[0] < place[1]:
        middle = (place[0] + place[1] + 1) // 2
        if T.cast(cu_seqlens[middle], "int32") // (segment * CHUNK) + middle <= slot:
            place[0] = middle
        else:
            place[1] = middle - 1
    place[1] = slot - T.cast(cu_seqlens[place[0]], "int32") // (segment * CHUNK) - place[0]


@T.macro
def find_ranked(cu_seqlens, bounds, rank, lengths, chosen):
    """chosen[0] = the sequence of this rank by length, the longest first; by position where there are too many to rank.

    Every thread of the block calls it, MOST_RANKED at least; lengths [MOST_RANKED] and chosen [1]: shared int32.
    """
    tx = T.get_thread_binding()
    ahead = T.alloc_var("int32", init=0)
    if bounds > 2 and bounds <= MOST_RANKED + 1:
        if tx < bounds - 1:
            lengths[tx] = T.cast(cu_seqlens[tx + 1] - cu_seqlens[tx], "int32")
        T.sync_threads()
        if tx < bounds - 1:
            for other in T.serial(bounds - 1):
                # Of equal ones the first: ranks are a permutation.
                if lengths[other] > lengths[tx] or (lengths[other] == lengths[tx] and other < tx):
                    ahead += 1
            if ahead == rank:
                chosen[0] = tx
    elif tx == 0:
        chosen[0] = rank
    T.fence_proxy_async()
    T.sync_threads()  # bulk copies write where the lengths lie


def turn(decides: bool, cuts: bool) -> Any:
    """A macro that ends a launch at once whose turn it is not, of a call that has launches for whole sequences and for segments
    (`cuts`): these have theirs where the longest sequence has more than cut_above tokens. Without `decides` it is nothing."""

    @T.macro
    def take_turn(cu_seqlens, bounds, cut_above):
        if decides:
            longest = T.alloc_var("int32", init=0)
            for sequence in T.serial(bounds - 1):
                longest = T.max(longest, T.cast(cu_seqlens[sequence + 1] - cu_seqlens[sequence], "int32"))
            if (longest <= cut_above) if cuts else (longest > cut_above):
                T.thread_return()

    return take_turn


def num_tiles(problem: ChunkProblem) -> int:
    """Tiles of a chunk and head: R and Z."""
    return 1 + problem.head_k_dim // HALF


def tiles_tensor(slots: Any, problem: ChunkProblem) -> Any:
    """[slots, HS, tiles, 64, 64] of the tokens' dtype."""
    return T.Tensor((slots, problem.num_state_heads, num_tiles(problem), CHUNK, CHUNK), problem.dtype)


def token_tensor(name: str, num_tokens: Any, heads: int, dim: int, dtype: str) -> Any:
    """[L, heads, dim] with free token and head strides, last dim contiguous."""
    token_stride = T.dynamic(f"{name}_token_stride", "int64")
    head_stride = T.dynamic(f"{name}_head_stride", "int64")
    return T.StridedTensor((num_tokens, heads, dim), (token_stride, head_stride, 1), dtype)


def bounds_tensor(bounds: Any, problem: ChunkProblem) -> Any:
    """cu_seqlens [N + 1]; also what is declared (and passed) where the problem has no such tensor.

    Every parameter needs an annotation object of its own: parameters that share one become one buffer.
    """
    return T.Tensor((bounds,), problem.cu_seqlens_dtype)


def gate_tensor(name: str, num_tokens: Any, bounds: Any, problem: ChunkProblem, dtype: str | None) -> Any:
    """[L, HS] with any strides, or the stand-in."""
    if dtype is None:
        return bounds_tensor(bounds, problem)
    strides = (T.dynamic(f"{name}_token_stride", "int64"), T.dynamic(f"{name}_head_stride", "int64"))
    return T.StridedTensor((num_tokens, problem.num_state_heads), strides, dtype)


def row_tensor(name: str, bounds: Any, problem: ChunkProblem, dtype: str | None) -> Any:
    """[>= N] with any stride, or the stand-in."""
    if dtype is None:
        return bounds_tensor(bounds, problem)
    return T.StridedTensor((T.dynamic(f"{name}_rows"),), (T.dynamic(f"{name}_stride", "int64"),), dtype)


def state_tensor(name: str, bounds: Any, problem: ChunkProblem, dtype: str | None) -> Any:
    """[slots, HS, K, V] (or V first), slot stride free, or the stand-in."""
    if dtype is None:
        return bounds_tensor(bounds, problem)
    inner = (problem.head_k_dim, problem.head_v_dim)
    if problem.state_v_first:
        inner = inner[::-1]
    slot_stride = T.dynamic(f"{name}_slot_stride", "int64")
    head_stride = T.dynamic(f"{name}_head_stride", "int64")
    shape = (T.dynamic(f"{name}_slots", "int64"), problem.num_state_heads, *inner)
    return T.StridedTensor(shape, (slot_stride, head_stride, inner[1], 1), dtype)


def checkpoint_tensor(columns: Any, bounds: Any, problem: ChunkProblem, dtype: str | None) -> Any:
    """[>= N, C] contiguous, or the stand-in."""
    if not problem.has_checkpoints or dtype is None:
        return bounds_tensor(bounds, problem)
    return T.Tensor((T.dynamic("checkpoint_rows"), columns), dtype)


def starts_tensor(segment_slots: Any, problem: ChunkProblem) -> Any:
    """[segment slots, HS, V, K] float32: the state that a segment starts from, V first."""
    return T.Tensor((segment_slots, problem.num_state_heads, problem.head_v_dim, problem.head_k_dim), "float32")


def transitions_tensor(segment_slots: Any, problem: ChunkProblem) -> Any:
    """[segment slots, HS, 2, K before, K after] bfloat16: what a segment makes of the states before it, as two summands."""
    return T.Tensor((segment_slots, problem.num_state_heads, 2, problem.head_k_dim, problem.head_k_dim), TRANSITION_DTYPE)


def state_loader(problem: ChunkProblem, columns: int) -> Any:
    """A macro that reads V columns of a given state into the halves of a transposed fragment."""
    v_first, wide = problem.state_v_first, problem.head_k_dim > HALF

    @T.macro
    def load_state(source, slot, head, column_begin, low_fragment, high_fragment):
        for i, j in T.Parallel(columns, HALF):
            if v_first:
                low_fragment[i, j] = T.cast(source[slot, head, column_begin + i, j], "float32")
            else:
                low_fragment[i, j] = T.cast(source[slot, head, j, column_begin + i], "float32")
        if wide:
            for i, j in T.Parallel(columns, HALF):
                if v_first:
                    high_fragment[i, j] = T.cast(source[slot, head, column_begin + i, HALF + j], "float32")
                else:
                    high_fragment[i, j] = T.cast(source[slot, head, HALF + j, column_begin + i], "float32")

    return load_state


def state_storer(problem: ChunkProblem, columns: int, dtype: str) -> Any:
    """A macro that writes V columns of a state, the halves of a transposed fragment, to a slot of `dtype`."""
    v_first, wide = problem.state_v_first, problem.head_k_dim > HALF

    @T.macro
    def store_state(target, slot, head, column_begin, low_fragment, high_fragment):
        for i, j in T.Parallel(columns, HALF):
            if v_first:
                target[slot, head, column_begin + i, j] = T.cast(low_fragment[i, j], dtype)
            else:
                target[slot, head, j, column_begin + i] = T.cast(low_fragment[i, j], dtype)
        if wide:
            for i, j in T.Parallel(columns, HALF):
                if v_first:
                    target[slot, head, column_begin + i, HALF + j] = T.cast(high_fragment[i, j], dtype)
                else:
                    target[slot, head, HALF + j, column_begin + i] = T.cast(high_fragment[i, j], dtype)

    return store_state
