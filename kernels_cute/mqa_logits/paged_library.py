"""Builds the library of paged logits."""

from typing import Any

import cutlass

from gdn.ops.indexer.problem import PagedMqaLogitsParams, PagedMqaLogitsProblem
from kernels_cute.common import build
from kernels_cute.common.memory import fake
from kernels_cute.mqa_logits.kernel import PagedLogits
from kernels_cute.mqa_logits.shape import DraftColumns
from kernels_cute.mqa_logits.tiles import PagedTiles


def _fakes(problem: PagedMqaLogitsProblem) -> PagedMqaLogitsParams:
    """Fake tensors and numbers of a launch."""
    p = problem
    page = p.page_size * p.num_kv_heads * (p.head_dim + 4 * p.has_k_scale)
    # Contiguous by contract: the strides are not read, and left open because those of extent-1 modes may be anything.
    q = fake(p.dtype, None, None, p.num_heads, p.head_dim, last=1, align=16)
    cache = fake("uint8" if p.has_k_scale else p.dtype, None, page, last=1, align=16)
    context_lens = fake("int32", None, p.next_n, last=1) if p.per_draft_lengths else fake("int32", None)
    weights, block_tables = fake(p.weights_dtype, None, p.num_heads, last=1), fake("int32", None, None, last=1)
    scalars = (cutlass.Float32(1.0), cutlass.Int32(0))
    return PagedMqaLogitsParams(q, cache, weights, context_lens, block_tables, fake(p.out_dtype, None, None, last=1), *scalars)


def library(
    entry: str, problem: PagedMqaLogitsProblem, config: Any, drafts: DraftColumns, kv_heads_per_round: int
) -> dict[str, bytes]:
    tiles = PagedTiles(problem, config, drafts, kv_heads_per_round)
    return build.one_entry(entry, PagedLogits(tiles), (*_fakes(problem), cutlass.Int32(0)))
