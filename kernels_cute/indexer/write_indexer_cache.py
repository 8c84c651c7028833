"""Key rows into the indexer's cache, in the cache's form: e4m3 with a scale per row, plain e4m3, or bfloat16.

Tensors: k [L, kv_heads, D] bfloat16 | float16, slot_mapping [L], cache [pages, elements of a page].
`gdn.problems.WriteIndexerCacheParams` is the contract. A group of lanes owns a row; `rows.py` describes it in registers and
in a page. The results are bit for bit the reference's.
"""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Uint32

from gdn.device import DeviceSpec
from gdn.problems import WriteIndexerCacheParams, WriteIndexerCacheProblem
from kernels_cute.common import build
from kernels_cute.common.memory import fake
from kernels_cute.indexer import rows as _indexer_rows
from kernels_cute.indexer.rows import WORDS, IndexerRows, form_of, row_offset


@dataclass(frozen=True)
class Config:
    threads: int  # threads of a block


def refusal(problem: WriteIndexerCacheProblem) -> str | None:
    indices = {"slot_mapping": problem.slot_dtype}
    return _indexer_rows.refusal(problem.head_dim, {"k": problem.dtype}, problem.cache_dtype, indices)


def default_config(problem: WriteIndexerCacheProblem, device: DeviceSpec) -> Config:
    """Blocks small enough to reach every SM."""
    threads_wanted = problem.num_tokens * problem.num_kv_heads * _indexer_rows.lanes_of(problem.head_dim)
    return Config(128 if threads_wanted >= 256 * device.num_sms else 32)


def _fakes(problem: WriteIndexerCacheProblem) -> WriteIndexerCacheParams:
    tokens = cute.sym_int()
    k = fake(problem.dtype, tokens, problem.num_kv_heads, problem.head_dim, last=1)
    return WriteIndexerCacheParams(k, fake(problem.cache_dtype, None, None, last=1), fake(problem.slot_dtype, tokens))


class _WriteIndexerCache(IndexerRows, params=WriteIndexerCacheParams):
    def __init__(self, problem: WriteIndexerCacheProblem, config: Config) -> None:
        super().__init__(problem.head_dim, 0, config.threads)
        self.kv_heads, self.dtype, self.form = problem.num_kv_heads, problem.dtype, form_of(problem.cache_dtype)

    def blocks(self, params: WriteIndexerCacheParams) -> Any:
        return (params.k.shape[0] * self.kv_heads + self.groups - 1) // self.groups

    @cute.kernel
    def kernel(self, params: WriteIndexerCacheParams):
        block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        lane = thread % self.lanes
        item = block * self.groups + thread // self.lanes
        token, head, is_live = self.live_item(item, params.k.shape[0], self.kv_heads)
        slot = params.slot_mapping[token]
        rWords = cute.make_rmem_tensor(WORDS, Uint32)
        self.load_row(params.k, row_offset(params.k, token, head), lane, rWords, 0)
        self.write_cache(rWords, self.dtype, params.cache, slot, head, lane, is_live)


fits, configs, compile, launch, workspace_bytes = build.step(_WriteIndexerCache, _fakes, Config, threads=(32, 64, 128, 256))
