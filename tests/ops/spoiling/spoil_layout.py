"""Spoilings of where a tensor lies: strides, addresses, rows that overlap."""

import math
import random

import torch

from tests.ops.spoiling import memory
from tests.ops.spoiling.call import Call
from tests.ops.spoiling.spoiling import Spoiled, as_bytes, lead_dims, on_tensor, put, spoiling

Tensor = torch.Tensor


@spoiling("last dim not contiguous")
def _last_strided(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor = call.get(path)
    if not isinstance(tensor, Tensor) or tensor.dim() == 0 or not tensor.numel() or tensor.shape[-1] < 2:
        return None
    if call.operator == "causal_conv1d_update" and path in ("x", "out") and tensor.dim() == 3:
        return None  # [B, dim, T] is taken by its strides
    strided = memory.last_strided(tensor)
    return put(call, path, strided, is_exact=False) if strided.stride(-1) != 1 else None


@on_tensor("misaligned base", is_layout=True)
def _shifted(x: Tensor) -> Tensor | None:
    return memory.shifted(x) if x.numel() and x.element_size() < memory.ALIGNMENT else None


@spoiling("misaligned rows")
def _odd_rows(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor = call.get(path)
    if not isinstance(tensor, Tensor) or tensor.dim() < 2 or not tensor.numel():
        return None
    lead = lead_dims(call, path)
    rows = tensor.shape[:lead].numel()
    return put(call, path, memory.odd_rows(tensor, lead), is_exact=False) if rows > 1 else None


@spoiling("reversed in memory order")
def _permuted(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """All dims in the opposite order in memory."""
    tensor = call.get(path)
    if not isinstance(tensor, Tensor) or tensor.dim() < 2 or tensor.numel() < 2:
        return None
    order = list(range(tensor.dim()))[::-1]
    value = tensor.permute(order).clone(memory_format=torch.contiguous_format).permute(order)
    return None if value.is_contiguous() else put(call, path, value, is_exact=False)


@spoiling("rows of one element each")
def _expanded(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """Stride 0 along the first dim: every row is the first one."""
    tensor = call.get(path)
    if not isinstance(tensor, Tensor) or tensor.dim() < 1 or tensor.shape[0] < 2:
        return None
    value = tensor[:1].expand(tensor.shape)
    model = call.with_values({path: value.clone(memory_format=torch.contiguous_format)})
    return put(call, path, value, model=model, is_exact=False)


@spoiling("all rows in one place")
def _stride_zero(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """Stride 0 along the first dim that has two entries, of a tensor that is written."""
    tensor = call.get(path)
    if not isinstance(tensor, Tensor) or not tensor.numel():
        return None
    for i, size in enumerate(tensor.shape):
        if size > 1:
            return put(call, path, tensor.narrow(i, 0, 1).clone().expand(tensor.shape))
    return None


@spoiling("overlapping rows")
def _overlapping_rows(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """Neighbours along the first long dim share memory, at multiples of 16 bytes."""
    tensor = call.get(path)
    if not isinstance(tensor, Tensor) or not tensor.numel():
        return None
    value = tensor.flatten(0, 1) if lead_dims(call, path) == 2 and tensor.is_contiguous() else tensor
    if value.shape[0] < 2:
        return None
    inner = value[0].numel() * tensor.element_size()
    step = (inner - 1) // memory.ALIGNMENT * memory.ALIGNMENT // tensor.element_size()
    if step < 1:
        return None
    squeezed = memory.squeezed_rows(value, step)
    if value is not tensor:
        strides = squeezed.stride()
        squeezed = squeezed.as_strided(tensor.shape, (tensor.shape[1] * strides[0], *strides))
    return put(call, path, squeezed)


@spoiling("part of a larger tensor")
def _part(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """Some rows before and after, so that the address stays a multiple of 16 bytes."""
    tensor = call.get(path)
    if not isinstance(tensor, Tensor) or tensor.dim() < 1 or not tensor.numel():
        return None
    before = memory.ALIGNMENT // math.gcd(memory.ALIGNMENT, tensor[0].numel() * tensor.element_size())
    rows = as_bytes(tensor)
    larger = torch.cat([rows[:1].expand(before, *rows.shape[1:]), rows, rows[:1]]).view(tensor.dtype)
    return put(call, path, larger[before:-1], is_exact=False)
