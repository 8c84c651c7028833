"""Exact results of attention over a paged cache, in float64 and independent of the references."""

import torch

from gdn.testing.expected import Arguments, Call, Expected, Pair, Pairs, often

_PART_BYTES = 2**28  # of scores of attention at a time


def _attention(call: Call, before: Arguments) -> Pairs:
    """Softmax over all positions of each sequence, masked: those after the query, and those not selected; then the gate."""
    q, caches, selected = before["q"], before["kv_cache"], before.get("topk_indices")
    bounds, lengths, block_size = before["query_start_loc"].tolist(), before["seq_lens"].tolist(), caches[0].shape[1]
    scale = q.shape[2] ** -0.5 if before["scale"] is None else before["scale"]
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for n, (start, end, length) in enumerate(zip(bounds[:-1], bounds[1:], lengths, strict=True)):
        if start == end:
            continue
        positions = torch.arange(length, device=q.device)
        rows = before["block_tables"][n].long()[positions // block_size] * block_size + positions % block_size
        groups = q.shape[1] // caches[0].shape[2]
        keys, values = (one.flatten(0, 1)[rows].double().repeat_interleave(groups, dim=1).transpose(0, 1) for one in caches)
        step = max(1, _PART_BYTES // (8 * q.shape[1] * length))
        for low in range(start, end, step):
            part = slice(low, min(low + step, end))
            own = torch.arange(part.start, part.stop, device=q.device) - end + length
            hidden = positions > own[:, None]
            if selected is not None:
                index = selected[part].long()
                listed = torch.zeros(len(index), length + 1, dtype=torch.bool, device=q.device)
                hidden |= ~listed.scatter_(1, torch.where(index < 0, length, index), True)[:, :length]
            scores = (q[part].double().transpose(0, 1) @ keys.mT * scale).masked_fill(hidden, -torch.inf)
            out[part] = (scores.softmax(dim=-1).nan_to_num(0.0) @ values).transpose(0, 1)
    if before["gate"] is not None:
        out = out * before["gate"].double().sigmoid()
    return [Pair(call.result.flatten(0, 1), out.flatten(0, 1), often(q))]


EXPECTED: Expected = {
    "sparse_attention": _attention,
    "attention": _attention,
}
