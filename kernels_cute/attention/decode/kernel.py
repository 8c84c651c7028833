"""The decode kernel: its launch, and a block from its barriers to its rows of out."""

import cutlass
import cutlass.cute as cute

from gdn.ops.attention.problem import SparseDecodeParams
from kernels_cute.attention.decode.copy import copy_warp
from kernels_cute.attention.decode.math import math_warp
from kernels_cute.attention.decode.merge import load_gates, merge
from kernels_cute.attention.decode.spec import Spec, Work
from kernels_cute.common.init_barriers import init_barriers


class SparseDecode:
    """The kernel of one problem and configuration."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(self, *values):
        """values: SparseDecodeParams, flat, and the stream."""
        spec, params, stream = self.spec, SparseDecodeParams(*values[:-1]), values[-1]
        blocks = cute.size(params.q, mode=[0]) * (spec.kv_sets * spec.splits)
        # Percent; without a value the DSL asks a device for its limit.
        limits = {"min_blocks_per_mp": spec.config.blocks_per_sm, "preferred_smem_carveout": 100}
        self.kernel(params).launch(
            grid=[blocks, 1, 1], block=[spec.threads, 1, 1], cluster=[spec.splits, 1, 1], stream=stream, **limits
        )

    @cute.kernel
    def kernel(self, params: SparseDecodeParams):
        spec = cutlass.const_expr(self.spec)
        thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        work = Work(block // (spec.kv_sets * spec.splits), block // spec.splits % spec.kv_sets, block % spec.splits)
        storage = cutlass.utils.SmemAllocator().allocate(spec.storage())
        if thread == 0:
            init_barriers(spec.barriers, storage, 0)
            cute.arch.mbarrier_init_fence()
        # Both roles wait for the mbarriers when their first loads are on their way.
        if warp < spec.math_warps:
            math_warp(spec, storage, params, work, warp)
        else:
            copy_warp(spec, storage, params, work, warp - spec.math_warps)
        rGates = None
        if cutlass.const_expr(spec.problem.has_gate):  # on their way while the block, and then the cluster, meets
            rGates = cute.make_rmem_tensor(spec.gate_words, cutlass.Int32)
            load_gates(spec, params, work, rGates)
        cute.arch.sync_threads()  # the parts are stored
        merge(spec, storage, params, work, rGates)
