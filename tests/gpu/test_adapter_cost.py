"""What adapters add on the host's CPU to their operators, with real launches, in the least of many calls."""

import pytest
import torch

from tests.hosts import adapter_cost

pytestmark = pytest.mark.gpu

# Paths that take more than they may (docs/integrations.md, "Host time"): Python that checks and passes on what the host gives.
SLOWER = {"SGLang, packed_decode", "Transformers, decode", "Transformers, prompts"}


def test_timing_of_what_adapters_add(device: torch.device) -> None:
    """The table is printed (`-s`). Another process on this core makes all of it slower, and this test worthless."""
    found = list(adapter_cost.measure(device, [], batches=400))
    print(adapter_cost.HEADER, *(one.row() for one in found), sep="\n")
    missed = [one for one in found if not one.holds]
    assert {one.path.what for one in missed} <= SLOWER, "\n".join(one.row() for one in missed)
