"""Bulk copies by one warp: a call for all 32 lanes, of which one starts the copy."""

from typing import Any

import tilelang.language as T


def bulk_load(source: Any, target: Any, barrier: Any) -> Any:
    """Copies a region of global memory into shared memory; the barrier counts its bytes."""
    return T.tma_copy(source, target, barrier=barrier, leader_scope_threads=32)


def bulk_store(source: Any, target: Any) -> Any:
    """Copies a region of shared memory into global memory."""
    return T.tma_copy(source, target, leader_scope_threads=32)
