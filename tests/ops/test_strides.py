"""Strides that kernels are launched with, for every operator and each tensor that a call reads.

Every read tensor comes expanded, at an odd address with odd strides, with its dimensions the other way round, and with useless
strides of dimensions of one entry. What a kernel describes to the copy engine then still fits a descriptor, and has the values
of the argument; a repeated call launches the same.
"""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import gdn
from gdn.problem import Problem
from gdn.runtime import log
from tests.described.plain import call as plain_call
from tests.ops.contract_kernel import ContractKernel
from tests.ops.spoiling.calls import OPERATORS, good_call
from tests.ops.stand_in import Recorder

Tensor = torch.Tensor
# Fields of the Params whose strides kernels pass on to descriptors of bulk tensor copies, and those that they take to be
# contiguous.
DESCRIBED = {
    "chunk": ("q", "k", "v", "out"), "chunk_summary": ("k", "v"), "gdn_prefill": ("z", "out"), "paged_mqa_logits": ("cache",),
}  # fmt: skip
CONTIGUOUS = {"mqa_logits": ("q", "k", "k_scale"), "paged_mqa_logits": ("q",)}
WRITTEN = {
    "out", "initial_state", "conv_state", "conv_states", "ssm_state", "cache", "k_cache", "v_cache", "kv_cache", "ring",
}  # fmt: skip


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder().put(monkeypatch)


def useless(x: Tensor, dim: int, stride: int) -> Tensor:
    """The same tensor, with another stride of a dimension of one entry."""
    assert x.shape[dim] == 1
    return x.as_strided(x.shape, [stride if i == dim else own for i, own in enumerate(x.stride())], x.storage_offset())


def variants(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Views of x's shape. Those of numbers with other values too: indices would point anywhere."""
    for dim, size in enumerate(x.shape):
        if size == 1:
            yield from ((f"stride {stride} of one entry along {dim}", useless(x, dim, stride)) for stride in (0, 1, 7))
        elif x.is_floating_point():
            yield f"expanded along {dim}", x.narrow(dim, 0, 1).expand(x.shape)
    if x.is_floating_point():
        yield "all one element", x[(slice(0, 1),) * x.dim()].expand(x.shape)
    odd = [size + 1 for size in x.shape]
    framed = x.new_empty(torch.Size(odd).numel() + 1)[1:].view(odd)[tuple(slice(size) for size in x.shape)]
    yield "odd strides at an odd address", framed.copy_(x)
    yield "dimensions the other way round", x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))


def bits(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def described(problem: Problem, params: Any) -> Iterator[tuple[str, Tensor]]:
    names = DESCRIBED.get(problem.op, ())
    if problem.op == "gdn_prefill" and params.z is None:
        names = ("mixed_qkv", "out")  # interleaved: z is part of it
    for name in names:
        yield name, getattr(params, name)


def misfits(x: Tensor) -> bool:
    """Whether the copy engine refuses a tensor by its address or a stride; rows of no multiple of 16 bytes go other ways."""
    size = x.element_size()
    if x.shape[-1] * size % 16:
        return False
    strides = [stride * size for stride in x.stride()[:-1]]
    if x.dim() == 4:
        strides = strides[1:]  # of one batch row: no dimension for a kernel
    return x.data_ptr() % 16 != 0 or x.stride(-1) != 1 or any(stride % 16 or not stride for stride in strides)


def faults(recorder: Recorder, given: dict[str, Any]) -> Iterator[str]:
    for problem, params in recorder.launched:
        for name, x in described(problem, params):
            if misfits(x):
                yield f"{name} is launched with strides {x.stride()} at {x.data_ptr() % 16}"
        for name in CONTIGUOUS.get(problem.op, ()):
            if (x := getattr(params, name)) is None:
                continue
            if not x.is_contiguous() or x.data_ptr() % 16:
                yield f"{name} is launched with strides {x.stride()} at {x.data_ptr() % 16}"
        for name in params._fields:
            x, argument = getattr(params, name), given.get(name)
            is_same = isinstance(x, Tensor) and isinstance(argument, Tensor) and x.dtype == argument.dtype
            # A part of the call, such as the rows of one form, has fewer elements.
            if is_same and name not in WRITTEN and x.numel() == argument.numel() and not torch.equal(bits(x), bits(argument)):
                yield f"{name} is launched with other values"


@pytest.mark.parametrize("operator", sorted(OPERATORS))
def test_strides(operator: str, recorder: Recorder) -> None:
    function, wrong, launches = getattr(gdn, operator), [], 0
    drawn = [(seed, good_call(operator, seed)) for seed in range(60)]
    full = [(seed, call.arguments) for seed, call in drawn if all(x.numel() for x in call.tensors().values())]
    for seed, arguments in full[:4]:
        read = {n: x for n, x in arguments.items() if isinstance(x, Tensor) and n not in WRITTEN and x.dim() and x.numel()}
        for name, x in read.items():
            for what, variant in variants(x):
                given = arguments | {name: variant}
                for call in range(2):  # the second one may take another way through the operator
                    recorder.launched.clear()
                    try:
                        function(**given)
                    except ValueError as error:
                        assert str(error).startswith(name), (name, what, error)
                        break
                    launches += len(recorder.launched)
                    wrong += [f"seed {seed}, {name}, {what}, call {call}: {fault}" for fault in faults(recorder, given)]
    assert not wrong, "\n".join(wrong)
    assert launches > 0


@pytest.mark.parametrize("stride", [0, 1, 7])
def test_one_token_of_one_head(stride: int, recorder: Recorder) -> None:
    """Results too, which are written by descriptor."""
    tokens = {name: torch.ones(1, 1, 1, 64, dtype=torch.bfloat16) for name in ("q", "k", "v", "out")}
    for name, dim in ((name, dim) for name in tokens for dim in (1, 2)):
        gdn.chunk_gated_delta_rule(**tokens | {name: useless(tokens[name], dim, stride)})
    step = plain_call("fused_gdn_prefill", 3, torch.bfloat16, is_served=True) | {"query_start_loc": torch.tensor([0, 1])}
    step |= {name: step[name][:1] for name in ("mixed_qkv", "z", "b", "a", "state_indices", "has_initial_state")}
    step["out"] = torch.empty(1, step["z"][0].numel(), dtype=step["z"].dtype)
    for name in ("z", "out", "mixed_qkv"):
        gdn.fused_gdn_prefill(**step | {name: useless(step[name], 0, stride)})
    assert len(recorder.launched) == 8 + 3
    assert not [fault for problem, params in recorder.launched for _, x in described(problem, params) if (fault := misfits(x))]


def test_an_expanded_input_is_copied_with_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """By the chunk form alone: the recurrent kernels read by address."""
    ContractKernel().put(monkeypatch)
    monkeypatch.setattr(log, "_told", set())
    q = torch.randn(1, 5, 2, 16).bfloat16()
    arguments = {"q": q[:, :, :1].expand(q.shape), "k": q, "v": q, "use_qk_l2norm_in_kernel": True}
    with caplog.at_level(logging.WARNING, logger="gdn"):
        for function in (gdn.fused_recurrent_gated_delta_rule, gdn.chunk_gated_delta_rule):
            for _ in range(2):
                found, _ = function(**arguments)
                expected, _ = function(**arguments | {"q": arguments["q"].contiguous()})
                assert torch.equal(found, expected)
            copies = [record.getMessage() for record in caplog.records]
            assert len(copies) == (function is gdn.chunk_gated_delta_rule)
    assert copies[0].startswith("q: copied, because it repeats the same memory")


@pytest.mark.parametrize("operator", ["mqa_logits", "paged_mqa_logits"])
def test_a_copy_in_another_dtype(operator: str, recorder: Recorder) -> None:
    """Weights whose last dimension is copied first, because it is not contiguous, and then made float32."""
    arguments = next(call.arguments for seed in range(20) if "weights" in (call := good_call(operator, seed)).arguments)
    weights = arguments["weights"].half()
    for _ in range(2):
        getattr(gdn, operator)(**arguments | {"weights": weights[:, :1].expand(weights.shape)})
    assert [torch.equal(params.weights, weights[:, :1].float().expand(weights.shape)) for _, params in recorder.launched] == [
        True
    ] * 2
