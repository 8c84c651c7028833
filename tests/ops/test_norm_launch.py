"""The host path of the residual norm, with a stand-in for its kernel: what it is launched with."""

from typing import Any

import pytest
import torch

import gdn
from gdn.ops.layer_step.problem import AddRmsNormParams, AddRmsNormProblem
from tests.described.plain import call as plain_call
from tests.ops.stand_in import StandIn
from tests.references import reference

BF16 = torch.bfloat16


class Kernel(StandIn):
    def __init__(self) -> None:
        super().__init__()
        self.read: Any = None  # x of the last launch

    def launch(self, problem: AddRmsNormProblem, params: AddRmsNormParams) -> None:
        x, residual, weight, scale, normed, total, eps = params
        self.read = x
        assert problem.has_residual == (residual is not None) == (total is not None) and isinstance(eps, float)
        dtypes = {"dtype": x, "weight_dtype": weight, "layer_scale_dtype": scale}
        for name, tensor in dtypes.items():
            dtype = getattr(problem, name)
            assert dtype is None if tensor is None else str(tensor.dtype) == f"torch.{dtype}", name
        for rows in (x, residual, normed, total):
            if rows is not None:
                assert rows.dtype == x.dtype and rows.shape == (problem.num_tokens, problem.dim) and rows.stride(1) == 1
                assert rows.data_ptr() % 16 == 0
                assert len(rows) == 1 or rows.stride(0) * rows.element_size() % 16 == 0 or problem.dim % 8
        for vector in (weight, scale):
            assert vector is None or vector.shape == (problem.dim,) and vector.is_contiguous() and vector.data_ptr() % 16 == 0
        assert normed.is_contiguous() and (total is None or total.is_contiguous())
        found = reference.add_rms_norm(x, residual, weight, eps, layer_scale=scale, zero_centred=problem.zero_centred)
        normed.copy_(found[0])
        if total is not None:
            total.copy_(found[1])


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel().put(monkeypatch)


def test_x_as_its_own_residual(kernel: Kernel) -> None:
    x, weight = torch.randn(5, 64).to(BF16), torch.ones(64)
    for _ in range(2):
        assert torch.equal(gdn.add_rms_norm(x, x, weight)[1], x + x)


@pytest.mark.parametrize("name", ["x", "residual", "weight", "layer_scale"])
def test_addresses_of_repeated_calls_are_looked_at(name: str, kernel: Kernel) -> None:
    arguments = plain_call("add_rms_norm", 5, BF16, is_served=True)
    gdn.add_rms_norm(**arguments)
    good = arguments[name]
    shifted = torch.empty(good.numel() + 4, dtype=BF16)[4:].view(good.shape).copy_(good)
    assert shifted.data_ptr() % 16 and shifted.stride() == good.stride()
    found, wanted = gdn.add_rms_norm(**arguments | {name: shifted}), reference.add_rms_norm(**arguments)
    assert all(map(torch.equal, found, wanted)) and kernel.prepared == 2


def test_without_a_residual_the_sum_is_x_itself() -> None:
    """Whatever its strides are: a copy that the norm reads is no result."""
    for x in (torch.randn(6, 4), torch.randn(4, 6).mT, torch.randn(3, 6, 8)[:, ::2, 1:5]):
        normed, total = gdn.add_rms_norm(x, None, torch.zeros(4))
        assert total is x
        torch.testing.assert_close(normed, torch.nn.functional.rms_norm(x, (4,), eps=1e-6))
