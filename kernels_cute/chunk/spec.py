"""What a chunk kernel is compiled for: all that the warp roles know before a launch."""

import copy

from gdn.problems import ChunkProblem
from kernels_cute.chunk.four_sm.shape import scaled_parts
from kernels_cute.chunk.shape import CHUNK, KEY_STAGES, STAGES, WARPGROUP
from kernels_cute.common.memory import CUTE_DTYPES

BLOCK_THREADS = 4 * WARPGROUP


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
        self.heads, self.dim, self.dtype = heads, dim, CUTE_DTYPES[problem.dtype]
        self.q_group, self.k_group = heads // problem.num_q_heads, heads // problem.num_k_heads
        self.v_group = heads // problem.num_v_heads
        self.has_gate, self.has_beta = problem.gate_dtype is not None, problem.beta_dtype is not None
        self.raw_gate, self.raw_beta = self.has_gate and problem.use_gate, self.has_beta and problem.use_beta_sigmoid
        self.normalize, self.v_first, self.pooled = problem.use_qk_l2norm, problem.state_v_first, problem.pooled
        self.has_initial, self.has_mask = problem.has_initial_state, problem.has_mask
        self.has_final, self.has_final_indices = problem.has_final_state, problem.has_final_indices
        self.has_checkpoints = problem.has_checkpoints
        self.stages, self.key_stages, self.prefetch = stages, KEY_STAGES if stages == STAGES else stages, prefetch
        self.is_persistent, self.has_both_variants, self.is_split = is_persistent, has_both_variants, is_split
        self.columns = 64  # of V, a block
        self.slices = dim // self.columns
        self.paired = dim == 128  # the two blocks of a head are a cluster
        self.sharers = 2 if self.paired else 1  # blocks that take from a `taken`
        self.units = heads * self.slices // self.sharers  # work tiles of a sequence
        self.aux_step = 2 if self.paired else 1  # chunks from one of this block's own to the next
        self.threads = BLOCK_THREADS
        self.transition_tiles = 2 * dim // 64  # K tiles that the P of a summary takes
        self.start_buffers = min(2, 2 * stages // self.transition_tiles)
        self.parts = scaled_parts(problem.dtype == "bfloat16")  # of the scaled M, with four SMs
        self.key_bytes = CHUNK * dim * 2
        self.value_bytes = CHUNK * self.columns * 2

    def with_stages(self, stages: int) -> "ChunkSpec":
        """The same with so many chunks of every tensor in shared memory."""
        made = copy.copy(self)
        made.stages = made.key_stages = stages
        return made

    def with_threads(self, threads: int) -> "ChunkSpec":
        made = copy.copy(self)
        made.threads = threads
        return made
