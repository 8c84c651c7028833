"""Steps around the indexer's logits in plain torch: quantisation, norm, RoPE, cache, and compressed keys.

    quantise      scale = max(amax, 1e-4) / 448 per group; value = e4m3(x / scale), nearest even, saturated
    norm          x * rsqrt(mean(x^2) + eps) * (1 + weight)      (weight alone where not zero_centred), float32 inside
    RoPE (neox)   on the first rotary_dim dims: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), pairs (i, i + rotary_dim / 2)

A cache row is a physical slot: page * page_size + offset. No value is read back to the host, except where the size of a result
depends on it.
"""

import torch
from torch import Tensor

from gdn.ops.indexer.reference_logits import page_views
from gdn.reference_modes import inference_only

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
