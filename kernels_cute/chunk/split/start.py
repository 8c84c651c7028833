"""What blocks of segments do before their first chunk: compose the state that the segment starts from. See compose.py."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from kernels_cute.chunk import layouts
from kernels_cute.chunk.shape import CHUNK
from kernels_cute.chunk.split.segments import load_summary, summary_address, transition_address
from kernels_cute.chunk.state_memory import load_state
from kernels_cute.common import ptx

_BROUGHT, _USED, _COMPOSED = 0, 2, 4  # places among the barriers of `start`


def init_start(spec: Any, storage: Any) -> None:
    barriers = storage.start.data_ptr()
    for buffer in range(spec.start_buffers):
        cute.arch.mbarrier_init(barriers + _BROUGHT + buffer, 1)
        cute.arch.mbarrier_init(barriers + _USED + buffer, 4)
    cute.arch.mbarrier_init(barriers + _COMPOSED, 4)


@cute.jit
def bring_start(spec, storage, head, segment):
    """The copying warp, before its first chunk."""
    if segment.is_summarized & (segment.index > 1):
        barriers = storage.start.data_ptr()
        size = spec.transition_tiles * spec.key_bytes
        for i in cutlass.range(1, segment.index, unroll=1):
            buffer, turn = (i - 1) % spec.start_buffers, (i - 1) // spec.start_buffers & 1
            cute.arch.mbarrier_wait(barriers + (_USED + buffer), turn ^ 1)
            with cute.arch.elect_one():
                brought = barriers + (_BROUGHT + buffer)
                cute.arch.mbarrier_arrive_and_expect_tx(brought, size)
                source = transition_address(spec, segment, i, head)
                target = storage.k.data_ptr().toint() + buffer * size
                for tile in cutlass.range_constexpr(spec.transition_tiles):
                    offset = tile * spec.key_bytes
                    ptx.copy_from_global(target + offset, source + offset, Int32(spec.key_bytes), brought.toint())
        cute.arch.mbarrier_wait(barriers + _COMPOSED, 0)


@cute.jit
def start_of_segment(spec, storage, params, state, head, segment, group, warp, lane):
    """state: S^T before the segment, of the 64 V columns `group`."""
    if segment.is_summarized:
        first = Int32(0)
        if segment.index == 0:
            first = segment.count - 1  # where the state before the sequence stands
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
    layout = layouts.by_columns(BFloat16, CHUNK, dim, spec.start_buffers * spec.transition_tiles)
    tensor = storage.k.get_tensor(layout.outer, swizzle=layout.inner, dtype=BFloat16)
    tiles = mma.make_fragment_B(mma.get_slice(0).partition_B(tensor))
    high = cute.make_rmem_tensor(mma.partition_shape_A((64, dim)), BFloat16)
    low = cute.make_rmem_tensor(mma.partition_shape_A((64, dim)), BFloat16)
    sums = cute.make_rmem_tensor(mma.partition_shape_C((64, dim)), Float32)
    high_words = cute.recast_tensor(high, Int32)
    low_words = cute.recast_tensor(low, Int32)
    barriers = storage.start.data_ptr()
    for i in cutlass.range(1, segment.index, unroll=1):
        buffer, turn = (i - 1) % spec.start_buffers, (i - 1) // spec.start_buffers & 1
        load_summary(spec, summary_address(spec, segment, i, head), group, warp, lane, sums)
        cute.arch.mbarrier_wait(barriers + (_BROUGHT + buffer), turn)
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
