"""Sparse attention of decode, for query token t and the query heads of key head g, over the positions j of its row of indices:

    s_j = scale * q[t, h] . k[j, g]      lse = log sum_j exp(s_j)      o = sum_j exp(s_j - lse) v[j, g]

    q, out [tokens, H, D] bf16 | fp16, k_cache, v_cache [blocks, block_size, KH, D] with any strides of 16 bytes,
    topk_indices [tokens, k] int32 | int64 (-1 = none) or None: all positions, block_tables [N, max_blocks] int32,
    query_start_loc [N + 1], seq_lens [N], topk_length [tokens] int32, lse [tokens, H] float32

A block has a query token, a key head and an equal part of the columns of the row of indices (dense: of the positions). It looks
up the cache rows of up to ROUND of its positions, then gathers tiles of them by asynchronous copies of 16 bytes, `stages` - 1
tiles ahead. The query heads of the key head are padded to the 64 rows of a warpgroup's product. With several parts a second
launch merges them, in their order, from the workspace.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any

import tilelang.language as T
import torch
from tilelang.cuda.language.tir import ptx_commit_group, ptx_wait_group

from gdn.device import DeviceSpec
from gdn.problems import DTYPE_BYTES, SparseDecodeParams, SparseDecodeProblem
from kernels_tl.common import build

ENTRY, MERGE = "sparse_attention_decode", "sparse_attention_decode_merge"
HEAD_DIMS = (128, 256)
ROWS = 64  # of a warpgroup's product: the query heads of a key head, padded
THREADS = 128
ROUND = 2048  # positions of a block whose cache rows are in shared memory at a time
MOST_SPLITS = 64
LEAST = -1e30  # of a running maximum: the difference of two of them is a number
LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
VECTOR = 8  # elements of 16 bytes
# Of a loop of copies: asynchronous, and the kernel itself says which belong together and when they must be there.
ASYNC = {"parallel_prefer_async": True, "parallel_async_without_async_commit_wait": True}
PASS_CONFIGS = {
    "tl.disable_warp_specialized": True,
    "tl.disable_thread_storage_sync": True,  # of copies in flight it knows nothing
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_data_race_check": True,
}


@dataclass(frozen=True)
class Config:
    splits: int  # blocks of a query token and key head
    tile: int  # positions of a product
    stages: int  # tiles in shared memory


def refusal(problem: SparseDecodeProblem) -> str | None:
    p = problem
    if p.dtype not in ("bfloat16", "float16"):
        return f"requires q of bfloat16 or float16, got {p.dtype}"
    if p.head_dim not in HEAD_DIMS:
        return f"requires head_dim 128 or 256, got {p.head_dim}"
    if p.num_kv_heads < 1 or p.num_heads % p.num_kv_heads or not 1 <= p.num_heads // p.num_kv_heads <= ROWS:
        return f"requires 1 to {ROWS} query heads a key head, got {p.num_heads} and {p.num_kv_heads}"
    if not p.rows_aligned:
        return "requires cache rows that start at multiples of 16 bytes"
    return None


def _shared_bytes(problem: SparseDecodeProblem, config: Config) -> int:
    row = problem.head_dim * DTYPE_BYTES[problem.dtype]
    return ROWS * row + 2 * config.stages * config.tile * row + 4 * ROUND + 2048


def fits(problem: SparseDecodeProblem, config: Config, device: DeviceSpec) -> bool:
    if config.tile not in (32, 64) or not 2 <= config.stages <= 6 or not 1 <= config.splits <= MOST_SPLITS:
        return False
    return _shared_bytes(problem, config) <= device.shared_bytes_per_block


def configs(problem: SparseDecodeProblem, device: DeviceSpec) -> list[Config]:
    most = default_config(problem, device).splits
    space = [Config(splits, tile, stages) for splits in {most, max(1, most // 2), min(2 * most, MOST_SPLITS)}
             for tile in (32, 64) for stages in (2, 3, 4)]  # fmt: skip
    return [config for config in space if fits(problem, config, device)]


def default_config(problem: SparseDecodeProblem, device: DeviceSpec) -> Config:
    """As many blocks as fill the device once, of 64 positions at least."""
    blocks = max(1, problem.num_tokens * problem.num_kv_heads)
    splits = max(1, min(device.num_sms // blocks, ceil(problem.k / 64), MOST_SPLITS))
    found = [Config(splits, 32, stages) for stages in (4, 3, 2)]
    return next(config for config in found if fits(problem, config, device))


def workspace_bytes(problem: SparseDecodeProblem, config: Config) -> int:
    """Parts of O, then their maxima and sums."""
    if config.splits == 1:
        return 0
    return 4 * problem.num_tokens * config.splits * problem.num_heads * (problem.head_dim + 2)


def compile(problem: SparseDecodeProblem, config: Config) -> dict[str, bytes]:
    entries = {ENTRY: build.library(program(problem, config), pass_configs=PASS_CONFIGS)}
    if config.splits > 1:
        entries[MERGE] = build.library(merge_program(problem, config), pass_configs=PASS_CONFIGS)
    return entries


def launch(compiled: Any, params: SparseDecodeParams) -> None:
    problem, splits = compiled.problem, compiled.config.splits
    q, out, lse = params.q, params.out, params.lse
    tokens, heads, dim = q.shape
    flat = []
    for cache in (params.k_cache, params.v_cache):
        extent = sum((size - 1) * stride for size, stride in zip(cache.shape, cache.stride(), strict=True)) + 1
        flat.append(cache.as_strided((extent,), (1,)))
    strides = [stride // VECTOR for cache in (params.k_cache, params.v_cache) for stride in cache.stride()[:3]]
    if splits == 1:
        part, sums = out, lse.view(tokens, 1, heads, 1)
    else:
        workspace = params.workspace.view(torch.float32)  # type: ignore[union-attr]
        count = tokens * splits * heads
        part = workspace[: count * dim].view(tokens, splits, heads, dim)
        sums = workspace[count * dim : count * (dim + 2)].view(tokens, splits, heads, 2)
    optional = build.arguments(params.topk_indices, params.topk_length)
    columns = params.block_tables.shape[1] * problem.block_size if problem.dense else params.topk_indices.shape[1]
    each = ceil(ceil(columns / splits) / compiled.config.tile) * compiled.config.tile
    compiled.functions[ENTRY](
        q, *flat, *optional, params.block_tables, params.query_start_loc, params.seq_lens, part, sums, *strides, each,
        params.scale * LOG2_E,
    )  # fmt: skip
    if splits > 1:
        compiled.functions[MERGE](part, sums, out, lse)


def program(problem: SparseDecodeProblem, config: Config) -> Any:
    """The TileLang function of a problem's static fields and a config."""
    heads, kv_heads, dim, dtype = problem.num_heads, problem.num_kv_heads, problem.head_dim, problem.dtype
    group, block_size, tile, stages, splits = heads // kv_heads, problem.block_size, config.tile, config.stages, config.splits
    dense, has_length, index_dtype = problem.dense, problem.has_topk_length, problem.index_dtype or "int32"
    tokens, sequences, offsets, k, max_blocks = (
        T.dynamic(name) for name in ("tokens", "sequences", "offsets", "k", "max_blocks")
    )
    k_elements, v_elements = T.dynamic("k_elements", "int64"), T.dynamic("v_elements", "int64")
    index_stride, table_stride = T.dynamic("index_stride", "int64"), T.dynamic("table_stride", "int64")
    out_strides = (T.dynamic("out_token_stride", "int64"), T.dynamic("out_head_stride", "int64"), 1)
    part_type = T.Tensor((tokens, splits, heads, dim), "float32")
    if splits == 1:
        part_type = T.StridedTensor((tokens, heads, dim), out_strides, dtype)

    tiles_of = Gather(problem, config)

    @T.prim_func
    def sparse_attention_decode():
        tensors = build.parameters(
            q=T.Tensor((tokens, heads, dim), dtype),
            k_cache=T.Tensor((k_elements,), dtype),
            v_cache=T.Tensor((v_elements,), dtype),
            topk_indices=None if dense else T.StridedTensor((tokens, k), (index_stride, 1), index_dtype),
            topk_length=T.Tensor((tokens,), "int32") if has_length else None,
            block_tables=T.StridedTensor((sequences, max_blocks), (table_stride, 1), "int32"),
            query_start_loc=T.Tensor((offsets,), "int32"),
            seq_lens=T.Tensor((sequences,), "int32"),
            part=part_type,
            sums=T.Tensor((tokens, splits, heads, 1 if splits == 1 else 2), "float32"),
            k_block=T.int64(),
            k_token=T.int64(),
            k_head=T.int64(),
            v_block=T.int64(),
            v_token=T.int64(),
            v_head=T.int64(),
            each=T.int32(),
            scale=T.float32(),
        )
        with T.Kernel(tokens, kv_heads, splits, threads=THREADS) as (token, head, split):  # only x may exceed 65535
            q_shared = T.alloc_shared((ROWS, dim), dtype)
            shared = build.named(
                k=T.alloc_shared((stages, tile, dim), dtype),
                v=T.alloc_shared((stages, tile, dim), dtype),
                row=T.alloc_shared((ROUND,), "int32"),  # of the cache: block * block_size + offset; -1 = none
            )
            count_shared = T.alloc_shared((1,), "int32")
            score_fragment = T.alloc_fragment((ROWS, tile), "float32")
            share_fragment = T.alloc_fragment((ROWS, tile), dtype)
            out_fragment = T.alloc_fragment((ROWS, dim), "float32")
            best_fragment = T.alloc_fragment((ROWS,), "float32")
            before_fragment = T.alloc_fragment((ROWS,), "float32")
            sum_fragment = T.alloc_fragment((ROWS,), "float32")
            total_fragment = T.alloc_fragment((ROWS,), "float32")
            thread = T.get_thread_binding()
            sequence, own, first, end, index = build.variables(5)

            for i, d in T.Parallel(ROWS, dim):
                q_shared[i, d] = T.if_then_else(
                    i < group, tensors.q[token, head * group + T.min(i, group - 1), d], T.cast(0, dtype)
                )
            if thread == 0:
                count_shared[0] = 0
            T.sync_threads()
            for e in T.serial(T.ceildiv(offsets, THREADS)):
                if e * THREADS + thread < offsets:
                    if tensors.query_start_loc[e * THREADS + thread] <= token:
                        T.atomic_add(count_shared[0], 1)
            T.sync_threads()
            sequence = T.max(T.min(count_shared[0] - 1, sequences - 1), 0)
            own = -1
            if count_shared[0] - 1 == sequence:
                own = tensors.seq_lens[sequence] - tensors.query_start_loc[sequence + 1] + token
            first = split * tensors.each
            end = own + 1 if dense else k
            if has_length:
                end = T.min(end, tensors.topk_length[token])
            count = T.max(T.min(end - first, tensors.each), 0)
            T.clear(out_fragment)
            T.clear(total_fragment)
            T.fill(best_fragment, LEAST)
            for turn in T.serial(T.ceildiv(count, ROUND)):
                tiles = T.ceildiv(T.min(count - turn * ROUND, ROUND), tile)
                for e in T.serial(T.ceildiv(tiles * tile, THREADS)):
                    if e * THREADS + thread < tiles * tile:
                        index = first + turn * ROUND + e * THREADS + thread
                        if index >= end:
                            index = -1
                        elif dense:
                            index = T.if_then_else(index <= own, index, -1)
                        else:
                            found = tensors.topk_indices[token, index]
                            index = T.if_then_else((found >= 0) & (found <= T.cast(own, index_dtype)), T.cast(found, "int32"), -1)
                        if index >= 0:
                            index = tensors.block_tables[sequence, index // block_size] * block_size + index % block_size
                        shared.row[e * THREADS + thread] = index
                T.sync_threads()
                for t in T.unroll(stages - 1):
                    if t < tiles:
                        gather(tiles_of, tensors, shared, head, t)
                    ptx_commit_group()
                for t in T.serial(tiles):
                    ptx_wait_group(stages - 2)
                    T.fence_proxy_async()
                    T.sync_threads()  # the tile is there, and all have read the one that is overwritten next
                    if t + stages - 1 < tiles:
                        gather(tiles_of, tensors, shared, head, t + stages - 1)
                    ptx_commit_group()
                    T.gemm(
                        q_shared, shared.k[t % stages, :, :], score_fragment, transpose_B=True, clear_accum=True,
                        policy=T.GemmWarpPolicy.FullRow,
                    )  # fmt: skip
                    for i, j in T.Parallel(ROWS, tile):
                        score_fragment[i, j] = T.if_then_else(
                            shared.row[t * tile + j] >= 0, score_fragment[i, j] * tensors.scale, -T.infinity("float32")
                        )
                    T.copy(best_fragment, before_fragment)
                    T.reduce_max(score_fragment, best_fragment, dim=1, clear=False)
                    for i, j in T.Parallel(ROWS, tile):
                        score_fragment[i, j] = T.exp2(score_fragment[i, j] - best_fragment[i])
                    T.reduce_sum(score_fragment, sum_fragment, dim=1)
                    for i in T.Parallel(ROWS):
                        before_fragment[i] = T.exp2(before_fragment[i] - best_fragment[i])
                        total_fragment[i] = total_fragment[i] * before_fragment[i] + sum_fragment[i]
                    for i, d in T.Parallel(ROWS, dim):
                        out_fragment[i, d] = out_fragment[i, d] * before_fragment[i]
                    T.copy(score_fragment, share_fragment)
                    T.gemm(share_fragment, shared.v[t % stages, :, :], out_fragment, policy=T.GemmWarpPolicy.FullRow)

                ptx_wait_group(0)
                T.sync_threads()  # the rows and tiles of this turn are read

            if splits == 1:
                for i, d in T.Parallel(ROWS, dim):
                    if i < group:
                        tensors.part[token, head * group + i, d] = T.cast(
                            T.if_then_else(total_fragment[i] != 0.0, out_fragment[i, d] / total_fragment[i], 0.0), dtype
                        )
                for i in T.Parallel(ROWS):
                    if i < group:
                        tensors.sums[token, 0, head * group + i, 0] = T.if_then_else(
                            total_fragment[i] != 0.0,
                            (best_fragment[i] + T.log2(total_fragment[i])) * LN_2,
                            -T.infinity("float32"),
                        )
            else:
                for i, d in T.Parallel(ROWS, dim):
                    if i < group:
                        tensors.part[token, split, head * group + i, d] = out_fragment[i, d]
                for i in T.Parallel(ROWS):
                    if i < group:
                        tensors.sums[token, split, head * group + i, 0] = best_fragment[i]
                        tensors.sums[token, split, head * group + i, 1] = total_fragment[i]

    return sparse_attention_decode


@T.macro
def gather(tiles, tensors, shared, head, t):
    """Starts the copies of a tile's keys and values; those of positions that do not count become zeros."""
    for i, d in T.Parallel(tiles.tile, tiles.dim, annotations=ASYNC):
        shared.k[t % tiles.stages, i, d] = T.if_then_else(
            shared.row[t * tiles.tile + i] >= 0,
            tensors.k_cache[tiles.place(tensors, "k", shared.row[t * tiles.tile + i], head) * VECTOR + d],
            T.cast(0, tiles.dtype),
        )
    for i, d in T.Parallel(tiles.tile, tiles.dim, annotations=ASYNC):
        shared.v[t % tiles.stages, i, d] = T.if_then_else(
            shared.row[t * tiles.tile + i] >= 0,
            tensors.v_cache[tiles.place(tensors, "v", shared.row[t * tiles.tile + i], head) * VECTOR + d],
            T.cast(0, tiles.dtype),
        )


class Gather:
    """Constants of `gather`."""

    def __init__(self, problem: SparseDecodeProblem, config: Config) -> None:
        self.tile, self.stages, self.dim, self.dtype = config.tile, config.stages, problem.head_dim, problem.dtype
        self.block_size = problem.block_size

    def place(self, tensors: Any, name: str, row: Any, head: Any) -> Any:
        """Where a row of a cache starts, in units of 16 bytes."""
        block, token, of_head = (getattr(tensors, f"{name}_{part}") for part in ("block", "token", "head"))
        at = T.cast(row // self.block_size, "int64") * block + T.cast(row % self.block_size, "int64") * token
        return at + T.cast(head, "int64") * of_head


def merge_program(problem: SparseDecodeProblem, config: Config) -> Any:
    """The launch that adds up the parts of a query token and head, in order."""
    heads, dim, dtype, splits = problem.num_heads, problem.head_dim, problem.dtype, config.splits
    tokens = T.dynamic("tokens")
    out_strides = (T.dynamic("out_token_stride", "int64"), T.dynamic("out_head_stride", "int64"), 1)

    @T.prim_func
    def sparse_attention_decode_merge():
        tensors = build.parameters(
            part=T.Tensor((tokens, splits, heads, dim), "float32"),
            sums=T.Tensor((tokens, splits, heads, 2), "float32"),
            out=T.StridedTensor((tokens, heads, dim), out_strides, dtype),
            lse=T.Tensor((tokens, heads), "float32"),
        )
        with T.Kernel(tokens, heads, threads=dim) as (token, head):
            d = T.get_thread_binding()
            best, total, value, weight = build.variables(4, "float32")
            best = LEAST
            total = 0.0
            value = 0.0
            for split in T.serial(splits):
                best = T.max(best, tensors.sums[token, split, head, 0])
            for split in T.serial(splits):
                weight = T.exp2(tensors.sums[token, split, head, 0] - best)
                total = total + tensors.sums[token, split, head, 1] * weight
                value = value + tensors.part[token, split, head, d] * weight
            tensors.out[token, head, d] = T.cast(T.if_then_else(total != 0.0, value / total, 0.0), dtype)
            if d == 0:
                tensors.lse[token, head] = T.if_then_else(total != 0.0, (best + T.log2(total)) * LN_2, -T.infinity("float32"))

    return sparse_attention_decode_merge
