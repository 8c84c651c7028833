"""The convolution of a prefill step that runs next to the chunk kernel, and ahead of it, on SMs of its own.

A block has an SM for itself: it takes all registers, as the chunk kernel's blocks do. Workers, `threads` threads each, take tiles
of `rows` tokens and `8 * threads` channels in the order of the tokens, and count each in its chunk's word of `rows_made`
(kernels_cute.chunk.signals) when it is written. They wait for nobody.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from gdn.ops.layer_step.problem import Conv1dParams, GdnPrefillProblem
from kernels_cute.chunk import signals
from kernels_cute.chunk.shape import CHUNK
from kernels_cute.conv1d.prefill import Config
from kernels_cute.conv1d.tiles import find_sequence
from kernels_cute.gdn_prefill.shape import CLUSTER, block_threads
from kernels_cute.gdn_prefill.steps import PrefillConv


class RowMaker(PrefillConv, params=Conv1dParams):
    def __init__(self, problem: GdnPrefillProblem, config: Config, skipped_tokens: int) -> None:
        """skipped_tokens: sequences of so many tokens or fewer are another launch's."""
        super().__init__(problem, config)
        self.block, self.skipped_tokens = block_threads(problem), skipped_tokens
        assert CHUNK % self.rows == 0 and self.block % self.threads == 0
        self.workers = self.block // self.threads

    def launch_options(self, blocks: int) -> dict[str, object]:
        return {
            "grid": (blocks, 1, 1),
            "block": (self.block, 1, 1),
            "cluster": (CLUSTER, 1, 1),
            "min_blocks_per_mp": 1,
            "preferred_smem_carveout": 0,
        }

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
            if cutlass.const_expr(self.skipped_tokens > 0):
                # Of a worker all threads or none.
                if Int32(params.cu_seqlens[sequence + 1]) - Int32(params.cu_seqlens[sequence]) > self.skipped_tokens:
                    make_tile(self, params, rows_made, tile, sequence, channel, worker, thread)
            else:
                make_tile(self, params, rows_made, tile, sequence, channel, worker, thread)


@cute.jit
def make_tile(
    maker: Any, params: Conv1dParams, rows_made: Int64, tile: Int32, sequence: Int32, channel: Int32, worker: Int32, thread: Int32
):
    """Write a tile and count it."""
    run_tile, dim, rows, threads = maker.run_tile, maker.dim, maker.rows, maker.threads
    if cutlass.const_expr(maker.has_partial_slice):
        if channel < dim:
            run_tile(params, tile, sequence, channel)
    else:
        run_tile(params, tile, sequence, channel)
    begin = Int32(params.cu_seqlens[sequence])
    first = (tile - begin // rows - sequence) * rows
    # The chunk kernel's copies of these rows are of the other proxy.
    cute.arch.fence_proxy("async.global")
    cute.arch.barrier(barrier_id=1 + worker, number_of_threads=threads)
    if thread % threads == 0:
        if (first >= 0) & (first < Int32(params.cu_seqlens[sequence + 1]) - begin):
            number = signals.chunk_number(begin, sequence, first // CHUNK)
            signals.count_release(signals.word_address(rows_made, number))
