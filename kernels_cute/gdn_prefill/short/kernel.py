"""A prefill step's short sequences, of 2 to 64 tokens: convolution, chunk rule and gated norm of a sequence and a key head in
one block.

A block has the value heads of its key head one after the other: Q and K are convolved once, and a slot's window is read and
written by one block. Other sequences' blocks return at once; the launches beside this one (normed.py) take those.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from gdn.ops.delta_rule.problem import ChunkParams
from gdn.ops.layer_step.problem import Conv1dParams, GdnPrefillProblem
from kernels_cute.chunk.roles.gates import make_gates, prefetch_gates
from kernels_cute.chunk.roles.norm import NormTerms
from kernels_cute.chunk.shape import AUX_BYTES, CUM, KEY_BETA, TILE_BYTES
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.chunk.storage import struct_of
from kernels_cute.common import ptx
from kernels_cute.conv1d.prefill import Config
from kernels_cute.conv1d.shape import CHANNELS
from kernels_cute.gdn_prefill.short.norm import norm_head
from kernels_cute.gdn_prefill.short.rows import Sequence, convolve_run, find_sequence, note_sequence, noted
from kernels_cute.gdn_prefill.short.rule import make_tiles, run_columns
from kernels_cute.gdn_prefill.short.shape import BLOCKS_PER_SM, MOST_TOKENS, RUN, THREADS, fields
from kernels_cute.gdn_prefill.steps import PrefillConv

_UNITS = 16  # of 8 channels, a head


def _anew(thread: Any) -> Any:
    """The thread's number as another value, from which a phase works out what it needs: kept from one phase to the next that
    would take more registers than there are. The compiler knows that it is not negative."""
    return ptx.opaque(thread) & (THREADS - 1)


class ShortStep:
    """spec: of the chunk kernel with the norm."""

    def __init__(self, problem: GdnPrefillProblem, spec: ChunkSpec) -> None:
        self.fields, self.spec = fields(problem), spec.changed(key_stages=1, query_stages=1)
        self.conv = PrefillConv(problem, Config(THREADS, MOST_TOKENS, RUN))
        self.key_heads, self.ratio = problem.num_k_heads, problem.num_v_heads // problem.num_k_heads

    def launch_shape(self, sequences: Any) -> dict[str, Any]:
        sizes = {"grid": (sequences * self.key_heads, 1, 1), "block": (THREADS, 1, 1)}
        return sizes | {"min_blocks_per_mp": BLOCKS_PER_SM, "preferred_smem_carveout": 100}

    @cute.kernel
    def kernel(self, conv: Conv1dParams, chunk: ChunkParams, terms: NormTerms, z: cute.Tensor):
        cute.arch.griddepcontrol_launch_dependents()
        block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        sequence, key_head = find_sequence(self.conv, conv, block // self.key_heads), block % self.key_heads
        if sequence.is_live & (sequence.length > 1) & (sequence.length <= MOST_TOKENS):
            self.run(conv, chunk, terms, z, sequence, key_head, thread)
        if block == 0:
            # The launch after this one waits for this one alone.
            cute.arch.griddepcontrol_wait()

    @cute.jit
    def run(
        self, conv: Conv1dParams, chunk: ChunkParams, terms: NormTerms, z: cute.Tensor, sequence: Sequence, key_head: Int32,
        thread: Int32,
    ):  # fmt: skip
        spec, ratio = self.spec, self.ratio
        storage = cutlass.utils.SmemAllocator().allocate(struct_of(self.fields))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        self.convolve_keys(conv, storage, sequence, key_head, warp, lane)
        rows = storage.rows.data_ptr().toint()
        if warp < ratio:
            self.make_gates(chunk, sequence, key_head * ratio + warp, rows + warp * AUX_BYTES, lane)
        # Above the diagonal they stay zero.
        for field in (storage.m, storage.p):
            for i in cutlass.range_constexpr(TILE_BYTES // 16 // THREADS):
                ptx.store_zeros(field.data_ptr().toint() + (i * THREADS + thread) * 16)
        note_sequence(storage, sequence, thread)
        for i in cutlass.range(ratio, unroll=1):
            head = cute.arch.block_idx()[0] % self.key_heads * ratio + i
            self.convolve_values(conv, storage, noted(storage, sequence), head, _anew(thread))
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_threads()
            make_tiles(spec, storage, chunk.scale, rows + i * AUX_BYTES, _anew(thread))
            run_columns(spec, storage, chunk, noted(storage, sequence), head, _anew(thread))
            cute.arch.sync_threads()
            norm_head(spec, storage, terms, z, chunk.out, noted(storage, sequence), head, _anew(thread))
            cute.arch.sync_threads()

    @cute.jit
    def convolve_keys(self, conv: Conv1dParams, storage: Any, sequence: Sequence, key_head: Int32, warp: Int32, lane: Int32):
        """Q in lanes 0 to 15, K in the others; a warp has a run of all of their channels at a time."""
        unit, tile = lane % _UNITS, storage.q.data_ptr().toint()
        channel = (key_head * _UNITS + unit) * CHANNELS
        if lane >= _UNITS:
            channel, tile = channel + self.key_heads * self.spec.dim, storage.k.data_ptr().toint()
        step = THREADS // 32 * RUN
        for first in cutlass.range(warp * RUN, MOST_TOKENS, step, unroll=1):
            convolve_run(self.conv, conv, sequence, first, channel, unit, tile)

    @cute.jit
    def convolve_values(self, conv: Conv1dParams, storage: Any, sequence: Sequence, head: Int32, thread: Int32):
        unit = thread % _UNITS
        channel = 2 * self.key_heads * self.spec.dim + (head * _UNITS + unit) * CHANNELS
        convolve_run(self.conv, conv, sequence, thread // _UNITS * RUN, channel, unit, storage.v.data_ptr().toint())

    @cute.jit
    def make_gates(self, chunk: ChunkParams, sequence: Sequence, head: Int32, rows: Int32, lane: Int32):
        words = cute.make_rmem_tensor(cute.make_layout(4), Int32)
        prefetch_gates(self.spec, chunk, words, sequence.begin, Int32(0), sequence.length, head, lane)
        minus_rate, bias = -cute.math.exp(chunk.A_log[head].to(Float32)), chunk.dt_bias[head].to(Float32)
        values = make_gates(self.spec, chunk, words, minus_rate, bias, sequence.length, lane)
        ptx.store_pair(rows + CUM + lane * 8, values[0], values[1])
        ptx.store_pair(rows + KEY_BETA + lane * 8, values[2], values[3])
