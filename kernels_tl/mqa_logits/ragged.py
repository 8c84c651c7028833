"""Ragged indexer logits: out[i, j] = scale * sum_g k_scale[j, g] * sum_{h in g} weights[i, h] * act(q[i, h] . k[j, g]).

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

The loader puts row ranges and weights of an item beside its queries, two items deep, so math warps read no index from memory.
"""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from gdn.device import H100, DeviceSpec
from gdn.problems import MqaLogitsParams, MqaLogitsProblem
from kernels_tl.common import build
from kernels_tl.mqa_logits import shared as _logits

ENTRY = "mqa_logits"


@dataclass(frozen=True)
class Config:
    block_queries: int  # queries of an item: block_queries x padded heads accumulator columns, at most 256
    math_warpgroups: int  # 64 key rows of a tile each
    stages: int  # key tiles in flight
    chunk_tiles: int  # most key tiles of an item; fewer where there is little work
    blocks: int  # persistent blocks: the SMs of the device
    ordered: bool  # math warpgroups take turns at the tensor cores, so that their head sums do not coincide


def refusal(problem: MqaLogitsProblem) -> str | None:
    why = _logits.refusal_common(problem)
    if why is None and _default(problem, H100) is None:
        return (
            "requires queries and keys that fit a block's shared memory, got "
            f"{problem.num_heads} heads and {problem.num_kv_heads} key heads of head_dim {problem.head_dim} in {problem.dtype}"
        )
    return why


def shared_bytes(problem: MqaLogitsProblem, config: Config) -> int:
    s = _logits.shape_of(problem)
    columns = config.block_queries * s.columns
    queries = 2 * s.kv_heads * columns * s.dim * s.value_bytes
    keys = config.stages * config.math_warpgroups * 64 * s.dim * s.value_bytes
    weights = 2 * s.kv_heads * columns * 4
    ranges = 2 * (2 * config.block_queries + 8) * 4
    return queries + keys + weights + ranges + 2048  # alignment of the buffers, barriers


def fits(problem: MqaLogitsProblem, config: Config, device: DeviceSpec) -> bool:
    s = _logits.shape_of(problem)
    columns = config.block_queries * s.columns
    if columns > _logits.MAX_COLUMNS or columns % 8:
        return False
    if shared_bytes(problem, config) > device.shared_bytes_per_block:
        return False
    # Addresses, masks and loop state take the rest of a math thread's registers.
    return _logits.accumulator_registers(config.block_queries, s) + 32 <= _logits.math_registers(config.math_warpgroups, s)


def configs(problem: MqaLogitsProblem, device: DeviceSpec) -> list[Config]:
    s = _logits.shape_of(problem)
    found = [
        Config(width // s.columns, groups, stages, chunk_tiles, device.num_sms, ordered)
        for width in _logits.WIDTHS
        if width % s.columns == 0
        for groups in (2, 3, 4)
        for stages in (6, 4, 3, 2)
        for chunk_tiles, ordered in ((32, True), (64, True), (32, False))
    ]
    return [config for config in found if fits(problem, config, device)]


def default_config(problem: MqaLogitsProblem, device: DeviceSpec) -> Config:
    config = _default(problem, device)
    if config is None:
        raise ValueError(f"no configuration fits {problem}")
    return config


def _default(problem: MqaLogitsProblem, device: DeviceSpec) -> Config | None:
    """Widest columns first (fewest shared-memory bytes a product), two math warpgroups, as many stages as fit."""
    s = _logits.shape_of(problem)
    widths = [width for width in _logits.WIDTHS if width % s.columns == 0]
    # Fewer queries than a width holds: the narrowest that takes them all comes first.
    enough = [width for width in widths if width >= problem.num_queries * s.columns]
    for width in enough[-1:] + [width for width in widths if width not in enough] + enough:
        for stages in (4, 3, 2):
            config = Config(width // s.columns, 2, stages, 32, device.num_sms, True)
            if fits(problem, config, device):
                return config
    return None


def workspace_bytes(problem: MqaLogitsProblem, config: Config) -> int:
    return 0


def program(problem: MqaLogitsProblem, config: Config) -> Any:
    """The TileLang function of a problem's static fields and a config."""
    s = _logits.shape_of(problem)
    H, KH, G, GP, D = s.heads, s.kv_heads, s.group, s.columns, s.dim
    BQ, WG, S, GRID = config.block_queries, config.math_warpgroups, config.stages, config.blocks
    BN, N, MATH = 64 * WG, BQ * GP, _logits.WARPGROUP * WG
    PACKED, CLEAN, RELU, SCALED, WEIGHTED = problem.packed, s.clean, s.relu, s.scaled, s.weights_dtype is not None
    ORDERED = config.ordered and WG > 1
    FLAT = _logits.flat(s)  # the queries of an item are consecutive rows of N
    COPY = _logits.copy_columns(s)
    MATH_REGISTERS = _logits.math_registers(WG, s)
    f32, out_dtype = "float32", s.out_dtype
    m, nk, width, q_rows = T.dynamic("m"), T.dynamic("nk"), T.dynamic("width"), T.dynamic("q_rows")
    weights_stride, out_stride = T.dynamic("weights_stride", "int64"), T.dynamic("out_stride", "int64")
    q_shape = (q_rows, D) if FLAT else (q_rows, KH, G, D)

    @T.macro
    def row_range(cu_seqlen_ks, cu_seqlen_ke, row, first, last):
        """The clamped key range of a row; an empty one, and a row beyond the end, is [0, 0)."""
        first[0] = 0
        last[0] = 0
        if row < m:
            first[0] = T.max(cu_seqlen_ks[row], 0)
            last[0] = T.min(cu_seqlen_ke[row], nk)
            if first[0] >= last[0]:
                first[0] = 0
                last[0] = 0

    @T.macro
    def union_of_rows(cu_seqlen_ks, cu_seqlen_ke, q0, lane, low, high, first, last):
        """[low, high) covers the ranges of the item's rows (by all 32 lanes); high = 0 where all are empty."""
        low[0] = nk
        high[0] = 0
        for r in T.serial((BQ + 31) // 32):
            if r * 32 + lane < BQ:
                row_range(cu_seqlen_ks, cu_seqlen_ke, q0 + r * 32 + lane, first, last)
                if first[0] < last[0]:
                    low[0] = T.min(low[0], first[0])
                    high[0] = T.max(high[0], last[0])
        for e in T.unroll(5):
            low[0] = T.min(low[0], T.shfl_xor(low[0], 1 << e))
            high[0] = T.max(high[0], T.shfl_xor(high[0], 1 << e))

    @T.macro
    def tiles_of_item(chunk_index, chunks, chunk_tiles, low, high, origin, begin, end):
        """Tiles [begin, end) of the item start at key origin + tile * BN."""
        if PACKED:  # chunks count from the first visible key; the last one takes whatever the union has left
            origin[0] = low[0] + chunk_index * chunk_tiles * BN
            begin[0] = 0
            end[0] = T.truncdiv(T.max(high[0] - origin[0], 0) + BN - 1, BN)
            if chunk_index < chunks - 1:
                end[0] = T.min(end[0], chunk_tiles)
        else:
            origin[0] = chunk_index * chunk_tiles * BN
            begin[0] = T.truncdiv(T.max(low[0] - origin[0], 0), BN)
            end[0] = T.min(T.truncdiv(T.max(T.min(high[0], width) - origin[0], 0) + BN - 1, BN), chunk_tiles)
            begin[0] = T.min(begin[0], end[0])

    @T.macro
    def kernel(q, k, k_scale, weights, cu_seqlen_ks, cu_seqlen_ke, out, scale, chunk_tiles):
        with T.Kernel(GRID, threads=MATH + _logits.WARPGROUP) as block:
            q_shared = T.alloc_shared((2 * KH, N, D), s.dtype)
            k_shared = T.alloc_shared((S, BN, D), s.dtype)
            weights_shared = T.alloc_shared((2 * KH, BQ, GP), f32)
            first_shared = T.alloc_shared((2, BQ), "int32")
            last_shared = T.alloc_shared((2, BQ), "int32")
            item_shared = T.alloc_shared((2, 8), "int32")  # first tile, end tile, origin, keys every row sees: from, to
            q_full = T.alloc_barrier([32] * 2)
            q_empty = T.alloc_barrier([MATH] * 2)
            k_full = T.alloc_barrier([32] * S)
            k_empty = T.alloc_barrier([MATH] * S)
            thread = T.get_thread_binding()
            query_blocks = T.alloc_var("int32")
            chunks = T.alloc_var("int32")
            items = T.alloc_var("int32")
            query_blocks = T.truncdiv(m + BQ - 1, BQ)
            chunks = T.max(T.truncdiv(width + chunk_tiles * BN - 1, chunk_tiles * BN), 1)
            items = T.truncdiv(query_blocks * chunks - block + GRID - 1, GRID)  # of this block
            if thread < MATH:
                T.set_max_nreg(MATH_REGISTERS, 1)
                scores = T.alloc_fragment((BN, N), f32)
                scores3 = T.reshape(scores, (BN, BQ, GP))
                product = T.alloc_fragment((BN, BQ, GP), f32)
                weights_fragment = T.alloc_fragment((BQ, GP), f32)
                part = T.alloc_fragment((BN, BQ), f32)
                total = T.alloc_fragment((BN, BQ), f32)
                key_scale = T.alloc_fragment((BN,), f32)
                count = T.alloc_var("int32", init=0)
                if ORDERED:  # the first turn is warpgroup 0's
                    if thread >= MATH - _logits.WARPGROUP:
                        T.named_barrier_arrive(1, 256)
                q0 = T.alloc_var("int32")
                k0 = T.alloc_var("int32")
                common_from = T.alloc_var("int32")
                common_to = T.alloc_var("int32")
                for i in T.serial(items):
                    q0 = T.truncmod(block + i * GRID, query_blocks) * BQ
                    T.mbarrier_wait_parity(q_full[i % 2], (i // 2) % 2)
                    k0 = item_shared[i % 2, 2] + item_shared[i % 2, 0] * BN
                    common_from = item_shared[i % 2, 3]
                    common_to = item_shared[i % 2, 4]
                    if WEIGHTED and KH == 1:
                        T.copy(weights_shared[i % 2, :, :], weights_fragment)
                    for _tile in T.serial(item_shared[i % 2, 1] - item_shared[i % 2, 0]):
                        for g in T.serial(KH):
                            if WEIGHTED and KH > 1:
                                T.copy(weights_shared[(i % 2) * KH + g, :, :], weights_fragment)
                            T.mbarrier_wait_parity(k_full[count % S], (count // S) % 2)
                            if ORDERED:
                                T.sync_threads(1 + thread // 128, 256)
                            T.wgmma_gemm(
                                k_shared[count % S, :, :],
                                q_shared[(i % 2) * KH + g, :, :],
                                scores,
                                transpose_B=True,
                                clear_accum=True,
                                policy=T.GemmWarpPolicy.FullRow,
                            )
                            if ORDERED:
                                T.named_barrier_arrive(1 + (thread // 128 + 1) % WG, 256)
                            # Loaded while the product runs; rows beyond the end repeat the last one and are masked below.
                            for j in T.Parallel(BN):
                                if SCALED:
                                    key_scale[j] = k_scale[T.min(k0 + j, nk - 1), g] * scale
                                else:
                                    key_scale[j] = scale
                            T.wait_wgmma(0)
                            T.mbarrier_arrive(k_empty[count % S])
                            count = count + 1
                            _logits.activate(product, scores3, weights_fragment, BN, BQ, GP, RELU, WEIGHTED)
                            T.reduce_sum(product, part, dim=-1, clear=True)
                            if KH == 1:
                                for j, b in T.Parallel(BN, BQ):
                                    total[j, b] = part[j, b] * key_scale[j]
                            else:
                                if g == 0:
                                    T.clear(total)
                                for j, b in T.Parallel(BN, BQ):
                                    total[j, b] = total[j, b] + part[j, b] * key_scale[j]
                        if PACKED:
                            for j, b in T.Parallel(BN, BQ):
                                if (
                                    (k0 + j >= first_shared[i % 2, b])
                                    & (k0 + j < last_shared[i % 2, b])
                                    & (k0 + j - first_shared[i % 2, b] < width)
                                ):
                                    out[q0 + b, k0 + j - first_shared[i % 2, b]] = T.cast(total[j, b], out_dtype)
                        else:
                            if (k0 >= common_from) & (k0 + BN <= common_to):
                                for j, b in T.Parallel(BN, BQ):
                                    out[q0 + b, k0 + j] = T.cast(total[j, b], out_dtype)
                            else:
                                for j, b in T.Parallel(BN, BQ):
                                    if (q0 + b < m) & (k0 + j < width):
                                        if (k0 + j >= first_shared[i % 2, b]) & (k0 + j < last_shared[i % 2, b]):
                                            out[q0 + b, k0 + j] = T.cast(total[j, b], out_dtype)
                                        else:
                                            if CLEAN:
                                                out[q0 + b, k0 + j] = T.cast(-T.infinity(f32), out_dtype)
                        k0 = k0 + BN
                    T.mbarrier_arrive(q_empty[i % 2])
            else:
                T.set_max_nreg(_logits.loader_registers(s), 0)
                lane = thread % 32
                p_q0 = T.alloc_var("int32")
                chunk_index = T.alloc_var("int32")
                low = T.alloc_local((1,), "int32")
                high = T.alloc_local((1,), "int32")
                first = T.alloc_local((1,), "int32")
                last = T.alloc_local((1,), "int32")
                origin = T.alloc_local((1,), "int32")
                begin = T.alloc_local((1,), "int32")
                end = T.alloc_local((1,), "int32")
                if thread < MATH + 32:
                    p_count = T.alloc_var("int32", init=0)
                    inner_low = T.alloc_var("int32")
                    inner_high = T.alloc_var("int32")
                    for i in T.serial(items):
                        p_q0 = T.truncmod(block + i * GRID, query_blocks) * BQ
                        chunk_index = T.truncdiv(block + i * GRID, query_blocks)
                        T.mbarrier_wait_parity(q_empty[i % 2], ((i // 2) % 2) ^ 1)
                        union_of_rows(cu_seqlen_ks, cu_seqlen_ke, p_q0, lane, low, high, first, last)
                        tiles_of_item(chunk_index, chunks, chunk_tiles, low, high, origin, begin, end)
                        inner_low = 0
                        inner_high = width
                        for r in T.serial((BQ + 31) // 32):
                            if r * 32 + lane < BQ:
                                row_range(cu_seqlen_ks, cu_seqlen_ke, p_q0 + r * 32 + lane, first, last)
                                first_shared[i % 2, r * 32 + lane] = first[0]
                                last_shared[i % 2, r * 32 + lane] = last[0]
                                inner_low = T.max(inner_low, first[0])
                                inner_high = T.min(inner_high, last[0])
                        for e in T.unroll(5):
                            inner_low = T.max(inner_low, T.shfl_xor(inner_low, 1 << e))
                            inner_high = T.min(inner_high, T.shfl_xor(inner_high, 1 << e))
                        if WEIGHTED and end[0] > begin[0]:
                            for e in T.serial((KH * N + 31) // 32):
                                # Column x of key head g: query x // GP, head x % GP of the group; padding heads weigh 0.
                                x = (e * 32 + lane) % N
                                g = (e * 32 + lane) // N
                                if e * 32 + lane < KH * N:
                                    weights_shared[(i % 2) * KH + g, x // GP, x % GP] = 0.0
                                    if (p_q0 + x // GP < m) & (x % GP < G):
                                        weights_shared[(i % 2) * KH + g, x // GP, x % GP] = T.cast(
                                            weights[p_q0 + x // GP, g * G + x % GP], f32
                                        )
                        if lane == 0:
                            item_shared[i % 2, 0] = begin[0]
                            item_shared[i % 2, 1] = end[0]
                            item_shared[i % 2, 2] = origin[0]
                            item_shared[i % 2, 3] = inner_low
                            item_shared[i % 2, 4] = inner_high
                        if end[0] > begin[0]:
                            if FLAT:
                                T.tma_copy(
                                    q[p_q0 * H : p_q0 * H + N, :],
                                    q_shared[i % 2, :, :],
                                    barrier=q_full[i % 2],
                                    leader_scope_threads=32,
                                )
                            else:
                                for g in T.serial(KH):
                                    for b in T.serial(BQ):
                                        for half in T.unroll(D // COPY):
                                            T.tma_copy(
                                                q[p_q0 + b, g, 0:GP, half * COPY : half * COPY + COPY],
                                                q_shared[
                                                    (i % 2) * KH + g, b * GP : b * GP + GP, half * COPY : half * COPY + COPY
                                                ],
                                                barrier=q_full[i % 2],
                                                leader_scope_threads=32,
                                            )
                        T.mbarrier_arrive(q_full[i % 2])
                        for tile in T.serial(end[0] - begin[0]):
                            key0 = origin[0] + (begin[0] + tile) * BN
                            for g in T.serial(KH):
                                T.mbarrier_wait_parity(k_empty[p_count % S], ((p_count // S) % 2) ^ 1)
                                T.tma_copy(
                                    k[key0 : key0 + BN, g * D : g * D + D],
                                    k_shared[p_count % S, :, :],
                                    barrier=k_full[p_count % S],
                                    leader_scope_threads=32,
                                )
                                T.mbarrier_arrive(k_full[p_count % S])
                                p_count = p_count + 1
                else:
                    if CLEAN:
                        fill_thread = thread - MATH - 32
                        left = T.alloc_var("int32")
                        right = T.alloc_var("int32")
                        column = T.alloc_var("int32")
                        for i in T.serial(items):
                            p_q0 = T.truncmod(block + i * GRID, query_blocks) * BQ
                            chunk_index = T.truncdiv(block + i * GRID, query_blocks)
                            left = chunk_index * chunk_tiles * BN
                            right = T.min(left + chunk_tiles * BN, width)
                            if PACKED:
                                for b in T.serial(T.min(BQ, m - p_q0)):
                                    row_range(cu_seqlen_ks, cu_seqlen_ke, p_q0 + b, first, last)
                                    column = T.max(left, last[0] - first[0]) + fill_thread
                                    while column < right:
                                        out[p_q0 + b, column] = T.cast(-T.infinity(f32), out_dtype)
                                        column = column + 96
                            else:
                                union_of_rows(cu_seqlen_ks, cu_seqlen_ke, p_q0, lane, low, high, first, last)
                                tiles_of_item(chunk_index, chunks, chunk_tiles, low, high, origin, begin, end)
                                if end[0] - begin[0] < chunk_tiles:
                                    for b in T.serial(T.min(BQ, m - p_q0)):
                                        column = left + fill_thread
                                        while column < T.min(left + begin[0] * BN, right):
                                            out[p_q0 + b, column] = T.cast(-T.infinity(f32), out_dtype)
                                            column = column + 96
                                        column = left + end[0] * BN + fill_thread
                                        while column < right:
                                            out[p_q0 + b, column] = T.cast(-T.infinity(f32), out_dtype)
                                            column = column + 96

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


def compile(problem: MqaLogitsProblem, config: Config) -> dict[str, bytes]:
    return {ENTRY: build.library(program(problem, config), pass_configs=_logits.PASS_CONFIGS)}


def chunk_tiles(num_queries: int, num_columns: int, config: Config) -> int:
    """Key tiles of an item: the config's, or fewer, so that every block gets about four items."""
    tiles = -(-num_columns // (64 * config.math_warpgroups))
    query_blocks = -(-num_queries // config.block_queries)
    return max(1, min(config.chunk_tiles, tiles * query_blocks // (4 * config.blocks)))


def launch(compiled: Any, params: MqaLogitsParams) -> None:
    # skip_rows_up_to only permits rows to be left out; this kernel scores every row.
    q, k, k_scale, weights, cu_seqlen_ks, cu_seqlen_ke, out, scale, _ = params
    problem = compiled.problem
    shape = _logits.shape_of(problem)
    q = q.view(-1, shape.dim) if _logits.flat(shape) else q.view(-1, shape.kv_heads, shape.group, shape.dim)
    k = k.view(-1, shape.kv_heads * shape.dim)
    optional = [tensor for tensor in (k_scale, weights) if tensor is not None]
    tiles = chunk_tiles(*out.shape, compiled.config)
    compiled.functions[ENTRY](q, k, *optional, cu_seqlen_ks, cu_seqlen_ke, out, scale, tiles)
