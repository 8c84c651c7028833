"""GPU tests need a Hopper GPU; where there is none they are skipped with that reason, and nothing else skips them."""

import pytest
import torch

from gdn.runtime import devices


@pytest.fixture(scope="session")
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a Hopper GPU (SM90): torch sees no CUDA device")
    found = torch.device("cuda", torch.cuda.current_device())
    spec, name = devices.describe(found)
    if spec is None:
        pytest.skip(f"needs a Hopper GPU (SM90), got {name}")
    return found
