"""Structures of the roles that make tiles in the one launch: everything of a chunk that does not depend on the state.

A block of a cluster of `makers` blocks makes the tiles of every makers-th chunk, for both chains. The formulas are in prepare.py;
here the work is split between two warpgroups, so that two chunks are under way at a time:

    inverse   K K^T, |k|^-1, L, X, which is (I + L)^-1 up to factors                                      inverse.py
    product   Q K^T, |q|^-1, then with X: R, Z and the row factors, into a slot of the block's own ring    product.py

A turn is a chunk that a block makes: turn t is chunk makers * t + rank. fused.py has the table of barriers.
"""

from typing import Any, NamedTuple

import tilelang.language as T

from gdn.ops.delta_rule.problem import ChunkProblem
from kernels_tl.chunk.constants import CHUNK, DIAGONAL_PITCH, HALF, NUM_VECTORS
from kernels_tl.chunk.sizes import CHAINS, KEY_BUFFERS, RING_COPIES, RING_STAGES, RING_TILES
from kernels_tl.chunk.state_chain import halves_of, load_halves
from kernels_tl.chunk.tile_math import LOG2_E, allocate_gates, inverse_dtype, make_gates
from kernels_tl.common import build
from kernels_tl.common.copies import bulk_load

WARPGROUP = 128
LOWER_PITCH = CHUNK + 8  # of L, in 16-bit numbers: rows that start in different banks


class MakerWork(NamedTuple):
    """The chunks that a block makes."""

    head: Any
    rank: Any  # of the block in its cluster
    turns: Any  # number of chunks
    token_begin: Any  # of the sequence
    length: Any  # tokens of the sequence


def ring_slot(makers: int, rank: Any, turn: Any) -> Any:
    """The slot that a block's turn fills: a chain's block fills the one that its chain reads, another block alternates while the
    previous tiles are sent."""
    if makers == CHAINS:
        return rank
    return (turn * (1 if makers % 2 else rank // CHAINS) + rank) & 1


def allocate_makers(problem: ChunkProblem) -> Any:
    """Shared memory and barriers between the makers of a block and their copies."""
    halves, dtype = halves_of(problem), problem.dtype
    return build.named(
        k=tuple(T.alloc_shared((KEY_BUFFERS, CHUNK, HALF), dtype) for _ in halves),  # [64 tokens, 64 key columns] by halves
        q=tuple(T.alloc_shared((CHUNK, HALF), dtype) for _ in halves),
        lower=T.alloc_shared((CHUNK, LOWER_PITCH), inverse_dtype(problem)),  # -L
        x=T.alloc_shared((2, CHUNK, CHUNK), dtype),
        # The diagonal blocks of -L, transposed, then their inverses.
        diagonal=T.alloc_shared((CHUNK, DIAGONAL_PITCH), "float32"),
        sums=T.alloc_shared((2, CHUNK), "float32"),  # c in units of log 2
        beta=T.alloc_shared((2, CHUNK), "float32"),  # from the inverse on the factor of Z and R
        k_factor=T.alloc_shared((2, CHUNK), "float32"),
        k_norm=T.alloc_shared((2, CHUNK), "float32"),
        q_factor=T.alloc_shared((CHUNK,), "float32"),
        k_full=T.alloc_barrier([32] * KEY_BUFFERS),
        k_empty=T.alloc_barrier([4] * KEY_BUFFERS),
        q_full=T.alloc_barrier([32]),
        q_empty=T.alloc_barrier(4),
        gates_full=T.alloc_barrier([32] * 2),
        gates_free=T.alloc_barrier([4] * 2),
        factors_full=T.alloc_barrier([128] * 2),
        x_full=T.alloc_barrier([128] * 2),
        x_free=T.alloc_barrier([4] * 2),
    )


def allocate_ring(problem: ChunkProblem) -> Any:
    """The ring of tiles between makers and chains, and its barriers."""
    return build.named(
        tiles=T.alloc_shared((RING_STAGES, RING_TILES, CHUNK, HALF), problem.dtype),
        vectors=T.alloc_shared((RING_STAGES, NUM_VECTORS, CHUNK), "float32"),
        ready=T.alloc_cluster_barrier([RING_COPIES] * RING_STAGES),
        taken=T.alloc_cluster_barrier([4 * CHAINS]),
        room=T.alloc_barrier(32),
        made=T.alloc_barrier(128),
    )


@T.macro
def gate_role(problem, makers, tensors, lane, work, shared):
    """One warp: cumulative log2 decays and beta of the chunks that the block makes."""
    gates = allocate_gates()
    for turn in T.serial(work.turns):
        step = makers * turn + work.rank
        begin = work.token_begin + step * CHUNK
        valid = T.min(work.length - step * CHUNK, CHUNK)
        make_gates(problem, tensors, begin, valid, lane, work.head, gates)
        T.barrier_wait(shared.gates_free[turn % 2], ((turn // 2) & 1) ^ 1)
        for half in T.unroll(2):
            shared.beta[turn % 2, 2 * lane + half] = gates.strengths[half]
        shared.sums[turn % 2, 2 * lane] = (gates.running[0] - gates.decays[1]) * LOG2_E
        shared.sums[turn % 2, 2 * lane + 1] = gates.running[0] * LOG2_E
        T.barrier_arrive(shared.gates_full[turn % 2])


@T.macro
def load_keys(problem, tensors, head, token, shared, buffer):
    load_halves(tensors.k, head // (problem.num_state_heads // problem.num_k_heads), token, shared.k, buffer, shared.k_full)
    T.barrier_arrive(shared.k_full[buffer])


@T.macro
def load_queries(problem, tensors, head, token, shared):
    q_head = head // (problem.num_state_heads // problem.num_q_heads)
    for half, target in enumerate(shared.q):
        columns = slice(half * HALF, (half + 1) * HALF)
        bulk_load(tensors.q[token : token + CHUNK, q_head, columns], target, shared.q_full[0])
    T.barrier_arrive(shared.q_full[0])


@T.macro
def send(ring, slot, remote_slot, block):
    for buffer in (ring.tiles, ring.vectors):
        region = (slice(None),) * (len(buffer.shape) - 1)
        source, target = (slot, *region), (remote_slot, *region)
        T.copy_cluster(buffer[source], buffer[target], dst_block=block, remote_barrier=ring.ready[remote_slot])


@T.macro
def give(makers, thread, turn, rank, ring):
    """Sends the tiles of a turn to the chains of other blocks; a chain's own block has them in place."""
    T.barrier_wait(ring.made, turn & 1)
    slot = ring_slot(makers, rank, turn)
    if makers == CHAINS:
        if thread < RING_COPIES:
            T.barrier_arrive(ring.ready[slot])
        send(ring, slot, slot, rank ^ 1)
    elif rank < CHAINS:
        if thread < RING_COPIES:
            T.barrier_arrive(ring.ready[slot])
        send(ring, slot, slot, rank ^ 1)
    else:
        T.barrier_wait(ring.taken[0], turn & 1)
        T.barrier_arrive(ring.room)
        for block in (0, 1):
            send(ring, slot, (makers * turn + rank) & 1, block)


@T.macro
def feed_makers(problem, makers, tensors, thread, work, shared, ring):
    """The warp that loads K and Q of the chunks that the block makes, two chunks and one chunk ahead, and sends their tiles."""
    head = work.head
    for turn in T.serial(T.min(work.turns, KEY_BUFFERS)):
        token = work.token_begin + (makers * turn + work.rank) * CHUNK
        load_keys(problem, tensors, head, token, shared, turn)
        if turn == 0:
            load_queries(problem, tensors, head, token, shared)
    for turn in T.serial(work.turns):
        token = work.token_begin + (makers * turn + work.rank) * CHUNK
        if turn + 1 < work.turns:
            T.barrier_wait(shared.q_empty, turn & 1)
            load_queries(problem, tensors, head, token + makers * CHUNK, shared)
        if turn + KEY_BUFFERS < work.turns:  # free before the tiles are made
            buffer = turn % KEY_BUFFERS
            T.barrier_wait(shared.k_empty[buffer], (turn // KEY_BUFFERS) & 1)
            load_keys(problem, tensors, head, token + makers * KEY_BUFFERS * CHUNK, shared, buffer)
        give(makers, thread, turn, work.rank, ring)
