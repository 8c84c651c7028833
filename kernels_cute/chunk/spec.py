"""Compile-time constants of a chunk kernel: all that the warp roles know before a launch."""

import copy
from typing import Any

from gdn.ops.delta_rule.problem import ChunkProblem
from kernels_cute.chunk.shape import CHUNK, KEY_STAGES, STAGES, WARPGROUP


class ChunkSpec:
    """Compile-time constants of a kernel; sizes, strides and scalars arrive at launch.

    stages: chunks of Q and V in shared memory; prefetch: chunks ahead of a copy that are prefetched into the L2 cache;
    is_persistent: clusters take one work tile after the other, else one is all that a cluster works on; has_both_variants: the
    call launches whole sequences and segments; is_split: the launch is of segments.
    """

    def __init__(
        self, problem: ChunkProblem, stages: int, prefetch: int, is_persistent: bool, has_both_variants: bool, is_split: bool
    ):  # fmt: skip
        heads, dim = problem.num_state_heads, problem.head_k_dim
        self.heads, self.dim, self.dtype_name = heads, dim, problem.dtype
        self.q_group, self.k_group = heads // problem.num_q_heads, heads // problem.num_k_heads
        self.v_group = heads // problem.num_v_heads
        self.has_gate, self.has_beta = problem.gate_dtype is not None, problem.beta_dtype is not None
        self.raw_gate, self.raw_beta = self.has_gate and problem.use_gate, self.has_beta and problem.use_beta_sigmoid
        self.normalize, self.v_first, self.pooled = problem.use_qk_l2norm, problem.state_v_first, problem.pooled
        self.has_initial, self.has_mask = problem.has_initial_state, problem.has_mask
        self.has_final, self.has_final_indices = problem.has_final_state, problem.has_final_indices
        self.has_checkpoints = problem.has_checkpoints
        self.stages, self.key_stages, self.prefetch = stages, KEY_STAGES if stages == STAGES else stages, prefetch
        self.value_stages = stages  # tiles of V
        self.is_persistent, self.has_both_variants, self.is_split = is_persistent, has_both_variants, is_split
        self.state_heads = 1  # of a work tile
        self.columns = 64  # of V, a block
        self.slices = dim // self.columns
        self.paired = dim == 128  # the two blocks of a head are a cluster
        self.sharers = 2 if self.paired else 1  # blocks that take from a `tile_released`
        self.units = heads * self.slices // self.sharers  # work tiles of a sequence
        self.aux_step = 2 if self.paired else 1  # chunks from one of this block's own to the next
        self.threads = 4 * WARPGROUP
        self.transition_tiles = 2 * dim // 64  # K tiles that the P of a summary takes
        self.parts = 1  # 16-bit summands of M in shared memory
        # Where another kernel writes q, k and v at the same time, and a third reads the outputs (signals.py): rows of its tiles,
        # and blocks that share a tile; else 0.
        self.row_tile, self.row_makers = 0, 0
        # The outputs leave through the gated norm (roles/norm.py), with a sigmoid or SiLU of z.
        self.has_norm, self.norm_sigmoid = False, False
        self.query_stages = stages
        self.follows_rows = False  # a programmatic dependent of the launch that writes q, k and v
        self.skipped_tokens = 0  # sequences of so many tokens or fewer, and padding ones, are another launch's
        self.key_bytes = CHUNK * dim * 2
        self.value_bytes = CHUNK * self.columns * 2

    @property
    def sorts_sequences(self) -> bool:
        """Whether the longest sequence is dealt first. Where another kernel writes the rows at the same time, sequences keep that
        kernel's order."""
        return self.is_persistent and not self.row_makers

    @property
    def dtype(self) -> Any:
        """Of the tokens, as the DSL names it."""
        from kernels_cute.common.memory import CUTE_DTYPES

        return CUTE_DTYPES[self.dtype_name]

    def changed(self, **changes: Any) -> "ChunkSpec":
        """Return a copy with other values of these attributes."""
        made = copy.copy(self)
        vars(made).update(changes)
        return made
