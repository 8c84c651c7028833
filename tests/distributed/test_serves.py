"""Whether summaries are made by the kernel of `chunk_summary` or by two passes of the chunk operator, on an H100."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gdn.device import H100
from gdn.ops.delta_rule import checks
from gdn.ops.delta_rule.chunk_summary import serves
from gdn.runtime import devices


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "describe", lambda _: (H100, "H100"))


def call(K: int, V: int, backend: str | None, dtype: torch.dtype = torch.bfloat16, device: str = "cuda:0") -> bool:
    q: Any = SimpleNamespace(device=torch.device(device), dtype=dtype)
    given = checks.Tokens(q, q, q, None, None, None, False, None, None, False)
    return serves(checks.Sizes(1, 640, 1, 2, 2, 4, K, V), given, True, backend)


@pytest.mark.parametrize("K", [4, 60, 96, 100, 256])
def test_cute_takes_two_passes_of_other_head_dims(K: int) -> None:
    """The chunk kernel serves these head dims, so a backend that is asked for must not be refused for the summaries' sake."""
    assert not call(K, K, "cute")


@pytest.mark.parametrize("K", [64, 128])
def test_cute_is_used_where_it_serves(K: int) -> None:
    assert call(K, K, "cute") and not call(K, K, "tilelang")
    assert call(K, K, "reference") and call(K, K, None, device="cpu")
