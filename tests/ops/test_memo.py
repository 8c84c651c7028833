"""Calls like an earlier one: they skip prepare, do the same work, and whatever should raise or be looked at again still is."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import gdn
from gdn import runtime
from gdn.core import memo
from gdn.ops.delta_rule import chunk
from gdn.ops.delta_rule.inputs import chunk_inputs, chunk_problem, recurrent_inputs, recurrent_problem
from gdn.ops.indexer.inputs import make_mqa_inputs, make_paged_inputs
from gdn.ops.indexer.problem import MqaLogitsProblem, PagedMqaLogitsProblem
from gdn.runtime import env, guards
from gdn.testing.compare import same_bits
from tests.ops.bad_calls import CHUNK, RECURRENT, Arguments, Bad, check, good_chunk, good_recurrent
from tests.ops.contract_kernel import ContractKernel
from tests.ops.test_delta_rule_host import misaligned
from tests.ops.test_logits_launch import Kernels

CHUNK_NAME, RECURRENT_NAME = "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"


@pytest.fixture(params=["torch", "python"])
def kernel(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ContractKernel:
    if request.param == "python":
        monkeypatch.setattr(guards, "maker", lambda: guards.in_python)
    else:
        assert guards.maker() is not guards.in_python
    return ContractKernel().put(monkeypatch)


def pooled_chunk(seed: int) -> Arguments:
    problem = chunk_problem(
        dtype="bfloat16", index_dtype="int64", has_mask=True, has_final_indices=True, has_checkpoints=True, use_gate=True
    )
    arguments = chunk_inputs(problem, seed=seed, lengths=[3, 0, 5, 70], strided=True, slot_gap=8)
    return arguments | {"checkpoint_slots": arguments["checkpoint_slots"].contiguous()}


def pooled_recurrent(seed: int) -> Arguments:
    problem = recurrent_problem(
        dtype="bfloat16", state_dtype="bfloat16", index_dtype="int32", write_every_token=True, has_accepted=True,
        has_final_indices=True, has_rounding=True, use_gate=True, state_v_first=True,
    )  # fmt: skip
    return recurrent_inputs(problem, seed=seed, lengths=[3, 0, 2, 1], strided=True, slot_gap=8)


def unpooled(make: Callable[..., Arguments], problem: Callable[..., Any], seed: int) -> Arguments:
    return make(problem(dtype="bfloat16"), seed=seed, lengths=[3, 0, 5])


def batched(seed: int) -> Arguments:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(3, 5, 2, 16, generator=generator).bfloat16() for _ in range(3))
    return {"q": q, "k": k, "v": v, "use_qk_l2norm_in_kernel": True}


CALLS: list[tuple[str, Callable[[int], Arguments]]] = [
    (CHUNK_NAME, pooled_chunk),
    (CHUNK_NAME, functools.partial(unpooled, chunk_inputs, chunk_problem)),
    (CHUNK_NAME, batched),
    (RECURRENT_NAME, pooled_recurrent),
    (RECURRENT_NAME, functools.partial(unpooled, recurrent_inputs, recurrent_problem)),
    (RECURRENT_NAME, batched),
]


def copies(arguments: Arguments) -> Arguments:
    """The same values in other memory, with the same strides."""

    def copy(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        whole = torch.empty_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), dtype=x.dtype)
        return whole.as_strided(x.shape, x.stride()).copy_(x)

    return {name: copy(value) for name, value in arguments.items()}


@pytest.mark.parametrize("has_out", [False, True])
@pytest.mark.parametrize(("name", "make"), CALLS)
def test_a_repeated_call_does_the_same_without_prepare(
    kernel: ContractKernel, name: str, make: Callable[[int], Arguments], has_out: bool
) -> None:
    function = getattr(gdn, name)

    def call(arguments: Arguments) -> tuple[Any, Any]:
        v, heads = arguments["v"], max(arguments["q"].shape[2], arguments["v"].shape[2])
        out = torch.full((*v.shape[:2], heads, v.shape[3]), torch.nan, dtype=v.dtype) if has_out else None
        o, state = function(**arguments, out=out)
        assert out is None or o is out
        return o, state

    call(make(0))  # other values, same metadata
    arguments, others = copies(make(1)), copies(make(1))
    before = kernel.prepared
    o, state = call(arguments)
    assert kernel.prepared == before == 1 and kernel.launches == 2
    env.reload()
    expected_o, expected_state = call(others)
    assert kernel.prepared == 2
    assert same_bits(o, expected_o)
    assert (state is None) == (expected_state is None)
    if state is not None:
        assert same_bits(state, expected_state)
        assert (state is arguments.get("initial_state")) == (expected_state is others.get("initial_state"))


@pytest.mark.parametrize("bad", [bad for bad in CHUNK if bad.name != "backend"], ids=lambda bad: bad.name)
def test_bad_chunk_calls_after_a_good_one(kernel: ContractKernel, bad: Bad) -> None:
    gdn.chunk_gated_delta_rule(**good_chunk())
    check(CHUNK_NAME, good_chunk(), bad)
    assert kernel.launches == 1


@pytest.mark.parametrize("bad", [bad for bad in RECURRENT if bad.name != "backend"], ids=lambda bad: bad.name)
def test_bad_recurrent_calls_after_a_good_one(kernel: ContractKernel, bad: Bad) -> None:
    gdn.fused_recurrent_gated_delta_rule(**good_recurrent())
    check(RECURRENT_NAME, good_recurrent(), bad)
    assert kernel.launches == 1


@pytest.mark.parametrize(
    ("good", "bad", "error"),
    [
        ({"null_slot": 1}, {"null_slot": 1.0}, TypeError),
        ({"scale": 1.0}, {"scale": torch.tensor(1.0)}, TypeError),
        ({"output_final_state": True}, {"output_final_state": 1}, TypeError),
        ({}, {"scale": [1.0]}, TypeError),  # no hash
    ],
)
def test_equal_is_not_the_same(kernel: ContractKernel, good: Arguments, bad: Arguments, error: type[Exception]) -> None:
    arguments = good_recurrent()
    gdn.fused_recurrent_gated_delta_rule(**{**arguments, **good})
    with pytest.raises(error):
        gdn.fused_recurrent_gated_delta_rule(**{**arguments, **bad})
    assert kernel.launches == 1


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
    without = unpooled(chunk_inputs, chunk_problem, 1)
    mask = {"has_initial_state": torch.ones(3, dtype=torch.bool)}
    for options in (mask, {}):
        gdn.chunk_gated_delta_rule(**without | options)
    compared: list[str] = []
    for name in ("__eq__", "__ne__"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_, name=name: compared.append(name))
    gdn.chunk_gated_delta_rule(**without | mask)
    assert kernel.prepared == 2 and not compared


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_addresses_are_looked_at(kernel: ContractKernel, name: str) -> None:
    good = good_chunk()
    gdn.chunk_gated_delta_rule(**copies(good))
    spoilt = copies(good)
    spoilt[name] = misaligned(spoilt[name])
    o, _ = gdn.chunk_gated_delta_rule(**spoilt)
    assert kernel.prepared == 2 and o is spoilt["out"]
    expected, _ = gdn.chunk_gated_delta_rule(**copies(good))
    assert kernel.prepared == 2 and same_bits(o, expected)


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


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return Kernels().put(monkeypatch)


def ragged_call(seed: int) -> Arguments:
    problem = MqaLogitsProblem(4, 1, 64, "float8_e4m3fn", True, "float32", True, True, "float32", False, 21, 75, 75)
    made = make_mqa_inputs(problem, seed=seed)
    names = ("q", "weights", "cu_seqlen_ks", "cu_seqlen_ke", "k_scale")
    return {"k": made.k[:, 0], **{name: getattr(made, name) for name in names}}


def paged_call(seed: int) -> Arguments:
    problem = PagedMqaLogitsProblem(4, 1, 64, "float8_e4m3fn", True, "float32", True, True, "float32", 16, 1, False, 3, 70)
    made = make_paged_inputs(problem, seed=seed, lengths=[70, 0, 17], page_pad_bytes=16)
    names = ("q", "cache", "weights", "context_lens", "block_tables")
    return {**{name: getattr(made, name) for name in names}, "max_context_len": 70}


LOGITS = [(gdn.mqa_logits, ragged_call), (gdn.paged_mqa_logits, paged_call)]


@pytest.mark.parametrize("has_out", [False, True])
@pytest.mark.parametrize(("function", "make"), LOGITS)
def test_repeated_logits(logits: Kernels, function: Any, make: Callable[[int], Arguments], has_out: bool) -> None:
    def call(arguments: Arguments) -> torch.Tensor:
        columns = arguments.get("max_context_len", 75)
        out = torch.full((arguments["weights"].shape[0], columns), torch.nan) if has_out else None
        found: torch.Tensor = function(**arguments, out=out)
        assert out is None or found is out
        return found

    call(make(0))
    found = call(make(1))
    assert len(logits.problems) == 1 and logits.launches == 2
    env.reload()
    assert same_bits(found, call(make(1))) and len(logits.problems) == 2


@pytest.mark.parametrize(
    ("function", "make", "good", "bad"),
    [
        (*LOGITS[0], {"relu": True}, {"relu": 1}),
        (*LOGITS[0], {"clean_logits": True}, {"clean_logits": 1.0}),
        (*LOGITS[0], {"scale": 1.0}, {"scale": True}),
        (*LOGITS[0], {"max_seqlen_k": 3}, {"max_seqlen_k": 3.0}),
        (*LOGITS[0], {"max_seqlen_k": 1}, {"max_seqlen_k": True}),
        (*LOGITS[1], {"max_context_len": 1}, {"max_context_len": True}),
        (*LOGITS[1], {"relu": False}, {"relu": 0}),
    ],
)
def test_equal_logits_arguments_are_not_the_same(
    logits: Kernels, function: Any, make: Callable[[int], Arguments], good: Arguments, bad: Arguments
) -> None:
    function(**{**make(0), **good})
    with pytest.raises(TypeError):
        function(**{**make(0), **bad})
    assert logits.launches == 1


def test_logits_arguments_are_converted_every_time(logits: Kernels) -> None:
    def ragged(seed: int) -> torch.Tensor:
        arguments = ragged_call(seed)
        for name in ("cu_seqlen_ks", "cu_seqlen_ke"):
            arguments[name] = arguments[name].long()
        return gdn.mqa_logits(**{**arguments, "weights": arguments["weights"].half()})

    def paged(seed: int) -> torch.Tensor:
        arguments = paged_call(seed)
        arguments["context_lens"] = torch.tensor([70, 7 * seed, 17])
        return gdn.paged_mqa_logits(**{**arguments, "weights": arguments["weights"].double()})

    for call in (ragged, paged):
        call(0)
        before = len(logits.problems)
        found = call(1)
        assert len(logits.problems) == before
        env.reload()
        assert same_bits(found, call(1))


def test_parameters_are_converted_every_time(kernel: ContractKernel) -> None:
    def call(seed: int) -> torch.Tensor:
        arguments = pooled_recurrent(seed)
        arguments["dt_bias"] = arguments["dt_bias"].bfloat16() + seed
        arguments["num_accepted_tokens"] = arguments["num_accepted_tokens"].long()
        o: torch.Tensor = gdn.fused_recurrent_gated_delta_rule(**arguments)[0]
        return o

    call(0)
    found = call(1)
    assert kernel.prepared == 1
    env.reload()
    assert same_bits(found, call(1))


def test_copied_arguments_teach_nothing(kernel: ContractKernel) -> None:
    arguments = good_chunk()
    arguments["cu_seqlens"] = torch.stack([arguments["cu_seqlens"]] * 2, dim=1)[:, 0]  # strided
    for _ in range(2):
        gdn.chunk_gated_delta_rule(**arguments)
    assert kernel.prepared == 2
