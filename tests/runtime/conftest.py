"""Here every test also has a kernel cache of its own, so that compilations can be counted."""

from pathlib import Path

import pytest

from gdn.runtime import env


@pytest.fixture(autouse=True)
def own_cache(clean_switches: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", raising=False)
    monkeypatch.setenv("GDN_CACHE_DIR", str(tmp_path / "cache"))
    env.reload()
