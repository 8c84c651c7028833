"""Sizes of the form in which a cluster takes two state heads of a key head."""

from kernels_cute.chunk.shape import CHUNK

STATE_HEADS = 2  # of a work tile
DIM = 128
# Chunks of K and of Q in shared memory, and tiles of V of the heads in turns. When a head waits for a tile of V, the other head
# has had what its stage held before: the one that waits has seen `ready`, which comes after `tile_released` of the chunk but one
# before.
KEY_STAGES, STAGES, VALUE_STAGES = 4, 2, 5
STATE_REGISTERS, MAKER_REGISTERS, COPY_REGISTERS = 192, 88, 40
# A lower triangular tile of 16-bit elements: panel s has columns 16 s .. and rows 16 s .., in rows of 32 bytes.
PANEL = 16
PANELS = CHUNK // PANEL
PANEL_ROW_BYTES = 2 * PANEL
TRIANGLE_BYTES = sum((CHUNK - PANEL * s) * PANEL_ROW_BYTES for s in range(PANELS))
# Scratch of a warp and head: columns of the halves of a diagonal block, then rows of their inverses. Pitches and offsets keep
# what lanes touch at a time in different banks.
COLUMN_PITCH, COLUMN_HALF = 48, 400
INVERSE_PITCH, INVERSE_HALF = 32, 288
SCRATCH_BYTES = 832
PART_BYTES = 4 * CHUNK  # later: a row of column decays, then one of them with factors
