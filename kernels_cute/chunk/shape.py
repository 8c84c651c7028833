"""Sizes, named barriers and numeric constants that the roles of the fused chunk kernel share."""

from kernels_cute.chunk import layouts

CHUNK = 64
WARPGROUP = 128
BUFFERS = 2
# Named barriers; 0 is the block's.
INVERSE_BARRIER = 1
SCORE_BARRIER = 2
STATE_BARRIER = 3
TILE_BYTES = CHUNK * layouts.ROW_BYTES  # a 64 x 64 tile of 16-bit elements
VECTORS = 3  # rows of 64 float32 per buffer:
STATE_KEY = 0  # exp(c) f: factor of K S
KEY_TO_LAST = 1  # exp(c_last - c) f beta: factor of Y before it enters the state
STATE_QUERY = 2  # exp(c) fq scale: factor of Q S
VECTOR_BYTES = (VECTORS + 1) * CHUNK * 4  # the first element of a fourth row is exp(c_last)
AUX_ROWS = 4  # rows of 64 float32 that inverse and score share, twice:
CUM, KEY_BETA, KEY_FACTOR, QUERY_FACTOR = range(AUX_ROWS)  # c; beta, which becomes f beta; f; fq scale
AUX_BYTES = AUX_ROWS * CHUNK * 4
BLOCK = 16  # diagonal blocks of the inverse
HALF = 8  # and what of them is inverted by substitution
COLUMN_PITCH = 80  # bytes of a row of a diagonal block of L, by columns
ROW_PITCH = 96  # bytes of a row of an inverted diagonal block
SCRATCH_BYTES = BLOCK * ROW_PITCH
START_BARRIERS = 5
# Registers a thread of the state, inverse, score and copying warpgroups. The block's pool is what a thread has at launch times
# its threads; with less than this ptxas spills, or serialises the products.
STATE_REGISTERS, INVERSE_REGISTERS, SCORE_REGISTERS, COPY_REGISTERS = 232, 128, 112, 40
NORM_EPS = 1e-6
SOFTPLUS_THRESHOLD = 20.0
LOG2E = 1.4426950408889634
# A decay below exp(-128) is 0 in float32. Cutting g there keeps c small, so that its later differences keep their digits.
LOWEST_LOG_DECAY = -128.0


# Chunks of Q and V in shared memory, all that fit, and of K, which is needed first, for M. Blocks that make every second chunk
# wait for every second fill of a ring of odd size: of 5 the fill between is over by then (notes); of 3 nothing ensures that.
STAGES = 4
KEY_STAGES = STAGES + 1
