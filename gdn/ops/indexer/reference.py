"""Steps around the indexer's logits in plain torch: quantisation, norm, RoPE, cache, and compressed keys.

    quantise      scale = max(amax, 1e-4) / 448 per group; value = e4m3(x / scale), nearest even, saturated
    norm          x * rsqrt(mean(x^2) + eps) * (1 + weight)      (weight alone where not zero_centred), float32 inside
    RoPE (neox)   on the first rotary_dim dims: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), pairs (i, i + rotary_dim / 2)

A cache row is a physical slot: page * page_size + offset. No value is read back to the host, except where the size of a result
depends on it.

Indexer logits in plain torch, ragged and paged: the lightning indexer of DeepSeek-V3.2 and its forms.

For query row i, key row j, and the key head g(h) = h // (H / kv_heads) of query head h:

    score(i, j) = scale * sum_g k_scale[j, g] * sum_{h: g(h) = g} w[i, h] * act(q[i, h] . k[j, g])      act = relu or identity

All products and sums are float32 (float64 where q is float64). FP8 values are used exactly; k_scale is 1 where it is None, w is
1 where weights is None. Columns outside a row's key range are -inf. No value is read back to the host, so
these functions can be captured in a CUDA graph.

Exact, deterministic top-k over rows of logits, and token positions of compressed keys.
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


SELECTION_BYTES = 64 * 1024 * 1024  # logits per step of the selection
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
    block = max(1, SELECTION_BYTES // max(1, n * 4))
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


FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
MIN_AMAX = 1e-4


def cast_fp8(x: Tensor) -> Tensor:
    """Saturating cast to e4m3; NaN stays NaN."""
    return x.float().clamp(-FP8_MAX, FP8_MAX).to(FP8)


def _divided(x: Tensor, divisor: float) -> Tensor:
    """x / divisor, rounded once. The divisor becomes a tensor: on a GPU torch multiplies by the reciprocal of a number."""
    return x / x.new_full((), divisor)


@inference_only
def quantize_fp8(x: Tensor, group_size: int = 128) -> tuple[Tensor, Tensor]:
    """x [..., D] -> e4m3 [..., D] and float32 scales [..., D / group], group = min(group_size, D); both contiguous."""
    group = min(group_size, x.shape[-1])
    grouped = x.float().contiguous().unflatten(-1, (-1, group))
    scale = _divided(grouped.abs().amax(dim=-1).clamp(min=MIN_AMAX), FP8_MAX)
    return cast_fp8((grouped / scale[..., None]).flatten(-2)), scale


def _write_flat(view: Tensor, slots: Tensor, values: Tensor, keep: Tensor) -> None:
    """view[slot // page_size, slot % page_size] = values where keep; kept slots are distinct. No host read.

    view [pages, page_size, ...], any page stride; slots [tokens]. A skipped token repeats the write of a kept one (the same bytes
    to the same row), or of row 0's old content where nothing is kept. Integers are moved: a copy may change the bits of a NaN.
    """
    page_size = view.shape[1]
    if slots.numel() == 0 or view.shape[0] == 0:
        return
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[view.element_size()]
    view, values = view.view(bits), values.view(bits)
    entry = torch.arange(slots.numel(), device=slots.device)
    last = torch.where(keep, entry, -1).cummax(0).values
    source = torch.where(last >= 0, last, keep.to(torch.uint8).argmax())
    slot = torch.where(keep.any(), slots[source], 0)
    page, offset = slot // page_size, slot % page_size
    kept = keep.any().view((1,) * values.dim())
    view[page, offset] = torch.where(kept, values[source], view[page, offset])


@inference_only
def write_indexer_cache(k: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """`gdn.write_indexer_cache`; a cache of another float dtype gets values in its dtype."""
    if k.dim() == 2:
        k = k[:, None]
    values, scales = page_views(cache, k.shape[-1])
    slots = slot_mapping.long()
    keep = slots >= 0
    if scales is not None:
        k, k_scale = quantize_fp8(k, k.shape[-1])
        _write_flat(scales, slots, k_scale[..., 0], keep)
    _write_flat(values, slots, cast_fp8(k) if cache.dtype == FP8 else k.to(values.dtype), keep)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centred: bool) -> Tensor:
    """Float32 norm over the last dim: x [..., D], weight [D] -> float32 [..., D]."""
    gain = weight.float() + 1.0 if zero_centred else weight.float()
    value = x.float()
    return value * torch.rsqrt(value.square().mean(dim=-1, keepdim=True) + eps) * gain


def rope(x: Tensor, positions: Tensor, cos_sin: Tensor, rotary_dim: int) -> Tensor:
    """x [tokens, heads, D] float32, positions [tokens], cos_sin [max_positions, rotary_dim] = [cos | sin]."""
    half = rotary_dim // 2
    entry = cos_sin[positions.long().clamp(0, cos_sin.shape[0] - 1)].float()[:, None]
    cos, sin = entry[..., :half], entry[..., half:rotary_dim]
    x1, x2 = x[..., :half], x[..., half:rotary_dim]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, x[..., rotary_dim:]], dim=-1)


@inference_only
def prepare_indexer(
    q: Tensor, k: Tensor | None, weights: Tensor | None, positions: Tensor, cos_sin: Tensor, q_norm: Tensor,
    k_norm: Tensor | None, cache: Tensor | None, slot_mapping: Tensor | None, *, rotary_dim: int, eps: float = 1e-6,
    zero_centred: bool = True, fp8: bool | None = None, v: Tensor | None = None, v_cache: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`gdn.prepare_indexer`. Norm and RoPE are float32; their result is rounded once to the dtype of q, before quantisation."""
    dim = q.shape[-1]
    q_rotated = rope(rms_norm(q, q_norm, eps, zero_centred), positions, cos_sin, rotary_dim).to(q.dtype).contiguous()
    if k is not None and k_norm is not None and cache is not None and slot_mapping is not None:
        keys = k[:, None] if k.dim() == 2 else k
        k_rotated = rope(rms_norm(keys, k_norm, eps, zero_centred), positions, cos_sin, rotary_dim).to(k.dtype)
        write_indexer_cache(k_rotated, cache, slot_mapping)
        if v is not None and v_cache is not None:
            write_indexer_cache(v, v_cache, slot_mapping)
    if fp8 is None:
        fp8 = cache is not None and cache.dtype in (torch.uint8, FP8)
    scaled = cache.dtype == torch.uint8 if cache is not None else weights is not None
    if fp8 and scaled:
        q_fp8, q_scale = quantize_fp8(q_rotated, dim)
        folded = q_scale[..., 0] * dim**-0.5
        return q_fp8, folded if weights is None else (weights.float() * folded).contiguous()
    return (cast_fp8(q_rotated) if fp8 else q_rotated), weights


@inference_only
def compress_indexer_keys(
    raw_k: Tensor, ring: Tensor, cache: Tensor, positions: Tensor, cos_sin: Tensor, k_norm: Tensor, ring_slots: Tensor,
    slot_mapping: Tensor, *, ratio: int = 4, rotary_dim: int, eps: float = 1e-6, zero_centred: bool = True, null_slot: int = -1,
) -> None:  # fmt: skip
    """`gdn.compress_indexer_keys`: the float32 mean of a group is rounded to the dtype of its raw keys before the norm."""
    if raw_k.dim() == 2:
        raw_k = raw_k[:, None]
    if ring.dim() == 3:
        ring = ring.unsqueeze(2)
    tokens, size = raw_k.shape[0], ring.shape[1]
    if tokens == 0:
        return
    entry = torch.arange(tokens, device=raw_k.device)
    position, slot = positions.long(), ring_slots.long()
    # A token whose position is negative, or more than an int32 holds, is skipped too.
    real = (slot >= 0) & (slot != null_slot) & (position >= 0) & (position < 2**31)
    safe_slot = slot.clamp(0, ring.shape[0] - 1)

    total = torch.zeros(raw_k.shape, dtype=torch.float32, device=raw_k.device)
    for back in range(ratio - 1, -1, -1):  # the member `back` tokens before this one, first member first
        earlier = (entry - back).clamp(min=0)
        here = (entry >= back) & (slot[earlier] == slot) & (position[earlier] == position - back)
        stored = ring[safe_slot, (position - back).clamp(min=0) % size]  # read before anything is overwritten
        total += torch.where(here[:, None, None], raw_k[earlier].float(), stored.float())
    mean = _divided(total, ratio).to(raw_k.dtype)
    group_position = position - (ratio - 1)
    key = rope(rms_norm(mean, k_norm, eps, zero_centred), group_position, cos_sin, rotary_dim).to(raw_k.dtype)
    complete = real & ((position + 1) % ratio == 0)
    write_indexer_cache(key, cache, torch.where(complete, slot_mapping.long(), -1))

    # A token whose ring row a later token of this call takes is not stored: kept rows are distinct.
    later = (entry + size).clamp(max=tokens - 1)
    replaced = (entry + size < tokens) & (slot[later] == slot) & (position[later] == position + size)
    _write_flat(ring, safe_slot * size + position.clamp(min=0) % size, raw_k.to(ring.dtype), real & ~replaced)


@inference_only
def gather_indexer_cache(
    cache: Tensor, block_tables: Tensor, cu_seqlens: Tensor, *, num_rows: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """`gdn.gather_indexer_cache`."""
    values, scales = page_views(cache)
    page_size = values.shape[1]
    bounds = cu_seqlens.long().contiguous()  # searchsorted warns otherwise
    total = int(bounds[-1]) if num_rows is None else num_rows
    row = torch.arange(total, device=cache.device)
    used = row < bounds[-1]
    if total == 0 or block_tables.numel() == 0 or values.shape[0] == 0:
        k = torch.zeros((total, *values.shape[2:]), dtype=torch.float32, device=cache.device).to(values.dtype)
        k_scale = torch.zeros(total, values.shape[2], dtype=torch.float32, device=cache.device) if scales is not None else None
    else:
        sequence = torch.searchsorted(bounds, row, right=True).clamp(max=bounds.numel() - 1) - 1
        offset = row - bounds[sequence]
        column = (offset // page_size).clamp(0, block_tables.shape[1] - 1)
        page = block_tables[sequence, column].long().clamp(0, values.shape[0] - 1)
        page = torch.where(used, page, 0)
        flat = (page, torch.where(used, offset, 0) % page_size)
        raw = values.view(torch.uint8)[flat].view(FP8) if values.dtype == FP8 else values[flat]
        k = torch.where(used[:, None, None], raw.float(), 0.0).to(values.dtype).contiguous()
        k_scale = torch.where(used[:, None], scales[flat], 0.0).contiguous() if scales is not None else None
    if cache.dim() == 3:
        return k[:, 0], k_scale[:, 0] if k_scale is not None else None
    return k, k_scale
