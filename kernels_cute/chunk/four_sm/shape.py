"""Sizes and barrier counts of the four-SM form, see kernel.py."""

from enum import IntEnum

from kernels_cute.chunk.shape import AUX_BYTES, CHUNK, SCRATCH_BYTES, TILE_BYTES, VECTOR_BYTES

DIM = 128  # the only head dim served
CHAINS = 2  # blocks that carry the state of a sequence and head, 64 V columns each
MAKERS = 2  # blocks that make tiles for them
BLOCKS = CHAINS + MAKERS
SETS = 2  # inverse and score warpgroups, of each kind, in a maker block
ROUND = MAKERS * SETS  # chunk j is made by set j // MAKERS % SETS of maker j % MAKERS
SET_KEY_STAGES = 2  # of a set
SLOTS = 4  # of tiles in a chain block; in clusters of four one for each set
RING = 16  # slots of tiles of a sequence and head in the workspace
TAKEN_EVERY = 4  # chunks after which the chains say how many they have taken; RING exceeds SLOTS + TAKEN_EVERY
TILE_LOADER = 0  # the chain that loads tiles from the ring for both
WARPGROUPS = 2 * SETS + 1
KEY_BYTES = CHUNK * DIM * 2
HANDED_BYTES = KEY_BYTES + TILE_BYTES + VECTOR_BYTES  # Z, P M and vectors of a chunk
WORDS_BYTES, WORD_BYTES = 256, 32  # of the counts of a sequence and head, and from one to the next
TAKEN = ROUND  # number of the count of chunks that the chains have taken, after those that the sets have made
BARRIER_BYTES = 512  # most of the barriers of either kind of block
# Registers a thread. A block has at launch 65536 / 640 = 96 a thread, in steps of 8: a pool of 5 * 96 = 480.
STATE_REGISTERS = 240
IDLE_REGISTERS = 24
INVERSE_REGISTERS = 112
SCORE_REGISTERS = 112
COPY_REGISTERS = 32


class NamedBarrier(IntEnum):
    """Named barriers of a maker block, those of its first set; the second set has the next. 0 is the whole block's."""

    INVERSE = 1
    SCORE = INVERSE + SETS


def ring_bytes(groups: int) -> int:
    """Workspace of `groups` sequences and heads: counts, and the ring."""
    return (groups + 1) * WORDS_BYTES + groups * RING * HANDED_BYTES


def chain_bytes(stages: int) -> int:
    """Shared memory of a chain block: stages of K, Q, V; a slot of Z, P M and vectors for every set."""
    rows = _whole(SLOTS * VECTOR_BYTES + BARRIER_BYTES)
    return rows + stages * (2 * KEY_BYTES + TILE_BYTES) + SLOTS * (KEY_BYTES + TILE_BYTES)


# 16-bit summands of the scaled M: bfloat16 needs two for Z to have no more than its own rounding error.
SCALED_PARTS = {"bfloat16": 2, "float16": 1}


def maker_bytes(parts: int) -> int:
    """Shared memory of a maker block: for every set stages of K, one of Q, M plain and in parts, L, and what is handed over."""
    rows = _whole(SETS * (VECTOR_BYTES + 2 * AUX_BYTES + 4 * SCRATCH_BYTES) + BARRIER_BYTES)
    return rows + SETS * ((SET_KEY_STAGES + 2) * KEY_BYTES + (parts + 3) * TILE_BYTES)


def _whole(num_bytes: int) -> int:
    return -(-num_bytes // 1024) * 1024
