"""Builds the libraries of a top-k."""

from collections.abc import Mapping
from typing import Any

import cutlass
import cutlass.cute as cute

from gdn.ops.indexer.problem import TopkParams, TopkProblem
from kernels_cute.common.build import library
from kernels_cute.common.memory import fake
from kernels_cute.topk.kernel import Topk
from kernels_cute.topk.tiles import Tiles


def _arguments(problem: TopkProblem) -> TopkParams:
    """Fake tensors and scalars to compile for."""
    rows = cute.sym_int()
    logits, out = [fake(dtype, rows, None, last=1) for dtype in (problem.dtype, "int32")]
    starts, ends, positions = [fake(one, None) for one in (problem.starts_dtype, problem.ends_dtype, problem.position_dtype)]
    list_short, num_keys, drafts = [cutlass.Int32(number) for number in (0, -1, 1)]
    return TopkParams(logits, starts, ends, positions, out, list_short, num_keys, drafts)


def libraries(problem: TopkProblem, entries: Mapping[str, Any]) -> dict[str, bytes]:
    """entries: configurations by name."""
    return {name: library(name, Topk(Tiles(problem, config)), *_arguments(problem)) for name, config in entries.items()}
