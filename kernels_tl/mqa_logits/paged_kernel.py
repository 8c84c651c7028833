"""The paged logits kernel.

    q [B, next_n, H, D] fp8 | bf16, cache [pages, page_size * KH * (D + 4)] uint8 (values, then float32 scales) or
    [pages, page_size * KH * D], weights [B * next_n, H], context_lens [B] or [B, next_n] int32,
    block_tables [B, max_pages] int32, out [B * next_n, W]

Key tiles of all sequences form one line; block i of the persistent grid takes the i-th equal part of it, found from the lengths
on the device by a scan over sequences. A tile has keys as rows (64 per math warpgroup) and drafts x padded heads as columns, and
is gathered from pages in pieces of gcd(page_size, tile) tokens. A sequence with more drafts than fit takes several passes.

    role                   waits for                     arrives at
    loader warp            q_empty[2], k_empty[stages]   q_full (32 lanes + TMA bytes), k_full (32 lanes + TMA bytes)
    math warpgroups        q_full, k_full                k_empty (every thread), q_empty (every thread)
    fill warps (3)         nothing                       nothing: they write -inf from each row's length on

The loader posts each item (a run of tiles of one sequence) next to its queries; an item of no tiles ends the math warpgroups.
"""

from math import gcd
from types import SimpleNamespace
from typing import Any

import tilelang.language as T

from gdn.problems import PagedMqaLogitsProblem
from kernels_tl.mqa_logits import shared as _logits


def scale_words(piece: int, kv_heads: int) -> int:
    """Scales of one copy: those of a whole piece where a box side, at most 256 words, holds them."""
    return piece * kv_heads if piece * kv_heads <= 256 else piece


def scale_pitch(words: int) -> int:
    """Words between two copies of scales: a bulk copy's place in shared memory is a multiple of 128 bytes."""
    return -(-words // 32) * 32


class PagedTiles(_logits.Tiles):
    """Numbers of a kernel that are known when it is compiled."""

    def __init__(self, problem: PagedMqaLogitsProblem, config: Any) -> None:
        super().__init__(problem, config.drafts, config.math_warpgroups, config.stages, config.blocks)
        self.page_size, self.next_n, self.per_draft = problem.page_size, problem.next_n, problem.per_draft_lengths
        self.passes = -(-self.next_n // self.queries)
        self.piece = gcd(self.page_size, self.keys)  # tokens of one copy: never across a page
        self.pieces = self.keys // self.piece
        self.words = scale_words(self.piece, self.kv_heads)
        self.copies = self.piece * self.kv_heads // self.words  # of a piece's scales
        self.pitch = scale_pitch(self.words)
        self.tiles_per_load = 32 // self.pieces  # tiles whose pages one warp-wide load of the block table covers
        self.scale_offset = self.page_size * self.kv_heads * self.dim // 4  # float32 words of a page before its scales

    def scale_column(self, token: Any, group: Any) -> Any:
        """Word of a tile's scale: copies of scales are `pitch` words apart."""
        if self.pitch == self.words:
            return token * self.kv_heads + group
        word = token % self.piece * self.kv_heads + group
        return (token // self.piece * self.copies + word // self.words) * self.pitch + word % self.words


@T.macro
def row_length(tiles: Any, sizes: Any, context_lens: Any, sequence: Any, draft: Any, length: Any):
    """Keys that a draft sees, clamped; 0 for a draft beyond the last."""
    length[0] = 0
    if draft < tiles.next_n:
        if tiles.per_draft:
            length[0] = context_lens[sequence * tiles.next_n + draft]
        elif tiles.next_n == 1:
            length[0] = context_lens[sequence]
        else:  # clamped before the subtraction, which would wrap at the most negative lengths
            length[0] = T.max(context_lens[sequence], 0) - tiles.next_n + 1 + draft
        # A page count times the page size may pass 2**31 where the table is wide: compare in 64 bits.
        if T.cast(length[0], "int64") > T.cast(sizes.max_pages, "int64") * tiles.page_size:
            length[0] = sizes.max_pages * tiles.page_size
        length[0] = T.max(T.min(length[0], sizes.width), 0)


@T.macro
def longest(tiles: Any, sizes: Any, context_lens: Any, job: Any, length: Any, most: Any):
    """The longest range among the drafts of a job (a pass over a sequence)."""
    sequence = T.truncdiv(job, tiles.passes)
    most[0] = 0
    if tiles.per_draft:
        for d in T.serial(tiles.queries):
            draft = T.truncmod(job, tiles.passes) * tiles.queries + d
            row_length(tiles, sizes, context_lens, sequence, draft, length)
            most[0] = T.max(most[0], length[0])
    else:  # ranges grow with the draft
        draft = T.min(T.truncmod(job, tiles.passes) * tiles.queries + tiles.queries, tiles.next_n) - 1
        row_length(tiles, sizes, context_lens, sequence, draft, length)
        most[0] = length[0]


@T.macro
def math_role(tiles: Any, buffers: Any, out: Any, scale: Any):
    T.set_max_nreg(tiles.math_registers, 1)
    scores = T.alloc_fragment((tiles.keys, tiles.columns), "float32")
    scores3 = T.reshape(scores, (tiles.keys, tiles.queries, tiles.padded))
    product = T.alloc_fragment((tiles.keys, tiles.queries, tiles.padded), "float32")
    weights_fragment = T.alloc_fragment((tiles.queries, tiles.padded), "float32")
    part = T.alloc_fragment((tiles.keys, tiles.queries), "float32")
    total = T.alloc_fragment((tiles.keys, tiles.queries), "float32")
    count = T.alloc_var("int32", init=0)
    item = T.alloc_var("int32", init=0)
    num_tiles = T.alloc_var("int32")
    job = T.alloc_var("int32")
    row0 = T.alloc_var("int32")
    k0 = T.alloc_var("int32")
    common = T.alloc_var("int32")
    T.mbarrier_wait_parity(buffers.q_full[0], 0)
    num_tiles = buffers.item[0, 2]
    while num_tiles > 0:
        job = buffers.item[item % 2, 0]
        k0 = buffers.item[item % 2, 1]
        common = buffers.item[item % 2, 3]
        row0 = T.truncdiv(job, tiles.passes) * tiles.next_n + T.truncmod(job, tiles.passes) * tiles.queries
        if tiles.weighted and tiles.kv_heads == 1:
            T.copy(buffers.weights[item % 2, :, :], weights_fragment)
        for _tile in T.serial(num_tiles):
            for g in T.serial(tiles.kv_heads):
                if tiles.weighted and tiles.kv_heads > 1:
                    T.copy(buffers.weights[(item % 2) * tiles.kv_heads + g, :, :], weights_fragment)
                T.mbarrier_wait_parity(buffers.k_full[count % tiles.stages], (count // tiles.stages) % 2)
                _logits.multiply(tiles, buffers, count, item, g, scores)
                T.wait_wgmma(0)
                _logits.activate(tiles, product, scores3, weights_fragment)
                T.reduce_sum(product, part, dim=-1, clear=True)
                if tiles.kv_heads > 1:
                    if g == 0:
                        T.clear(total)
                    for j, b in T.Parallel(tiles.keys, tiles.queries):
                        if tiles.scaled:
                            total[j, b] = total[j, b] + part[j, b] * (
                                buffers.scale[count % tiles.stages, tiles.scale_column(j, g)] * scale
                            )
                        else:
                            total[j, b] = total[j, b] + part[j, b] * scale
                else:
                    for j, b in T.Parallel(tiles.keys, tiles.queries):
                        if tiles.scaled:
                            total[j, b] = part[j, b] * (buffers.scale[count % tiles.stages, tiles.scale_column(j, 0)] * scale)
                        else:
                            total[j, b] = part[j, b] * scale
                T.mbarrier_arrive(buffers.k_empty[count % tiles.stages])
                count = count + 1
            if k0 + tiles.keys <= common:
                for j, b in T.Parallel(tiles.keys, tiles.queries):
                    out[row0 + b, k0 + j] = T.cast(total[j, b], tiles.out_dtype)
            else:
                for j, b in T.Parallel(tiles.keys, tiles.queries):
                    if k0 + j < buffers.length[item % 2, b]:
                        out[row0 + b, k0 + j] = T.cast(total[j, b], tiles.out_dtype)
            k0 = k0 + tiles.keys
        T.mbarrier_arrive(buffers.q_empty[item % 2])
        item = item + 1
        T.mbarrier_wait_parity(buffers.q_full[item % 2], (item // 2) % 2)
        num_tiles = buffers.item[item % 2, 2]


@T.macro
def publish_lengths(
    tiles: Any, sizes: Any, buffers: Any, context_lens: Any, job: Any, item: Any, lane: Any, length: Any, common: Any
):  # fmt: skip
    """Lengths of an item's drafts; common[0]: the keys that every draft sees."""
    common[0] = sizes.width
    for r in T.serial((tiles.queries + 31) // 32):
        if r * 32 + lane < tiles.queries:
            draft = T.truncmod(job, tiles.passes) * tiles.queries + r * 32 + lane
            row_length(tiles, sizes, context_lens, T.truncdiv(job, tiles.passes), draft, length)
            buffers.length[item % 2, r * 32 + lane] = length[0]
            common[0] = T.min(common[0], length[0])
    for e in T.unroll(5):
        common[0] = T.min(common[0], T.shfl_xor(common[0], 1 << e))


@T.macro
def copy_keys(
    tiles: Any, buffers: Any, tensors: Any, page: Any, first_tile: Any, tile: Any, group: Any, count: Any, piece: Any
):  # fmt: skip
    """One tile of one key head, by one warp. page: in each lane the page of a piece, from the last tile on that is a
    multiple of tiles_per_load; tile: number in the item, which starts at first_tile; count: of the block's tiles before;
    piece: words for the page and the token of the piece at hand."""
    for p in T.serial(tiles.pieces):
        piece.page[0] = T.shfl_sync(page, T.truncmod(tile, tiles.tiles_per_load) * tiles.pieces + p)
        piece.token[0] = T.truncmod((first_tile + tile) * tiles.keys + p * tiles.piece, tiles.page_size)  # within its page
        for half in T.unroll(tiles.dim // tiles.copy_columns):
            T.tma_copy(
                tensors.cache[
                    piece.page[0],
                    piece.token[0] : piece.token[0] + tiles.piece,
                    group * tiles.dim + half * tiles.copy_columns : group * tiles.dim
                    + half * tiles.copy_columns
                    + tiles.copy_columns,
                ],
                buffers.k[
                    count % tiles.stages,
                    p * tiles.piece : p * tiles.piece + tiles.piece,
                    half * tiles.copy_columns : half * tiles.copy_columns + tiles.copy_columns,
                ],
                barrier=buffers.k_full[count % tiles.stages],
                leader_scope_threads=32,
            )
        if tiles.scaled:
            word = tiles.scale_offset + piece.token[0] * tiles.kv_heads
            for w in T.unroll(tiles.copies):
                T.tma_copy(
                    tensors.scales[piece.page[0], word + w * tiles.words : word + w * tiles.words + tiles.words],
                    buffers.scale[
                        count % tiles.stages,
                        (p * tiles.copies + w) * tiles.pitch : (p * tiles.copies + w) * tiles.pitch + tiles.words,
                    ],
                    barrier=buffers.k_full[count % tiles.stages],
                    leader_scope_threads=32,
                )


@T.macro
def first_work(tiles: Any, sizes: Any, context_lens: Any, block: Any, lane: Any, found: Any):
    """found: (job, tile within the job, tiles) of this block's part of the line of all tiles."""
    length = T.alloc_local((1,), "int32")
    most = T.alloc_local((1,), "int32")
    jobs = T.alloc_var("int32")
    everything = T.alloc_var("int32")  # tiles of all sequences
    share = T.alloc_var("int32")
    before = T.alloc_var("int32")  # tiles before the 32 jobs at hand
    running = T.alloc_var("int32")
    own = T.alloc_var("int32")
    other = T.alloc_var("int32")
    start = T.alloc_var("int32")
    jobs = sizes.batch * tiles.passes
    everything = 0
    for c in T.serial(T.truncdiv(jobs + 31, 32)):
        own = 0
        if c * 32 + lane < jobs:
            longest(tiles, sizes, context_lens, c * 32 + lane, length, most)
            own = T.truncdiv(most[0] + tiles.keys - 1, tiles.keys)
        for e in T.unroll(5):
            own = own + T.shfl_xor(own, 1 << e)
        everything = everything + own
    share = T.truncdiv(everything + tiles.blocks - 1, tiles.blocks)
    start = T.min(block * share, everything)
    found.left[0] = T.min(share, everything - start)
    # The job that holds tile `start`, and the tile's number within it.
    found.job[0] = 0
    found.tile[0] = 0
    before = 0
    if found.left[0] > 0:
        for c in T.serial(T.truncdiv(jobs + 31, 32)):
            if before <= start:
                own = 0
                if c * 32 + lane < jobs:
                    longest(tiles, sizes, context_lens, c * 32 + lane, length, most)
                    own = T.truncdiv(most[0] + tiles.keys - 1, tiles.keys)
                running = own
                for e in T.unroll(5):
                    other = T.shfl_up(running, 1 << e)
                    if lane >= (1 << e):
                        running = running + other
                # One lane at most: tiles [before + running - own, before + running) are its job's.
                if (start >= before + running - own) & (start < before + running):
                    found.job[0] = c * 32 + lane
                    found.tile[0] = start - (before + running - own)
                before = before + T.shfl_sync(running, 31)
        for e in T.unroll(5):
            found.job[0] = T.max(found.job[0], T.shfl_xor(found.job[0], 1 << e))
            found.tile[0] = T.max(found.tile[0], T.shfl_xor(found.tile[0], 1 << e))


@T.macro
def loader_role(tiles: Any, buffers: Any, sizes: Any, tensors: Any, block: Any, lane: Any):
    """tensors: q, cache, scales, weights, context_lens, block_tables."""
    length = T.alloc_local((1,), "int32")
    most = T.alloc_local((1,), "int32")
    common = T.alloc_local((1,), "int32")
    found_job = T.alloc_local((1,), "int32")
    found_tile = T.alloc_local((1,), "int32")
    left = T.alloc_local((1,), "int32")  # tiles of this block still to do
    num_tiles = T.alloc_var("int32")
    item = T.alloc_var("int32", init=0)
    count = T.alloc_var("int32", init=0)
    page = T.alloc_var("int32")
    piece_page = T.alloc_local((1,), "int32")
    piece_token = T.alloc_local((1,), "int32")
    row0 = T.alloc_var("int32")
    first_work(tiles, sizes, tensors.context_lens, block, lane, SimpleNamespace(job=found_job, tile=found_tile, left=left))
    while left[0] > 0:
        longest(tiles, sizes, tensors.context_lens, found_job[0], length, most)
        num_tiles = T.min(T.truncdiv(most[0] + tiles.keys - 1, tiles.keys) - found_tile[0], left[0])
        if num_tiles > 0:
            row0 = T.truncdiv(found_job[0], tiles.passes) * tiles.next_n + T.truncmod(found_job[0], tiles.passes) * tiles.queries
            T.mbarrier_wait_parity(buffers.q_empty[item % 2], ((item // 2) % 2) ^ 1)
            publish_lengths(tiles, sizes, buffers, tensors.context_lens, found_job[0], item, lane, length, common)
            if lane == 0:
                buffers.item[item % 2, 0] = found_job[0]
                buffers.item[item % 2, 1] = found_tile[0] * tiles.keys
                buffers.item[item % 2, 2] = num_tiles
                buffers.item[item % 2, 3] = common[0]
            if tiles.weighted:
                _logits.publish_weights(tiles, buffers, tensors.weights, row0, sizes.rows, item, lane)
            _logits.copy_queries(tiles, buffers, tensors.q, row0, item)
            T.mbarrier_arrive(buffers.q_full[item % 2])
            page = 0
            for tile in T.serial(num_tiles):
                if T.truncmod(tile, tiles.tiles_per_load) == 0:
                    # Tokens beyond the range repeat the page of the last one: read, and masked at the store.
                    page = tensors.block_tables[
                        T.truncdiv(found_job[0], tiles.passes),
                        T.truncdiv(T.min((found_tile[0] + tile) * tiles.keys + lane * tiles.piece, most[0] - 1), tiles.page_size),
                    ]
                for g in T.serial(tiles.kv_heads):
                    T.mbarrier_wait_parity(buffers.k_empty[count % tiles.stages], ((count // tiles.stages) % 2) ^ 1)
                    copy_keys(
                        tiles,
                        buffers,
                        tensors,
                        page,
                        found_tile[0],
                        tile,
                        g,
                        count,
                        SimpleNamespace(page=piece_page, token=piece_token),
                    )
                    T.mbarrier_arrive(buffers.k_full[count % tiles.stages])
                    count = count + 1
            item = item + 1
            left[0] = left[0] - num_tiles
        found_job[0] = found_job[0] + 1
        found_tile[0] = 0
    T.mbarrier_wait_parity(buffers.q_empty[item % 2], ((item // 2) % 2) ^ 1)
    if lane == 0:
        buffers.item[item % 2, 2] = 0
    T.mbarrier_arrive(buffers.q_full[item % 2])


@T.macro
def fill_role(tiles: Any, sizes: Any, context_lens: Any, out: Any, block: Any, fill_thread: Any):
    """-inf from each row's length on. Rows are dealt to blocks; with fewer rows than blocks, each row's tail is split."""
    length = T.alloc_local((1,), "int32")
    splits = T.alloc_var("int32")
    unit = T.alloc_var("int32")
    row = T.alloc_var("int32")
    column = T.alloc_var("int32")
    splits = T.max(T.truncdiv(tiles.blocks, T.max(sizes.rows, 1)), 1)
    unit = block
    while unit < sizes.rows * splits:
        row = T.truncdiv(unit, splits)
        row_length(tiles, sizes, context_lens, T.truncdiv(row, tiles.next_n), T.truncmod(row, tiles.next_n), length)
        column = length[0] + T.truncmod(unit, splits) * 96 + fill_thread
        while column < sizes.width:
            out[row, column] = T.cast(-T.infinity("float32"), tiles.out_dtype)
            column = column + splits * 96
        unit = unit + tiles.blocks


def program(problem: PagedMqaLogitsProblem, config: Any) -> Any:
    """The TileLang function of a problem's static fields and a config."""
    tiles = PagedTiles(problem, config)
    batch, rows, width, max_pages, pages = (T.dynamic(name) for name in ("batch", "rows", "width", "max_pages", "pages"))
    sizes = SimpleNamespace(batch=batch, rows=rows, width=width, max_pages=max_pages)

    @T.macro
    def kernel(q, cache, scales, weights, context_lens, block_tables, out, scale):
        with T.Kernel(tiles.blocks, threads=tiles.math_threads + _logits.WARPGROUP) as block:
            q_shared = T.alloc_shared((2 * tiles.kv_heads, tiles.columns, tiles.dim), tiles.dtype)
            k_shared = T.alloc_shared((tiles.stages, tiles.keys, tiles.dim), tiles.dtype)
            scale_shared = T.alloc_shared((tiles.stages, tiles.pieces * tiles.copies * tiles.pitch), "float32")
            weights_shared = T.alloc_shared((2 * tiles.kv_heads, tiles.queries, tiles.padded), "float32")
            length_shared = T.alloc_shared((2, tiles.queries), "int32")
            item_shared = T.alloc_shared((2, 8), "int32")  # job, first token, tiles, keys that every draft sees
            q_full = T.alloc_barrier([32] * 2)
            q_empty = T.alloc_barrier([tiles.math_threads] * 2)
            k_full = T.alloc_barrier([32] * tiles.stages)
            k_empty = T.alloc_barrier([tiles.math_threads] * tiles.stages)
            buffers = SimpleNamespace(
                q=q_shared, k=k_shared, scale=scale_shared, weights=weights_shared, length=length_shared, item=item_shared,
                q_full=q_full, q_empty=q_empty, k_full=k_full, k_empty=k_empty,
            )  # fmt: skip
            thread = T.get_thread_binding()
            if thread < tiles.math_threads:
                math_role(tiles, buffers, out, scale)
            else:
                T.set_max_nreg(tiles.loader_registers, 0)
                lane = thread % 32
                if thread < tiles.math_threads + 32:
                    tensors = SimpleNamespace(
                        q=q, cache=cache, scales=scales, weights=weights, context_lens=context_lens, block_tables=block_tables
                    )
                    loader_role(tiles, buffers, sizes, tensors, block, lane)
                else:
                    if tiles.clean:
                        fill_role(tiles, sizes, context_lens, out, block, thread - tiles.math_threads - 32)

    return _entry(problem, tiles, sizes, pages, kernel)


def _entry(problem: PagedMqaLogitsProblem, tiles: PagedTiles, sizes: Any, pages: Any, kernel: Any) -> Any:
    """The signature: optional tensors that the problem lacks are left out of it."""
    batch, rows, width, max_pages, q_rows = sizes.batch, sizes.rows, sizes.width, sizes.max_pages, T.dynamic("q_rows")
    page_stride, scale_stride, weights_stride, table_stride, out_stride = (
        T.dynamic(name, "int64") for name in ("page_stride", "scale_stride", "weights_stride", "table_stride", "out_stride")
    )
    kv_heads, dim, page_size = tiles.kv_heads, tiles.dim, tiles.page_size
    q_type = T.Tensor((q_rows, dim) if tiles.flat else (q_rows, kv_heads, tiles.group, dim), tiles.dtype)
    cache_type = T.StridedTensor((pages, page_size, kv_heads * dim), (page_stride, kv_heads * dim, 1), tiles.dtype)
    scales_type = T.StridedTensor((pages, page_size * kv_heads * (dim + 4) // 4), (scale_stride, 1), "float32")
    weights_type = T.StridedTensor((rows, tiles.num_heads), (weights_stride, 1), problem.weights_dtype or "float32")
    lens_type = T.Tensor((rows if problem.per_draft_lengths else batch,), "int32")
    table_type = T.StridedTensor((batch, max_pages), (table_stride, 1), "int32")
    out_type = T.StridedTensor((rows, width), (out_stride, 1), tiles.out_dtype)
    scalar = T.float32

    if tiles.scaled and tiles.weighted:

        @T.prim_func
        def paged_mqa_logits(
            q: q_type, cache: cache_type, scales: scales_type, weights: weights_type, lens: lens_type, tables: table_type,
            out: out_type, scale: scalar,
        ):  # fmt: skip
            kernel(q, cache, scales, weights, lens, tables, out, scale)

    elif tiles.scaled:

        @T.prim_func
        def paged_mqa_logits(
            q: q_type, cache: cache_type, scales: scales_type, lens: lens_type, tables: table_type, out: out_type, scale: scalar
        ):
            kernel(q, cache, scales, None, lens, tables, out, scale)

    elif tiles.weighted:

        @T.prim_func
        def paged_mqa_logits(
            q: q_type, cache: cache_type, weights: weights_type, lens: lens_type, tables: table_type, out: out_type, scale: scalar
        ):
            kernel(q, cache, None, weights, lens, tables, out, scale)

    else:

        @T.prim_func
        def paged_mqa_logits(q: q_type, cache: cache_type, lens: lens_type, tables: table_type, out: out_type, scale: scalar):
            kernel(q, cache, None, None, lens, tables, out, scale)

    return paged_mqa_logits
