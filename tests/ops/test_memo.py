"""Calls like an earlier one: they skip prepare, do the same work, and whatever should raise or be looked at again still is."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

import gdn
from gdn import runtime
from gdn.core import memo
from gdn.ops.delta_rule import chunk
from gdn.ops.delta_rule.inputs import chunk_inputs, chunk_problem
from gdn.runtime import env
from gdn.testing.compare import same_bits
from tests.ops.bad_calls import good_chunk
from tests.ops.contract_kernel import ContractKernel
from tests.ops.test_repeated_calls import copies


@pytest.fixture
def kernel(guard: None, monkeypatch: pytest.MonkeyPatch) -> ContractKernel:
    return ContractKernel().put(monkeypatch)


def test_an_array_of_another_library_is_named(kernel: ContractKernel) -> None:
    arguments = good_chunk()
    gdn.chunk_gated_delta_rule(**arguments)
    with pytest.raises(TypeError, match="^A_log: expected a torch.Tensor, got ndarray"):
        gdn.chunk_gated_delta_rule(**arguments, A_log=np.zeros((2, 3)))
    assert kernel.launches == 1


def test_which_tensor_is_missing_matters(kernel: ContractKernel) -> None:
    arguments = good_chunk()
    gate = arguments.pop("g")
    del arguments["beta"]
    fresh = copies(arguments)
    gdn.chunk_gated_delta_rule(**arguments, g=gate)
    o, _ = gdn.chunk_gated_delta_rule(**fresh, beta=gate)
    assert kernel.prepared == 2 and kernel.problem.gate_dtype is None
    env.reload()
    again = copies(good_chunk())
    del again["g"]
    expected, _ = gdn.chunk_gated_delta_rule(**{**again, "beta": gate})
    assert same_bits(o, expected)


def test_a_plan_without_a_tensor_does_not_compare_one_with_none(kernel: ContractKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch takes 10 us for it, in every call that has an argument more than the plan before its own."""
    without = chunk_inputs(chunk_problem(dtype="bfloat16"), lengths=[3, 0, 5])
    mask = {"has_initial_state": torch.ones(3, dtype=torch.bool)}
    for options in (mask, {}):
        gdn.chunk_gated_delta_rule(**without | options)
    compared: list[str] = []
    for name in ("__eq__", "__ne__"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_, name=name: compared.append(name))
    gdn.chunk_gated_delta_rule(**without | mask)
    assert kernel.prepared == 2 and not compared


def test_one_tensor_in_two_places_teaches_nothing(kernel: ContractKernel) -> None:
    q, k, v = (torch.randn(1, 5, 2, 16).bfloat16() for _ in range(3))
    gdn.chunk_gated_delta_rule(q, q, q)
    o, _ = gdn.chunk_gated_delta_rule(q, k, v)
    twice, _ = gdn.chunk_gated_delta_rule(q, k, k)
    assert kernel.prepared == 3
    env.reload()
    assert same_bits(o, gdn.chunk_gated_delta_rule(q, k, v)[0])
    assert same_bits(twice, gdn.chunk_gated_delta_rule(q, k, k)[0])


def test_sizes_are_told_apart_and_the_memory_is_bounded(kernel: ContractKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo.Memo, "_LIMIT", 4)
    for length in (1, 2, 3, 4, 5, 6, 6, 5):
        q, k, v = (torch.randn(1, length, 2, 16).bfloat16() for _ in range(3))
        o, _ = gdn.chunk_gated_delta_rule(q, k, v)
        assert o.shape == q.shape
    assert kernel.prepared == 6 and len(gdn.chunk_gated_delta_rule.operator.memo._found) == 4
    monkeypatch.setattr(memo.Memo, "_PER_KEY", 2)
    wide = torch.randn(1, 6, 64, 16).bfloat16()
    for step in (1, 2, 4, 8):  # strides alone differ
        gdn.chunk_gated_delta_rule(wide[:, :, : 2 * step : step], wide[:, :, 1 : 1 + 2 * step : step], wide[:, :, 2:4])
    assert max(map(len, gdn.chunk_gated_delta_rule.operator.memo._found.values())) == 2


def test_reload_and_validate(kernel: ContractKernel, switch: Callable[..., env.Switches]) -> None:
    arguments = good_chunk()
    arguments["state_indices"] = arguments["state_indices"].clone()
    gdn.chunk_gated_delta_rule(**arguments)
    arguments["state_indices"][2] = 99
    switch(GDN_VALIDATE="1")
    for _ in range(2):
        with pytest.raises(ValueError, match="^state_indices: expected slots below"):
            gdn.chunk_gated_delta_rule(**arguments)
    arguments["state_indices"][2] = -1
    for _ in range(2):
        gdn.chunk_gated_delta_rule(**arguments)
    assert kernel.prepared == 3  # validated calls are never skipped
    switch(GDN_VALIDATE="0")
    gdn.chunk_gated_delta_rule(**arguments)
    gdn.chunk_gated_delta_rule(**arguments)
    assert kernel.prepared == 4


def test_explain_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = ContractKernel()
    monkeypatch.setattr(chunk, "prepare", stand_in.prepare)
    arguments = good_chunk()
    for _ in range(2):
        gdn.chunk_gated_delta_rule(**arguments)
    monkeypatch.setattr(chunk, "prepare", runtime.prepare)
    before = arguments["initial_state"].clone()
    assert gdn.explain("chunk", **arguments).backend == "reference"
    assert stand_in.launches == 2 and same_bits(arguments["initial_state"], before)


def test_copied_arguments_teach_nothing(kernel: ContractKernel) -> None:
    arguments = good_chunk()
    arguments["cu_seqlens"] = torch.stack([arguments["cu_seqlens"]] * 2, dim=1)[:, 0]  # strided
    for _ in range(2):
        gdn.chunk_gated_delta_rule(**arguments)
    assert kernel.prepared == 2
