"""Inference only: inputs that require grad, parameters and autocast change nothing, however an operator is called."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gdn
from gdn.testing.compare import same_bits
from tests.described.plain import call as plain_call
from tests.ops.contract_kernel import ContractKernel
from tests.ops.indexer_kernels import IndexerKernels
from tests.ops.library_calls import BY_TOKENS, REGISTERED, as_tuple, compiled, of_schema
from tests.ops.test_decode_launch import Kernel
from tests.ops.test_memory import arguments as pooled
from tests.ops.test_prefill_launch import Kernel as PrefillKernel

Arguments = dict[str, Any]
Way = Callable[[str, Arguments], Any]
TOKENS = 6


def eager(name: str, arguments: Arguments) -> Any:
    return getattr(gdn, name)(**arguments)


def in_a_graph(name: str, arguments: Arguments) -> Any:
    return compiled(getattr(gdn, name))(**arguments)


def registered(name: str, arguments: Arguments) -> Any:
    operator, given = of_schema(name, arguments)
    return operator(**given)


WAYS = {"eager": eager, "compiled": in_a_graph, "torch.ops": registered}
CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a leaf": lambda x: x.clone().requires_grad_(),
    "computed": lambda x: x.clone().requires_grad_() * 1,
    "a parameter": lambda x: torch.nn.Parameter(x.clone()),
}


def changed(arguments: Arguments, change: Callable[[torch.Tensor], torch.Tensor]) -> Arguments:
    """Every float tensor, pools and weights too; copies of the others, some of which are written."""
    has_gradient = {torch.bfloat16, torch.float32}

    def own(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return change(x) if x.dtype in has_gradient else x.clone()

    return {name: own(x) for name, x in arguments.items()}


def same(found: Any, expected: Any, given: Arguments, plain: Arguments, graphs: dict[str, Any]) -> None:
    for have, want in zip(as_tuple(found), as_tuple(expected), strict=True):
        if want is None:
            assert have is None
            continue
        assert same_bits(have.detach(), want)
        assert any(have is x for x in given.values()) or not (have.requires_grad or have.grad_fn)
    for name, x in given.items():
        if isinstance(x, torch.Tensor):
            assert same_bits(x.detach(), plain[name]), name
            assert x.grad_fn is graphs[name], f"{name} became part of a graph"


def graphs_of(arguments: Arguments) -> dict[str, Any]:
    return {name: x.grad_fn for name, x in arguments.items() if isinstance(x, torch.Tensor)}


CASES = [(name, way, change) for name in REGISTERED for way in ("eager", "torch.ops") for change in CHANGES]
CASES += [(name, "compiled", "computed") for name in REGISTERED]  # compiling takes a second
CASES += [(name, "compiled", "a parameter") for name in ("causal_conv1d_fn", "rms_norm_gated", "fused_gdn_gating")]


@pytest.mark.parametrize(("name", "way", "change"), CASES)
def test_inputs_that_require_grad(name: str, way: str, change: str) -> None:
    plain, given = BY_TOKENS[name](TOKENS), changed(BY_TOKENS[name](TOKENS), CHANGES[change])
    graphs = graphs_of(given)
    expected, found = WAYS[way](name, plain), WAYS[way](name, given)
    same(found, expected, given, plain, graphs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "causal_conv1d_fn", "prepare_indexer", "mqa_logits"])
def test_autocast(name: str, way: str, dtype: torch.dtype) -> None:
    plain, given = BY_TOKENS[name](TOKENS), BY_TOKENS[name](TOKENS)
    for arguments in (plain, given):
        for key in ("q", "k", "v", "x"):  # float32 stays float32
            if key in arguments and name != "mqa_logits":
                arguments[key] = arguments[key].float()
    expected = WAYS[way](name, plain)
    with torch.autocast("cpu", dtype=dtype):
        found = WAYS[way](name, given)
    same(found, expected, given, plain, graphs_of(given))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("name", "make", "kernel"),
    [
        ("chunk_gated_delta_rule", lambda: pooled("chunk_gated_delta_rule"), ContractKernel),
        ("fused_recurrent_gated_delta_rule", lambda: pooled("fused_recurrent_gated_delta_rule"), ContractKernel),
        ("fused_gdn_decode", lambda: plain_call("fused_gdn_decode", TOKENS, torch.bfloat16), Kernel),
        ("fused_gdn_prefill", lambda: plain_call("fused_gdn_prefill", TOKENS, torch.bfloat16), PrefillKernel),
        ("quantize_fp8", lambda: BY_TOKENS["quantize_fp8"](TOKENS), IndexerKernels),
    ],
)
def test_repeated_calls_of_a_kernel(
    name: str, make: Callable[[], Arguments], kernel: Callable[[], Any], change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is served from the memo, which knows nothing of gradients."""
    made = kernel().put(monkeypatch)
    plain = make()
    expected = eager(name, plain)
    for _ in range(3):
        given = changed(make(), CHANGES[change])
        graphs = graphs_of(given)
        same(eager(name, given), expected, given, plain, graphs)
    assert made.launches == 4
