"""Cached key rows of N sequences out of their pages, packed: row r of sequence n goes to row cu_seqlens[n] + r.

Tensors: cache [pages, elements of a page], block_tables [N, max_pages] int32, cu_seqlens [N + 1] -> k [rows, kv_heads * D],
k_scale [rows, kv_heads] float32. `gdn.ops.indexer.problem.GatherIndexerCacheParams` is the contract.

A warp owns `rows` neighbouring rows. Each lane finds one row's sequence by bisection (cu_seqlens stays in L1), its page and
its offset there; then all lanes copy the rows in 16-byte pieces, all loads before the first store, with addresses by shuffle.
"""

from dataclasses import dataclass

from gdn.device import DeviceSpec
from gdn.ops.indexer.problem import GatherIndexerCacheProblem
from kernels_cute.common import choice
from kernels_cute.common.choice import ACCESS_BYTES, INDEX_DTYPES, space, unserved
from kernels_cute.indexer.forms import CACHE_DTYPES, row_bytes

launch, workspace_bytes = choice.launch, choice.no_workspace


@dataclass(frozen=True)
class Config:
    threads: int  # threads of a block
    rows: int  # rows of a warp: more bytes in flight, fewer blocks


def refusal(problem: GatherIndexerCacheProblem) -> str | None:
    dtypes = {CACHE_DTYPES: {"a cache": problem.cache_dtype}, INDEX_DTYPES: {"cu_seqlens": problem.cu_seqlens_dtype}}
    if (reason := unserved(dtypes)) is not None:
        return reason
    if problem.num_kv_heads < 1 or row_bytes(problem) % ACCESS_BYTES:
        return f"requires rows of a multiple of 16 bytes, got {row_bytes(problem)} bytes"
    return None


def default_config(problem: GatherIndexerCacheProblem, device: DeviceSpec) -> Config:
    """The most rows per warp that leave every SM 16 warps; blocks of one warp for few rows."""
    for rows in (32, 16, 8):
        if problem.num_rows >= rows * 16 * device.num_sms:
            return Config(128, rows)
    return Config(32, 8 if problem.num_rows >= 8 * 2 * device.num_sms else 4)


fits, configs = space(Config, threads=(32, 64, 128), rows=(4, 8, 16, 32))


def compile(problem: GatherIndexerCacheProblem, config: Config) -> dict[str, bytes]:
    from kernels_cute.indexer.gather_indexer_cache_kernel import library

    return library(problem, config)
