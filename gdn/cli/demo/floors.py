"""Least times of the demo's calls: bytes through device memory, and arithmetic on tensor cores.

What a call needs is mostly what its problem says. Where it depends on the values in tensors (how many positions are visible),
they are counted here.
"""

from collections.abc import Callable, Sequence

import torch

from gdn.core.check import dtype_name
from gdn.problem import Problem
from gdn.testing.expected import Call
from gdn.testing.timing import Limits

Tensor = torch.Tensor


def floor_us(call: Call, problems: Sequence[Problem | None], limits: Limits) -> float:
    """Microseconds that the device needs at least for the call. problems: those of the kernels that it runs, in order."""
    counted = _COUNTED.get(call.operator)
    if counted is not None:
        flops, num_bytes = counted(call)
        return limits.floor_us(flops, num_bytes, dtype_name(call.before["q"].dtype))
    known = [problem for problem in problems if problem is not None]
    return sum(limits.floor_us(one.flops(), one.bytes_moved(), str(getattr(one, "dtype", "bfloat16"))) for one in known)


def _bytes(*tensors: Tensor | None) -> int:
    return sum(one.numel() * one.element_size() for one in tensors if one is not None)


def _attention(call: Call) -> tuple[int, int]:
    """Products with the visible positions; queries, gates, results, indices, and the keys and values of each sequence once."""
    given, q = call.before, call.before["q"]
    k_cache = given["kv_cache"][0]
    new, lengths = given["query_start_loc"].long().diff(), given["seq_lens"].long()
    selected = given.get("topk_indices")
    # Tokens at the end of a sequence of n see n, n - 1, ... positions.
    visible = int((new * lengths - new * (new - 1) // 2).sum()) if selected is None else int((selected >= 0).sum())
    rows = min(visible, int(lengths[new > 0].sum()))
    row_bytes = 2 * k_cache.shape[2] * k_cache.shape[3] * k_cache.element_size()
    return 4 * visible * q.shape[1] * q.shape[2], 2 * _bytes(q) + _bytes(given["gate"], selected) + rows * row_bytes


def _scored(visible: Tensor, topk: int) -> int:
    """Keys that are scored: all visible ones of rows that see more than are selected."""
    return int(visible[visible > topk].sum())


def _ragged(call: Call) -> tuple[int, int]:
    given, q = call.before, call.before["q"]
    scored = _scored((given["cu_seqlen_ke"] - given["cu_seqlen_ks"]).long(), given["topk"])
    num_bytes = _bytes(q, given["k"], given["k_scale"], given["weights"], call.result)
    return 2 * scored * q.shape[1] * q.shape[2], num_bytes


def _paged(call: Call) -> tuple[int, int]:
    given, q, cache = call.before, call.before["q"], call.before["cache"]
    visible = given["context_lens"].long().reshape(q.shape[0], -1)
    scored = _scored(visible, given["topk"])
    row_bytes = cache[0, 0].numel() * cache.element_size()
    keys = int(visible.amax(1).clamp(min=0).sum())
    return 2 * scored * q.shape[2] * q.shape[3], _bytes(q, given["weights"], call.result) + keys * row_bytes


_COUNTED: dict[str, Callable[[Call], tuple[int, int]]] = {
    "attention": _attention, "sparse_attention": _attention, "indexer_topk": _ragged, "paged_indexer_topk": _paged,
}  # fmt: skip
