"""Sizes, registers and slots that decide which configurations fit, and the kernels' constants that they follow from."""

from gdn.ops.delta_rule.problem import ChunkProblem
from kernels_tl.chunk.constants import CHUNK, DIAGONAL_PITCH, HALF, NUM_VECTORS

MOST_RANKED = 256  # sequences that a block of as many threads ranks by length


PANEL = 64  # V columns of a math warpgroup: the rows of its wgmmas
STAGES = 3  # chunks of `allocate_stages` in shared memory at a time
# The chain of segments.
MATH_THREADS = 128  # one warpgroup: a block has one panel of V columns
PRODUCER_THREADS = 128  # one warpgroup: register counts change by whole warpgroups
PRODUCER_REGISTERS = 24
MATH_REGISTERS = 240
BLOCK_REGISTERS = MATH_THREADS * MATH_REGISTERS + PRODUCER_THREADS * PRODUCER_REGISTERS
# The makers of tiles in the one launch.
CHAINS = 2  # blocks of a cluster that run the chain, 64 V columns each; the others only make tiles
MOST_MAKERS = 4  # blocks of a cluster, limited by the slots of the ring, see ring_slot
KEY_BUFFERS = 2  # of K for the makers: one for the inverse, one for the product
RING_STAGES = 2  # slots of the ring, and chunks that a chain has in shared memory
RING_TILES = 3  # R, the halves of Z
RING_COPIES = 2  # that fill a slot: the tiles, the row factors
MAKER_TILES = RING_STAGES * RING_TILES + 2 * KEY_BUFFERS + 2 + 3  # [64, 64] in shared memory: ring; K, Q; L, X
# The one launch.
FUSED_THREADS = 512
CHAIN_REGISTERS = 224
INVERSE_REGISTERS = 120
PRODUCT_REGISTERS = 128  # what all warpgroups begin with; set all the same, else the assembler gives them fewer
COPY_REGISTERS = 40
FUSED_REGISTERS = 128 * (CHAIN_REGISTERS + INVERSE_REGISTERS + PRODUCT_REGISTERS + COPY_REGISTERS)
_TILE_BYTES = CHUNK * HALF * 2
_TILES = 4 * RING_STAGES + RING_STAGES + 1 + MAKER_TILES  # K, Q; V; out
_FLOATS = RING_STAGES * NUM_VECTORS * CHUNK + CHUNK * DIAGONAL_PITCH + 9 * CHUNK + MOST_RANKED
FUSED_BYTES = _TILES * _TILE_BYTES + 4 * _FLOATS + 1024  # barriers


def num_slots(num_tokens: int, num_sequences: int, chunks: int = 1) -> int:
    """Slots that a call needs at most, whatever the lengths are; chunks: of a slot, 1 or a segment's."""
    return -(-num_tokens // (CHUNK * chunks)) + num_sequences


def num_tiles(problem: ChunkProblem) -> int:
    """Tiles of a chunk and head: R and Z."""
    return 1 + problem.head_k_dim // HALF
