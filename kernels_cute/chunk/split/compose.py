"""The second launch of a split call: the fused kernel on segments, each from a state that its blocks compose themselves.

With the summaries of the first launch (segments.py, summary.py) a block of segment s computes, for its own V columns,
S_1 = h_0 and S_(i+1) = P_i S_i + h_i up to S_s in the state warpgroup's registers, before its first chunk. P_i comes by bulk
copies into the room of the K and Q stages and is read as K is; S^T and P are pairs of bfloat16 summands, of whose four products
the smallest is left out.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from gdn.ops.delta_rule.problem import ChunkParams
from kernels_cute.chunk.arguments import TokenCopies, is_selected_launch, packed_params, token_copies
from kernels_cute.chunk.fused import launch_shape, run_block
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.chunk.split.segments import find_segment
from kernels_cute.chunk.split.summary import SummaryChunk


class SplitChunk:
    """Pair of launches of a split call."""

    def __init__(self, spec: ChunkSpec):
        self.spec = spec
        self.summaries = SummaryChunk(spec)

    @cute.jit
    def launch(self, *values: Any):
        """values: Params, tokens of a segment, slots, split_if_longest_exceeds, stream."""
        params, (segment_tokens, slots, split_if_longest_exceeds, stream) = packed_params(values)
        spec, copies = self.spec, token_copies(self.spec, params)
        summary_copies = TokenCopies(None, None, copies.k_atom, copies.k, copies.v_atom, copies.v)
        shape = launch_shape(spec) | {"stream": stream, "use_pdl": spec.has_both_variants}
        self.summaries.kernel(params, summary_copies, segment_tokens, split_if_longest_exceeds).launch(
            grid=(spec.sharers * spec.heads * slots, 1, 1), **shape
        )
        self.kernel(params, copies, segment_tokens, split_if_longest_exceeds).launch(
            grid=(spec.slices * spec.heads * slots, 1, 1), **shape
        )

    @cute.kernel
    def kernel(self, params: ChunkParams, copies: TokenCopies, segment_tokens: Int32, split_if_longest_exceeds: Int32):
        if is_selected_launch(self.spec, params.cu_seqlens, split_if_longest_exceeds):
            block, _, _ = cute.arch.block_idx()
            slot = block // (self.spec.slices * self.spec.heads)
            segment = find_segment(self.spec, params, slot, segment_tokens)
            has_work = segment.exists
            if cutlass.const_expr(self.spec.skipped_tokens > 0):
                has_work = has_work & (segment.length > 0)
            if has_work:
                run_block(self.spec, params, copies, segment)
