"""The convolution of a prefill step that runs next to the chunk kernel, and ahead of it, on SMs of its own.

A block has an SM for itself: it takes all registers, as the chunk kernel's blocks do. Workers, `threads` threads each, take tiles
of `rows` tokens and `8 * threads` channels in the order of the tokens, and count each in its chunk's word of `rows_made`
(kernels_cute.chunk.signals) when it is written. They wait for nobody.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from gdn.problems import Conv1dParams, GdnPrefillProblem
from kernels_cute.chunk import signals
from kernels_cute.chunk.shape import CHUNK
from kernels_cute.common import ptx
from kernels_cute.conv1d.convolution import CHANNELS
from kernels_cute.conv1d.prefill import Config
from kernels_cute.conv1d.tiles import find_sequence
from kernels_cute.gdn_prefill.steps import PrefillConv

_PREFETCHED = 128  # channels
CLUSTER = 2  # blocks: with pairs the SMs that are left are pairs, too, which the chunk kernel's clusters need


def block_threads(problem: GdnPrefillProblem) -> int:
    """Threads of a block: as many as the registers of an SM allow without spills."""
    is_plain = problem.dtype == "bfloat16" and problem.bias_dtype is None and problem.silu and not problem.has_checkpoints
    return 512 if is_plain else 384


class RowMaker(PrefillConv, params=Conv1dParams):
    def __init__(self, problem: GdnPrefillProblem, config: Config) -> None:
        super().__init__(problem, config)
        self.block = block_threads(problem)
        assert CHUNK % self.rows == 0 and self.block % self.threads == 0
        self.workers = self.block // self.threads
        # A head's channels of a row, which interleaved projections have next to each other, too.
        self.prefetches = self.dim % _PREFETCHED == 0 and self.k_dim % _PREFETCHED == 0

    def launch_options(self, blocks: int) -> dict[str, object]:
        return {
            "grid": (blocks, 1, 1),
            "block": (self.block, 1, 1),
            "cluster": (CLUSTER, 1, 1),
            "min_blocks_per_mp": 1,
            "preferred_smem_carveout": 0,
        }

    @cute.jit
    def prefetch(self, params: Conv1dParams, unit: Int32, sequence: Int32, thread: Int32):
        """Asks the L2 cache for a tile's rows of x, about those if it is not of this `sequence`: with few SMs there are
        few loads in flight, and memory is far."""
        parts = cutlass.const_expr(self.threads * CHANNELS // _PREFETCHED)  # of a row
        tile, slice_ = unit // self.slices, unit % self.slices
        for i in cutlass.range(thread, self.rows * parts, self.threads, unroll=1):
            token = (tile - sequence) * self.rows + i // parts
            channel = slice_ * self.threads * CHANNELS + i % parts * _PREFETCHED
            if (token < params.x.shape[0]) & (channel < self.dim):
                offset = Int64(token) * params.x.stride[0] + self.column_of(channel)
                size = cutlass.const_expr(params.x.element_type.width // 8)
                ptx.prefetch_bytes(params.x.iterator.toint() + offset * size, Int32(_PREFETCHED * size))

    @cute.kernel
    def kernel(self, params: Conv1dParams, rows_made: Int64):
        # The words are cleared by the launch before; the chunk kernel may begin once all of these blocks have.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        thread, _, _ = cute.arch.thread_idx()
        worker = cute.arch.make_warp_uniform(thread // self.threads)
        num_sequences = params.cu_seqlens.shape[0] - 1
        units = (params.x.shape[0] // self.rows + num_sequences) * self.slices
        for unit in cutlass.range(block * self.workers + worker, units, blocks * self.workers, unroll=1):
            tile = unit // self.slices
            channel = (unit % self.slices * self.threads + thread % self.threads) * 8
            sequence = find_sequence(self.rows, tile, num_sequences, params.cu_seqlens)
            if cutlass.const_expr(self.prefetches):
                self.prefetch(params, unit + blocks * self.workers, sequence, thread % self.threads)
            if cutlass.const_expr(self.has_partial_slice):
                if channel < self.dim:
                    self.run_tile(params, tile, sequence, channel)
            else:
                self.run_tile(params, tile, sequence, channel)
            begin = Int32(params.cu_seqlens[sequence])
            first = (tile - begin // self.rows - sequence) * self.rows
            # The chunk kernel's copies of these rows are of the other proxy.
            cute.arch.fence_proxy("async.global")
            cute.arch.barrier(barrier_id=1 + worker, number_of_threads=self.threads)
            if thread % self.threads == 0:
                if (first >= 0) & (first < Int32(params.cu_seqlens[sequence + 1]) - begin):
                    number = signals.chunk_number(begin, sequence, first // CHUNK)
                    signals.count_release(signals.word_address(rows_made, number))
