"""FlashQLA's prefill kernel."""

import importlib
from collections.abc import Mapping
from typing import Any

from autotune.peers import Peer, keys_first, operands
from gdn.problems import ChunkProblem


def chunk(problem: ChunkProblem, arguments: Mapping[str, Any]) -> list[Peer]:
    """The prefill kernel, with and without the norm."""
    x = operands(problem, arguments)
    prefill = importlib.import_module("flash_qla").chunk_gated_delta_rule
    return [Peer("", norm, keys_first(prefill, x, norm, x.cu_seqlens), True) for norm in (True, False)]
