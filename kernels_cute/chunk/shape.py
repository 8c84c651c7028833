"""Sizes, named barriers and numeric constants that the roles of the chunk kernels share."""

from enum import IntEnum

CHUNK = 64
WARPGROUP = 128
BUFFERS = 2
ROW_BYTES = 128  # of a piece of 64 columns in shared memory
TILE_BYTES = CHUNK * ROW_BYTES  # a 64 x 64 tile of 16-bit elements
_ROW = CHUNK * 4  # bytes of 64 float32
# Row vectors of a buffer: exp(c) f, factor of K S; exp(c_last - c) f beta, factor of Y before it enters the state;
# exp(c) fq scale, factor of Q S; and the one element exp(c_last).
STATE_KEY, KEY_TO_LAST, STATE_QUERY, LAST_DECAY = range(0, 4 * _ROW, _ROW)
VECTOR_BYTES = 4 * _ROW
# Rows that inverse and score share, twice: c; beta, which becomes f beta; f; fq scale.
CUM, KEY_BETA, KEY_FACTOR, QUERY_FACTOR = range(0, 4 * _ROW, _ROW)
LAST_CUM = CUM + _ROW - 4
AUX_BYTES = 4 * _ROW
ROW_PITCH = 96  # bytes of a row of an inverted 16 x 16 diagonal block
SCRATCH_BYTES = 16 * ROW_PITCH
START_BUFFERS = 2  # of the P of a summary, in the room of the K and Q stages
# Registers a thread of the state, inverse, score and copying warpgroups. The block's pool is what a thread has at launch times
# its threads; with less than this ptxas spills, or serialises the products.
STATE_REGISTERS, INVERSE_REGISTERS, SCORE_REGISTERS, COPY_REGISTERS = 232, 128, 112, 40
NORM_EPS = 1e-6
SOFTPLUS_THRESHOLD = 20.0
LOG2E = 1.4426950408889634
# A decay below exp(-128) is 0 in float32. Cutting g there keeps c small, so that its later differences keep their digits.
LOWEST_LOG_DECAY = -128.0
# Chunks of Q and V in shared memory, all that fit, and of K, which is needed first, for M. Blocks that make every second chunk
# wait for every second fill of a ring of odd size: of 5 the fill between is over by then (LAB-NOTES.md); of 3 nothing ensures
# that.
STAGES = 4
KEY_STAGES = STAGES + 1
# With the gated norm in the kernel: chunks of Q, which has a ring of its own; of z; and of the other block's sums of squares.
NORM_QUERY_STAGES, Z_BUFFERS, SUM_BUFFERS = 3, 2, 4


class NamedBarrier(IntEnum):
    """Named barriers on which the warps of one role meet. 0 is the whole block's."""

    INVERSE = 1
    MAKER = 1  # a maker is inverse and score in one
    SCORE = 2
    STATE = 3  # of the first state warpgroup; a second one has the next
