"""Paged indexer logits (decode), for draft d of sequence b and token t:

    out[b * next_n + d, t] = scale * sum_g k_scale[t, g] * sum_{h in g} w[b * next_n + d, h] * act(q[b, d, h] . k[t, g])

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

from dataclasses import dataclass
from math import ceil, gcd
from types import SimpleNamespace
from typing import Any

import tilelang.language as T
import torch
from tilelang.layout import make_linear_layout

from gdn.device import DeviceSpec
from gdn.problems import PagedMqaLogitsParams, PagedMqaLogitsProblem
from kernels_tl.common import build
from kernels_tl.common.copies import bulk_load
from kernels_tl.common.versions import as_matrix, matrix_type, part_of_row, prim_func
from kernels_tl.mqa_logits import shared as _logits

ENTRY = "paged_mqa_logits"
IN_FLIGHT_US = 2.9  # time for which a key tile is on its way
MIN_STAGES = 3  # of keys, where they fit


@dataclass(frozen=True)
class Config:
    drafts: int  # drafts of a sequence in one pass: drafts x padded heads accumulator columns, at most 256
    math_warpgroups: int  # 64 tokens of a tile each
    stages: int  # key tiles in flight
    blocks: int  # persistent blocks: the SMs of the device


class PagedTiles(_logits.Tiles):
    """Numbers of a kernel that are known when it is compiled."""

    def __init__(self, problem: PagedMqaLogitsProblem, config: Config) -> None:
        super().__init__(problem, config.drafts, config)
        self.page_size, self.next_n, self.per_draft = problem.page_size, problem.next_n, problem.per_draft_lengths
        self.passes = -(-self.next_n // self.queries)
        self.piece = gcd(self.page_size, self.keys)  # tokens of one copy: never across a page
        self.pieces = self.keys // self.piece
        # Scales of one copy: those of a whole piece where a box side, at most 256 words, holds them.
        self.words = self.piece * self.kv_heads if self.piece * self.kv_heads <= 256 else self.piece
        self.copies = self.piece * self.kv_heads // self.words  # of a piece's scales
        # Words between two copies of scales: a bulk copy's place in shared memory is a multiple of 128 bytes.
        self.pitch = -(-self.words // 32) * 32
        self.tiles_per_load = 32 // self.pieces  # tiles whose pages one warp-wide load of the block table covers
        self.scale_offset = self.page_size * self.kv_heads * self.dim // 4  # float32 words of a page before its scales

    def scale_column(self, token: Any, group: Any) -> Any:
        """Word of a tile's scale: copies of scales are `pitch` words apart."""
        if self.pitch == self.words:
            return token * self.kv_heads + group
        word = token % self.piece * self.kv_heads + group
        return (token // self.piece * self.copies + word // self.words) * self.pitch + word % self.words


def refusal(problem: PagedMqaLogitsProblem) -> str | None:
    if problem.page_size < 4 or problem.page_size % 4:
        return f"requires a page_size that is a multiple of 4, got {problem.page_size}"
    if problem.next_n < 1:
        return f"requires next_n of at least 1, got {problem.next_n}"
    return _logits.refusal(problem, _default)


def fits(problem: PagedMqaLogitsProblem, config: Config, device: DeviceSpec) -> bool:
    tiles = PagedTiles(problem, config)
    scales = tiles.stages * tiles.pieces * tiles.copies * tiles.pitch * 4
    lengths = 2 * (tiles.queries + 8) * 4
    return tiles.fits(tiles.tile_bytes() + scales + lengths, device)


def _drafts(problem: PagedMqaLogitsProblem) -> list[int]:
    """Drafts of one pass, the fewest passes first. Columns are a multiple of 8. One key head takes the first; the queries of
    several lie in shared memory at once, and may leave room for fewer drafts only."""
    padded = _logits.padded_heads(problem)
    most = _logits.MAX_COLUMNS // padded
    found = [-(-problem.next_n // passes) for passes in range(-(-problem.next_n // most), problem.next_n + 1)]
    return list(dict.fromkeys(drafts + (drafts * padded % 8 != 0) for drafts in found))


def configs(problem: PagedMqaLogitsProblem, device: DeviceSpec) -> list[Config]:
    for drafts in _drafts(problem):
        found = [Config(drafts, groups, stages, device.num_sms) for groups in (1, 2, 3) for stages in (12, 8, 6, 4, 3, 2)]
        fitting = [config for config in found if fits(problem, config, device)]
        if fitting:
            return fitting
    return []


def default_config(problem: PagedMqaLogitsProblem, device: DeviceSpec) -> Config:
    return _logits.present(_default(problem, device), problem)


def _default(problem: PagedMqaLogitsProblem, device: DeviceSpec) -> Config | None:
    """Tiles of 128 tokens, of 64 where there are few. How many are in flight follows from Little's law: bytes in flight =
    bandwidth x time in flight; more only queue (measured: LAB-NOTES.md)."""
    few = problem.batch * -(-problem.max_context_len // 128) < 4 * device.num_sms
    in_flight = IN_FLIGHT_US * 1e3 * device.copy_gbps / device.num_sms
    for drafts in _drafts(problem):
        for groups in (1, 2) if few else (2, 1):
            tiles = PagedTiles(problem, Config(drafts, groups, MIN_STAGES, device.num_sms))
            tile_bytes = tiles.keys * (tiles.dim * tiles.value_bytes + 4 * tiles.scaled)
            for stages in range(max(MIN_STAGES, ceil(in_flight / tile_bytes)), 1, -1):
                config = Config(drafts, groups, stages, device.num_sms)
                if fits(problem, config, device):
                    return config
    return None


def workspace_bytes(problem: PagedMqaLogitsProblem, config: Config) -> int:
    return 0


def compile(problem: PagedMqaLogitsProblem, config: Config) -> dict[str, bytes]:
    return {ENTRY: build.library(program(problem, config), pass_configs=_logits.PASS_CONFIGS)}


def launch(compiled: Any, params: PagedMqaLogitsParams) -> None:
    # skip_rows_up_to only permits rows to be left out; this kernel scores every row.
    q, cache, weights, context_lens, block_tables, out, scale, _ = params
    problem = compiled.problem
    q = q.view(_logits.q_shape(problem, -1))
    scales = as_matrix(cache.view(torch.float32)) if problem.has_k_scale else None
    values = cache.view(q.dtype) if problem.has_k_scale else cache
    row = problem.num_kv_heads * problem.head_dim
    values = values.as_strided((values.shape[0], problem.page_size, row), (values.stride(0), row, 1))
    optional = build.arguments(scales, weights)
    compiled.functions[ENTRY](q, values, *optional, context_lens.view(-1), block_tables, out, scale)


def program(problem: PagedMqaLogitsProblem, config: Config) -> Any:
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
            q=T.Tensor(_logits.q_shape(problem, T.dynamic("q_rows")), tiles.dtype),
            cache=T.StridedTensor((pages, page_size, kv_heads * dim), (page_stride, kv_heads * dim, 1), tiles.dtype),
            scales=scales_type if tiles.scaled else None,
            weights=weights_type if tiles.weighted else None,
            context_lens=T.Tensor((rows if problem.per_draft_lengths else batch,), "int32"),
            block_tables=T.StridedTensor((batch, max_pages), (table_stride, 1), "int32"),
            out=T.StridedTensor((rows, width), (out_stride, 1), tiles.out_dtype),
            scale=T.float32(),
        )
        threads = tiles.math_threads + _logits.WARPGROUP
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
