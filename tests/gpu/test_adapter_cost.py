"""What adapters add on the host's CPU to their operators, with real launches, in the least of many calls."""

import pytest
import torch

from tests.hosts import adapter_cost

pytestmark = pytest.mark.gpu

# What functions of other libraries may take at most, in us: Python takes twice as long on a slow host as on a fast one.
MOST_OF_A_FUNCTION = 16.0


def test_timing_of_what_adapters_add(device: torch.device) -> None:
    """The table is printed (`-s`). Another process on this core makes all of it slower, and this test worthless."""
    found = list(adapter_cost.measure(device, [], batches=400))
    print(found[0].pace.row(), adapter_cost.HEADER, *(one.row() for one in found), sep="\n")

    def may(one: adapter_cost.Added) -> bool:
        return one.holds if one.path.is_step else one.us[0] <= MOST_OF_A_FUNCTION

    missed = [one for one in found if not may(one)]
    assert not missed, "\n".join(one.row() for one in missed)
