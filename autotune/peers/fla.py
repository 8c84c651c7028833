"""FLA's prefill kernels.

Their GPU time is summed by the profiler: a CUDA graph cannot capture their launches, and the host bounds them.
"""

import importlib
from collections.abc import Mapping
from typing import Any

from autotune.peers import Peer, keys_first, operands
from gdn.problems import ChunkProblem


def chunk(problem: ChunkProblem, arguments: Mapping[str, Any]) -> list[Peer]:
    """The prefill kernels with the norm. Where FlashQLA is installed, FLA calls that, unless FLA_FLASH_QLA=0 is set."""
    x = operands(problem, arguments)
    prefill = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    return [Peer("", True, keys_first(prefill, x, True, x.cu_seqlens.long()), False)]
