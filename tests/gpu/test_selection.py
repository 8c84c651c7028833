"""Share of the float32 top-k that the indexer's kernels select: random normed inputs, 16 heads, k 2048, every key visible."""

import functools

import pytest
import torch

from benchmarks import selection
from benchmarks.selection import BF16, DEMANDED, FP8, FP8_EXACT

pytestmark = pytest.mark.gpu

# Rounding to e4m3 moves each value of q and k by 2.6 % (rms), so a score by 3.7 % of the scores' deviation. The smaller the
# share of the keys that is selected, the more of the selection is that near to its end, however exactly one sums.
OUT_OF_REACH = pytest.mark.xfail(strict=True, reason="the FP8 format itself, summed exactly, stays below 97 % at this length")


@functools.cache
def _shares(keys: int, device: torch.device) -> dict[str, float]:
    return selection.measure(keys, rows=256, topk=2048, device=device).shares


@pytest.mark.parametrize("keys", selection.KEYS)
def test_bf16_scores(device: torch.device, keys: int) -> None:
    assert _shares(keys, device)[BF16] >= DEMANDED[BF16]


@pytest.mark.parametrize("keys", [4096, pytest.param(32768, marks=OUT_OF_REACH), pytest.param(131072, marks=OUT_OF_REACH)])
def test_fp8_scores(device: torch.device, keys: int) -> None:
    assert _shares(keys, device)[FP8] >= DEMANDED[FP8]


@pytest.mark.parametrize("keys", selection.KEYS)
def test_fp8_sums_of_the_tensor_cores_lose_nothing(device: torch.device, keys: int) -> None:
    shares = _shares(keys, device)
    assert shares[FP8] == pytest.approx(shares[FP8_EXACT], abs=1e-3)
