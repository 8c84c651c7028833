"""The host path of the residual norm, with a stand-in for its kernel: what is launched, also by repeated calls."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gdn
from gdn.ops.layer_step.problem import AddRmsNormParams, AddRmsNormProblem
from tests.ops.stand_in import StandIn
from tests.references import reference

BF16 = torch.bfloat16
Arguments = dict[str, Any]


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
                assert rows.data_ptr() % 16 == 0 and (len(rows) == 1 or rows.stride(0) * rows.element_size() % 16 == 0)
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


def arguments_of(*shape: int, seed: int = 0, wide: int = 0, shift: int = 0, **dtypes: torch.dtype) -> Arguments:
    """wide: elements between the rows of x; shift: of its first element in its memory."""
    source = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(*shape, generator=source).to(dtype)

    dim = shape[-1]
    given = {"x": normal(*shape[:-1], dim + wide)[..., shift : shift + dim], "residual": normal(*shape), "weight": normal(dim)}
    return given | {name: normal(dim, dtype=dtype) for name, dtype in dtypes.items()}


MADE: dict[str, Callable[[int], Arguments]] = {
    "rows": lambda seed: arguments_of(5, 64, seed=seed),
    "three dimensions": lambda seed: arguments_of(2, 3, 64, seed=seed),
    "a slice of a projection": lambda seed: arguments_of(5, 64, wide=16, seed=seed),
    "layer scale": lambda seed: arguments_of(5, 64, seed=seed, layer_scale=torch.float32) | {"eps": 1e-5},
    "plain gain": lambda seed: arguments_of(5, 64, seed=seed, weight=torch.float32) | {"zero_centred": False},
    "no residual": lambda seed: arguments_of(5, 64, seed=seed) | {"residual": None},
    "no residual, a slice": lambda seed: arguments_of(5, 64, wide=16, seed=seed) | {"residual": None},
}


@pytest.mark.parametrize("made", MADE)
def test_repeated_calls_do_the_same_without_prepare(made: str, kernel: Kernel) -> None:
    for seed in range(3):
        arguments = MADE[made](seed)
        before = {name: value.clone() for name, value in arguments.items() if torch.is_tensor(value)}
        found, wanted = gdn.add_rms_norm(**arguments), reference.add_rms_norm(**arguments)
        assert all(map(torch.equal, found, wanted)) and found[0].is_contiguous()
        assert (found[1] is arguments["x"]) == (arguments["residual"] is None)
        assert all(torch.equal(arguments[name], value) for name, value in before.items())
        assert kernel.read.data_ptr() == arguments["x"].data_ptr()  # no copy
        assert (kernel.launches, kernel.prepared) == (seed + 1, 1)


@pytest.mark.parametrize("changes", [{"wide": 3, "shift": 1}, {"wide": 8, "shift": 4}], ids=["rows", "base"])
@pytest.mark.parametrize("has_residual", [True, False])
def test_rows_off_their_alignment_are_copied(changes: dict[str, int], has_residual: bool, kernel: Kernel) -> None:
    for count in (1, 2):
        arguments = arguments_of(5, 64, **changes)
        if not has_residual:
            arguments["residual"] = None
        found, wanted = gdn.add_rms_norm(**arguments), reference.add_rms_norm(**arguments)
        assert all(map(torch.equal, found, wanted)) and kernel.read.data_ptr() != arguments["x"].data_ptr()
        assert (found[1] is arguments["x"]) == (not has_residual)
        assert (kernel.launches, kernel.prepared) == (count, count)  # not remembered


def test_x_as_its_own_residual(kernel: Kernel) -> None:
    x, weight = arguments_of(5, 64)["x"], torch.ones(64)
    for _ in range(2):
        assert torch.equal(gdn.add_rms_norm(x, x, weight)[1], x + x)


def test_no_rows_launch_nothing(kernel: Kernel) -> None:
    x, weight = torch.empty(0, 64, dtype=BF16), torch.ones(64)
    for residual in (x, None):
        assert [one.shape for one in gdn.add_rms_norm(x, residual, weight)] == [x.shape] * 2
    assert kernel.launches == 0


@pytest.mark.parametrize("name", ["x", "residual", "weight", "layer_scale"])
def test_addresses_of_repeated_calls_are_looked_at(name: str, kernel: Kernel) -> None:
    arguments = arguments_of(5, 64, layer_scale=BF16)
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
