"""The second launch of a split call: the fused kernel on segments, each from a state that its blocks compose themselves.

With the summaries of the first launch (_chunk_segments, _chunk_summary) a block of segment s computes, for its own V columns,
S_1 = h_0 and S_(i+1) = P_i S_i + h_i up to S_s in the state warpgroup's registers, before its first chunk. P_i comes by bulk
copies into the room of the K and Q stages and is read as K is; S^T and P are pairs of bfloat16 summands, of whose four products
the smallest is left out.

    barrier             arrivals                                      waits
    brought[buffer]     1: the copying lane, with the bytes           state
    used[buffer]        1 a state warp, P read                        the copying warp
    composed            1 a state warp, all of them read              the copying warp, before the first chunk
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from gdn.problems import ChunkParams
from kernels_cute.chunk import layouts
from kernels_cute.chunk.arguments import TokenCopies, packed_params
from kernels_cute.chunk.fused import FusedChunk
from kernels_cute.chunk.shape import CHUNK
from kernels_cute.chunk.split.segments import Segments
from kernels_cute.chunk.split.summary import SummaryChunk
from kernels_cute.common import ptx

_BROUGHT, _USED, _COMPOSED = 0, 2, 4  # places among the barriers of `start`


class SplitChunk(Segments, FusedChunk):
    """Both launches of a split call. options: FusedChunk's."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.summaries = SummaryChunk(**options)
        self.transition_tiles = 2 * self.dim // 64  # K tiles that P takes
        self.start_buffers = min(2, 2 * self.stages // self.transition_tiles)

    @cute.jit
    def launch(self, *values):
        """values: Params, tokens of a segment, slots, split_if_longest_exceeds, stream."""
        params, (segment_tokens, slots, split_if_longest_exceeds, stream) = packed_params(values)
        copies = self.token_copies(params)
        summary_copies = TokenCopies(None, None, copies.k_atom, copies.k, copies.v_atom, copies.v)
        self.summaries.kernel(params, summary_copies, segment_tokens, split_if_longest_exceeds).launch(
            grid=(self.summaries.sharers * self.heads * slots, 1, 1),
            block=(self.summaries.threads, 1, 1),
            cluster=(self.summaries.sharers, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=self.decides,
            stream=stream,
        )
        self.kernel(params, copies, segment_tokens, split_if_longest_exceeds).launch(
            grid=(self.slices * self.heads * slots, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(self.sharers, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=self.decides,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, params: ChunkParams, copies: TokenCopies, segment_tokens: Int32, split_if_longest_exceeds: Int32):
        if self.works(params.cu_seqlens, split_if_longest_exceeds):
            block, _, _ = cute.arch.block_idx()
            slot = block // (self.slices * self.heads)
            segment = self.find_segment(params, slot, segment_tokens)
            if segment.exists:
                self.run(params, copies, segment)

    def init_start(self, storage: Any) -> None:
        barriers = storage.start.data_ptr()
        for buffer in range(self.start_buffers):
            cute.arch.mbarrier_init(barriers + _BROUGHT + buffer, 1)
            cute.arch.mbarrier_init(barriers + _USED + buffer, 4)
        cute.arch.mbarrier_init(barriers + _COMPOSED, 4)

    @cute.jit
    def bring_start(self, storage, head, segment):
        """The copying warp, before its first chunk."""
        if segment.is_summarized & (segment.index > 1):
            barriers = storage.start.data_ptr()
            size = self.transition_tiles * self.key_bytes
            for i in cutlass.range(1, segment.index, unroll=1):
                buffer, turn = (i - 1) % self.start_buffers, (i - 1) // self.start_buffers & 1
                cute.arch.mbarrier_wait(barriers + (_USED + buffer), turn ^ 1)
                with cute.arch.elect_one():
                    brought = barriers + (_BROUGHT + buffer)
                    cute.arch.mbarrier_arrive_and_expect_tx(brought, size)
                    source = self.transition_address(segment, i, head)
                    target = storage.k.data_ptr().toint() + buffer * size
                    for tile in cutlass.range_constexpr(self.transition_tiles):
                        offset = tile * self.key_bytes
                        ptx.copy_from_global(target + offset, source + offset, Int32(self.key_bytes), brought.toint())
            cute.arch.mbarrier_wait(barriers + _COMPOSED, 0)

    @cute.jit
    def start_of_segment(self, storage, params, state, head, segment, group, warp, lane):
        """state: S^T before the segment, of the 64 V columns `group`."""
        if segment.is_summarized:
            first = Int32(0)
            if segment.index == 0:
                first = segment.count - 1  # where the state before the sequence stands
            self.load_summary(self.summary_address(segment, first, head), group, warp, lane, state)
            if segment.index > 1:
                self.compose(storage, state, head, segment, group, warp, lane)
        else:
            row0 = group * self.columns + warp * 16 + lane // 4
            self.load_state(params, state, segment, head, row0, lane % 4)

    @cute.jit
    def compose(self, storage, state, head, segment, group, warp, lane):
        """S_1 to S_s of the V columns `group`, s = segment.index > 1."""
        dim, steps = self.dim, CHUNK // 16
        op = warpgroup.MmaF16BF16Op(
            BFloat16, Float32, (64, dim, 16), warpgroup.OperandSource.RMEM, OperandMajorMode.K, OperandMajorMode.MN
        )
        mma = cute.make_tiled_mma(op)
        # K stages, then Q stages: 2 buffers of hi and lo, whatever the dtype of the tokens.
        layout = layouts.by_columns(BFloat16, CHUNK, dim, self.start_buffers * self.transition_tiles)
        tensor = storage.k.get_tensor(layout.outer, swizzle=layout.inner, dtype=BFloat16)
        tiles = mma.make_fragment_B(mma.get_slice(0).partition_B(tensor))
        high = cute.make_rmem_tensor(mma.partition_shape_A((64, dim)), BFloat16)
        low = cute.make_rmem_tensor(mma.partition_shape_A((64, dim)), BFloat16)
        sums = cute.make_rmem_tensor(mma.partition_shape_C((64, dim)), Float32)
        high_words = cute.recast_tensor(high, Int32)
        low_words = cute.recast_tensor(low, Int32)
        barriers = storage.start.data_ptr()
        for i in cutlass.range(1, segment.index, unroll=1):
            buffer, turn = (i - 1) % self.start_buffers, (i - 1) // self.start_buffers & 1
            self.load_summary(self.summary_address(segment, i, head), group, warp, lane, sums)
            cute.arch.mbarrier_wait(barriers + (_BROUGHT + buffer), turn)
            tile = buffer * self.transition_tiles
            for step in cutlass.range_constexpr(dim // 16):
                for j in cutlass.range_constexpr(4):
                    place = 4 * step + j
                    high_words[place] = ptx.pack(BFloat16, state[2 * place], state[2 * place + 1])
                    first, second = ptx.unpack(BFloat16, high_words[place])
                    low_words[place] = ptx.pack(BFloat16, state[2 * place] - first, state[2 * place + 1] - second)
                warpgroup.fence()
                rows, inner = step // steps, step % steps
                of_high = tiles[None, None, inner, tile + rows]
                of_low = tiles[None, None, inner, tile + dim // 64 + rows]
                mma.set(warpgroup.Field.ACCUMULATE, True)
                cute.gemm(mma, sums, low[None, None, step], of_high, sums)
                cute.gemm(mma, sums, high[None, None, step], of_low, sums)
                cute.gemm(mma, sums, high[None, None, step], of_high, sums)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            for place in cutlass.range_constexpr(dim // 2):
                state[place] = sums[place]
            if lane == 0:
                cute.arch.mbarrier_arrive(barriers + (_USED + buffer))
        if lane == 0:
            cute.arch.mbarrier_arrive(barriers + _COMPOSED)
