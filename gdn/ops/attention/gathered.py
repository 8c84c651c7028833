"""Dense attention of prefill rows in torch, on keys and values that are gathered from the pages first."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gdn.ops.attention import torch_attention
from gdn.ops.attention.host_lengths import HostSequence
from gdn.ops.attention.pages import Pages

_GATHERED_BYTES = 2**30  # of keys and values gathered at a time, or one sequence's


def attend(
    q: Tensor, pages: Pages, sequences: Sequence[HostSequence], scale: float, gate: Tensor | None, o: Tensor, lse: Tensor
) -> None:
    """Write o and lse of the sequences' rows, and zeros to the rows of o after the last of them. pages: of the whole call."""
    last = sequences[-1]
    o[last.token + last.query_len :].zero_()
    for group in _groups(sequences, pages.k_cache):
        _attend_equal(q, pages, group, scale, gate, o, lse)


def _groups(sequences: Sequence[HostSequence], cache: Tensor) -> Iterator[list[HostSequence]]:
    """Neighbours of equal lengths, as many as may be gathered at a time; sequences without new tokens are left out."""
    row_bytes = 2 * cache.shape[2] * cache.shape[3] * cache.element_size()
    live = [one for one in sequences if one.query_len]
    while live:
        first, most = live[0], max(1, _GATHERED_BYTES // (row_bytes * live[0].seq_len))
        lengths = [(one.row - n, one.query_len, one.seq_len) for n, one in enumerate(live[:most])]
        count = next((n for n, one in enumerate(lengths) if one != (first.row, first.query_len, first.seq_len)), len(lengths))
        yield live[:count]
        live = live[count:]


def _attend_equal(
    q: Tensor, pages: Pages, group: Sequence[HostSequence], scale: float, gate: Tensor | None, o: Tensor, lse: Tensor
) -> None:
    """Attention of sequences of equal lengths."""
    (first, token, query_len, seq_len), count = group[0], len(group)
    blocks = pages.block_tables[first : first + count, : -(-seq_len // pages.k_cache.shape[1])]
    keys, values = (
        cache.index_select(0, blocks.flatten()).unflatten(0, blocks.shape).flatten(1, 2)[:, :seq_len] for cache in pages[:2]
    )  # [sequences, seq_len, kv_heads, D]
    rows, shape = slice(token, token + count * query_len), (count, query_len)
    found, found_lse = torch_attention.attend(q[rows].unflatten(0, shape), keys, values, scale)
    target = o[rows].unflatten(0, shape)
    if gate is None:
        target.copy_(found)
    else:
        torch.ops.aten.glu.out(torch.cat([found, gate[rows].unflatten(0, shape)], dim=-1), -1, out=target)
    lse[rows].unflatten(0, shape).copy_(found_lse)
