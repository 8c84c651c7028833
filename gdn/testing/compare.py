"""Errors per head and per sequence, so that one wrong head cannot hide in a global norm."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass
class Error:
    """The worst relative errors of a comparison, and where they are."""

    l2: float  # |actual - expected| / |expected| of one head of one sequence
    peak: float  # max |actual - expected| / max |expected| of one head of one sequence
    where: str  # place of the largest l2

    def within(self, l2: float, peak: float | None = None) -> bool:
        return self.l2 <= l2 and self.peak <= (4 * l2 if peak is None else peak)


def error(actual: torch.Tensor, expected: torch.Tensor, groups: int) -> Error:
    """Error between tensors of one shape; the first `groups` dims are kept apart, the error is taken over the rest.

    A NaN in `actual` is an infinite error. A group that is zero in `expected` must be zero in `actual`.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"actual: expected shape {list(expected.shape)}, got shape {list(actual.shape)}")
    if actual.numel() == 0:
        return Error(0.0, 0.0, "nothing to compare")
    lead = expected.shape[:groups]
    l2 = row_errors(actual, expected, groups)
    peak = row_errors(actual, expected, groups, ord=torch.inf)
    worst = int(l2.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst, device="cpu"), lead)) if lead else ()
    return Error(float(l2.max()), float(peak.max()), f"index {index}")


def row_errors(actual: torch.Tensor, expected: torch.Tensor, groups: int, ord: float = 2) -> torch.Tensor:
    """|actual - expected| / |expected| over the dims after the first `groups`, in float64; infinite for a NaN in `actual`."""
    got, want = (x.to(torch.float64).reshape(*expected.shape[:groups], -1) for x in (actual, expected))
    return _ratio((got - want).norm(ord, dim=-1), want.norm(ord, dim=-1))


def token_error(actual: torch.Tensor, expected: torch.Tensor, offsets: Sequence[int]) -> Error:
    """o [.., tokens, heads, V] per (sequence, head); rows at or beyond offsets[-1] must be exactly zero in actual."""
    actual, expected = (x.reshape(-1, *x.shape[-2:]) for x in (actual, expected))
    worst = Error(0.0, 0.0, "nothing to compare")
    for n, (start, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        if end <= start:
            continue
        found = error(actual[start:end].transpose(0, 1), expected[start:end].transpose(0, 1), groups=1)
        if found.l2 >= worst.l2:
            worst.l2, worst.where = found.l2, f"sequence {n} (tokens {start}..{end}), head {found.where}"
        worst.peak = max(worst.peak, found.peak)
    rest = actual[max(0, int(offsets[-1])) :]
    if rest.numel() and not bool((rest == 0).all()):
        return Error(float("inf"), float("inf"), "rows beyond cu_seqlens[-1] are not zero")
    return worst


def after_summary(h: torch.Tensor, P: torch.Tensor, state_v_first: bool, seed: int = 0) -> torch.Tensor:
    """States [N, HS, ...] in float64 that summaries make of random ones, the same for a seed."""
    generator = torch.Generator("cpu").manual_seed(seed)
    start = 0.3 * torch.randn(h.shape, generator=generator, dtype=torch.float64, device="cpu").to(h.device)
    return (start @ P.double() if state_v_first else P.double() @ start) + h.double()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise equality, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def _ratio(difference: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    ratio = torch.where(difference == 0, 0.0, difference / size)
    return torch.nan_to_num(ratio, nan=torch.inf, posinf=torch.inf)
