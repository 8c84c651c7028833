"""The wide chunk kernel: four SMs for a sequence and state head of D = 128, where the fused kernel would leave SMs idle.

With c the inclusive cumulative sum of the log decays of a chunk, f the factors of the L2 norms, P as in fused.py and M so
too, but with its diagonal of ones,

    Z    = (exp(c_last - c) f beta M)^T K     16-bit, of the scaled M in `parts` 16-bit summands; P M is 16-bit, too
    U^T  = S^T K^T      O^T = S^T Q^T         S^T rounded to 16 bits, from registers
    W^T  = V^T - exp(c) f U^T
    S^T  = exp(c_last) S^T + W^T Z
    O^T  = exp(c) fq scale O^T + W^T (P M)^T

so that the chain from state to state is two products, U and W Z. Z, P M and the vectors do not depend on the state: two makers
make them, two chains carry the state of 64 V columns each. Makers hand over in one of two ways:

    clusters of four    cluster.py: copies between shared memories. A device has less room for those than for blocks:
                        30 on an H100 of 132 SMs, where not all GPCs have a multiple of four
    clusters of two     l2_ring.py: through a ring in the workspace, that is through the L2 cache, for the sequences and
                        heads that find no such room, in a launch of its own on the SMs that are left

The second launch begins as soon as all blocks of the first have (they say so at once, programmatic dependent launch): not
before, or its pairs might take the places of fours. It needs nothing of the first; that the counts of its ring are zero it knows
from the first, which waits for that launch. Its last blocks wait for the end of the first launch, so that whatever follows in
the stream sees both. Results are the same bits either way.

Chain block: warpgroup 0 is the state role; of warpgroup 4 warp 0 loads K and Q, 1 loads V and stores O, 2 loads the tiles.
Maker block: two sets of an inverse (M) and a score warpgroup (P, then Z and P M) and a copying warpgroup: a warp loads K and Q,
one makes the gates, one for each set hands over. Chunk j is made by set j // 2 % 2 of maker j % 2.

The barriers: barriers.py. One chain loads K for both, one Q (which ones, a form says); with a ring the other one loads the tiles:
a block arms its own barrier for what the other loads once the last fill of that stage is there. `empty`, `free` and `taken` of
another block are relaxed arrivals: what they free has been read by then, and is refilled by copies that count bytes, or by stores
that wait for them. No block of a cluster leaves before all are done.
"""

import cutlass.cute as cute
from cutlass import BFloat16, Int32

from kernels_cute.chunk.arguments import packed_params, token_copies
from kernels_cute.chunk.four_sm.block import FourSmBlock
from kernels_cute.chunk.four_sm.cluster import ClusterForm
from kernels_cute.chunk.four_sm.l2_ring import CLEAR_THREADS, RingForm
from kernels_cute.chunk.four_sm.shape import BLOCKS, SET_KEY_STAGES, SETS, WARPGROUPS, WORDS_BYTES, scaled_parts
from kernels_cute.chunk.shape import WARPGROUP
from kernels_cute.chunk.spec import ChunkSpec


class FourSmChunk:
    """Whole sequences with four SMs a head."""

    def __init__(self, spec: ChunkSpec):
        parts = scaled_parts(spec.dtype is BFloat16)
        self.spec = spec = spec.changed(threads=WARPGROUPS * WARPGROUP, key_stages=SETS * SET_KEY_STAGES, parts=parts)
        self.ring_form = RingForm()
        self.four, self.ring = FourSmBlock(spec, ClusterForm()), FourSmBlock(spec, self.ring_form)

    @cute.jit
    def launch(self, *values):
        """values: Params, groups of the L2 ring (the last ones), split_if_longest_exceeds, stream."""
        params, (ring_groups, split_if_longest_exceeds, stream) = packed_params(values)
        copies = token_copies(self.spec, params, multicast=True)
        first_ring_group = self.spec.heads * (cute.size(params.cu_seqlens, mode=[0]) - 1) - ring_groups
        words_bytes = (ring_groups + 1) * WORDS_BYTES
        cleared = 16 * CLEAR_THREADS  # by a block
        shape = {"block": (self.spec.threads, 1, 1), "min_blocks_per_mp": 1, "stream": stream}
        if ring_groups > 0:
            self.ring_form.clear(params.workspace, words_bytes).launch(
                grid=((words_bytes + (cleared - 1)) // cleared, 1, 1), block=(CLEAR_THREADS, 1, 1), stream=stream
            )
        self.four.kernel(params, copies, Int32(0), split_if_longest_exceeds).launch(
            grid=(BLOCKS * first_ring_group, 1, 1), cluster=(self.four.form.cluster_blocks, 1, 1), **shape
        )
        if ring_groups > 0:
            self.ring.kernel(params, copies, first_ring_group, split_if_longest_exceeds).launch(
                grid=(BLOCKS * ring_groups, 1, 1), cluster=(self.ring.form.cluster_blocks, 1, 1), use_pdl=True, **shape
            )
