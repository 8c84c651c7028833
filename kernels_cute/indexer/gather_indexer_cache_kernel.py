"""Kernel of gather_indexer_cache.py, which has its formulas and tensors: the arguments to compile for, and the body."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from gdn.ops.indexer.problem import GatherIndexerCacheParams, GatherIndexerCacheProblem
from kernels_cute.common import build
from kernels_cute.common.choice import ACCESS_BYTES
from kernels_cute.common.memory import fake, load, store, word_pointer
from kernels_cute.indexer.forms import row_bytes

_MOST_PIECES = 16  # 16-byte pieces that a lane holds at once: 64 registers


def _fakes(problem: GatherIndexerCacheProblem) -> GatherIndexerCacheParams:
    p, rows = problem, cute.sym_int()
    cache, cu_seqlens = fake(p.cache_dtype, None, None, last=1), fake(p.cu_seqlens_dtype, None)
    k = fake("float8_e4m3fn" if p.scaled else p.cache_dtype, rows, p.num_kv_heads * p.head_dim, last=1)
    k_scale = fake("float32" if p.scaled else None, rows, p.num_kv_heads, last=1)
    return GatherIndexerCacheParams(cache, fake("int32", None, None), cu_seqlens, k, k_scale)


class _GatherIndexerCache(build.Kernel, params=GatherIndexerCacheParams):
    def __init__(self, problem: GatherIndexerCacheProblem, config: Any) -> None:
        self.threads, self.rows = config.threads, config.rows
        self.kv_heads = problem.num_kv_heads
        self.row_bytes = row_bytes(problem)
        # Elements of a row in the cache, its scales included.
        self.row_elements = problem.num_kv_heads * (problem.head_dim + (4 if problem.scaled else 0))
        self.row_pieces = self.row_bytes // ACCESS_BYTES
        self.pieces = self.rows * self.row_pieces  # of a warp
        self.rounds = -(-self.pieces // 32)

    def blocks(self, params: GatherIndexerCacheParams) -> Any:
        block_rows = self.threads // 32 * self.rows
        return (params.k.shape[0] + block_rows - 1) // block_rows

    @cute.kernel
    def kernel(self, params: GatherIndexerCacheParams):
        block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        lane = thread % 32
        first = (block * (self.threads // 32) + thread // 32) * self.rows
        num_rows = params.k.shape[0]
        page_size = Int32(params.cache.shape[1]) // self.row_elements

        # One row per lane; lanes beyond the warp's rows repeat its last row.
        row = first + (lane if lane < self.rows else self.rows - 1)
        page, page_row, is_used = self.find(params, row, page_size)
        base = params.cache.iterator.toint() + Int64(page) * params.cache.stride[0] * (params.cache.element_type.width // 8)
        source = base + Int64(page_row) * self.row_bytes
        if not is_used:
            source = Int64(0)

        target = params.k.iterator.toint() + Int64(first) * self.row_bytes
        for start in cutlass.range_constexpr(0, self.rounds, _MOST_PIECES):
            self.copy(source, target, num_rows - first, lane, start, min(_MOST_PIECES, self.rounds - start))
        if cutlass.const_expr(params.k_scale is not None):
            self.copy_scales(base + Int64(page_size) * self.row_bytes, page_row, is_used, row, lane, num_rows, params.k_scale)

    @cute.jit
    def find(self, params: GatherIndexerCacheParams, row: Int32, page_size: Int32):
        """Page of a row of the result, row in the page, and whether a sequence has it (else both are 0)."""
        count = params.cu_seqlens.shape[0] - 1
        sequence = Int32(0)
        size = Int32(count)
        while size > 1:
            half = size // 2
            if Int64(params.cu_seqlens[sequence + half]) <= row:
                sequence += half
                size -= half
            else:
                size = half
        start = Int64(params.cu_seqlens[sequence])
        is_used = Int64(row) < Int64(params.cu_seqlens[count]) and start <= Int64(row)
        page, page_row = Int32(0), Int32(0)
        if is_used:
            offset = row - Int32(start)
            column = offset // page_size
            page_row = offset - column * page_size
            column = cutlass.min(column, Int32(params.block_tables.shape[1]) - 1)
            page = cutlass.max(cutlass.min(params.block_tables[sequence, column], Int32(params.cache.shape[0]) - 1), Int32(0))
        return page, page_row, is_used

    @cute.jit
    def copy(
        self, source: Int64, target: Int64, rows_left: Int32, lane: Int32, start: cutlass.Constexpr, count: cutlass.Constexpr
    ):
        """Copies rounds start .. start + count of the warp's pieces, 32 per round. source: address of this lane's row."""
        rPieces = cute.make_rmem_tensor(4 * count, Uint32)
        rPieces.fill(0)
        for u in cutlass.range_constexpr(count):
            piece = (start + u) * 32 + lane
            row = piece // self.row_pieces
            # Executed by all lanes: the row's address is another lane's.
            address = self.from_lane(source, cutlass.min(row, self.rows - 1))
            if address != 0 and row < self.rows:
                load(word_pointer(address + (piece - row * self.row_pieces) * 16, 16), 4, rPieces, 4 * u, True)
        for u in cutlass.range_constexpr(count):
            piece = (start + u) * 32 + lane
            row = piece // self.row_pieces
            if row < self.rows and row < rows_left:
                store(rPieces, 4 * u, 4, word_pointer(target + Int64(piece) * 16, 16))

    @cute.jit
    def from_lane(self, value: Int64, lane: Int32):
        """Another lane's 64-bit value."""
        low = cute.arch.shuffle_sync(Int32(value & 0xFFFFFFFF), lane)
        high = cute.arch.shuffle_sync(Int32(value >> 32), lane)
        return (Int64(high) << 32) | (Int64(low) & 0xFFFFFFFF)

    @cute.jit
    def copy_scales(self, scales: Int64, page_row: Int32, is_used: Boolean, row: Int32, lane: Int32, num_rows: Int32, gScale):
        """Copies the scales of the row that this lane found."""
        if lane < self.rows and row < num_rows:
            source = cute.make_ptr(
                Float32, scales + Int64(page_row) * (4 * self.kv_heads), cute.AddressSpace.gmem, assumed_align=4
            )
            for head in cutlass.range_constexpr(self.kv_heads):
                scale = Float32(0.0)
                if is_used:
                    scale = source[head]
                gScale[row, head] = scale


def library(problem: GatherIndexerCacheProblem, config: Any) -> dict[str, bytes]:
    return build.one_entry(problem.op, _GatherIndexerCache(problem, config), _fakes(problem))
