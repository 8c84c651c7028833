"""What adapters add on the host's CPU to their operators, with real launches, in the least of many calls."""

import pytest
import torch

from tests.hosts import adapter_cost

pytestmark = pytest.mark.gpu


def test_timing_of_what_adapters_add(device: torch.device) -> None:
    """The table is printed (`-s`). Another process on this core makes all of it slower, and this test worthless."""
    found = list(adapter_cost.measure(device, [], batches=400))
    print(adapter_cost.HEADER, *(one.row() for one in found), sep="\n")
    assert all(one.holds for one in found), "\n".join(one.row() for one in found if not one.holds)
