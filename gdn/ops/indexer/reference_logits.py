"""Indexer logits in plain torch, ragged and paged: the lightning indexer of DeepSeek-V3.2 and its forms.

For query row i, key row j, and the key head g(h) = h // (H / kv_heads) of query head h:

    score(i, j) = scale * sum_g k_scale[j, g] * sum_{h: g(h) = g} w[i, h] * act(q[i, h] . k[j, g])      act = relu or identity

All products and sums are float32 (float64 where q is float64). FP8 values are used exactly; k_scale is 1 where it is None, w is
1 where weights is None. Columns outside a row's key range are -inf. No value is read back to the host, so
these functions can be captured in a CUDA graph.
"""

import torch
from torch import Tensor

from gdn.reference_modes import compute_dtype, inference_only

# Largest [rows, heads, keys] intermediate. Rows, then keys, are cut into blocks that stay below it.
BLOCK_BYTES = 256 * 1024 * 1024

# All products are tiles of this one shape, padded with zeros: a matrix product of another shape may add in another order, and a
# row's scores must have the same bits whatever else is in the batch.
TILE_ROWS, TILE_KEYS = 64, 1024


def scores(q: Tensor, k: Tensor, k_scale: Tensor | None, weights: Tensor | None, scale: float, relu: bool) -> Tensor:
    """Unmasked scores: q [m, H, D], k [n, kv_heads, D], k_scale [n, kv_heads], weights [m, H] -> [m, n]."""
    dtype = compute_dtype(q)
    num_rows, num_keys = q.shape[0], k.shape[0]
    total = torch.empty(num_rows, num_keys, dtype=dtype, device=q.device)
    for low in range(0, num_rows, TILE_ROWS):
        rows = slice(low, min(low + TILE_ROWS, num_rows))
        queries = _padded(q[rows].to(dtype), TILE_ROWS)
        row_weights = None if weights is None else _padded(weights[rows].to(dtype), TILE_ROWS)
        for first in range(0, num_keys, TILE_KEYS):
            keys = slice(first, min(first + TILE_KEYS, num_keys))
            scales = None if k_scale is None else k_scale[keys].to(dtype)
            tile = _tile(queries, _padded(k[keys].to(dtype), TILE_KEYS), row_weights, relu, scales)
            total[rows, keys] = tile[: rows.stop - low, : keys.stop - first] * scale
    return total


def _padded(x: Tensor, size: int) -> Tensor:
    """x [n, ...] with rows of zeros up to `size`."""
    return x if x.shape[0] == size else torch.cat([x, x.new_zeros(size - x.shape[0], *x.shape[1:])])


def _tile(q: Tensor, k: Tensor, weights: Tensor | None, relu: bool, k_scale: Tensor | None) -> Tensor:
    """Sums over heads of one tile: q [TILE_ROWS, H, D], k [TILE_KEYS, kv_heads, D] -> [TILE_ROWS, the keys of k_scale or all]."""
    num_kv_heads = k.shape[1]
    group = q.shape[1] // num_kv_heads
    count = k.shape[0] if k_scale is None else k_scale.shape[0]
    total = q.new_zeros(q.shape[0], count)
    for kv_head in range(num_kv_heads):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        products = torch.matmul(q[:, heads], k[:, kv_head].T)  # [TILE_ROWS, group, TILE_KEYS]
        if relu:
            products = products.relu_()
        head_sum = products.sum(dim=1) if weights is None else torch.matmul(weights[:, None, heads], products)[:, 0]
        head_sum = head_sum[:, :count]
        total += head_sum if k_scale is None else head_sum * k_scale[:, kv_head]
    return total


def key_range(starts: Tensor, ends: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Ranges clamped to [0, num_keys], with end >= start: starts and ends [rows] -> int64."""
    start = starts.long().clamp(0, num_keys)
    return start, torch.maximum(ends.long().clamp(0, num_keys), start)


@inference_only
def mqa_logits(
    q: Tensor, k: Tensor, weights: Tensor | None, cu_seqlen_ks: Tensor, cu_seqlen_ke: Tensor, *, k_scale: Tensor | None = None,
    scale: float = 1.0, relu: bool = True, max_seqlen_k: int | None = None, clean_logits: bool = True,
    out_dtype: torch.dtype = torch.float32, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`gdn.mqa_logits`. Columns outside the ranges are -inf, with clean_logits=False too."""
    if k.dim() == 2:
        k = k[:, None]
    if k_scale is not None and k_scale.dim() == 1:
        k_scale = k_scale[:, None]
    num_rows, num_heads, _ = q.shape
    num_keys = k.shape[0]
    num_columns = num_keys if max_seqlen_k is None else max_seqlen_k
    if out is None:
        out = torch.empty(num_rows, num_columns, dtype=out_dtype, device=q.device)
    if num_keys == 0:
        return out.fill_(-torch.inf)
    start, end = key_range(cu_seqlen_ks, cu_seqlen_ke, num_keys)
    first = start[:, None] if max_seqlen_k is not None else torch.zeros_like(start)[:, None]
    columns = torch.arange(num_columns, device=q.device)
    block = max(1, BLOCK_BYTES // max(1, num_heads * num_keys * compute_dtype(q).itemsize))
    for low in range(0, num_rows, block):
        rows = slice(low, min(low + block, num_rows))
        row_weights = weights[rows] if weights is not None else None
        values = scores(q[rows], k, k_scale, row_weights, scale, relu)
        key = first[rows] + columns  # [block, columns]: key row of each column
        if max_seqlen_k is not None:
            values = values.gather(1, key.clamp(max=num_keys - 1))
        visible = (key >= start[rows, None]) & (key < end[rows, None])
        out[rows] = values.masked_fill_(~visible, -torch.inf).to(out.dtype)
    return out


def page_views(cache: Tensor, head_dim: int | None = None) -> tuple[Tensor, Tensor | None]:
    """Typed views of an indexer cache: values [pages, page_size, kv_heads, D], and float32 scales [pages, page_size, kv_heads]

    cache: as for `gdn.paged_mqa_logits`, only uint8 has scales; the kv_heads axis may be missing. Writes to the views reach it.
    """
    if cache.dim() == 3:
        cache = cache.unsqueeze(2)
    if cache.dtype != torch.uint8:
        return cache, None
    pages, page_size, kv_heads, row_bytes = cache.shape
    dim = row_bytes - 4 if head_dim is None else head_dim
    split = page_size * kv_heads * dim
    flat = cache.view(pages, page_size * kv_heads * row_bytes)
    values = flat[:, :split].view(torch.float8_e4m3fn).view(pages, page_size, kv_heads, dim)
    scales = flat[:, split:].view(torch.float32).view(pages, page_size, kv_heads)
    return values, scales


def take_rows(values: Tensor, index: Tensor) -> Tensor:
    """values[index] along dim 0; FP8 goes through bytes, since torch indexes no FP8 on every device."""
    if values.dtype == torch.float8_e4m3fn:
        return values.view(torch.uint8)[index].view(torch.float8_e4m3fn)
    return values[index]


def visible_lengths(context_lens: Tensor, batch: int, next_n: int, limit: int) -> Tensor:
    """Keys that each query row sees, [B * next_n] int64 in [0, limit].

    context_lens [B, next_n] are those counts; with [B], draft i of next_n sees context_len - next_n + 1 + i.
    """
    lengths = context_lens.long().clamp(min=0)
    if lengths.dim() == 1:
        lengths = lengths[:, None] - (next_n - 1) + torch.arange(next_n, device=lengths.device)
    return lengths.reshape(batch * next_n).clamp(0, limit)


@inference_only
def paged_mqa_logits(
    q: Tensor, cache: Tensor, weights: Tensor | None, context_lens: Tensor, block_tables: Tensor, max_context_len: int, *,
    scale: float = 1.0, relu: bool = True, clean_logits: bool = True, out_dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`gdn.paged_mqa_logits`; cache as `page_views`. Entries of block_tables after a sequence's last page may hold anything."""
    batch, next_n, num_heads, head_dim = q.shape
    values, scales = page_views(cache, head_dim)
    num_pages, page_size = values.shape[:2]
    if out is None:
        out = torch.empty(batch * next_n, max_context_len, dtype=out_dtype, device=q.device)
    num_columns = min(max_context_len, block_tables.shape[1] * page_size)
    if num_columns < max_context_len or num_pages == 0:
        out.fill_(-torch.inf)
    if num_pages == 0 or num_columns == 0 or batch == 0:
        return out
    lengths = visible_lengths(context_lens, batch, next_n, num_columns).view(batch, next_n, 1)
    key_block = max(1, BLOCK_BYTES // (next_n * num_heads * page_size * compute_dtype(q).itemsize)) * page_size
    for sequence in range(batch):
        rows = slice(sequence * next_n, (sequence + 1) * next_n)
        row_weights = weights[rows] if weights is not None else None
        for low in range(0, num_columns, key_block):
            high = min(low + key_block, num_columns)
            page = block_tables[sequence, low // page_size : -(-high // page_size)].long().clamp(0, num_pages - 1)
            k = take_rows(values, page).flatten(0, 1)[: high - low]
            k_scale = take_rows(scales, page).flatten(0, 1)[: high - low] if scales is not None else None
            block = scores(q[sequence], k, k_scale, row_weights, scale, relu)
            hidden = torch.arange(low, high, device=q.device) >= lengths[sequence]
            out[rows, low:high] = block.masked_fill_(hidden, -torch.inf).to(out.dtype)
    return out
