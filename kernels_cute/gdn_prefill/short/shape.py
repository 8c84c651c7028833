"""Sizes of a block of the short form, and which sequences it takes."""

from gdn.ops.layer_step.problem import GdnPrefillProblem
from kernels_cute.chunk.barriers import Field, Fields, shared_bytes
from kernels_cute.chunk.shape import AUX_BYTES, CHUNK, SCRATCH_BYTES, TILE_BYTES, VECTOR_BYTES

THREADS = 256  # two warpgroups, each with 64 of the V columns
MOST_TOKENS = CHUNK  # of a sequence
RUN = 4  # tokens of a thread in the convolution
MOST_VALUE_HEADS = 8  # of a key head: a warp makes the gates of one
BLOCKS_PER_SM = 2  # 128 registers a thread
RESERVED_BYTES = 1024  # of shared memory, a block

# Tiles of 64 columns. `state` holds the state before the sequence, in the tokens' dtype; before that, while M is made, L and the
# scratch of its inverse.
_TILES = {"q": 2, "k": 2, "v": 2, "m": 1, "p": 1, "state": 4}
LOWER, SCRATCH = 0, TILE_BYTES  # bytes in `state`
assert SCRATCH + 4 * SCRATCH_BYTES <= _TILES["state"] * TILE_BYTES


def fields(problem: GdnPrefillProblem) -> Fields:
    """Shared memory of a block."""
    ratio = problem.num_v_heads // problem.num_k_heads
    tiles = {name: Field(problem.dtype, CHUNK * 64 * count, 1024) for name, count in _TILES.items()}
    rows = {"rows": ratio * AUX_BYTES, "vectors": VECTOR_BYTES}
    vectors = {name: Field("float32", size // 4, 128) for name, size in rows.items()}
    return tiles | vectors | {"record": Field("int32", 5, 16)}


def fits(problem: GdnPrefillProblem, shared_bytes_per_block: int) -> bool:
    """Whether the form has room for the key head's value heads."""
    ratio = problem.num_v_heads // problem.num_k_heads
    return ratio <= MOST_VALUE_HEADS and shared_bytes(fields(problem)) <= shared_bytes_per_block
