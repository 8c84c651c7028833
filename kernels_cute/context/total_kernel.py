"""Kernel of total.py, which has its formulas and tensors: the arguments to compile for, and the body."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from gdn.ops.context.problem import ContextTotalParams, ContextTotalProblem
from kernels_cute.common import build
from kernels_cute.common.memory import fake
from kernels_cute.context.chain import Kept, P_in, Run, compose, first_summary, h_in, put, segment_run, shared_of, take
from kernels_cute.context.tiles import BLOCK_COLUMNS, BLOCKS_PER_SM, Tiles, place_of


def fakes_of(problem: Any) -> tuple[Any, Any, tuple[int, int]]:
    """h and P of the segments, and the inner dims of a state."""
    K, V, heads = problem.head_k_dim, problem.head_v_dim, problem.num_state_heads
    inner = (V, K) if problem.state_v_first else (K, V)
    h = fake("float32", cute.sym_int64(), heads, *inner, last=(inner[1], 1))
    return h, fake("float32", cute.sym_int64(), heads, K, K, last=(K, 1)), inner


def _fakes(problem: ContextTotalProblem) -> ContextTotalParams:
    p, heads = problem, problem.num_state_heads
    h, P, inner = fakes_of(problem)
    if not p.has_summaries:
        h = P = None
    pool, states = [
        fake(dtype, cute.sym_int64(), heads, *inner, last=(inner[1], 1))
        for dtype in (p.state_dtype, "float32" if p.is_first else None)
    ]
    indices, mask = fake(p.index_dtype, None), fake("bool" if p.has_mask else None, None)
    message = fake("float32", cute.sym_int64(), last=1)
    return ContextTotalParams(h, P, pool, indices, mask, states, message, Int32(1), Int32(1), Int64(-1))


class _ContextTotal(build.Kernel, params=ContextTotalParams):
    def __init__(self, problem: ContextTotalProblem, config: Any) -> None:
        self.tiles = tiles = Tiles(problem)
        self.threads, self.problem = tiles.threads, problem
        self.h_blocks = tiles.V // BLOCK_COLUMNS
        self.head_blocks = self.h_blocks + (0 if problem.is_first else tiles.K // BLOCK_COLUMNS)
        self.limits = {"min_blocks_per_mp": BLOCKS_PER_SM, "preferred_smem_carveout": 100}

    def blocks(self, params: ContextTotalParams) -> Any:
        return params.num_sequences * (self.tiles.heads * self.head_blocks)

    @cute.kernel
    def kernel(self, params: ContextTotalParams):
        tiles = cutlass.const_expr(self.tiles)
        block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        place, shared = place_of(tiles, thread), None
        if cutlass.const_expr(self.problem.has_summaries):
            shared = shared_of(tiles, cutlass.utils.SmemAllocator().allocate(tiles.storage(False)), False)
        number = block // self.head_blocks  # of a sequence and head
        block = block - number * self.head_blocks
        if cutlass.const_expr(self.problem.is_first):
            self.run_first(params, number, block, place, shared)
        else:
            self.run_later(params, number, block, place, shared)

    @cute.jit
    def run_first(self, params: ContextTotalParams, number: Int32, block: Int32, place: Any, shared: Any):
        tiles, segments = cutlass.const_expr(self.tiles), params.num_segments
        sequence = number // tiles.heads
        first = tiles.first_element(place, block, tiles.V)
        rX = cute.make_rmem_tensor(tiles.values, Float32)
        rX.fill(0.0)
        self.load_start(params, sequence, number - sequence * tiles.heads, first, rX)
        base, step = first_summary(tiles, number, segments), Int64(tiles.heads * tiles.h_bytes)
        kept = Kept(params.states.iterator.toint() + base * tiles.h_bytes + first * 4, step, Int32(0), segments - 1)
        if cutlass.const_expr(self.problem.has_summaries):
            run = segment_run(tiles, params, number, first, Int32(0))
            compose(tiles, (run,), segments, Int32(1), tiles.V, kept, place, shared, rX)
            target = h_in(tiles, params.message.iterator.toint(), number)
            put(tiles, Float32, target + first * 4, tiles.V, rX)
        else:
            put(tiles, Float32, kept.address, tiles.V, rX)

    @cute.jit
    def run_later(self, params: ContextTotalParams, number: Int32, block: Int32, place: Any, shared: Any):
        """Columns of h, or after them those of P, on which the same chain works without its h."""
        tiles, segments = cutlass.const_expr(self.tiles), params.num_segments
        is_h = block < self.h_blocks
        adds_h, width = Int32(1), Int32(tiles.V)
        if not is_h:
            adds_h, width, block = Int32(0), Int32(tiles.K), block - self.h_blocks
        first = tiles.first_element(place, block, width)
        run = segment_run(tiles, params, number, first, Int32(0))
        message = params.message.iterator.toint()
        source, target = run.h, h_in(tiles, message, number)
        if not is_h:
            source, target = run.P + first * 4, P_in(tiles, message, number, params.num_sequences)
        rX = cute.make_rmem_tensor(tiles.values, Float32)
        take(tiles, Float32, source, width, rX)
        rest = Run(Int32(0), run.h + run.h_step, run.h_step, run.P + run.P_step, run.P_step)
        compose(tiles, (rest,), segments - 1, adds_h, width, None, place, shared, rX)
        put(tiles, Float32, target + first * 4, width, rX)

    @cute.jit
    def load_start(self, params: ContextTotalParams, sequence: Int32, head: Int32, first: Int32, rX: cute.Tensor):
        """The sequence's state in the pool; rX stays as it is, zero, where it starts from zero."""
        pool, tiles = params.initial_state, cutlass.const_expr(self.tiles)
        if cutlass.const_expr(pool is not None):
            slot, is_continued = Int64(sequence), Boolean(True)
            if cutlass.const_expr(params.state_indices is not None):
                slot = Int64(params.state_indices[sequence])
                is_continued = slot > params.null_slot
            if cutlass.const_expr(params.has_initial_state is not None):
                is_continued = is_continued & Boolean(params.has_initial_state[sequence])
            if is_continued:
                size = cutlass.const_expr(pool.element_type.width // 8)
                offset = slot * pool.stride[0] + (head * (tiles.K * tiles.V) + first)
                take(tiles, pool.element_type, pool.iterator.toint() + offset * size, tiles.V, rX)


def library(problem: ContextTotalProblem, config: Any) -> dict[str, bytes]:
    return build.one_entry(problem.op, _ContextTotal(problem, config), _fakes(problem))
