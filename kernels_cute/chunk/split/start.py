"""The work of blocks of segments before their first chunk: composing the state that the segment starts from. See compose.py."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from kernels_cute.chunk import layouts
from kernels_cute.chunk.operands import accumulators, register_operand
from kernels_cute.chunk.shape import CHUNK, START_BUFFERS
from kernels_cute.chunk.split.segments import load_summary, summary_address, transition_address
from kernels_cute.chunk.state_memory import load_state
from kernels_cute.common import ptx


@cute.jit
def bring_start(spec, storage, head, segment):
    """The copying warp, before its first chunk."""
    if segment.is_summarized & (segment.index > 1):
        size = spec.transition_tiles * spec.key_bytes
        for i in cutlass.range(1, segment.index, unroll=1):
            buffer, turn = (i - 1) % START_BUFFERS, (i - 1) // START_BUFFERS & 1
            cute.arch.mbarrier_wait(storage.used.data_ptr() + buffer, turn ^ 1)
            with cute.arch.elect_one():
                brought = storage.brought.data_ptr() + buffer
                cute.arch.mbarrier_arrive_and_expect_tx(brought, size)
                source = transition_address(spec, segment, i, head)
                target = storage.k.data_ptr().toint() + buffer * size
                for tile in cutlass.range_constexpr(spec.transition_tiles):
                    offset = tile * spec.key_bytes
                    ptx.copy_from_global(target + offset, source + offset, Int32(spec.key_bytes), brought.toint())
        cute.arch.mbarrier_wait(storage.composed.data_ptr(), 0)


@cute.jit
def start_of_segment(spec, storage, params, state, head, segment, group, warp, lane):
    """state: S^T before the segment, of the 64 V columns `group`."""
    if segment.is_summarized:
        first = Int32(0)
        if segment.index == 0:
            first = segment.count - 1  # the place of the state before the sequence
        load_summary(spec, summary_address(spec, segment, first, head), group, warp, lane, state)
        if segment.index > 1:
            compose(spec, storage, state, head, segment, group, warp, lane)
    else:
        row0 = group * spec.columns + warp * 16 + lane // 4
        load_state(spec, params, state, segment, head, row0, lane % 4)


@cute.jit
def compose(spec, storage, state, head, segment, group, warp, lane):
    """S_1 to S_s of the V columns `group`, s = segment.index > 1."""
    dim, steps = spec.dim, CHUNK // 16
    op = warpgroup.MmaF16BF16Op(
        BFloat16, Float32, (64, dim, 16), warpgroup.OperandSource.RMEM, OperandMajorMode.K, OperandMajorMode.MN
    )
    mma = cute.make_tiled_mma(op)
    # K stages, then Q stages: 2 buffers of hi and lo, whatever the dtype of the tokens.
    layout = layouts.by_columns(BFloat16, CHUNK, dim, START_BUFFERS * spec.transition_tiles)
    tensor = storage.k.get_tensor(layout.outer, swizzle=layout.inner, dtype=BFloat16)
    tiles = mma.make_fragment_B(mma.get_slice(0).partition_B(tensor))
    high, high_words = register_operand(BFloat16, mma, dim)
    low, low_words = register_operand(BFloat16, mma, dim)
    sums = accumulators(mma, dim)
    for i in cutlass.range(1, segment.index, unroll=1):
        buffer, turn = (i - 1) % START_BUFFERS, (i - 1) // START_BUFFERS & 1
        load_summary(spec, summary_address(spec, segment, i, head), group, warp, lane, sums)
        cute.arch.mbarrier_wait(storage.brought.data_ptr() + buffer, turn)
        tile = buffer * spec.transition_tiles
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
            for left, right in ((low, of_high), (high, of_low), (high, of_high)):
                cute.gemm(mma, sums, left[None, None, step], right, sums)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        for place in cutlass.range_constexpr(dim // 2):
            state[place] = sums[place]
        if lane == 0:
            cute.arch.mbarrier_arrive(storage.used.data_ptr() + buffer)
    if lane == 0:
        cute.arch.mbarrier_arrive(storage.composed.data_ptr())
