"""Structures of the roles that make tiles in the one launch: everything of a chunk that does not depend on the state.

A block of a cluster of `makers` blocks makes the tiles of every makers-th chunk, for both chains. The formulas are in prepare.py;
here the work is split between two warpgroups, so that two chunks are under way at a time:

    inverse   K K^T, |k|^-1, L, X, which is (I + L)^-1 up to factors                                      inverse.py
    product   Q K^T, |q|^-1, then with X: R, Z and the row factors, into a slot of the block's own ring    product.py

A turn is a chunk that a block makes: turn t is chunk makers * t + rank. fused.py has the table of barriers.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import tilelang.language as T

from gdn.problems import ChunkProblem
from kernels_tl.chunk.gates import LOG2_E, gate_macros
from kernels_tl.chunk.tile_math import DIAGONAL_PITCH
from kernels_tl.chunk.types import CHUNK, HALF, NUM_VECTORS

CHAINS = 2  # blocks of a cluster that run the chain, 64 V columns each; the others only make tiles
MOST_MAKERS = 4  # blocks of a cluster, limited by the slots of the ring, see ring_slot
KEY_BUFFERS = 2  # of K for the makers: one for the inverse, one for the product
STAGES = 2  # slots of the ring, and chunks that a chain has in shared memory
RING_TILES = 3  # R, the halves of Z
WARPGROUP = 128
LOWER_PITCH = CHUNK + 8  # of L, in 16-bit numbers: rows that start in different banks


@dataclass(frozen=True)
class MakerShared:
    """Shared memory and barriers between the makers of a block and their copies."""

    k: Any  # [KEY_BUFFERS, 64 tokens, 64 key columns]
    k_high: Any
    q: Any  # [64 tokens, 64 key columns]
    q_high: Any
    lower: Any  # [64, LOWER_PITCH]: -L
    x: Any  # [2, 64, 64]
    diagonal: Any  # [64, DIAGONAL_PITCH] float32: the diagonal blocks of -L, transposed, then their inverses
    sums: Any  # [2, 64] float32: c in units of log 2
    beta: Any  # [2, 64] float32: beta, and from the inverse on the factor of Z and R
    k_factor: Any  # [2, 64] float32
    k_norm: Any  # [2, 64] float32
    q_factor: Any  # [64] float32
    k_full: Any
    k_empty: Any
    q_full: Any
    q_empty: Any
    gates_full: Any
    gates_free: Any
    factors_full: Any
    x_full: Any
    x_free: Any


@dataclass(frozen=True)
class RingShared:
    """The ring of tiles between makers and chains, and its barriers."""

    tiles: Any  # [STAGES, RING_TILES, 64, 64]
    vectors: Any  # [STAGES, NUM_VECTORS, 64] float32
    ready: Any
    taken: Any
    room: Any
    made: Any


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


def maker_allocation(problem: ChunkProblem) -> Any:
    """A macro that allocates a MakerShared."""
    dtype = problem.dtype
    inverse_dtype = "float16" if problem.use_qk_l2norm else dtype

    @T.macro
    def allocate():
        maker_k_shared = T.alloc_shared((KEY_BUFFERS, CHUNK, HALF), dtype)
        maker_k_high_shared = T.alloc_shared((KEY_BUFFERS, CHUNK, HALF), dtype)
        maker_q_shared = T.alloc_shared((CHUNK, HALF), dtype)
        maker_q_high_shared = T.alloc_shared((CHUNK, HALF), dtype)
        lower_shared = T.alloc_shared((CHUNK, LOWER_PITCH), inverse_dtype)
        x_shared = T.alloc_shared((2, CHUNK, CHUNK), dtype)
        diagonal_shared = T.alloc_shared((CHUNK, DIAGONAL_PITCH), "float32")
        sum_shared = T.alloc_shared((2, CHUNK), "float32")
        beta_shared = T.alloc_shared((2, CHUNK), "float32")
        k_factor_shared = T.alloc_shared((2, CHUNK), "float32")
        k_norm_shared = T.alloc_shared((2, CHUNK), "float32")
        q_factor_shared = T.alloc_shared((CHUNK,), "float32")
        k_full = T.alloc_barrier([32] * KEY_BUFFERS)
        k_empty = T.alloc_barrier([4] * KEY_BUFFERS)
        q_full = T.alloc_barrier([32])
        q_empty = T.alloc_barrier(4)
        gates_full = T.alloc_barrier([32] * 2)
        gates_free = T.alloc_barrier([4] * 2)
        factors_full = T.alloc_barrier([128] * 2)
        x_full = T.alloc_barrier([128] * 2)
        x_free = T.alloc_barrier([4] * 2)
        return MakerShared(
            maker_k_shared, maker_k_high_shared, maker_q_shared, maker_q_high_shared, lower_shared, x_shared,
            diagonal_shared, sum_shared, beta_shared, k_factor_shared, k_norm_shared, q_factor_shared,
            k_full, k_empty, q_full, q_empty, gates_full, gates_free, factors_full, x_full, x_free,
        )  # fmt: skip

    return allocate


def ring_allocation(problem: ChunkProblem, ring_copies: int) -> Any:
    """A macro that allocates a RingShared; ring_copies: copies that fill a slot."""
    dtype = problem.dtype

    @T.macro
    def allocate():
        ring = T.alloc_shared((STAGES, RING_TILES, CHUNK, HALF), dtype)
        vector_ring = T.alloc_shared((STAGES, NUM_VECTORS, CHUNK), "float32")
        ready = T.alloc_cluster_barrier([ring_copies] * STAGES)
        taken = T.alloc_cluster_barrier([4 * CHAINS])
        room = T.alloc_barrier(32)
        made = T.alloc_barrier(128)
        return RingShared(ring, vector_ring, ready, taken, room, made)

    return allocate


def gate_role(problem: ChunkProblem, makers: int) -> Any:
    """A macro for one warp: cumulative log2 decays and beta of the chunks that the block makes."""
    gates = gate_macros(problem)

    @T.macro
    def make_gates(tensors, lane, work, shared):
        decays = T.alloc_local((2,), "float32")
        strengths = T.alloc_local((2,), "float32")
        log_decay = T.alloc_var("float32", init=0.0)
        gate_input = T.alloc_var("float32", init=0.0)
        strength = T.alloc_var("float32", init=0.0)
        running = T.alloc_var("float32", init=0.0)
        for turn in T.serial(work.turns):
            step = makers * turn + work.rank
            begin = work.token_begin + step * CHUNK
            valid = T.min(work.length - step * CHUNK, CHUNK)
            gates.load(tensors, begin, valid, lane, work.head, decays, strengths)
            for half in T.unroll(2):
                gates.evaluate(
                    tensors, 2 * lane + half < valid, half, work.head, decays, strengths, log_decay, gate_input, strength
                )
                strengths[half] = strength
                decays[half] = log_decay
            gates.sum_decays(lane, decays, running, gate_input)
            T.barrier_wait(shared.gates_free[turn % 2], ((turn // 2) & 1) ^ 1)
            for half in T.unroll(2):
                shared.beta[turn % 2, 2 * lane + half] = strengths[half]
            shared.sums[turn % 2, 2 * lane] = (running - decays[1]) * LOG2_E
            shared.sums[turn % 2, 2 * lane + 1] = running * LOG2_E
            T.barrier_arrive(shared.gates_full[turn % 2])

    return make_gates
