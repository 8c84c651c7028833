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

The loader posts each item (a run of tiles of one sequence) beside its queries; an item of no tiles ends the math warpgroups.
"""

from dataclasses import dataclass
from math import ceil, gcd
from typing import Any

import tilelang.language as T
import torch

from gdn.device import H100, DeviceSpec
from gdn.problems import PagedMqaLogitsParams, PagedMqaLogitsProblem
from kernels_tl.common import build
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


def refusal(problem: PagedMqaLogitsProblem) -> str | None:
    if problem.page_size < 4 or problem.page_size % 4:
        return f"requires a page_size that is a multiple of 4, got {problem.page_size}"
    if problem.next_n < 1:
        return f"requires next_n of at least 1, got {problem.next_n}"
    why = _logits.refusal_common(problem)
    if why is None and _default(problem, H100) is None:
        return (
            "requires queries and keys that fit a block's shared memory, got "
            f"{problem.num_heads} heads and {problem.num_kv_heads} key heads of head_dim {problem.head_dim} in {problem.dtype}"
        )
    return why


def shared_bytes(problem: PagedMqaLogitsProblem, config: Config) -> int:
    s = _logits.shape_of(problem)
    columns = config.drafts * s.columns
    tile = config.math_warpgroups * 64
    queries = 2 * s.kv_heads * columns * s.dim * s.value_bytes
    keys = config.stages * tile * s.dim * s.value_bytes
    piece = gcd(problem.page_size, tile)
    words = _scale_words(piece, s.kv_heads)
    scales = config.stages * tile * s.kv_heads // words * _scale_pitch(words) * 4
    weights = 2 * s.kv_heads * columns * 4
    ranges = 2 * (config.drafts + 8) * 4
    return queries + keys + scales + weights + ranges + 2048  # alignment of the buffers, barriers


def fits(problem: PagedMqaLogitsProblem, config: Config, device: DeviceSpec) -> bool:
    s = _logits.shape_of(problem)
    columns = config.drafts * s.columns
    if columns > _logits.MAX_COLUMNS or columns % 8:
        return False
    if shared_bytes(problem, config) > device.shared_bytes_per_block:
        return False
    return _logits.accumulator_registers(config.drafts, s) + 32 <= _logits.math_registers(config.math_warpgroups, s)


def _drafts(problem: PagedMqaLogitsProblem) -> list[int]:
    """Drafts of one pass, the fewest passes first. Columns are a multiple of 8. One key head takes the first; the queries of
    several lie in shared memory at once, and may leave room for fewer drafts only."""
    columns = _logits.shape_of(problem).columns
    most = _logits.MAX_COLUMNS // columns
    found: list[int] = []
    for passes in range(-(-problem.next_n // most), problem.next_n + 1):
        drafts = -(-problem.next_n // passes)
        drafts += drafts * columns % 8 != 0
        if drafts not in found:
            found.append(drafts)
    return found


def configs(problem: PagedMqaLogitsProblem, device: DeviceSpec) -> list[Config]:
    for drafts in _drafts(problem):
        found = [Config(drafts, groups, stages, device.num_sms) for groups in (1, 2, 3) for stages in (12, 8, 6, 4, 3, 2)]
        fitting = [config for config in found if fits(problem, config, device)]
        if fitting:
            return fitting
    return []


def default_config(problem: PagedMqaLogitsProblem, device: DeviceSpec) -> Config:
    config = _default(problem, device)
    if config is None:
        raise ValueError(f"no configuration fits {problem}")
    return config


def _default(problem: PagedMqaLogitsProblem, device: DeviceSpec) -> Config | None:
    """Tiles of 128 tokens, of 64 where there are few. How many are in flight follows from Little's law: bytes in flight =
    bandwidth x time in flight; more only queue (measured: NOTES.md)."""
    few = problem.batch * -(-problem.max_context_len // 128) < 4 * device.num_sms
    in_flight = IN_FLIGHT_US * 1e3 * device.copy_gbps / device.num_sms
    s = _logits.shape_of(problem)
    for drafts in _drafts(problem):
        for groups in (1, 2) if few else (2, 1):
            tile_bytes = groups * 64 * (s.dim * s.value_bytes + 4 * s.scaled)
            for stages in range(max(MIN_STAGES, ceil(in_flight / tile_bytes)), 1, -1):
                config = Config(drafts, groups, stages, device.num_sms)
                if fits(problem, config, device):
                    return config
    return None


def _scale_words(piece: int, kv_heads: int) -> int:
    """Scales of one copy: those of a whole piece where a box side, at most 256 words, holds them."""
    return piece * kv_heads if piece * kv_heads <= 256 else piece


def _scale_pitch(words: int) -> int:
    """Words between two copies of scales: a bulk copy's place in shared memory is a multiple of 128 bytes."""
    return -(-words // 32) * 32


def workspace_bytes(problem: PagedMqaLogitsProblem, config: Config) -> int:
    return 0


def program(problem: PagedMqaLogitsProblem, config: Config) -> Any:
    """The TileLang function of a problem's static fields and a config."""
    s = _logits.shape_of(problem)
    H, KH, G, GP, D = s.heads, s.kv_heads, s.group, s.columns, s.dim
    P, NEXT = problem.page_size, problem.next_n
    BQ, WG, S, GRID = config.drafts, config.math_warpgroups, config.stages, config.blocks
    BN, N, MATH = 64 * WG, BQ * GP, _logits.WARPGROUP * WG
    PASSES = -(-NEXT // BQ)
    PIECE = gcd(P, BN)  # tokens of one copy: never across a page
    PIECES = BN // PIECE
    WORDS = _scale_words(PIECE, KH)
    COPIES = PIECE * KH // WORDS  # of a piece's scales
    PITCH = _scale_pitch(WORDS)
    TILES = 32 // PIECES  # tiles whose pages one warp-wide load of the block table covers
    CLEAN, RELU, SCALED, WEIGHTED = s.clean, s.relu, s.scaled, s.weights_dtype is not None
    PER_DRAFT = problem.per_draft_lengths
    FLAT = _logits.flat(s)
    COPY = _logits.copy_columns(s)
    MATH_REGISTERS = _logits.math_registers(WG, s)
    f32, out_dtype = "float32", s.out_dtype
    SCALE_OFFSET = P * KH * D // 4  # float32 words of a page before its scales
    batch, rows, width, max_pages, pages = (T.dynamic(name) for name in ("batch", "rows", "width", "max_pages", "pages"))
    q_rows = T.dynamic("q_rows")
    page_stride, scale_stride, weights_stride, table_stride, out_stride = (
        T.dynamic(name, "int64") for name in ("page_stride", "scale_stride", "weights_stride", "table_stride", "out_stride")
    )

    def scale_column(token, group):
        """Where the scale of a tile's token stands: copies of scales lie PITCH words apart."""
        if PITCH == WORDS:
            return token * KH + group
        word = token % PIECE * KH + group
        return (token // PIECE * COPIES + word // WORDS) * PITCH + word % WORDS

    @T.macro
    def row_length(context_lens, sequence, draft, length):
        """Keys that a draft sees, clamped; 0 for a draft beyond the last."""
        length[0] = 0
        if draft < NEXT:
            if PER_DRAFT:
                length[0] = context_lens[sequence * NEXT + draft]
            elif NEXT == 1:
                length[0] = context_lens[sequence]
            else:  # clamped before the subtraction, which would wrap at the most negative lengths
                length[0] = T.max(context_lens[sequence], 0) - NEXT + 1 + draft
            # A page count times the page size may pass 2**31 where the table is wide: compare in 64 bits.
            if T.cast(length[0], "int64") > T.cast(max_pages, "int64") * P:
                length[0] = max_pages * P
            length[0] = T.max(T.min(length[0], width), 0)

    @T.macro
    def longest(context_lens, job, length, most):
        """The longest range among the drafts of a job (a pass over a sequence)."""
        most[0] = 0
        if PER_DRAFT:
            for d in T.serial(BQ):
                row_length(context_lens, T.truncdiv(job, PASSES), T.truncmod(job, PASSES) * BQ + d, length)
                most[0] = T.max(most[0], length[0])
        else:  # ranges grow with the draft
            row_length(context_lens, T.truncdiv(job, PASSES), T.min(T.truncmod(job, PASSES) * BQ + BQ, NEXT) - 1, length)
            most[0] = length[0]

    @T.macro
    def kernel(q, cache, scales, weights, context_lens, block_tables, out, scale):
        with T.Kernel(GRID, threads=MATH + _logits.WARPGROUP) as block:
            q_shared = T.alloc_shared((2 * KH, N, D), s.dtype)
            k_shared = T.alloc_shared((S, BN, D), s.dtype)
            scale_shared = T.alloc_shared((S, PIECES * COPIES * PITCH), f32)
            weights_shared = T.alloc_shared((2 * KH, BQ, GP), f32)
            length_shared = T.alloc_shared((2, BQ), "int32")
            item_shared = T.alloc_shared((2, 8), "int32")  # job, first token, tiles, keys that every draft sees
            q_full = T.alloc_barrier([32] * 2)
            q_empty = T.alloc_barrier([MATH] * 2)
            k_full = T.alloc_barrier([32] * S)
            k_empty = T.alloc_barrier([MATH] * S)
            thread = T.get_thread_binding()
            if thread < MATH:
                T.set_max_nreg(MATH_REGISTERS, 1)
                scores = T.alloc_fragment((BN, N), f32)
                scores3 = T.reshape(scores, (BN, BQ, GP))
                product = T.alloc_fragment((BN, BQ, GP), f32)
                weights_fragment = T.alloc_fragment((BQ, GP), f32)
                part = T.alloc_fragment((BN, BQ), f32)
                total = T.alloc_fragment((BN, BQ), f32)
                count = T.alloc_var("int32", init=0)
                item = T.alloc_var("int32", init=0)
                tiles = T.alloc_var("int32")
                job = T.alloc_var("int32")
                row0 = T.alloc_var("int32")
                k0 = T.alloc_var("int32")
                common = T.alloc_var("int32")
                T.mbarrier_wait_parity(q_full[0], 0)
                tiles = item_shared[0, 2]
                while tiles > 0:
                    job = item_shared[item % 2, 0]
                    k0 = item_shared[item % 2, 1]
                    common = item_shared[item % 2, 3]
                    row0 = T.truncdiv(job, PASSES) * NEXT + T.truncmod(job, PASSES) * BQ
                    if WEIGHTED and KH == 1:
                        T.copy(weights_shared[item % 2, :, :], weights_fragment)
                    for _tile in T.serial(tiles):
                        for g in T.serial(KH):
                            if WEIGHTED and KH > 1:
                                T.copy(weights_shared[(item % 2) * KH + g, :, :], weights_fragment)
                            T.mbarrier_wait_parity(k_full[count % S], (count // S) % 2)
                            T.wgmma_gemm(
                                k_shared[count % S, :, :],
                                q_shared[(item % 2) * KH + g, :, :],
                                scores,
                                transpose_B=True,
                                clear_accum=True,
                                policy=T.GemmWarpPolicy.FullRow,
                            )
                            T.wait_wgmma(0)
                            _logits.activate(product, scores3, weights_fragment, BN, BQ, GP, RELU, WEIGHTED)
                            T.reduce_sum(product, part, dim=-1, clear=True)
                            if KH > 1:
                                if g == 0:
                                    T.clear(total)
                                for j, b in T.Parallel(BN, BQ):
                                    if SCALED:
                                        total[j, b] = total[j, b] + part[j, b] * (
                                            scale_shared[count % S, scale_column(j, g)] * scale
                                        )
                                    else:
                                        total[j, b] = total[j, b] + part[j, b] * scale
                            else:
                                for j, b in T.Parallel(BN, BQ):
                                    if SCALED:
                                        total[j, b] = part[j, b] * (scale_shared[count % S, scale_column(j, 0)] * scale)
                                    else:
                                        total[j, b] = part[j, b] * scale
                            T.mbarrier_arrive(k_empty[count % S])
                            count = count + 1
                        if k0 + BN <= common:
                            for j, b in T.Parallel(BN, BQ):
                                out[row0 + b, k0 + j] = T.cast(total[j, b], out_dtype)
                        else:
                            for j, b in T.Parallel(BN, BQ):
                                if k0 + j < length_shared[item % 2, b]:
                                    out[row0 + b, k0 + j] = T.cast(total[j, b], out_dtype)
                        k0 = k0 + BN
                    T.mbarrier_arrive(q_empty[item % 2])
                    item = item + 1
                    T.mbarrier_wait_parity(q_full[item % 2], (item // 2) % 2)
                    tiles = item_shared[item % 2, 2]
            else:
                T.set_max_nreg(_logits.loader_registers(s), 0)
                lane = thread % 32
                length = T.alloc_local((1,), "int32")
                most = T.alloc_local((1,), "int32")
                if thread < MATH + 32:
                    jobs = T.alloc_var("int32")
                    everything = T.alloc_var("int32")  # tiles of all sequences
                    share = T.alloc_var("int32")
                    before = T.alloc_var("int32")  # tiles before the 32 jobs at hand
                    running = T.alloc_var("int32")
                    own = T.alloc_var("int32")
                    other = T.alloc_var("int32")
                    start = T.alloc_var("int32")
                    left = T.alloc_var("int32")  # tiles of this block still to do
                    p_job = T.alloc_var("int32")
                    p_tile = T.alloc_var("int32")
                    p_tiles = T.alloc_var("int32")
                    p_token = T.alloc_var("int32")
                    p_common = T.alloc_var("int32")
                    p_item = T.alloc_var("int32", init=0)
                    p_count = T.alloc_var("int32", init=0)
                    page = T.alloc_var("int32")
                    piece_page = T.alloc_var("int32")
                    p_row0 = T.alloc_var("int32")
                    jobs = batch * PASSES
                    everything = 0
                    for c in T.serial(T.truncdiv(jobs + 31, 32)):
                        own = 0
                        if c * 32 + lane < jobs:
                            longest(context_lens, c * 32 + lane, length, most)
                            own = T.truncdiv(most[0] + BN - 1, BN)
                        for e in T.unroll(5):
                            own = own + T.shfl_xor(own, 1 << e)
                        everything = everything + own
                    share = T.truncdiv(everything + GRID - 1, GRID)
                    start = T.min(block * share, everything)
                    left = T.min(share, everything - start)
                    # The job that holds tile `start`, and the tile's number within it.
                    p_job = 0
                    p_tile = 0
                    before = 0
                    if left > 0:
                        for c in T.serial(T.truncdiv(jobs + 31, 32)):
                            if before <= start:
                                own = 0
                                if c * 32 + lane < jobs:
                                    longest(context_lens, c * 32 + lane, length, most)
                                    own = T.truncdiv(most[0] + BN - 1, BN)
                                running = own
                                for e in T.unroll(5):
                                    other = T.shfl_up(running, 1 << e)
                                    if lane >= (1 << e):
                                        running = running + other
                                # One lane at most: tiles [before + running - own, before + running) are its job's.
                                if (start >= before + running - own) & (start < before + running):
                                    p_job = c * 32 + lane
                                    p_tile = start - (before + running - own)
                                before = before + T.shfl_sync(running, 31)
                        for e in T.unroll(5):
                            p_job = T.max(p_job, T.shfl_xor(p_job, 1 << e))
                            p_tile = T.max(p_tile, T.shfl_xor(p_tile, 1 << e))
                    while left > 0:
                        longest(context_lens, p_job, length, most)
                        p_tiles = T.min(T.truncdiv(most[0] + BN - 1, BN) - p_tile, left)
                        if p_tiles > 0:
                            p_row0 = T.truncdiv(p_job, PASSES) * NEXT + T.truncmod(p_job, PASSES) * BQ
                            T.mbarrier_wait_parity(q_empty[p_item % 2], ((p_item // 2) % 2) ^ 1)
                            p_common = width
                            for r in T.serial((BQ + 31) // 32):
                                if r * 32 + lane < BQ:
                                    row_length(
                                        context_lens,
                                        T.truncdiv(p_job, PASSES),
                                        T.truncmod(p_job, PASSES) * BQ + r * 32 + lane,
                                        length,
                                    )
                                    length_shared[p_item % 2, r * 32 + lane] = length[0]
                                    p_common = T.min(p_common, length[0])
                            for e in T.unroll(5):
                                p_common = T.min(p_common, T.shfl_xor(p_common, 1 << e))
                            if lane == 0:
                                item_shared[p_item % 2, 0] = p_job
                                item_shared[p_item % 2, 1] = p_tile * BN
                                item_shared[p_item % 2, 2] = p_tiles
                                item_shared[p_item % 2, 3] = p_common
                            if WEIGHTED:
                                for e in T.serial((KH * N + 31) // 32):
                                    # Column x of key head g: draft x // GP, head x % GP of the group; padding weighs 0.
                                    x = (e * 32 + lane) % N
                                    g = (e * 32 + lane) // N
                                    if e * 32 + lane < KH * N:
                                        weights_shared[(p_item % 2) * KH + g, x // GP, x % GP] = 0.0
                                        if (p_row0 + x // GP < rows) & (x % GP < G):
                                            weights_shared[(p_item % 2) * KH + g, x // GP, x % GP] = T.cast(
                                                weights[p_row0 + x // GP, g * G + x % GP], f32
                                            )
                            if FLAT:
                                T.tma_copy(
                                    q[p_row0 * H : p_row0 * H + N, :],
                                    q_shared[p_item % 2, :, :],
                                    barrier=q_full[p_item % 2],
                                    leader_scope_threads=32,
                                )
                            else:
                                for g in T.serial(KH):
                                    for b in T.serial(BQ):
                                        for half in T.unroll(D // COPY):
                                            T.tma_copy(
                                                q[p_row0 + b, g, 0:GP, half * COPY : half * COPY + COPY],
                                                q_shared[
                                                    (p_item % 2) * KH + g, b * GP : b * GP + GP, half * COPY : half * COPY + COPY
                                                ],
                                                barrier=q_full[p_item % 2],
                                                leader_scope_threads=32,
                                            )
                            T.mbarrier_arrive(q_full[p_item % 2])
                            page = 0
                            for tile in T.serial(p_tiles):
                                if T.truncmod(tile, TILES) == 0:
                                    # Tokens beyond the range repeat the page of the last one: read, and masked at the store.
                                    page = block_tables[
                                        T.truncdiv(p_job, PASSES),
                                        T.truncdiv(T.min((p_tile + tile) * BN + lane * PIECE, most[0] - 1), P),
                                    ]
                                for g in T.serial(KH):
                                    T.mbarrier_wait_parity(k_empty[p_count % S], ((p_count // S) % 2) ^ 1)
                                    for p in T.serial(PIECES):
                                        piece_page = T.shfl_sync(page, T.truncmod(tile, TILES) * PIECES + p)
                                        p_token = T.truncmod((p_tile + tile) * BN + p * PIECE, P)  # within its page
                                        for half in T.unroll(D // COPY):
                                            T.tma_copy(
                                                cache[
                                                    piece_page,
                                                    p_token : p_token + PIECE,
                                                    g * D + half * COPY : g * D + half * COPY + COPY,
                                                ],
                                                k_shared[
                                                    p_count % S, p * PIECE : p * PIECE + PIECE, half * COPY : half * COPY + COPY
                                                ],
                                                barrier=k_full[p_count % S],
                                                leader_scope_threads=32,
                                            )
                                        if SCALED:
                                            p_word = SCALE_OFFSET + p_token * KH
                                            for w in T.unroll(COPIES):
                                                T.tma_copy(
                                                    scales[piece_page, p_word + w * WORDS : p_word + w * WORDS + WORDS],
                                                    scale_shared[
                                                        p_count % S,
                                                        (p * COPIES + w) * PITCH : (p * COPIES + w) * PITCH + WORDS,
                                                    ],
                                                    barrier=k_full[p_count % S],
                                                    leader_scope_threads=32,
                                                )
                                    T.mbarrier_arrive(k_full[p_count % S])
                                    p_count = p_count + 1
                            p_item = p_item + 1
                            left = left - p_tiles
                        p_job = p_job + 1
                        p_tile = 0
                    T.mbarrier_wait_parity(q_empty[p_item % 2], ((p_item // 2) % 2) ^ 1)
                    if lane == 0:
                        item_shared[p_item % 2, 2] = 0
                    T.mbarrier_arrive(q_full[p_item % 2])
                else:
                    if CLEAN:
                        # Rows are dealt to blocks; with fewer rows than blocks, each row's tail is split.
                        splits = T.alloc_var("int32")
                        unit = T.alloc_var("int32")
                        f_row = T.alloc_var("int32")
                        column = T.alloc_var("int32")
                        splits = T.max(T.truncdiv(GRID, T.max(rows, 1)), 1)
                        unit = block
                        while unit < rows * splits:
                            f_row = T.truncdiv(unit, splits)
                            row_length(context_lens, T.truncdiv(f_row, NEXT), T.truncmod(f_row, NEXT), length)
                            column = length[0] + T.truncmod(unit, splits) * 96 + (thread - MATH - 32)
                            while column < width:
                                out[f_row, column] = T.cast(-T.infinity(f32), out_dtype)
                                column = column + splits * 96
                            unit = unit + GRID

    q_type = T.Tensor((q_rows, D) if FLAT else (q_rows, KH, G, D), s.dtype)
    cache_type = T.StridedTensor((pages, P, KH * D), (page_stride, KH * D, 1), s.dtype)
    scales_type = T.StridedTensor((pages, P * KH * (D + 4) // 4), (scale_stride, 1), f32)
    weights_type = T.StridedTensor((rows, H), (weights_stride, 1), s.weights_dtype or f32)
    lens_type = T.Tensor((rows if PER_DRAFT else batch,), "int32")
    table_type = T.StridedTensor((batch, max_pages), (table_stride, 1), "int32")
    out_type = T.StridedTensor((rows, width), (out_stride, 1), out_dtype)
    scalar = T.float32

    if SCALED and WEIGHTED:

        @T.prim_func
        def paged_mqa_logits(
            q: q_type, cache: cache_type, scales: scales_type, weights: weights_type, lens: lens_type, tables: table_type,
            out: out_type, scale: scalar,
        ):  # fmt: skip
            kernel(q, cache, scales, weights, lens, tables, out, scale)

    elif SCALED:

        @T.prim_func
        def paged_mqa_logits(
            q: q_type, cache: cache_type, scales: scales_type, lens: lens_type, tables: table_type, out: out_type, scale: scalar
        ):
            kernel(q, cache, scales, None, lens, tables, out, scale)

    elif WEIGHTED:

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


def compile(problem: PagedMqaLogitsProblem, config: Config) -> dict[str, bytes]:
    return {ENTRY: build.library(program(problem, config), pass_configs=_logits.PASS_CONFIGS)}


def launch(compiled: Any, params: PagedMqaLogitsParams) -> None:
    # skip_rows_up_to only permits rows to be left out; this kernel scores every row.
    q, cache, weights, context_lens, block_tables, out, scale, _ = params
    problem = compiled.problem
    shape = _logits.shape_of(problem)
    q = q.view(-1, shape.dim) if _logits.flat(shape) else q.view(-1, shape.kv_heads, shape.group, shape.dim)
    scales = cache.view(torch.float32) if problem.has_k_scale else None
    values = cache.view(q.dtype) if problem.has_k_scale else cache
    row = shape.kv_heads * shape.dim
    values = values.as_strided((values.shape[0], problem.page_size, row), (values.stride(0), row, 1))
    optional = [tensor for tensor in (scales, weights) if tensor is not None]
    compiled.functions[ENTRY](q, values, *optional, context_lens.view(-1), block_tables, out, scale)
