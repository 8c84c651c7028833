"""Builds the libraries of the chunk kernel."""

from typing import Any

from gdn.ops.delta_rule.problem import ChunkProblem
from kernels_tl.chunk.chain import chain
from kernels_tl.chunk.fused import fused
from kernels_tl.chunk.prepare import prepare
from kernels_tl.chunk.segments import starts, summaries
from kernels_tl.common import build

# The kernels set every barrier themselves: the compiler's own would be in each chunk of the chain.
_OWN_BARRIERS = {"tl.disable_thread_storage_sync": True, "tl.disable_data_race_check": True, "tl.enable_fast_math": True}


def libraries(problem: ChunkProblem, config: Any, in_one_launch: bool) -> dict[str, bytes]:
    """Libraries of one variant, by entry."""
    functions = _kernels(problem, config, in_one_launch)
    return {name: build.library(function, pass_configs=_OWN_BARRIERS) for name, function in functions.items()}


def _kernels(problem: ChunkProblem, config: Any, in_one_launch: bool) -> dict[str, Any]:
    decides = config.split_if_longest_exceeds > 0
    if in_one_launch:
        return {"chunk_fused": fused(problem, config.cluster_size, decides)}
    split = config.split_chunks > 0
    functions = {"chunk_prepare": prepare(problem, decides), "chunk_chain": chain(problem, split, decides)}
    if split:
        functions |= {"chunk_summaries": summaries(problem, decides), "chunk_starts": starts(problem, decides)}
    return functions
