"""A kernel cache for a test, and what the commands try with the fake kernel."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune import compiling, tables, tune_command, tuning
from gdn.device import H100
from tests.autotune import fake_kernel
from tests.autotune.fake_gpu import KERNEL, FakeGpu, compile_at_once


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


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeGpu], None]:
    """gpu(fake) makes it the device of `tune`. Everything compiles, and no machine code is read."""
    monkeypatch.setattr(tune_command, "device_spec", lambda: H100)
    monkeypatch.setattr(tune_command, "_versions", lambda backend: {"torch": "3"})
    monkeypatch.setattr(compiling.workers, "run", compile_at_once)
    monkeypatch.setattr(tables, "code_of", lambda *_: None)
    return lambda fake: monkeypatch.setattr(tune_command, "Device", lambda spec: fake)
