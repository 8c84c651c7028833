"""Gives every test here a kernel cache of its own as well, so that compilations can be counted."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gdn.runtime import compiled, env, toolchain
from tests.runtime.fake_kernel import FakeProblem


@pytest.fixture(autouse=True)
def own_cache(clean_switches: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    before = os.umask(0o022)  # the cache loads nothing that the group may write, which some users' umask lets it
    monkeypatch.delenv("VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", raising=False)
    monkeypatch.setenv("GDN_CACHE_DIR", str(tmp_path / "cache"))
    env.reload()
    yield
    os.umask(before)


@pytest.fixture
def plain_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """For fake kernels, which are C: they need neither nvcc nor a DSL's runtime library."""
    compiled.forget()
    monkeypatch.setattr(toolchain, "missing", lambda backend: None)
    monkeypatch.setattr(compiled, "_preload", lambda backend: None)


@pytest.fixture
def problem(tmp_path: Path) -> FakeProblem:
    return FakeProblem("bfloat16", 128, str(tmp_path / "journal"), 0.0, 1)
