"""The marker of the long run, until pyproject.toml has it."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cover: the long run of the seeded calls, which .ci/run selects with -m cover")
