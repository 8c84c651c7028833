"""Kernel of paged.py, which has its formulas, tensors and roles."""

from types import SimpleNamespace
from typing import Any

import tilelang.language as T
from tilelang.layout import make_linear_layout

from gdn.ops.indexer.problem import PagedMqaLogitsProblem
from kernels_tl.common import build
from kernels_tl.common.copies import bulk_load
from kernels_tl.common.versions import IS_0_1_12, matrix_type, part_of_row, prim_func
from kernels_tl.mqa_logits import shared as _logits
from kernels_tl.mqa_logits.tiles import WARPGROUP, PagedTiles, q_shape


def library(problem: PagedMqaLogitsProblem, config: Any, entry: str, line_entry: str) -> dict[str, bytes]:
    """line_entry: name of the entry where the kernel takes the scales as one line, which the launch then passes."""
    name = line_entry if IS_0_1_12 else entry
    function = program(problem, config).with_attr("global_symbol", name)
    return {name: build.library(function, pass_configs=_logits.PASS_CONFIGS)}


def program(problem: PagedMqaLogitsProblem, config: Any) -> Any:
    """The TileLang function of a problem's static fields and a config."""
    tiles = PagedTiles(problem, config)
    kv_heads, dim, page_size = tiles.kv_heads, tiles.dim, tiles.page_size
    batch, rows, width, max_pages, pages = (T.dynamic(name) for name in ("batch", "rows", "width", "max_pages", "pages"))
    page_stride, scale_stride, weights_stride, table_stride, out_stride = (
        T.dynamic(name, "int64") for name in ("page_stride", "scale_stride", "weights_stride", "table_stride", "out_stride")
    )
    sizes = SimpleNamespace(batch=batch, rows=rows, width=width, max_pages=max_pages)
    scales_type = matrix_type(pages, page_size * kv_heads * (dim + 4) // 4, scale_stride, "float32")
    weights_type = T.StridedTensor((rows, tiles.num_heads), (weights_stride, 1), tiles.weights_dtype)

    @prim_func
    def paged_mqa_logits():
        tensors = build.parameters(
            q=T.Tensor(q_shape(problem, T.dynamic("q_rows")), tiles.dtype),
            cache=T.StridedTensor((pages, page_size, kv_heads * dim), (page_stride, kv_heads * dim, 1), tiles.dtype),
            scales=scales_type if tiles.scaled else None,
            weights=weights_type if tiles.weighted else None,
            context_lens=T.Tensor((rows if problem.per_draft_lengths else batch,), "int32"),
            block_tables=T.StridedTensor((batch, max_pages), (table_stride, 1), "int32"),
            out=T.StridedTensor((rows, width), (out_stride, 1), tiles.out_dtype),
            scale=T.float32(),
        )
        threads = tiles.math_threads + WARPGROUP
        with T.Kernel(tiles.blocks, threads=threads, prelude=_logits.prelude(tiles)) as block:
            shared = _logits.allocate_shared(
                tiles,  # item: job, first token, tiles, keys that every draft sees
                scale=T.alloc_shared((tiles.stages, tiles.pieces * tiles.copies * tiles.pitch), "float32"),
                length=T.alloc_shared((2, tiles.queries), "int32"),
            )
            thread = T.get_thread_binding()
            # TileLang 0.1.12 may else choose a layout for it that its bulk copies do not take.
            T.annotate_layout({shared.scale: make_linear_layout(shared.scale)})
            if thread < tiles.math_threads:
                math_role(tiles, shared, tensors)
            else:
                T.set_max_nreg(tiles.loader_registers, 0)
                if thread < tiles.math_threads + 32:
                    loader_role(tiles, shared, sizes, tensors, block, thread % 32)
                elif tiles.clean:
                    fill_role(tiles, sizes, tensors, block, thread - tiles.math_threads - 32)

    return paged_mqa_logits


@T.macro
def row_length(tiles, sizes, tensors, sequence, draft, length: T.Ref):
    """Keys that a draft sees, clamped; 0 for a draft beyond the last."""
    length = 0
    if draft < tiles.next_n:
        if tiles.per_draft:
            length = tensors.context_lens[sequence * tiles.next_n + draft]
        elif tiles.next_n == 1:
            length = tensors.context_lens[sequence]
        else:  # clamped before the subtraction, which would wrap at the most negative lengths
            length = T.max(tensors.context_lens[sequence], 0) - tiles.next_n + 1 + draft
        # A page count times the page size may pass 2**31 where the table is wide: compare in 64 bits.
        if T.cast(length, "int64") > T.cast(sizes.max_pages, "int64") * tiles.page_size:
            length = sizes.max_pages * tiles.page_size
        length = T.max(T.min(length, sizes.width), 0)


@T.macro
def longest(tiles, sizes, tensors, job, length: T.Ref, most: T.Ref):
    """The longest range among the drafts of a job (a pass over a sequence)."""
    if tiles.per_draft:
        most = 0
        for d in T.serial(tiles.queries):
            draft = T.truncmod(job, tiles.passes) * tiles.queries + d
            row_length(tiles, sizes, tensors, T.truncdiv(job, tiles.passes), draft, length)
            most = T.max(most, length)
    else:  # ranges grow with the draft
        draft = T.min(T.truncmod(job, tiles.passes) * tiles.queries + tiles.queries, tiles.next_n) - 1
        row_length(tiles, sizes, tensors, T.truncdiv(job, tiles.passes), draft, most)


@T.macro
def math_role(tiles, shared, tensors):
    T.set_max_nreg(tiles.math_registers, 1)
    registers = _logits.allocate_registers(tiles)
    part, total, out = registers.part, registers.total, tensors.out
    count, item = build.variables(2, init=0)
    num_tiles, job, row0, k0, common = build.variables(5)
    T.mbarrier_wait_parity(shared.q_full[0], 0)
    num_tiles = shared.item[0, 2]
    while num_tiles > 0:
        job = shared.item[item % 2, 0]
        k0 = shared.item[item % 2, 1]
        common = shared.item[item % 2, 3]
        row0 = T.truncdiv(job, tiles.passes) * tiles.next_n + T.truncmod(job, tiles.passes) * tiles.queries
        if tiles.kv_heads == 1:
            _logits.load_weights(tiles, shared, item, 0, registers)
        for _tile in T.serial(num_tiles):
            for g in T.serial(tiles.kv_heads):
                if tiles.kv_heads > 1:
                    _logits.load_weights(tiles, shared, item, g, registers)
                T.mbarrier_wait_parity(shared.k_full[count % tiles.stages], (count // tiles.stages) % 2)
                _logits.multiply(tiles, shared, count, item, g, registers.scores)
                T.wait_wgmma(0)
                _logits.sum_heads(tiles, registers)
                if tiles.kv_heads > 1:
                    if g == 0:
                        T.clear(total)
                    for j, b in T.Parallel(tiles.keys, tiles.queries):
                        total[j, b] = total[j, b] + part[j, b] * key_scale(tiles, shared, tensors, count, j, g)
                else:
                    for j, b in T.Parallel(tiles.keys, tiles.queries):
                        total[j, b] = part[j, b] * key_scale(tiles, shared, tensors, count, j, 0)
                T.mbarrier_arrive(shared.k_empty[count % tiles.stages])
                count = count + 1
            if k0 + tiles.keys <= common:
                for j, b in T.Parallel(tiles.keys, tiles.queries):
                    out[row0 + b, k0 + j] = T.cast(total[j, b], tiles.out_dtype)
            else:
                for j, b in T.Parallel(tiles.keys, tiles.queries):
                    if k0 + j < shared.length[item % 2, b]:
                        out[row0 + b, k0 + j] = T.cast(total[j, b], tiles.out_dtype)
            k0 = k0 + tiles.keys
        T.mbarrier_arrive(shared.q_empty[item % 2])
        item = item + 1
        T.mbarrier_wait_parity(shared.q_full[item % 2], (item // 2) % 2)
        num_tiles = shared.item[item % 2, 2]


def key_scale(tiles: PagedTiles, shared: Any, tensors: Any, count: Any, token: Any, group: Any) -> Any:
    """Factor of a key's scores."""
    scale = _logits.activated_scale(tiles, tensors.scale)
    if tiles.scaled:
        return shared.scale[count % tiles.stages, tiles.scale_column(token, group)] * scale
    return scale


@T.macro
def copy_keys(tiles, shared, tensors, page, key0, tile, group, count, piece_page: T.Ref, token: T.Ref):
    """One tile of one key head, by one warp.

    page: in each lane the page of a piece, from the last tile on that is a multiple of tiles_per_load. tile: number in the item,
    whose first key is key0; count: of the block's tiles before. piece_page, token: scratch, where the piece at hand begins.
    """
    for p in T.serial(tiles.pieces):
        piece_page = T.shfl_sync(page, T.truncmod(tile, tiles.tiles_per_load) * tiles.pieces + p)
        token = T.truncmod(key0 + tile * tiles.keys + p * tiles.piece, tiles.page_size)
        for half in T.unroll(tiles.dim // tiles.copy_columns):
            first, row = half * tiles.copy_columns, p * tiles.piece
            source = slice(group * tiles.dim + first, group * tiles.dim + first + tiles.copy_columns)
            target = slice(first, first + tiles.copy_columns)
            bulk_load(
                tensors.cache[piece_page, token : token + tiles.piece, source],
                shared.k[count % tiles.stages, row : row + tiles.piece, target],
                shared.k_full[count % tiles.stages],
            )
        if tiles.scaled:
            for w in T.unroll(tiles.copies):
                word = tiles.scale_offset + token * tiles.kv_heads + w * tiles.words
                place = (p * tiles.copies + w) * tiles.pitch
                bulk_load(  # keys with scales are bytes, and a scale is four of them
                    part_of_row(tensors.scales, piece_page, tensors.cache.strides[0] // 4, word, tiles.words),
                    shared.scale[count % tiles.stages, place : place + tiles.words],
                    shared.k_full[count % tiles.stages],
                )


@T.macro
def count_tiles(tiles, sizes, tensors, job, jobs, length: T.Ref, most: T.Ref, own: T.Ref):
    """Counts the tiles of a job: own, 0 of one beyond the last."""
    own = 0
    if job < jobs:
        longest(tiles, sizes, tensors, job, length, most)
        own = T.truncdiv(most + tiles.keys - 1, tiles.keys)  # noqa: F841 - a reference


@T.macro
def first_work(tiles, sizes, tensors, block, lane, found_job: T.Ref, found_tile: T.Ref, left: T.Ref):
    """The job, the tile within the job, and the tiles of this block's part of the line of all tiles."""
    length, most, jobs, share, running, own, other, start = build.variables(8)
    everything, before = build.variables(2)  # tiles of all sequences, and before the 32 jobs at hand
    jobs = sizes.batch * tiles.passes
    everything = 0
    for c in T.serial(T.truncdiv(jobs + 31, 32)):
        count_tiles(tiles, sizes, tensors, c * 32 + lane, jobs, length, most, own)
        for e in T.unroll(5):
            own = own + T.shfl_xor(own, 1 << e)
        everything = everything + own
    share = T.truncdiv(everything + tiles.blocks - 1, tiles.blocks)
    start = T.min(block * share, everything)
    left = T.min(share, everything - start)
    # The job that holds tile `start`, and the tile's number within it.
    found_job = 0
    found_tile = 0
    before = 0
    if left > 0:
        for c in T.serial(T.truncdiv(jobs + 31, 32)):
            if before <= start:
                count_tiles(tiles, sizes, tensors, c * 32 + lane, jobs, length, most, own)
                running = own
                for e in T.unroll(5):
                    other = T.shfl_up(running, 1 << e)
                    if lane >= (1 << e):
                        running = running + other
                # One lane at most: tiles [before + running - own, before + running) are its job's.
                if (start >= before + running - own) & (start < before + running):
                    found_job = c * 32 + lane
                    found_tile = start - (before + running - own)
                before = before + T.shfl_sync(running, 31)
        for e in T.unroll(5):
            found_job = T.max(found_job, T.shfl_xor(found_job, 1 << e))
            found_tile = T.max(found_tile, T.shfl_xor(found_tile, 1 << e))


@T.macro
def publish_lengths(tiles, sizes, shared, tensors, job, item, lane, length: T.Ref, common: T.Ref):
    """Lengths of an item's drafts; common: the keys that every draft sees."""
    common = sizes.width
    for r in T.serial((tiles.queries + 31) // 32):
        if r * 32 + lane < tiles.queries:
            draft = T.truncmod(job, tiles.passes) * tiles.queries + r * 32 + lane
            row_length(tiles, sizes, tensors, T.truncdiv(job, tiles.passes), draft, length)
            shared.length[item % 2, r * 32 + lane] = length
            common = T.min(common, length)
    for e in T.unroll(5):
        common = T.min(common, T.shfl_xor(common, 1 << e))


@T.macro
def loader_role(tiles, shared, sizes, tensors, block, lane):
    item, count = build.variables(2, init=0)
    length, most, common, job, first_tile, num_tiles, page, piece_page, token, row0 = build.variables(10)
    left = T.alloc_var("int32")  # tiles of this block still to do
    first_work(tiles, sizes, tensors, block, lane, job, first_tile, left)
    while left > 0:
        longest(tiles, sizes, tensors, job, length, most)
        num_tiles = T.min(T.truncdiv(most + tiles.keys - 1, tiles.keys) - first_tile, left)
        if num_tiles > 0:
            row0 = T.truncdiv(job, tiles.passes) * tiles.next_n + T.truncmod(job, tiles.passes) * tiles.queries
            T.mbarrier_wait_parity(shared.q_empty[item % 2], ((item // 2) % 2) ^ 1)
            publish_lengths(tiles, sizes, shared, tensors, job, item, lane, length, common)
            if lane == 0:
                for place, value in enumerate((job, first_tile * tiles.keys, num_tiles, common)):
                    shared.item[item % 2, place] = value
            if tiles.weighted:
                _logits.publish_weights(tiles, shared, tensors.weights, row0, sizes.rows, item, lane)
            _logits.copy_queries(tiles, shared, tensors.q, row0, item)
            T.mbarrier_arrive(shared.q_full[item % 2])
            page = 0
            for tile in T.serial(num_tiles):
                if T.truncmod(tile, tiles.tiles_per_load) == 0:
                    # Tokens beyond the range repeat the page of the last one: read, and masked at the store.
                    last = T.min((first_tile + tile) * tiles.keys + lane * tiles.piece, most - 1)
                    page = tensors.block_tables[T.truncdiv(job, tiles.passes), T.truncdiv(last, tiles.page_size)]
                for g in T.serial(tiles.kv_heads):
                    T.mbarrier_wait_parity(shared.k_empty[count % tiles.stages], ((count // tiles.stages) % 2) ^ 1)
                    copy_keys(tiles, shared, tensors, page, first_tile * tiles.keys, tile, g, count, piece_page, token)
                    T.mbarrier_arrive(shared.k_full[count % tiles.stages])
                    count = count + 1
            item = item + 1
            left = left - num_tiles
        job = job + 1
        first_tile = 0
    T.mbarrier_wait_parity(shared.q_empty[item % 2], ((item // 2) % 2) ^ 1)
    if lane == 0:
        shared.item[item % 2, 2] = 0
    T.mbarrier_arrive(shared.q_full[item % 2])


@T.macro
def fill_role(tiles, sizes, tensors, block, fill_thread):
    """-inf from each row's length on. Rows are dealt to blocks; with fewer rows than blocks, each row's tail is split."""
    length, splits, unit, row, column = build.variables(5)
    splits = T.max(T.truncdiv(tiles.blocks, T.max(sizes.rows, 1)), 1)
    unit = block
    while unit < sizes.rows * splits:
        row = T.truncdiv(unit, splits)
        row_length(tiles, sizes, tensors, T.truncdiv(row, tiles.next_n), T.truncmod(row, tiles.next_n), length)
        column = length + T.truncmod(unit, splits) * 96 + fill_thread
        while column < sizes.width:
            tensors.out[row, column] = T.cast(-T.infinity("float32"), tiles.out_dtype)
            column = column + splits * 96
        unit = unit + tiles.blocks
