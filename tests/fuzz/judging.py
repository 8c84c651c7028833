"""Results of calls: what a call returned and wrote, next to the reference's, and next to the same call's before."""

from collections.abc import Sequence
from typing import Any

import torch

import gdn
from tests.fuzz import chosen
from tests.fuzz.families import Arguments, Family
from tests.gpu.twins import twin, whole

Tensor = torch.Tensor
WRITTEN = (
    "out", "initial_state", "conv_state", "conv_states", "ssm_state", "cache", "v_cache", "ring", "state_tokens",
    "num_accepted_tokens",
)  # fmt: skip
FEW_BYTES = 0.05  # share of a cache's bytes that a rounding may change
SAME_PICKS = 0.97  # share of selected indices that scores in another rounding leave


def call(family: Family, arguments: Arguments, backend: str) -> list[Tensor]:
    """Results, and the whole memory of every tensor that the call may have written."""
    function = getattr(gdn, family.function) if family.op else getattr(chosen, family.function)
    found = function(**arguments, backend=backend)
    results = [x for x in (found if isinstance(found, tuple) else (found,)) if x is not None]
    return results + [whole(x) for name, x in arguments.items() if name in WRITTEN and isinstance(x, Tensor)]


def bits(x: Tensor) -> Tensor:
    """A tensor as integers of its own size."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(kinds[x.element_size()])


def differ(found: Sequence[Tensor], expected: Sequence[Tensor]) -> Tensor:
    """Whether one bit differs, as a tensor on the device: nobody waits. NaNs are the same whatever their bits are."""
    if len(found) != len(expected) or any(a.shape != b.shape for a, b in zip(found, expected, strict=True)):
        return torch.ones((), dtype=torch.bool, device=expected[0].device)
    wrong = torch.zeros((), dtype=torch.bool, device=expected[0].device)
    for a, b in zip(found, expected, strict=True):
        unequal = bits(a) != bits(b)
        if a.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            unequal &= ~(a.isnan() & b.isnan())
        wrong |= unequal.any()
    return wrong


def fault(family: Family, arguments: Arguments, found: Sequence[Tensor]) -> str | None:
    """What is wrong with a kernel's results next to the reference on the same device, or None."""
    if family.judge is not None:
        return family.judge(arguments, found)
    expected = call(family, twin(arguments), "reference")
    if len(found) != len(expected):
        return f"{len(found)} results, of the reference {len(expected)}"
    for n, (a, b) in enumerate(zip(found, expected, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"result {n}: {a.dtype} {list(a.shape)}, of the reference {b.dtype} {list(b.shape)}"
        wrong = _fault(family, a, b)
        if wrong is not None:
            return f"result {n}: {wrong}"
    return None


def _fault(family: Family, a: Tensor, b: Tensor) -> str | None:
    if not a.numel():
        return None
    if family.is_selection and a.dtype == torch.int32:
        pairs = zip(a.flatten(0, -2).tolist(), b.flatten(0, -2).tolist(), strict=True)
        rows = [(set(one) - {-1}, set(other) - {-1}) for one, other in pairs]
        same, every = sum(len(one & other) for one, other in rows), sum(len(other) for _, other in rows)
        sizes = all(len(one) == len(other) for one, other in rows)
        return None if sizes and same >= SAME_PICKS * every else f"{same} of {every} selected indices are the reference's"
    if family.tolerance == 0 or not (a.is_floating_point() or a.dtype == torch.uint8):
        return "not the reference's bits" if bool(differ([a], [b])) else None
    if a.dtype == torch.uint8:
        share = float((a != b).float().mean())
        return None if share <= FEW_BYTES else f"{share:.1%} of the bytes are not the reference's"
    return _error(a, b, family.tolerance)


def _error(a: Tensor, b: Tensor, tolerance: float) -> str | None:
    one, other = (x.float().double() if x.dtype == torch.float8_e4m3fn else x.double() for x in (a, b))
    is_number = other.isfinite()
    if not torch.equal(one.isfinite(), is_number) or not torch.equal(one.isnan(), other.isnan()):
        return "finite in other places than the reference"
    if one.dim() < 2:
        one, other, is_number = one[None], other[None], is_number[None]
    difference = torch.where(is_number, one - other, 0.0).flatten(0, -2).norm(dim=-1)
    size = torch.where(is_number, other, 0.0).flatten(0, -2).norm(dim=-1)
    limit = tolerance * (size + 0.2 * size.square().mean().sqrt()) + 1e-6
    excess = (difference - limit).argmax()
    if bool((difference <= limit).all()):
        return None
    return f"row {int(excess)}: {float(difference[excess]):.3g} off, {float(limit[excess]):.3g} allowed"


def relaid(x: Any, how: str) -> Any:
    """The same values in other memory: an odd address and odd strides, or the dimensions the other way round."""
    if how == "odd":
        sizes = [size + 1 for size in x.shape]
        frame = x.new_empty(torch.Size(sizes).numel() + 1)[1:].view(sizes)
        return frame[tuple(slice(size) for size in x.shape)].copy_(x)
    if how == "reversed":
        order = tuple(reversed(range(x.dim())))
        return x.permute(order).contiguous().permute(order)
    return x
