"""Sizes of tiles, and places in the workspace."""

CHUNK = 64  # tokens of a chunk; the tile of every matmul and the rows of a wgmma
HALF = 64  # columns of K and Q in one shared tile: 128 bytes, a row of the swizzle
DIAGONAL_PITCH = 20  # floats: 16-byte rows whose starts fall into different banks
TILE_R = 0  # positions of the per-chunk tiles in the workspace, see prepare.py: R,
TILE_Z = 1  # Z's lower 64 columns, then the upper ones, where K = 128
NUM_VECTORS = 3  # rows of the per-chunk vectors in the workspace:
ROW_STATE_KEY = 0  # exp(c) * |k|^-1: factor of K S
ROW_STATE_QUERY = 1  # exp(c) * |q|^-1 * scale: factor of Q S
ROW_LAST = 2  # element 0: exp(c_last), the decay of the whole chunk
TRANSITION_DTYPE = "bfloat16"  # of a segment's transition, whatever the tokens are: keys that are not normalised make it large
