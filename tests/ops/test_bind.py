"""Operators with their options given once: the same calls, checks and plans as through the public function."""

from typing import Any

import pytest
import torch

import gdn
from gdn.core import call
from gdn.core.call import operator_of
from gdn.ops.delta_rule.inputs import chunk_inputs, chunk_problem, recurrent_inputs, recurrent_problem
from gdn.runtime import env
from gdn.testing.compare import same_bits
from tests.ops.contract_kernel import ContractKernel

RULE = gdn.fused_recurrent_gated_delta_rule


def pooled(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors of a call, and its options."""
    problem = recurrent_problem(dtype="bfloat16", state_dtype="bfloat16", index_dtype="int32", use_gate=True, state_v_first=True)
    every = recurrent_inputs(problem, seed=seed, lengths=[1, 1, 1], strided=True, slot_gap=8)
    tensors = {name: value for name, value in every.items() if value is None or isinstance(value, torch.Tensor)}
    return tensors, {name: value for name, value in every.items() if name not in tensors}


def test_it_does_what_the_public_function_does(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = ContractKernel().put(monkeypatch)
    _, options = pooled(0)
    bound = operator_of(RULE).bind(**options)
    for seed in range(3):
        (mine, _), (theirs, _) = pooled(seed), pooled(seed)
        o, state = bound(**mine)
        expected, after = RULE(**theirs, **options)
        assert same_bits(o, expected) and state is mine["initial_state"] and same_bits(state, after)
    assert kernel.prepared == 2  # each of them once
    tensors, _ = pooled(3)
    order = [name for name in operator_of(RULE).kinds if name in tensors]
    assert order[:3] == ["q", "k", "v"]
    leading = [tensors.pop(name) for name in order[:5]]
    o, _ = bound(*leading, **tensors)
    assert same_bits(o, RULE(**pooled(3)[0], **options)[0]) and kernel.prepared == 2
    env.reload()  # the switches may choose another kernel
    bound(**pooled(4)[0])
    assert kernel.prepared == 3


def test_equal_options_are_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of equal sizes share what is kept for their calls; 1 and True are not equal."""
    operator = operator_of(gdn.rms_norm_gated)
    assert operator.bind(eps=1e-6) is operator.bind() is not operator.bind(eps=1e-5)
    assert operator.bind(eps=1) is not operator.bind(eps=1.0)
    monkeypatch.setattr(call, "_MOST_BOUND", 4)
    for eps in range(9):
        operator.bind(eps=eps)
        assert len(operator._bound) <= 4


def test_errors() -> None:
    tensors, options = pooled(0)
    operator = operator_of(RULE)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"q": tensors["q"]}, "q: expected an argument of fused_recurrent_gated_delta_rule that is no tensor"),
        ({"speed": 3}, "speed: expected an argument of fused_recurrent_gated_delta_rule that is no tensor, got 3"),
        ({"state_v_first": 1}, "state_v_first: expected a bool, got int"),
        ({"null_slot": None}, "null_slot: expected an int, got NoneType"),
    ]
    for given, message in wrong:
        with pytest.raises(TypeError, match=message):
            operator.bind(**given)
    with pytest.raises(TypeError, match="num_k_heads: expected a value, got none"):
        operator_of(gdn.fused_gdn_decode).bind()
    bound = operator.bind(**options)
    before = tensors["initial_state"].clone()
    bad: list[tuple[str, Any, str]] = [
        ("k", tensors["k"][..., :3], "k: expected shape"),
        ("k", 3, "k: expected a torch.Tensor, got int"),
    ]
    for name, value, message in bad:
        with pytest.raises((TypeError, ValueError), match=message):
            bound(**tensors | {name: value})
    assert same_bits(tensors["initial_state"], before)


def test_a_compiler_traces_it() -> None:
    norm = operator_of(gdn.rms_norm_gated).bind(eps=1e-3, activation="sigmoid")
    x, gate, gain = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)

    def twice(x: torch.Tensor) -> torch.Tensor:
        return norm(x, gate, gain) + norm(2 * x, gate, gain)  # type: ignore[no-any-return]

    with torch.no_grad():
        compiled = torch.compile(twice, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), twice(x))


def test_a_hint_is_given_in_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of other lengths are other calls; equal ones repeat."""
    kernel = ContractKernel().put(monkeypatch)
    problem = chunk_problem(dtype="bfloat16", state_dtype="float32", index_dtype="int32")
    every = chunk_inputs(problem, seed=0, lengths=[1, 70])
    tensors = {name: value for name, value in every.items() if value is None or isinstance(value, torch.Tensor)}
    bound = operator_of(gdn.chunk_gated_delta_rule).bind(**{n: v for n, v in every.items() if n not in tensors})
    for longest, prepared in ((None, 1), (70, 2), (70, 2), (71, 3), (None, 3)):
        bound(**tensors, max_seqlen=longest)
        assert kernel.prepared == prepared
    with pytest.raises(TypeError, match="max_seqlen: expected an int, got bool"):
        bound(**tensors, max_seqlen=True)
    with pytest.raises(ValueError, match="max_seqlen: expected at least the 70 tokens of the longest sequence, got 69"):
        bound(**tensors, max_seqlen=69)
    with pytest.raises(ValueError, match="max_seqlen: expected an int >= 0 or None, got -1"):
        gdn.chunk_gated_delta_rule(**every, max_seqlen=-1)
