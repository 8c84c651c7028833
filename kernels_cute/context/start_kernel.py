"""Kernel of start.py, which has its formulas and tensors: the arguments to compile for, and the body."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from gdn.ops.context.problem import ContextStartParams, ContextStartProblem
from kernels_cute.common import build
from kernels_cute.common.memory import fake
from kernels_cute.context.chain import Kept, P_in, Run, compose, first_summary, h_in, put, segment_run, shared_of, take
from kernels_cute.context.tiles import BLOCK_COLUMNS, BLOCKS_PER_SM, Tiles, place_of
from kernels_cute.context.total_kernel import fakes_of


def _fakes(problem: ContextStartProblem) -> ContextStartParams:
    p, heads = problem, problem.num_state_heads
    h, P, inner = fakes_of(problem)
    if not p.is_cut:
        h = P = None
    final, states = [
        fake(dtype, cute.sym_int64(), heads, *inner, last=(inner[1], 1))
        for dtype in (p.final_dtype, "float32" if p.has_segments or p.ends_here else None)
    ]
    messages = fake("float32", None, cute.sym_int64(), last=1)
    indices, final_indices = fake(p.index_dtype, None), fake(p.final_index_dtype, None)
    return ContextStartParams(messages, h, P, states, final, indices, final_indices, Int32(0), Int32(1), Int32(1), Int64(-1))


class _ContextStart(build.Kernel, params=ContextStartParams):
    def __init__(self, problem: ContextStartProblem, config: Any) -> None:
        self.tiles = tiles = Tiles(problem)
        self.threads, self.problem = tiles.threads, problem
        self.head_blocks = tiles.V // BLOCK_COLUMNS
        self.has_final = problem.final_dtype is not None
        self.limits = {"min_blocks_per_mp": BLOCKS_PER_SM, "preferred_smem_carveout": 100}

    def blocks(self, params: ContextStartParams) -> Any:
        return params.num_sequences * (self.tiles.heads * self.head_blocks)

    @cute.kernel
    def kernel(self, params: ContextStartParams):
        tiles = cutlass.const_expr(self.tiles)
        block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        place = place_of(tiles, thread)
        number = block // self.head_blocks  # of a sequence and head
        first = tiles.first_element(place, block - number * self.head_blocks, tiles.V)
        rX = cute.make_rmem_tensor(tiles.values, Float32)
        if cutlass.const_expr(self.problem.ends_here):
            last = first_summary(tiles, number, params.num_segments) + Int64(params.num_segments - 1) * tiles.heads
            take(tiles, Float32, params.states.iterator.toint() + last * tiles.h_bytes + first * 4, tiles.V, rX)
        else:
            self.run_chain(params, number, first, place, rX)
        if cutlass.const_expr(self.has_final):
            self.store_final(params, number, first, rX)

    @cute.jit
    def run_chain(self, params: ContextStartParams, number: Int32, first: Int32, place: Any, rX: cute.Tensor):
        tiles, problem = cutlass.const_expr(self.tiles), cutlass.const_expr(self.problem)
        has_fork = cutlass.const_expr(problem.is_cut and self.has_final)
        storage = cutlass.utils.SmemAllocator().allocate(tiles.storage(has_fork))
        shared = shared_of(tiles, storage, has_fork)
        take(tiles, Float32, self.message_run(params, number, first, Int32(0), Int32(0)).h, tiles.V, rX)
        later = cutlass.max(params.rank, Int32(1))  # of the ranks with a link
        runs, num_links, kept = (), Int32(0), None
        if cutlass.const_expr(problem.has_segments):
            before, num_links = self.message_run(params, number, first, Int32(1), Int32(0)), later - 1
            own = first_summary(tiles, number, params.num_segments)
            states = params.states.iterator.toint() + own * tiles.h_bytes + first * 4
            kept = Kept(states, Int64(tiles.heads * tiles.h_bytes), num_links, num_links + params.num_segments - 1)
            runs = (before,)
            if cutlass.const_expr(problem.is_cut):
                runs = (before, segment_run(tiles, params, number, first, num_links))
            num_links = kept.last
        if cutlass.const_expr(self.has_final):
            runs = (*runs, self.message_run(params, number, first, later, num_links))
            num_links += Int32(params.messages.shape[0]) - later
        compose(tiles, runs, num_links, Int32(1), tiles.V, kept, place, shared, rX)

    @cute.jit
    def message_run(self, params: ContextStartParams, number: Int32, first: Int32, rank: Int32, link: Int32):
        """Links of the messages of a rank and those after it. link: number of the first."""
        tiles = cutlass.const_expr(self.tiles)
        step = Int64(params.messages.stride[0]) * 4
        row = params.messages.iterator.toint() + Int64(rank) * step
        return Run(link, h_in(tiles, row, number) + first * 4, step, P_in(tiles, row, number, params.num_sequences), step)

    @cute.jit
    def store_final(self, params: ContextStartParams, number: Int32, first: Int32, rX: cute.Tensor):
        tiles, pool = cutlass.const_expr(self.tiles), params.final_state
        sequence = number // tiles.heads
        slot, is_written = Int64(sequence), Boolean(True)
        if cutlass.const_expr(params.state_indices is not None):
            slot = Int64(params.state_indices[sequence])
            is_written = (slot > params.null_slot) & self.has_tokens(params, sequence)
            if cutlass.const_expr(params.final_state_indices is not None):
                slot = Int64(params.final_state_indices[sequence])
                is_written = is_written & (slot > params.null_slot)
        if is_written:
            size = cutlass.const_expr(pool.element_type.width // 8)
            offset = slot * pool.stride[0] + ((number - sequence * tiles.heads) * (tiles.K * tiles.V) + first)
            put(tiles, pool.element_type, pool.iterator.toint() + offset * size, tiles.V, rX)

    @cute.jit
    def has_tokens(self, params: ContextStartParams, sequence: Int32):
        """Whether a sequence has tokens on any rank."""
        tiles = cutlass.const_expr(self.tiles)
        state_numbers = cutlass.const_expr(tiles.heads * tiles.K * (tiles.K + tiles.V))
        place = Int64(params.num_sequences) * state_numbers + sequence
        found = Boolean(False)
        for rank in cutlass.range(0, Int32(params.messages.shape[0]), unroll=1):
            found = found | (params.messages[rank, place] != 0.0)
        return found


def library(problem: ContextStartProblem, config: Any) -> dict[str, bytes]:
    return build.one_entry(problem.op, _ContextStart(problem, config), _fakes(problem))
