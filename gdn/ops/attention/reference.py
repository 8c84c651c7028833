"""Attention over the positions that the indexer selected, in plain torch.

For query token t of a sequence (query head h, its key head g = h // (heads / kv_heads)) and its selected positions J:

    s_j = scale * q[t, h] . k[j, g]      lse = log sum_{j in J} exp(s_j)      o = sum_j exp(s_j - lse) v[j, g]

Computed in float32. A position j counts if 0 <= j <= the query's own (causal); without any, o is 0 and lse is -inf. With a gate
o, rounded to the dtype of q, is multiplied by sigmoid(gate).
"""

import torch
from torch import Tensor

from gdn.reference_modes import compute_dtype, inference_only

BLOCK_BYTES = 256 * 1024 * 1024  # gathered keys and values at a time


def query_positions(query_start_loc: Tensor, seq_lens: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Sequence and position of each query token, [tokens] int64 each; position -1 for padding after the last sequence.

    query_start_loc [N + 1]; seq_lens [N]: cached tokens plus new ones, which come last.
    """
    bounds = query_start_loc.long().contiguous()  # searchsorted warns otherwise
    token = torch.arange(num_tokens, device=bounds.device)
    sequence = torch.searchsorted(bounds, token, right=True) - 1
    real = (sequence >= 0) & (sequence < seq_lens.numel())
    sequence = sequence.clamp(0, max(0, seq_lens.numel() - 1))
    position = seq_lens.long()[sequence] - (bounds[sequence + 1] - token)
    return sequence, torch.where(real, position, -1)


@inference_only
def sparse_attention(
    q: Tensor, kv_cache: Tensor | tuple[Tensor, Tensor], topk_indices: Tensor | None, block_tables: Tensor,
    query_start_loc: Tensor, seq_lens: Tensor, *, topk_length: Tensor | None = None, scale: float | None = None,
    return_lse: bool = False, max_query_len: int | None = None, gate: Tensor | None = None, out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`gdn.sparse_attention`: o [tokens, heads, D], and lse [tokens, heads] float32 on request.

    topk_indices None: all positions.
    """
    k_cache, v_cache = kv_cache[0], kv_cache[1]
    num_tokens, num_heads, dim = q.shape
    num_blocks, block_size, kv_heads, _ = k_cache.shape
    group = num_heads // kv_heads
    dtype = compute_dtype(q)
    if scale is None:
        scale = dim**-0.5
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full((num_tokens, num_heads), -torch.inf, dtype=dtype, device=q.device)
    if topk_indices is None:
        topk_indices = torch.arange(block_tables.shape[1] * block_size, device=q.device).expand(num_tokens, -1)
    k = topk_indices.shape[1]
    if num_tokens == 0 or k == 0 or num_blocks == 0 or seq_lens.numel() == 0 or block_tables.shape[1] == 0:
        out.zero_()
        return (out, lse.float()) if return_lse else out

    sequence, position = query_positions(query_start_loc, seq_lens, num_tokens)
    step = max(1, BLOCK_BYTES // (2 * k * kv_heads * dim * dtype.itemsize))
    for low in range(0, num_tokens, step):
        part = slice(low, min(low + step, num_tokens))
        index = topk_indices[part].long()
        valid = (index >= 0) & (index <= position[part, None])
        if topk_length is not None:
            valid &= torch.arange(k, device=q.device) < topk_length[part, None]
        index = torch.where(valid, index, 0)
        column = (index // block_size).clamp(max=block_tables.shape[1] - 1)
        block = block_tables[sequence[part, None], column].long().clamp(0, num_blocks - 1)
        mask = valid[:, :, None, None]
        # Selection instead of a product with the mask: rows that do not count may hold NaN.
        keys = torch.where(mask, k_cache[block, index % block_size].to(dtype), 0.0)  # [m, k, kv_heads, D]
        values = torch.where(mask, v_cache[block, index % block_size].to(dtype), 0.0)
        queries = q[part].to(dtype).unflatten(1, (kv_heads, group))
        score = torch.einsum("mgrd,mkgd->mgrk", queries, keys) * scale
        score = score.masked_fill(~valid[:, None, None], -torch.inf)
        row_lse = score.logsumexp(dim=-1)
        share = torch.exp(score - row_lse[..., None]).masked_fill(~valid[:, None, None], 0.0)
        o = torch.einsum("mgrk,mkgd->mgrd", share, values).flatten(1, 2).to(out.dtype)
        # Contiguous: on the CPU the last bit of a sigmoid depends on the strides.
        if gate is not None:
            o = o.to(dtype) * gate[part].to(dtype).contiguous().sigmoid()
            o = o.masked_fill(~valid.any(1)[:, None, None], 0.0)  # padding may have any gate
        out[part] = o
        lse[part] = row_lse.flatten(1, 2)
    return (out, lse.float()) if return_lse else out


@inference_only
def attention(
    q: Tensor, kv_cache: Tensor | tuple[Tensor, Tensor], block_tables: Tensor, query_start_loc: Tensor, seq_lens: Tensor, *,
    scale: float | None = None, return_lse: bool = False, max_query_len: int | None = None, gate: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`gdn.attention`: J is all positions up to the query's own."""
    return sparse_attention(
        q, kv_cache, None, block_tables, query_start_loc, seq_lens, scale=scale, return_lse=return_lse, gate=gate, out=out
    )
