"""Seeded selections of positions for sparse attention: shared by the tests and the autotuner."""

import torch
from torch import Tensor

_ROWS = 256  # rows whose random scores are held at a time


def own_positions(query_start_loc: Tensor, seq_lens: Tensor, tokens: int) -> Tensor:
    """Position of each query token in its sequence, [tokens] int64; -1 after the last sequence."""
    bounds, token = query_start_loc.long(), torch.arange(tokens, device=seq_lens.device)
    sequence = torch.searchsorted(bounds, token, right=True) - 1
    real = (sequence >= 0) & (sequence < seq_lens.numel())
    sequence = sequence.clamp(0, seq_lens.numel() - 1)
    return torch.where(real, seq_lens.long()[sequence] - bounds[sequence + 1] + token, -1)


def random_positions(ends: Tensor, k: int, run: int, generator: torch.Generator) -> Tensor:
    """k different positions below each end, [rows, k] int64, ascending; -1 last where there are fewer.

    run: positions come in aligned groups of this many neighbours.
    """
    device, most = ends.device, max(1, int(ends.max()) // run)
    count = min(k // run, most)
    rows = []
    for low in range(0, len(ends), _ROWS):
        groups = ends[low : low + _ROWS, None] // run
        score = torch.rand(len(groups), most, dtype=torch.float32, device=device, generator=generator)
        score = score.masked_fill(torch.arange(most, device=device) >= groups, -1.0)
        found = score.topk(count, dim=1)
        chosen = torch.where(found.values < 0, most, found.indices).sort(dim=1).values
        members = chosen[:, :, None] * run + torch.arange(run, device=device)
        rows.append(torch.where(chosen[:, :, None] < most, members, -1).flatten(1))
    return torch.nn.functional.pad(torch.cat(rows), (0, k - count * run), value=-1)


def kept_positions(ends: Tensor, k: int, share: float, generator: torch.Generator) -> Tensor:
    """Random positions; each row keeps this share of the positions of the row before, and draws the others anew."""
    device, limits = ends.device, ends.tolist()
    found = torch.full((len(limits), k), -1, dtype=torch.int64, device=device)
    last = torch.empty(0, dtype=torch.int64, device=device)
    for row, end in enumerate(limits):
        count = min(k, end)
        kept = last[torch.randperm(len(last), device=device, generator=generator)[: min(count, round(share * len(last)))]]
        score = torch.rand(max(end, 0), dtype=torch.float32, device=device, generator=generator)
        score[kept] = -1.0
        drawn = score.topk(count - len(kept)).indices
        last = torch.cat([kept, drawn]).sort().values
        found[row, :count] = last
    return found
