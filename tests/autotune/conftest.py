from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def cache(tmp_path: Path, switch: Callable[..., Any]) -> Path:
    """A kernel cache of the test's own."""
    switch(GDN_CACHE_DIR=str(tmp_path / "cache"))
    return tmp_path / "cache"
