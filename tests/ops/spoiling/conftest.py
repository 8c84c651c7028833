"""The marker of the long run, until pyproject.toml has it, and one thread for tensors of a few elements."""

from collections.abc import Iterator

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cover: the long run of the seeded calls, minutes; run with -m cover")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the long run out where the marker expression says nothing of it."""
    if "cover" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("cover")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More threads only wait for each other, on a busy machine ten times as long as the call takes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
