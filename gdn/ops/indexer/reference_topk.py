"""Exact, deterministic top-k over rows of logits, and token positions of compressed keys."""

import torch
from torch import Tensor

from gdn.ops.indexer.reference_logits import key_range, mqa_logits, paged_mqa_logits, visible_lengths
from gdn.reference_modes import inference_only

BLOCK_BYTES = 64 * 1024 * 1024  # logits per step of the selection
INT32_MAX = 2**31 - 1


def _select(values: Tensor, k: int, sorted_by: str) -> Tensor:
    """values [rows, n], -inf where nothing may be selected -> columns [rows, k] int64, -1 after the last selected one.

    All values above the k-th largest are selected; of the values equal to it, the leftmost that still fit.
    """
    rows, n = values.shape
    if n == 0 or k == 0:
        return torch.full((rows, k), -1, dtype=torch.int64, device=values.device)
    kept = min(k, n)
    threshold = values.topk(kept, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    above = values > threshold
    equal = (values == threshold) & (values > -torch.inf)
    places = kept - above.sum(dim=1, keepdim=True, dtype=torch.int32)
    chosen = above | (equal & (equal.cumsum(dim=1, dtype=torch.int32) <= places))
    # A chosen column goes to the place given by the number chosen before it, all others to a last place that is cut off.
    place = torch.where(chosen, chosen.cumsum(dim=1, dtype=torch.int32).long() - 1, k)
    columns = torch.arange(n, device=values.device).expand(rows, n)
    picked = torch.full((rows, k + 1), -1, dtype=torch.int64, device=values.device)
    picked = picked.scatter_(1, place, columns)[:, :k].contiguous()
    if sorted_by == "score":
        score = values.gather(1, picked.clamp(min=0)).masked_fill_(picked < 0, -torch.inf)
        # Stable, and columns ascend already: equal scores stay in column order, and -1 (the only -inf) stays last.
        picked = picked.gather(1, score.sort(dim=1, descending=True, stable=True).indices)
    return picked


def column_range(logits: Tensor, row_starts: Tensor | None, row_ends: Tensor | None) -> tuple[Tensor, Tensor]:
    """First column and end of each row's range, clamped; None = 0 and n."""
    rows, n = logits.shape
    zeros = torch.zeros(rows, dtype=torch.int64, device=logits.device)
    return key_range(zeros if row_starts is None else row_starts, zeros + n if row_ends is None else row_ends, n)


@inference_only
def topk_indices(
    logits: Tensor,
    k: int,
    row_starts: Tensor | None = None,
    row_ends: Tensor | None = None,
    *,
    sorted_by: str = "index",
    out: Tensor | None = None,
) -> Tensor:
    """`gdn.topk_indices`."""
    rows, n = logits.shape
    if out is None:
        out = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    start, end = column_range(logits, row_starts, row_ends)
    columns = torch.arange(n, device=logits.device)
    block = max(1, BLOCK_BYTES // max(1, n * 4))
    for low in range(0, rows, block):
        part = slice(low, min(low + block, rows))
        first = start[part, None]
        hidden = (columns < first) | (columns >= end[part, None]) | logits[part].isnan()
        picked = _select(logits[part].masked_fill(hidden, -torch.inf), k, sorted_by)
        out[part] = torch.where(picked >= 0, picked - first, -1).to(torch.int32)
    return out


def list_short_rows(picked: Tensor, lengths: Tensor) -> Tensor:
    """Rows with at most k visible keys list them all, whatever their scores: picked [rows, k] int32, lengths [rows]."""
    k = picked.shape[1]
    columns = torch.arange(k, device=picked.device, dtype=torch.int32)
    listed = columns.where(columns < lengths[:, None], torch.full_like(columns, -1))
    return torch.where(lengths[:, None] <= k, listed, picked)


@inference_only
def indexer_topk(
    q: Tensor, k: Tensor, weights: Tensor | None, cu_seqlen_ks: Tensor, cu_seqlen_ke: Tensor, topk: int, *,
    k_scale: Tensor | None = None, scale: float = 1.0, relu: bool = True, workspace_bytes: int | None = None,
    max_seqlen_k: int | None = None, ratio: int = 1, positions: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`gdn.indexer_topk`; all scores at once, whatever workspace_bytes says."""
    start, end = key_range(cu_seqlen_ks, cu_seqlen_ke, k.shape[0])
    lengths = end - start if max_seqlen_k is None else (end - start).clamp(max=max_seqlen_k)
    first = start if max_seqlen_k is None else torch.zeros_like(start)  # column of a row's first key
    logits = mqa_logits(q, k, weights, start, end, k_scale=k_scale, scale=scale, relu=relu, max_seqlen_k=max_seqlen_k)
    picked = list_short_rows(topk_indices(logits, topk, first, first + lengths), lengths)
    return _listed(picked, positions, ratio, out)


@inference_only
def paged_indexer_topk(
    q: Tensor, cache: Tensor, weights: Tensor | None, context_lens: Tensor, block_tables: Tensor, topk: int, *,
    scale: float = 1.0, relu: bool = True, workspace_bytes: int | None = None, max_context_len: int | None = None, ratio: int = 1,
    positions: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`gdn.paged_indexer_topk`; all scores at once, whatever workspace_bytes says."""
    width = block_tables.shape[1] * cache.shape[1]
    width = width if max_context_len is None else min(width, max_context_len)
    lengths = visible_lengths(context_lens, q.shape[0], q.shape[1], width)
    logits = paged_mqa_logits(q, cache, weights, lengths.view(q.shape[:2]), block_tables, width, scale=scale, relu=relu)
    picked = list_short_rows(topk_indices(logits, topk, None, lengths), lengths)
    return _listed(picked, positions, ratio, out)


def _listed(picked: Tensor, positions: Tensor | None, ratio: int, out: Tensor | None) -> Tensor:
    """The selected columns, or with positions the tokens of these groups."""
    if positions is not None:
        return expand_topk_groups(picked, positions, ratio=ratio, out=out)
    return picked if out is None else out.copy_(picked)


@inference_only
def expand_topk_groups(group_indices: Tensor, positions: Tensor, *, ratio: int = 4, out: Tensor | None = None) -> Tensor:
    """`gdn.expand_topk_groups`. An int64 value that does not fit int32 is not a group, and as a position has no tail."""
    tokens, k = group_indices.shape
    device = group_indices.device
    if out is None:
        out = torch.empty(tokens, k * ratio + ratio - 1, dtype=torch.int32, device=device)
    groups = group_indices.long()[:, :, None]
    is_group = (groups >= 0) & (groups <= INT32_MAX)
    members = torch.where(is_group, groups * ratio + torch.arange(ratio, device=device), -1).flatten(1)
    position = positions.long()[:, None]
    tail = (position + 1) // ratio * ratio + torch.arange(ratio - 1, device=device)
    tail = torch.where((tail <= position) & (position >= 0) & (position <= INT32_MAX), tail, -1)
    listed = torch.cat([members, tail], dim=1)
    order = (listed < 0).to(torch.uint8).sort(dim=1, stable=True).indices
    out.copy_(listed.gather(1, order))
    return out
