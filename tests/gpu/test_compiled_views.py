"""torch.compile with inductor on a GPU: written views of one buffer, and a whole model, against eager calls."""

import pytest
import torch

from tests.layers.test_compile import FORMS, compare
from tests.ops import test_library_views as views

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("name", "form", "mode"), views.CASES)
def test_every_operator_and_20_calls(device: torch.device, name: str, form: str, mode: str) -> None:
    views.compare(name, form, mode, views.SIZES, str(device))


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_model(device: torch.device, form: str, dynamic: bool | None) -> None:
    compare(form, dynamic, device, torch.float32, 1e-4)


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_model_with_kernels(device: torch.device, dynamic: bool | None) -> None:
    """Without an indexer, whose selection may hang on the last bit of a score."""
    compare("no indexer", dynamic, device, torch.bfloat16, 0.05)
