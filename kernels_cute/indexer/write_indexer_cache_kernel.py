"""Kernel of write_indexer_cache.py, which has its formulas and tensors: the arguments to compile for, and the body."""

from typing import Any

import cutlass.cute as cute
from cutlass import Uint32

from gdn.ops.indexer.problem import WriteIndexerCacheParams, WriteIndexerCacheProblem
from kernels_cute.common import build
from kernels_cute.common.memory import fake
from kernels_cute.indexer.forms import WORDS, form_of
from kernels_cute.indexer.rows import IndexerRows, row_offset


def _fakes(problem: WriteIndexerCacheProblem) -> WriteIndexerCacheParams:
    tokens = cute.sym_int()
    k = fake(problem.dtype, tokens, problem.num_kv_heads, problem.head_dim, last=1)
    return WriteIndexerCacheParams(k, fake(problem.cache_dtype, None, None, last=1), fake(problem.slot_dtype, tokens))


class _WriteIndexerCache(IndexerRows, params=WriteIndexerCacheParams):
    def __init__(self, problem: WriteIndexerCacheProblem, config: Any) -> None:
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


def library(problem: WriteIndexerCacheProblem, config: Any) -> dict[str, bytes]:
    return build.one_entry(problem.op, _WriteIndexerCache(problem, config), _fakes(problem))
