"""Strided inputs of every kernel: each read tensor expanded along each dimension, at odd addresses and with odd strides.

The result has the bits of the call with a contiguous copy of that tensor. What a kernel cannot take by its strides is copied by
the operator or refused by the backend, never an error of the driver and never another result.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import gdn
from tests.gpu import test_gdn_prefill, test_streams
from tests.gpu.calls import CALLS
from tests.gpu.delta_rule import Arguments, backends
from tests.gpu.twins import are_same, copy_of, twin, whole

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
MAKERS: dict[str, tuple[str, str, Callable[[torch.device], Arguments]]] = {
    **{name: (call.function, call.op, call.make) for name, call in CALLS.items()},
    **test_streams.CALLS, **test_streams.MORE,
}  # fmt: skip
WRITTEN = {"out", "initial_state", "conv_state", "conv_states", "ssm_state", "cache", "v_cache", "ring"}
EVERY = [(name, backend) for name, (_, op, _) in MAKERS.items() for backend in backends(op)]


def useless(x: Tensor, dim: int, stride: int) -> Tensor:
    """The same tensor, with another stride of a dimension of one entry."""
    assert x.shape[dim] == 1
    return x.as_strided(x.shape, [stride if i == dim else own for i, own in enumerate(x.stride())], x.storage_offset())


def variants(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Views of x's shape: some with other values, which repeat along a dimension."""
    for dim, size in enumerate(x.shape):
        if size > 1:
            yield f"expanded along {dim}", x.narrow(dim, 0, 1).expand(x.shape)
        else:
            yield from ((f"stride {stride} of one entry along {dim}", useless(x, dim, stride)) for stride in (0, 1, 7))
    yield "all one element", x[(slice(0, 1),) * x.dim()].expand(x.shape)
    odd = [size + 1 for size in x.shape]
    framed = x.new_empty(torch.Size(odd).numel() + 1)[1:].view(odd)[tuple(slice(size) for size in x.shape)]
    yield "odd strides at an odd address", framed.copy_(x)
    yield "dimensions the other way round", x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))


def call(function: str, arguments: Arguments, backend: str) -> list[Tensor]:
    found = getattr(gdn, function)(**arguments, backend=backend)
    results = [x for x in (found if isinstance(found, tuple) else (found,)) if x is not None]
    return [*results, *[whole(x) for name, x in arguments.items() if name in WRITTEN and isinstance(x, Tensor)]]


def read_tensors(arguments: Arguments) -> Iterator[tuple[str, Tensor]]:
    """Float tensors that the call only reads; one entry of a pair stands for both."""
    for name, x in arguments.items():
        if isinstance(x, Tensor) and name not in WRITTEN and (x.is_floating_point() or x.dtype == torch.uint8) and x.numel() > 1:
            yield name, x


@pytest.mark.parametrize(("name", "backend"), EVERY)
def test_strides(name: str, backend: str, device: torch.device) -> None:
    function, _, make = MAKERS[name]
    arguments = make(device)
    wrong = []
    for argument, x in read_tensors(arguments):
        for what, variant in variants(x):
            plain = twin(arguments) | {argument: variant.clone(memory_format=torch.contiguous_format)}
            strided = twin(arguments) | {argument: variant}
            try:
                call(function, strided, backend)
            except ValueError as error:  # refused by name: a cache whose rows overlap, say, or rows that this kernel cannot copy
                if not str(error).startswith((argument, "backend: expected a backend that can run")):
                    wrong.append(f"{argument}: {what}, {error}")
                continue
            expected = call(function, plain, backend)
            for repeat in range(2):  # a repeated call may take another way through the operator
                fresh: dict[str, Any] = {n: copy_of(arguments[n]) for n in WRITTEN if isinstance(arguments.get(n), Tensor)}
                if not are_same(call(function, strided | fresh, backend), expected):
                    wrong.append(f"{argument}: {what}, call {repeat}")
    torch.cuda.synchronize()
    assert not wrong, "; ".join(wrong)


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("argument", ["q", "k", "v", "out"])
@pytest.mark.parametrize("backend", backends("chunk"))
def test_one_token_of_one_head(backend: str, argument: str, dim: int, device: torch.device) -> None:
    """Strides that nothing uses are in descriptors all the same."""
    source = torch.Generator(device).manual_seed(3)
    names = ("q", "k", "v", "out")
    arguments = {n: torch.randn(1, 1, 1, 128, device=device, dtype=torch.bfloat16, generator=source) for n in names}
    expected, _ = gdn.chunk_gated_delta_rule(**twin(arguments), use_qk_l2norm_in_kernel=True, backend=backend)
    for stride in (0, 1, 7):
        given = twin(arguments)
        given[argument] = useless(given[argument], dim, stride)
        for _ in range(2):
            found, _ = gdn.chunk_gated_delta_rule(**given, use_qk_l2norm_in_kernel=True, backend=backend)
            assert found is given["out"] and are_same([found], [expected])


@pytest.mark.parametrize("layout", ["flat", "interleaved", "merged"])
@pytest.mark.parametrize("backend", backends("gdn_prefill"))
def test_a_prefill_step_of_one_token(backend: str, layout: str, device: torch.device) -> None:
    case = test_gdn_prefill.Case(lengths=(1,), padding=0, layout=layout)
    arguments = test_gdn_prefill.make(case, device)
    expected = call("fused_gdn_prefill", twin(arguments), backend)
    for argument in ("mixed_qkv", "out", *(["z"] if layout == "flat" else [])):
        for stride in (0, 1, 7):
            given = twin(arguments)
            given[argument] = useless(given[argument], 0, stride)
            assert are_same(call("fused_gdn_prefill", given, backend), expected)
