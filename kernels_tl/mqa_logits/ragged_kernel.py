"""Kernel of ragged.py, which has its formulas, tensors and roles."""

from types import SimpleNamespace
from typing import Any

import tilelang.language as T

from gdn.ops.indexer.problem import MqaLogitsProblem
from kernels_tl.common import build
from kernels_tl.common.copies import bulk_load
from kernels_tl.common.versions import prim_func
from kernels_tl.mqa_logits import shared as _logits
from kernels_tl.mqa_logits.tiles import WARPGROUP, RaggedTiles, q_shape


def library(problem: MqaLogitsProblem, config: Any) -> bytes:
    return build.library(program(problem, config), pass_configs=_logits.PASS_CONFIGS)


def program(problem: MqaLogitsProblem, config: Any) -> Any:
    """The TileLang function of a problem's static fields and a config."""
    tiles = RaggedTiles(problem, config)
    m, nk, width = T.dynamic("m"), T.dynamic("nk"), T.dynamic("width")
    weights_stride, out_stride = T.dynamic("weights_stride", "int64"), T.dynamic("out_stride", "int64")

    @prim_func
    def mqa_logits():
        tensors = build.parameters(
            q=T.Tensor(q_shape(problem, T.dynamic("q_rows")), tiles.dtype),
            k=T.Tensor((nk, tiles.kv_heads * tiles.dim), tiles.dtype),
            k_scale=T.Tensor((nk, tiles.kv_heads), "float32") if tiles.scaled else None,
            weights=T.StridedTensor((m, tiles.num_heads), (weights_stride, 1), tiles.weights_dtype) if tiles.weighted else None,
            cu_seqlen_ks=T.Tensor((m,), "int32"),
            cu_seqlen_ke=T.Tensor((m,), "int32"),
            out=T.StridedTensor((m, width), (out_stride, 1), tiles.out_dtype),
            scale=T.float32(),
            chunk_tiles=T.int32(),
        )
        threads = tiles.math_threads + WARPGROUP
        with T.Kernel(tiles.blocks, threads=threads, prelude=_logits.prelude(tiles)) as block:
            shared = _logits.allocate_shared(
                tiles,  # item: first tile, end tile, origin, keys every row sees: from, to
                first=T.alloc_shared((2, tiles.queries), "int32"),
                last=T.alloc_shared((2, tiles.queries), "int32"),
            )
            thread = T.get_thread_binding()
            query_blocks, chunks, items = build.variables(3)
            query_blocks = T.truncdiv(m + tiles.queries - 1, tiles.queries)
            chunk_keys = tensors.chunk_tiles * tiles.keys
            chunks = T.max(T.truncdiv(width + chunk_keys - 1, chunk_keys), 1)
            items = T.truncdiv(query_blocks * chunks - block + tiles.blocks - 1, tiles.blocks)  # of this block
            sizes = SimpleNamespace(m=m, nk=nk, width=width, query_blocks=query_blocks, chunks=chunks, items=items, block=block)
            if thread < tiles.math_threads:
                math_role(tiles, shared, sizes, tensors, thread)
            else:
                T.set_max_nreg(tiles.loader_registers, 0)
                if thread < tiles.math_threads + 32:
                    loader_role(tiles, shared, sizes, tensors, thread % 32)
                elif tiles.clean:
                    fill_role(tiles, sizes, tensors, thread % 32, thread - tiles.math_threads - 32)

    return mqa_logits


@T.macro
def row_range(sizes, tensors, row, first, last):
    """The clamped key range of a row; an empty one, and a row beyond the end, is [0, 0)."""
    first[0] = 0
    last[0] = 0
    if row < sizes.m:
        first[0] = T.max(tensors.cu_seqlen_ks[row], 0)
        last[0] = T.min(tensors.cu_seqlen_ke[row], sizes.nk)
        if first[0] >= last[0]:
            first[0] = 0
            last[0] = 0


def allocate_item() -> Any:
    """Variables of an item in the warps that do not compute."""
    names = ("low", "high", "first", "last", "origin", "begin", "end")
    return build.named(**{name: T.alloc_local((1,), "int32") for name in names})


@T.macro
def find_item(tiles, sizes, tensors, index, q0, lane, item):
    """The tiles [begin, end) of the block's item, the first at key origin + begin * tiles.keys.

    [low, high) covers the ranges of its rows, found by all 32 lanes; high = 0 where all are empty.
    """
    low, high, first, last, origin, begin, end = item.low, item.high, item.first, item.last, item.origin, item.begin, item.end
    low[0] = sizes.nk
    high[0] = 0
    for r in T.serial((tiles.queries + 31) // 32):
        if r * 32 + lane < tiles.queries:
            row_range(sizes, tensors, q0 + r * 32 + lane, first, last)
            if first[0] < last[0]:
                low[0] = T.min(low[0], first[0])
                high[0] = T.max(high[0], last[0])
    for e in T.unroll(5):
        low[0] = T.min(low[0], T.shfl_xor(low[0], 1 << e))
        high[0] = T.max(high[0], T.shfl_xor(high[0], 1 << e))
    if tiles.packed:  # chunks count from the first visible key; the last one takes whatever the union has left
        origin[0] = low[0] + index * tensors.chunk_tiles * tiles.keys
        begin[0] = 0
        end[0] = T.truncdiv(T.max(high[0] - origin[0], 0) + tiles.keys - 1, tiles.keys)
        if index < sizes.chunks - 1:
            end[0] = T.min(end[0], tensors.chunk_tiles)
    else:
        origin[0] = index * tensors.chunk_tiles * tiles.keys
        begin[0] = T.truncdiv(T.max(low[0] - origin[0], 0), tiles.keys)
        visible = T.max(T.min(high[0], sizes.width) - origin[0], 0)
        end[0] = T.min(T.truncdiv(visible + tiles.keys - 1, tiles.keys), tensors.chunk_tiles)
        begin[0] = T.min(begin[0], end[0])


@T.macro
def math_role(tiles, shared, sizes, tensors, thread):
    T.set_max_nreg(tiles.math_registers, 1)
    registers = _logits.allocate_registers(tiles)
    key_scale = T.alloc_fragment((tiles.keys,), "float32")
    scale = _logits.activated_scale(tiles, tensors.scale)
    count = T.alloc_var("int32", init=0)
    if tiles.ordered:  # the first turn is warpgroup 0's
        if thread >= tiles.math_threads - WARPGROUP:
            T.named_barrier_arrive(1, 256)
    q0, k0, common_from, common_to = build.variables(4)
    part, total, out = registers.part, registers.total, tensors.out
    for i in T.serial(sizes.items):
        q0 = T.truncmod(sizes.block + i * tiles.blocks, sizes.query_blocks) * tiles.queries
        T.mbarrier_wait_parity(shared.q_full[i % 2], (i // 2) % 2)
        k0 = shared.item[i % 2, 2] + shared.item[i % 2, 0] * tiles.keys
        common_from = shared.item[i % 2, 3]
        common_to = shared.item[i % 2, 4]
        if tiles.kv_heads == 1:
            _logits.load_weights(tiles, shared, i, 0, registers)
        for _tile in T.serial(shared.item[i % 2, 1] - shared.item[i % 2, 0]):
            for g in T.serial(tiles.kv_heads):
                if tiles.kv_heads > 1:
                    _logits.load_weights(tiles, shared, i, g, registers)
                T.mbarrier_wait_parity(shared.k_full[count % tiles.stages], (count // tiles.stages) % 2)
                if tiles.ordered:
                    T.sync_threads(1 + thread // 128, 256)
                _logits.multiply(tiles, shared, count, i, g, registers.scores)
                if tiles.ordered:
                    T.named_barrier_arrive(1 + (thread // 128 + 1) % tiles.math_warpgroups, 256)
                # Loaded while the product runs; rows beyond the end repeat the last one and are masked below.
                for j in T.Parallel(tiles.keys):
                    if tiles.scaled:
                        key_scale[j] = tensors.k_scale[T.min(k0 + j, sizes.nk - 1), g] * scale
                    else:
                        key_scale[j] = scale
                T.wait_wgmma(0)
                T.mbarrier_arrive(shared.k_empty[count % tiles.stages])
                count = count + 1
                _logits.sum_heads(tiles, registers)
                if tiles.kv_heads == 1:
                    for j, b in T.Parallel(tiles.keys, tiles.queries):
                        total[j, b] = part[j, b] * key_scale[j]
                else:
                    if g == 0:
                        T.clear(total)
                    for j, b in T.Parallel(tiles.keys, tiles.queries):
                        total[j, b] = total[j, b] + part[j, b] * key_scale[j]
            if tiles.packed:
                for j, b in T.Parallel(tiles.keys, tiles.queries):
                    if (
                        (k0 + j >= shared.first[i % 2, b])
                        & (k0 + j < shared.last[i % 2, b])
                        & (k0 + j - shared.first[i % 2, b] < sizes.width)
                    ):
                        out[q0 + b, k0 + j - shared.first[i % 2, b]] = T.cast(total[j, b], tiles.out_dtype)
            elif (k0 >= common_from) & (k0 + tiles.keys <= common_to):
                for j, b in T.Parallel(tiles.keys, tiles.queries):
                    out[q0 + b, k0 + j] = T.cast(total[j, b], tiles.out_dtype)
            else:
                for j, b in T.Parallel(tiles.keys, tiles.queries):
                    if (q0 + b < sizes.m) & (k0 + j < sizes.width):
                        if (k0 + j >= shared.first[i % 2, b]) & (k0 + j < shared.last[i % 2, b]):
                            out[q0 + b, k0 + j] = T.cast(total[j, b], tiles.out_dtype)
                        elif tiles.clean:
                            out[q0 + b, k0 + j] = T.cast(-T.infinity("float32"), tiles.out_dtype)
            k0 = k0 + tiles.keys
        T.mbarrier_arrive(shared.q_empty[i % 2])


@T.macro
def loader_role(tiles, shared, sizes, tensors, lane):
    q0, index, inner_low, inner_high = build.variables(4)  # index: of the chunk
    item = allocate_item()
    count = T.alloc_var("int32", init=0)
    for i in T.serial(sizes.items):
        q0 = T.truncmod(sizes.block + i * tiles.blocks, sizes.query_blocks) * tiles.queries
        index = T.truncdiv(sizes.block + i * tiles.blocks, sizes.query_blocks)
        T.mbarrier_wait_parity(shared.q_empty[i % 2], ((i // 2) % 2) ^ 1)
        find_item(tiles, sizes, tensors, index, q0, lane, item)
        inner_low = 0
        inner_high = sizes.width
        for r in T.serial((tiles.queries + 31) // 32):
            if r * 32 + lane < tiles.queries:
                row_range(sizes, tensors, q0 + r * 32 + lane, item.first, item.last)
                shared.first[i % 2, r * 32 + lane] = item.first[0]
                shared.last[i % 2, r * 32 + lane] = item.last[0]
                inner_low = T.max(inner_low, item.first[0])
                inner_high = T.min(inner_high, item.last[0])
        for e in T.unroll(5):
            inner_low = T.max(inner_low, T.shfl_xor(inner_low, 1 << e))
            inner_high = T.min(inner_high, T.shfl_xor(inner_high, 1 << e))
        if tiles.weighted and item.end[0] > item.begin[0]:
            _logits.publish_weights(tiles, shared, tensors.weights, q0, sizes.m, i, lane)
        if lane == 0:
            for place, value in enumerate((item.begin[0], item.end[0], item.origin[0], inner_low, inner_high)):
                shared.item[i % 2, place] = value
        if item.end[0] > item.begin[0]:
            _logits.copy_queries(tiles, shared, tensors.q, q0, i)
        T.mbarrier_arrive(shared.q_full[i % 2])
        for tile in T.serial(item.end[0] - item.begin[0]):
            key0 = item.origin[0] + (item.begin[0] + tile) * tiles.keys
            for g in T.serial(tiles.kv_heads):
                T.mbarrier_wait_parity(shared.k_empty[count % tiles.stages], ((count // tiles.stages) % 2) ^ 1)
                bulk_load(
                    tensors.k[key0 : key0 + tiles.keys, g * tiles.dim : g * tiles.dim + tiles.dim],
                    shared.k[count % tiles.stages, :, :],
                    shared.k_full[count % tiles.stages],
                )
                T.mbarrier_arrive(shared.k_full[count % tiles.stages])
                count = count + 1


@T.macro
def fill_role(tiles, sizes, tensors, lane, fill_thread):
    """-inf in the columns of which no tile is computed; packed: from the end of each row's range on."""
    q0, index, left, right, column = build.variables(5)  # index: of the chunk
    item = allocate_item()
    for i in T.serial(sizes.items):
        q0 = T.truncmod(sizes.block + i * tiles.blocks, sizes.query_blocks) * tiles.queries
        index = T.truncdiv(sizes.block + i * tiles.blocks, sizes.query_blocks)
        left = index * tensors.chunk_tiles * tiles.keys
        right = T.min(left + tensors.chunk_tiles * tiles.keys, sizes.width)
        if tiles.packed:
            for b in T.serial(T.min(tiles.queries, sizes.m - q0)):
                row_range(sizes, tensors, q0 + b, item.first, item.last)
                column = T.max(left, item.last[0] - item.first[0]) + fill_thread
                while column < right:
                    tensors.out[q0 + b, column] = T.cast(-T.infinity("float32"), tiles.out_dtype)
                    column = column + 96
        else:
            find_item(tiles, sizes, tensors, index, q0, lane, item)
            if item.end[0] - item.begin[0] < tensors.chunk_tiles:
                for b in T.serial(T.min(tiles.queries, sizes.m - q0)):
                    column = left + fill_thread
                    while column < T.min(left + item.begin[0] * tiles.keys, right):
                        tensors.out[q0 + b, column] = T.cast(-T.infinity("float32"), tiles.out_dtype)
                        column = column + 96
                    column = left + item.end[0] * tiles.keys + fill_thread
                    while column < right:
                        tensors.out[q0 + b, column] = T.cast(-T.infinity("float32"), tiles.out_dtype)
                        column = column + 96
