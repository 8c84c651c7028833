"""The ragged logits kernel.

    q [M, H, D] fp8 | bf16, k [Nk, KH, D], k_scale [Nk, KH] float32, weights [M, H], ranges [M] int32, out [M, W]

Persistent blocks walk items = (block of queries) x (chunk of key tiles), chunks outermost. A product has the keys of a tile as
rows, 64 per math warpgroup, and `block_queries` x padded heads as columns. Math warpgroups do not wait for each other: while
one sums over heads, the tensor cores work for another.

    role                       waits for                     arrives at
    loader warp                q_empty[2], k_empty[stages]   q_full (32 lanes + TMA bytes), k_full (32 lanes + TMA bytes)
    math warpgroups            q_full, k_full                k_empty (every thread), q_empty (every thread)
    fill warps (3)             nothing                       nothing: they write -inf where no tile is computed
    with `ordered`, math warpgroup w also waits at named barrier 1 + w (256 threads) before a product and arrives at its
    successor's after issuing it

The loader puts row ranges and weights of an item next to its queries, two items deep, so math warps read no index from memory.
"""

from types import SimpleNamespace
from typing import Any

import tilelang.language as T

from gdn.problems import MqaLogitsProblem
from kernels_tl.mqa_logits import shared as _logits


class RaggedTiles(_logits.Tiles):
    """Numbers of a kernel that are known when it is compiled."""

    def __init__(self, problem: MqaLogitsProblem, config: Any) -> None:
        super().__init__(problem, config.block_queries, config.math_warpgroups, config.stages, config.blocks)
        self.packed = problem.packed
        self.ordered = config.ordered and config.math_warpgroups > 1


@T.macro
def row_range(rows: Any, row: Any, first: Any, last: Any):
    """The clamped key range of a row; an empty one, and a row beyond the end, is [0, 0)."""
    first[0] = 0
    last[0] = 0
    if row < rows.m:
        first[0] = T.max(rows.cu_seqlen_ks[row], 0)
        last[0] = T.min(rows.cu_seqlen_ke[row], rows.nk)
        if first[0] >= last[0]:
            first[0] = 0
            last[0] = 0


@T.macro
def union_of_rows(tiles: Any, rows: Any, q0: Any, lane: Any, low: Any, high: Any, first: Any, last: Any):
    """[low, high) covers the ranges of the item's rows (by all 32 lanes); high = 0 where all are empty."""
    low[0] = rows.nk
    high[0] = 0
    for r in T.serial((tiles.queries + 31) // 32):
        if r * 32 + lane < tiles.queries:
            row_range(rows, q0 + r * 32 + lane, first, last)
            if first[0] < last[0]:
                low[0] = T.min(low[0], first[0])
                high[0] = T.max(high[0], last[0])
    for e in T.unroll(5):
        low[0] = T.min(low[0], T.shfl_xor(low[0], 1 << e))
        high[0] = T.max(high[0], T.shfl_xor(high[0], 1 << e))


@T.macro
def tiles_of_item(tiles: Any, rows: Any, chunk_index: Any, low: Any, high: Any, origin: Any, begin: Any, end: Any):
    """Tiles [begin, end) of the item start at key origin + tile * tiles.keys."""
    if tiles.packed:  # chunks count from the first visible key; the last one takes whatever the union has left
        origin[0] = low[0] + chunk_index * rows.chunk_tiles * tiles.keys
        begin[0] = 0
        end[0] = T.truncdiv(T.max(high[0] - origin[0], 0) + tiles.keys - 1, tiles.keys)
        if chunk_index < rows.chunks - 1:
            end[0] = T.min(end[0], rows.chunk_tiles)
    else:
        origin[0] = chunk_index * rows.chunk_tiles * tiles.keys
        begin[0] = T.truncdiv(T.max(low[0] - origin[0], 0), tiles.keys)
        visible = T.max(T.min(high[0], rows.width) - origin[0], 0)
        end[0] = T.min(T.truncdiv(visible + tiles.keys - 1, tiles.keys), rows.chunk_tiles)
        begin[0] = T.min(begin[0], end[0])


@T.macro
def math_role(tiles: Any, buffers: Any, rows: Any, k_scale: Any, out: Any, scale: Any, block: Any, thread: Any):
    T.set_max_nreg(tiles.math_registers, 1)
    scores = T.alloc_fragment((tiles.keys, tiles.columns), "float32")
    scores3 = T.reshape(scores, (tiles.keys, tiles.queries, tiles.padded))
    product = T.alloc_fragment((tiles.keys, tiles.queries, tiles.padded), "float32")
    weights_fragment = T.alloc_fragment((tiles.queries, tiles.padded), "float32")
    part = T.alloc_fragment((tiles.keys, tiles.queries), "float32")
    total = T.alloc_fragment((tiles.keys, tiles.queries), "float32")
    key_scale = T.alloc_fragment((tiles.keys,), "float32")
    count = T.alloc_var("int32", init=0)
    if tiles.ordered:  # the first turn is warpgroup 0's
        if thread >= tiles.math_threads - _logits.WARPGROUP:
            T.named_barrier_arrive(1, 256)
    q0 = T.alloc_var("int32")
    k0 = T.alloc_var("int32")
    common_from = T.alloc_var("int32")
    common_to = T.alloc_var("int32")
    for i in T.serial(rows.items):
        q0 = T.truncmod(block + i * tiles.blocks, rows.query_blocks) * tiles.queries
        T.mbarrier_wait_parity(buffers.q_full[i % 2], (i // 2) % 2)
        k0 = buffers.item[i % 2, 2] + buffers.item[i % 2, 0] * tiles.keys
        common_from = buffers.item[i % 2, 3]
        common_to = buffers.item[i % 2, 4]
        if tiles.weighted and tiles.kv_heads == 1:
            T.copy(buffers.weights[i % 2, :, :], weights_fragment)
        for _tile in T.serial(buffers.item[i % 2, 1] - buffers.item[i % 2, 0]):
            for g in T.serial(tiles.kv_heads):
                if tiles.weighted and tiles.kv_heads > 1:
                    T.copy(buffers.weights[(i % 2) * tiles.kv_heads + g, :, :], weights_fragment)
                T.mbarrier_wait_parity(buffers.k_full[count % tiles.stages], (count // tiles.stages) % 2)
                if tiles.ordered:
                    T.sync_threads(1 + thread // 128, 256)
                _logits.multiply(tiles, buffers, count, i, g, scores)
                if tiles.ordered:
                    T.named_barrier_arrive(1 + (thread // 128 + 1) % tiles.math_warpgroups, 256)
                # Loaded while the product runs; rows beyond the end repeat the last one and are masked below.
                for j in T.Parallel(tiles.keys):
                    if tiles.scaled:
                        key_scale[j] = k_scale[T.min(k0 + j, rows.nk - 1), g] * scale
                    else:
                        key_scale[j] = scale
                T.wait_wgmma(0)
                T.mbarrier_arrive(buffers.k_empty[count % tiles.stages])
                count = count + 1
                _logits.activate(tiles, product, scores3, weights_fragment)
                T.reduce_sum(product, part, dim=-1, clear=True)
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
                        (k0 + j >= buffers.first[i % 2, b])
                        & (k0 + j < buffers.last[i % 2, b])
                        & (k0 + j - buffers.first[i % 2, b] < rows.width)
                    ):
                        out[q0 + b, k0 + j - buffers.first[i % 2, b]] = T.cast(total[j, b], tiles.out_dtype)
            else:
                if (k0 >= common_from) & (k0 + tiles.keys <= common_to):
                    for j, b in T.Parallel(tiles.keys, tiles.queries):
                        out[q0 + b, k0 + j] = T.cast(total[j, b], tiles.out_dtype)
                else:
                    for j, b in T.Parallel(tiles.keys, tiles.queries):
                        if (q0 + b < rows.m) & (k0 + j < rows.width):
                            if (k0 + j >= buffers.first[i % 2, b]) & (k0 + j < buffers.last[i % 2, b]):
                                out[q0 + b, k0 + j] = T.cast(total[j, b], tiles.out_dtype)
                            else:
                                if tiles.clean:
                                    out[q0 + b, k0 + j] = T.cast(-T.infinity("float32"), tiles.out_dtype)
            k0 = k0 + tiles.keys
        T.mbarrier_arrive(buffers.q_empty[i % 2])


@T.macro
def loader_role(tiles: Any, buffers: Any, rows: Any, q: Any, k: Any, weights: Any, block: Any, lane: Any):
    q0 = T.alloc_var("int32")
    chunk_index = T.alloc_var("int32")
    low = T.alloc_local((1,), "int32")
    high = T.alloc_local((1,), "int32")
    first = T.alloc_local((1,), "int32")
    last = T.alloc_local((1,), "int32")
    origin = T.alloc_local((1,), "int32")
    begin = T.alloc_local((1,), "int32")
    end = T.alloc_local((1,), "int32")
    count = T.alloc_var("int32", init=0)
    inner_low = T.alloc_var("int32")
    inner_high = T.alloc_var("int32")
    for i in T.serial(rows.items):
        q0 = T.truncmod(block + i * tiles.blocks, rows.query_blocks) * tiles.queries
        chunk_index = T.truncdiv(block + i * tiles.blocks, rows.query_blocks)
        T.mbarrier_wait_parity(buffers.q_empty[i % 2], ((i // 2) % 2) ^ 1)
        union_of_rows(tiles, rows, q0, lane, low, high, first, last)
        tiles_of_item(tiles, rows, chunk_index, low, high, origin, begin, end)
        inner_low = 0
        inner_high = rows.width
        for r in T.serial((tiles.queries + 31) // 32):
            if r * 32 + lane < tiles.queries:
                row_range(rows, q0 + r * 32 + lane, first, last)
                buffers.first[i % 2, r * 32 + lane] = first[0]
                buffers.last[i % 2, r * 32 + lane] = last[0]
                inner_low = T.max(inner_low, first[0])
                inner_high = T.min(inner_high, last[0])
        for e in T.unroll(5):
            inner_low = T.max(inner_low, T.shfl_xor(inner_low, 1 << e))
            inner_high = T.min(inner_high, T.shfl_xor(inner_high, 1 << e))
        if tiles.weighted and end[0] > begin[0]:
            _logits.publish_weights(tiles, buffers, weights, q0, rows.m, i, lane)
        if lane == 0:
            buffers.item[i % 2, 0] = begin[0]
            buffers.item[i % 2, 1] = end[0]
            buffers.item[i % 2, 2] = origin[0]
            buffers.item[i % 2, 3] = inner_low
            buffers.item[i % 2, 4] = inner_high
        if end[0] > begin[0]:
            _logits.copy_queries(tiles, buffers, q, q0, i)
        T.mbarrier_arrive(buffers.q_full[i % 2])
        for tile in T.serial(end[0] - begin[0]):
            key0 = origin[0] + (begin[0] + tile) * tiles.keys
            for g in T.serial(tiles.kv_heads):
                T.mbarrier_wait_parity(buffers.k_empty[count % tiles.stages], ((count // tiles.stages) % 2) ^ 1)
                T.tma_copy(
                    k[key0 : key0 + tiles.keys, g * tiles.dim : g * tiles.dim + tiles.dim],
                    buffers.k[count % tiles.stages, :, :],
                    barrier=buffers.k_full[count % tiles.stages],
                    leader_scope_threads=32,
                )
                T.mbarrier_arrive(buffers.k_full[count % tiles.stages])
                count = count + 1


@T.macro
def fill_role(tiles: Any, rows: Any, out: Any, block: Any, lane: Any, fill_thread: Any):
    """-inf in the columns of which no tile is computed; packed: from the end of each row's range on."""
    q0 = T.alloc_var("int32")
    chunk_index = T.alloc_var("int32")
    low = T.alloc_local((1,), "int32")
    high = T.alloc_local((1,), "int32")
    first = T.alloc_local((1,), "int32")
    last = T.alloc_local((1,), "int32")
    origin = T.alloc_local((1,), "int32")
    begin = T.alloc_local((1,), "int32")
    end = T.alloc_local((1,), "int32")
    left = T.alloc_var("int32")
    right = T.alloc_var("int32")
    column = T.alloc_var("int32")
    for i in T.serial(rows.items):
        q0 = T.truncmod(block + i * tiles.blocks, rows.query_blocks) * tiles.queries
        chunk_index = T.truncdiv(block + i * tiles.blocks, rows.query_blocks)
        left = chunk_index * rows.chunk_tiles * tiles.keys
        right = T.min(left + rows.chunk_tiles * tiles.keys, rows.width)
        if tiles.packed:
            for b in T.serial(T.min(tiles.queries, rows.m - q0)):
                row_range(rows, q0 + b, first, last)
                column = T.max(left, last[0] - first[0]) + fill_thread
                while column < right:
                    out[q0 + b, column] = T.cast(-T.infinity("float32"), tiles.out_dtype)
                    column = column + 96
        else:
            union_of_rows(tiles, rows, q0, lane, low, high, first, last)
            tiles_of_item(tiles, rows, chunk_index, low, high, origin, begin, end)
            if end[0] - begin[0] < rows.chunk_tiles:
                for b in T.serial(T.min(tiles.queries, rows.m - q0)):
                    column = left + fill_thread
                    while column < T.min(left + begin[0] * tiles.keys, right):
                        out[q0 + b, column] = T.cast(-T.infinity("float32"), tiles.out_dtype)
                        column = column + 96
                    column = left + end[0] * tiles.keys + fill_thread
                    while column < right:
                        out[q0 + b, column] = T.cast(-T.infinity("float32"), tiles.out_dtype)
                        column = column + 96


def program(problem: MqaLogitsProblem, config: Any) -> Any:
    """The TileLang function of a problem's static fields and a config."""
    tiles = RaggedTiles(problem, config)
    m, nk, width, q_rows = T.dynamic("m"), T.dynamic("nk"), T.dynamic("width"), T.dynamic("q_rows")
    weights_stride, out_stride = T.dynamic("weights_stride", "int64"), T.dynamic("out_stride", "int64")

    @T.macro
    def kernel(q, k, k_scale, weights, cu_seqlen_ks, cu_seqlen_ke, out, scale, chunk_tiles):
        with T.Kernel(tiles.blocks, threads=tiles.math_threads + _logits.WARPGROUP) as block:
            q_shared = T.alloc_shared((2 * tiles.kv_heads, tiles.columns, tiles.dim), tiles.dtype)
            k_shared = T.alloc_shared((tiles.stages, tiles.keys, tiles.dim), tiles.dtype)
            weights_shared = T.alloc_shared((2 * tiles.kv_heads, tiles.queries, tiles.padded), "float32")
            first_shared = T.alloc_shared((2, tiles.queries), "int32")
            last_shared = T.alloc_shared((2, tiles.queries), "int32")
            item_shared = T.alloc_shared((2, 8), "int32")  # first tile, end tile, origin, keys every row sees: from, to
            q_full = T.alloc_barrier([32] * 2)
            q_empty = T.alloc_barrier([tiles.math_threads] * 2)
            k_full = T.alloc_barrier([32] * tiles.stages)
            k_empty = T.alloc_barrier([tiles.math_threads] * tiles.stages)
            buffers = SimpleNamespace(
                q=q_shared, k=k_shared, weights=weights_shared, first=first_shared, last=last_shared, item=item_shared,
                q_full=q_full, q_empty=q_empty, k_full=k_full, k_empty=k_empty,
            )  # fmt: skip
            thread = T.get_thread_binding()
            query_blocks = T.alloc_var("int32")
            chunks = T.alloc_var("int32")
            items = T.alloc_var("int32")
            query_blocks = T.truncdiv(m + tiles.queries - 1, tiles.queries)
            chunks = T.max(T.truncdiv(width + chunk_tiles * tiles.keys - 1, chunk_tiles * tiles.keys), 1)
            items = T.truncdiv(query_blocks * chunks - block + tiles.blocks - 1, tiles.blocks)  # of this block
            rows = SimpleNamespace(
                m=m, nk=nk, width=width, cu_seqlen_ks=cu_seqlen_ks, cu_seqlen_ke=cu_seqlen_ke, chunk_tiles=chunk_tiles,
                query_blocks=query_blocks, chunks=chunks, items=items,
            )  # fmt: skip
            if thread < tiles.math_threads:
                math_role(tiles, buffers, rows, k_scale, out, scale, block, thread)
            else:
                T.set_max_nreg(tiles.loader_registers, 0)
                lane = thread % 32
                if thread < tiles.math_threads + 32:
                    loader_role(tiles, buffers, rows, q, k, weights, block, lane)
                else:
                    if tiles.clean:
                        fill_role(tiles, rows, out, block, lane, thread - tiles.math_threads - 32)

    q_shape = (q_rows, tiles.dim) if tiles.flat else (q_rows, tiles.kv_heads, tiles.group, tiles.dim)
    return _entry(problem, kernel, q_shape, m, nk, width, weights_stride, out_stride)


def _entry(
    problem: MqaLogitsProblem, kernel: Any, q_shape: Any, m: Any, nk: Any, width: Any, weights_stride: Any, out_stride: Any
) -> Any:
    """The signature: optional tensors that the problem lacks are left out of it."""
    s = _logits.shape_of(problem)
    q_type = T.Tensor(q_shape, s.dtype)
    k_type = T.Tensor((nk, s.kv_heads * s.dim), s.dtype)
    k_scale_type = T.Tensor((nk, s.kv_heads), "float32")
    weights_type = T.StridedTensor((m, s.heads), (weights_stride, 1), s.weights_dtype or "float32")
    # Two objects: one annotation object used twice would make both parameters one buffer.
    ks_type, ke_type = T.Tensor((m,), "int32"), T.Tensor((m,), "int32")
    out_type = T.StridedTensor((m, width), (out_stride, 1), s.out_dtype)
    f32, i32 = T.float32, T.int32

    if s.scaled and s.weights_dtype is not None:

        @T.prim_func
        def mqa_logits(
            q: q_type, k: k_type, k_scale: k_scale_type, weights: weights_type, ks: ks_type, ke: ke_type, out: out_type,
            scale: f32, chunk_tiles: i32,
        ):  # fmt: skip
            kernel(q, k, k_scale, weights, ks, ke, out, scale, chunk_tiles)

    elif s.scaled:

        @T.prim_func
        def mqa_logits(
            q: q_type, k: k_type, k_scale: k_scale_type, ks: ks_type, ke: ke_type, out: out_type, scale: f32, chunk_tiles: i32
        ):
            kernel(q, k, k_scale, None, ks, ke, out, scale, chunk_tiles)

    elif s.weights_dtype is not None:

        @T.prim_func
        def mqa_logits(
            q: q_type, k: k_type, weights: weights_type, ks: ks_type, ke: ke_type, out: out_type, scale: f32, chunk_tiles: i32
        ):
            kernel(q, k, None, weights, ks, ke, out, scale, chunk_tiles)

    else:

        @T.prim_func
        def mqa_logits(q: q_type, k: k_type, ks: ks_type, ke: ke_type, out: out_type, scale: f32, chunk_tiles: i32):
            kernel(q, k, None, None, ks, ke, out, scale, chunk_tiles)

    return mqa_logits
