"""A kernel cache for a test, and what the commands try with the fake kernel."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune import tuning
from tests.autotune import fake_kernel
from tests.autotune.fake_gpu import KERNEL


@pytest.fixture
def cache(tmp_path: Path, switch: Callable[..., Any]) -> Path:
    """A kernel cache of the test's own."""
    switch(GDN_CACHE_DIR=str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def two_candidates(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The fake kernel with two configurations besides the default, of which one does not compile; returns the kernel cache."""
    monkeypatch.setattr(tuning, "kernels", lambda op, backend: [KERNEL])
    configs = [fake_kernel.Config(tile, False) for tile in (fake_kernel.FAST, fake_kernel.RAISES)]
    monkeypatch.setattr(fake_kernel, "configs", lambda problem, device: configs)
    return cache
