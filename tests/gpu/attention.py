"""Inputs of sparse attention with every trap in them, the exact answer, and torch's error on the same positions.

Positions that no query may see hold NaN: rows that were not selected, those after a sequence, blocks of nobody.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdn.ops.attention.inputs import own_positions
from tests.references import reference


@dataclass(frozen=True)
class Variant:
    """One compiled kernel per backend."""

    heads: int
    kv_heads: int
    dim: int = 256
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    index_dtype: torch.dtype = torch.int32
    layout: str = "stacked"  # one tensor; "pair"; "packed": K and V of a head in one row; "padded": blocks and tokens apart
    has_topk_length: bool = False
    has_gate: bool = False  # next to the raw query of its head, as in the layer


@dataclass(frozen=True)
class Inputs:
    arguments: dict[str, Any]  # of gdn.sparse_attention
    positions: list[Tensor]  # of each query token: those that count


def _caches(variant: Variant, blocks: int) -> tuple[Tensor, Tensor] | Tensor:
    shape = (blocks, variant.block_size, variant.kv_heads, variant.dim)
    options: dict[str, Any] = {"dtype": variant.dtype, "device": "cuda"}
    if variant.layout == "stacked":
        return torch.full((2, *shape), torch.nan, **options)
    if variant.layout == "packed":
        both = torch.full((*shape[:3], 2 * variant.dim), torch.nan, **options)
        return both[..., : variant.dim], both[..., variant.dim :]
    if variant.layout == "padded":
        wide = [torch.full((shape[0], shape[1] + 3, shape[2] + 1, shape[3]), torch.nan, **options) for _ in range(2)]
        return wide[0][:, : shape[1], : shape[2]], wide[1][:, : shape[1], : shape[2]]
    return torch.full(shape, torch.nan, **options), torch.full(shape, torch.nan, **options)


def make_inputs(variant: Variant, lengths: list[int], new: list[int], k: int, *, dense: bool = False, seed: int = 1) -> Inputs:
    """Sequences of `lengths` tokens, the last `new` of which are queries, and two tokens of padding.

    A row selects some of what it sees, with -1 between; every fifth selects nothing, and some a position after their own.
    """
    g = torch.Generator("cuda").manual_seed(seed)
    size, columns = variant.block_size, max(1, -(-max(lengths) // variant.block_size))
    count, tokens = len(lengths), sum(new) + 2
    kv_cache = _caches(variant, count * columns + 1)
    blocks = torch.randperm(count * columns + 1, device="cuda", generator=g)[: count * columns].int()
    tables = torch.full((count, columns + 2), -1, device="cuda", dtype=torch.int32)  # entries after the last are not followed
    tables[:, :columns] = blocks.view(count, columns)
    starts = torch.tensor([0, *new], device="cuda").cumsum(0).int()
    seq_lens = torch.tensor(lengths, device="cuda", dtype=torch.int32)
    own = own_positions(starts, seq_lens, tokens).tolist()
    wide = torch.full((tokens, k + 5), -1, device="cuda", dtype=variant.index_dtype)
    indices = wide[:, :k]
    length = (
        torch.randint(0, k + 1, (tokens,), device="cuda", generator=g, dtype=torch.int32) if variant.has_topk_length else None
    )
    positions = []
    for token in range(tokens):
        end = max(0, own[token] + 1)
        drawn = torch.randperm(end, device="cuda", generator=g)[: k * 3 // 4]
        if token % 5 == 4:
            drawn = drawn[:0]
        places = torch.randperm(k, device="cuda", generator=g)[: len(drawn)].sort().values
        indices[token, places] = drawn.to(variant.index_dtype)
        row = indices[token] if length is None else indices[token, : int(length[token])]
        positions.append(torch.arange(end, device="cuda") if dense else row[row >= 0].long())
        free = (indices[token] < 0).nonzero()
        sequence = int(torch.searchsorted(starts.long(), token, right=True)) - 1
        if len(free) and sequence < count and end < lengths[sequence]:
            indices[token, free[0, 0]] = end  # after its own: does not count
    for token, chosen in enumerate(positions):
        sequence = int(torch.searchsorted(starts.long(), token, right=True)) - 1
        if len(chosen):
            at = tables[sequence, chosen // size].long(), chosen % size
            for cache in (kv_cache[0], kv_cache[1]):
                rows = torch.randn(len(chosen), variant.kv_heads, variant.dim, device="cuda", generator=g).to(variant.dtype)
                cache[at] = torch.where(cache[at].isnan(), rows, cache[at])
    q = torch.randn(tokens, variant.heads, variant.dim, device="cuda", generator=g).to(variant.dtype)
    heads = torch.randn(tokens, variant.heads, 2 * variant.dim, device="cuda", generator=g).to(variant.dtype)
    arguments = {
        "q": q, "kv_cache": kv_cache, "topk_indices": None if dense else indices, "block_tables": tables[:, :columns],
        "query_start_loc": starts, "seq_lens": seq_lens, "topk_length": length,
        "gate": heads[..., variant.dim :] if variant.has_gate else None,
    }  # fmt: skip
    return Inputs(arguments, positions)


def exact(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """o and log-sum-exp in float64."""
    arguments = inputs.arguments | {"q": inputs.arguments["q"].double()}
    found = reference.sparse_attention(**arguments, return_lse=True)
    assert isinstance(found, tuple)
    return found


def of_torch(inputs: Inputs) -> Tensor:
    """Torch's attention in the same dtype on the gathered rows of each query, and its gate."""
    arguments = inputs.arguments
    q, kv_cache, tables = arguments["q"], arguments["kv_cache"], arguments["block_tables"]
    out, size, kv_heads = torch.zeros_like(q), kv_cache[0].shape[1], kv_cache[0].shape[2]
    starts = arguments["query_start_loc"].long()
    for token, chosen in enumerate(inputs.positions):
        if len(chosen):
            sequence = int(torch.searchsorted(starts, token, right=True)) - 1
            at = tables[sequence, chosen // size].long(), chosen % size
            rows = [cache[at].transpose(0, 1).repeat_interleave(q.shape[1] // kv_heads, 0)[None] for cache in kv_cache]
            out[token] = torch.nn.functional.scaled_dot_product_attention(q[token][None, :, None], *rows)[0, :, 0]
    return out if arguments["gate"] is None else torch.nn.functional.glu(torch.cat([out, arguments["gate"]], dim=-1))


def head_errors(o: Tensor, exact_o: Tensor) -> Tensor:
    """Largest relative error of a row, per head; 1 where a row that should be 0 is not, and NaN where one is."""
    norm = exact_o.norm(dim=2)
    difference = (o.double() - exact_o).norm(dim=2)
    return torch.where(norm > 0, difference / norm, (difference != 0).double()).amax(0)
