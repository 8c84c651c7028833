"""The caller's modes have no influence: gradients, parameters, autocast and inference mode give the bits of a plain call.

Every call is made three times: a repeated call may take another way through the operator.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch

import gdn
from tests.gpu.calls import CALLS, Call, every_call
from tests.gpu.delta_rule import Arguments
from tests.gpu.twins import are_same, copy_of, outcome, twin, whole

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
TIMES = 3
each_call = pytest.mark.parametrize(("name", "backend"), every_call())


def check(
    call: Call,
    backend: str,
    device: torch.device,
    prepared: Callable[[Arguments], Arguments],
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """prepared: the arguments as the mode has them, tensors of their own each time."""
    function, arguments = getattr(gdn, call.function), call.make(device)
    for _ in range(TIMES):
        expected = outcome(function, twin(arguments), backend=backend)
        given = prepared(arguments)
        with mode():
            found = outcome(function, given, backend=backend)
        assert are_same(found, expected)
        for name in call.pools:
            assert given[name].grad_fn is None
        for name, x in given.items():
            assert not isinstance(x, Tensor) or x.grad is None, name


def takes_gradients(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.itemsize > 1


def with_gradients(call: Call) -> Callable[[Arguments], Arguments]:
    """Weights are parameters, and every other float tensor that is not written requires grad."""

    def prepared(arguments: Arguments) -> Arguments:
        given = twin(arguments)
        for name, x in given.items():
            if name in call.weights and x is not None:
                given[name] = torch.nn.Parameter(x)
            elif takes_gradients(x) and name not in (*call.pools, "out"):
                given[name] = x.requires_grad_()
        return given

    return prepared


@each_call
def test_inputs_that_require_grad(name: str, backend: str, device: torch.device) -> None:
    call = CALLS[name]
    check(call, backend, device, with_gradients(call))


@each_call
def test_pools_that_require_grad(name: str, backend: str, device: torch.device) -> None:
    call = CALLS[name]
    if not call.pools:
        return

    def prepared(arguments: Arguments) -> Arguments:
        given = with_gradients(call)(arguments)
        for pool in call.pools:
            if takes_gradients(given[pool]):
                given[pool].requires_grad_()
        return given

    check(call, backend, device, prepared)


@each_call
def test_results_of_other_operations_that_require_grad(name: str, backend: str, device: torch.device) -> None:
    """Results are not leaves of a graph: neither are activations."""
    call = CALLS[name]

    def prepared(arguments: Arguments) -> Arguments:
        given = twin(arguments)
        for key, x in given.items():
            if takes_gradients(x) and key not in (*call.pools, "out"):
                given[key] = torch.as_strided(whole(x).requires_grad_().clone(), x.shape, x.stride(), x.storage_offset())
                assert given[key].grad_fn is not None
        return given

    check(call, backend, device, prepared)


@each_call
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype, name: str, backend: str, device: torch.device) -> None:
    check(CALLS[name], backend, device, twin, lambda: torch.autocast(device.type, dtype))


@each_call
def test_autocast_with_parameters(name: str, backend: str, device: torch.device) -> None:
    """Autocast keeps casts of parameters that require grad."""
    call = CALLS[name]
    if call.weights:
        check(call, backend, device, with_gradients(call), lambda: torch.autocast(device.type, torch.bfloat16))


@each_call
def test_inference_mode(name: str, backend: str, device: torch.device) -> None:
    """Tensors made outside, with a weight that requires grad."""
    call = CALLS[name]
    check(call, backend, device, with_gradients(call), torch.inference_mode)


@each_call
@pytest.mark.parametrize("is_inside", [True, False], ids=["inside", "outside"])
def test_inference_tensors(is_inside: bool, name: str, backend: str, device: torch.device) -> None:
    """Tensors made in inference mode, handed in there or outside."""

    def prepared(arguments: Arguments) -> Arguments:
        with torch.inference_mode():
            return {key: copy_of(x) if isinstance(x, Tensor) else x for key, x in arguments.items()}

    check(CALLS[name], backend, device, prepared, torch.inference_mode if is_inside else nullcontext)


# --- torch.compile -----------------------------------------------------------------------------------------------------

COMPILED = [(name, backend) for name, backend in every_call() if name in ("chunk", "decode", "prepare")]


@contextmanager
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("name", "backend"), COMPILED)
@pytest.mark.parametrize("has_gradients", [False, True])
def test_compiled(has_gradients: bool, name: str, backend: str, device: torch.device) -> None:
    """One graph, without a break, with the results and effects of the eager call."""
    call = CALLS[name]
    function, arguments = getattr(gdn, call.function), call.make(device)
    arguments.pop("out", None)  # the compiler takes contiguous ones only
    prepared = with_gradients(call) if has_gradients else twin
    with fresh_compiler():
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        for _ in range(TIMES):
            expected = outcome(function, twin(arguments), backend=backend)
            assert are_same(outcome(compiled, prepared(arguments), backend=backend), expected)
