"""Numbers that both logits kernels and all their warp roles share."""

KEY_ROWS = 64  # keys of a warpgroup's product: M of wgmma
WARPGROUP = 128
QUERIES_PER_GROUP = 4  # lanes of a quad: one query each
COPY_WARP, PUBLISH_WARP, FILL_WARP = 0, 1, 2  # of the first warpgroup; two warps from FILL_WARP on write -inf
END_OF_LIST = -1  # query row of the item after the last
