"""gdn.explain: for every public function, what a call would run; nothing runs, nothing is written."""

import copy
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import gdn
from gdn.core.call import operator_named
from gdn.device import H100
from gdn.runtime import compiled, devices, env, registry
from tests import described
from tests.described import plain
from tests.references import reference

BF16, I32 = torch.bfloat16, torch.int32
T, D = 6, 64  # tokens, head dim


def ones(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def made(name: str) -> dict[str, Any]:
    """A call in sizes that kernels take."""
    return plain.call(name, T, BF16, is_served=True)


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    **{name: partial(made, name) for name in described.every()},
    "gated_delta_rule": lambda: {  # of both forms: a new prompt, and a sequence that goes on
        **made("gated_delta_rule"),
        "lengths_host": (T - 2, 2),
        "has_initial_state": torch.tensor([False, True]),
    },
}


def test_every_operator_is_called_here():
    assert set(CALLS) == {name for operator in registry.OPERATORS.values() for name in operator.functions}


def call(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    arguments = CALLS[name]()
    if name == "fp8_mqa_logits":  # the pair's name is not fixed: all of them by position
        order = ("q", "kv", "weights", "cu_seqlen_ks", "cu_seqlen_ke")
        return tuple(arguments[key] for key in order), {}
    return (), arguments


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return all(map(same, a, b)) if isinstance(a, tuple) else a == b


@pytest.mark.parametrize("name", CALLS)
def test_without_a_gpu_the_reference_would_run(name: str, monkeypatch: pytest.MonkeyPatch):
    args, kwargs = call(name)
    before = copy.deepcopy((args, kwargs))

    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the reference ran")

    for place in {sys.modules[function.__module__] for function in vars(reference).values()}:
        if hasattr(place, name):
            monkeypatch.setattr(place, name, forbidden)
    if hasattr(reference, name):
        monkeypatch.setattr(operator_named(name), "reference", forbidden)
    answer = gdn.explain(name, *args, **kwargs)
    assert (answer.function, answer.backend, answer.config, answer.config_source) == (name, "reference", None, "none")
    operator = registry.operator(name)
    assert answer.op in [one.name for one in registry.operators(name)]
    # `attention` deals rows to one of its parts or both: this call has rows of decode alone.
    assert [part.op for part in answer.parts] == list(operator.composed_of[: 1 if name == "attention" else None])
    for part in answer.parts or (answer,):
        assert part.decided_by == "no SM90 (Hopper) GPU"
        assert {backend for backend, _ in part.refusals} == set(registry.operator(part.op).modules)
    assert str(answer).startswith(name) and "reference" in str(answer)
    assert all(same(args[i], before[0][i]) for i in range(len(args)))
    assert all(same(kwargs[key], before[1][key]) for key in kwargs)


@pytest.mark.parametrize("name", CALLS)
def test_the_same_arguments_are_a_valid_call(name: str):
    """The test above would otherwise explain calls that nobody can make."""
    args, kwargs = call(name)
    getattr(gdn, name)(*args, **kwargs)


def test_functions_and_short_names():
    by_name = gdn.explain("chunk_gated_delta_rule", **CALLS["chunk_gated_delta_rule"]())
    assert gdn.explain(gdn.chunk_gated_delta_rule, **CALLS["chunk_gated_delta_rule"]()) == by_name
    assert gdn.explain("chunk", **CALLS["chunk_gated_delta_rule"]()) == by_name
    assert by_name.problem is not None and by_name.problem.num_tokens == T
    for wrong in ("chunked", print):
        with pytest.raises(ValueError, match="op: expected one of chunk, recurrent"):
            gdn.explain(wrong)


def test_a_call_with_a_ring() -> None:
    """The kernel that a ring reaches, tokens of a call, live entries, bytes and floor."""
    plain_call = CALLS["fused_gdn_decode"]()
    slots, rows = plain_call["ssm_state"].shape[0], plain_call["state_indices"].shape[0]
    entry = plain_call["num_k_heads"] * D + plain_call["A_log"].shape[0] * (D + 1)
    one_token = {name: plain_call[name][:rows] for name in ("mixed_qkv", "z", "b", "a")}
    given = plain_call | one_token | {
        "query_start_loc": None, "ring": -torch.ones(slots, 22, entry), "fold_every": 15,
        "state_tokens": torch.zeros(slots, dtype=I32), "num_computed_tokens": torch.zeros(rows, dtype=I32),
    }  # fmt: skip
    found = gdn.explain("fused_gdn_decode", **given)
    assert (found.problem.ring_rows, found.problem.fold_every) == (22, 15)  # type: ignore[union-attr]
    assert found.notes[-2] == "replay: at most 1 token of a sequence in a call"
    assert "a mean of 8 live entries a sequence, a fold every 15 tokens" in found.notes[-1] and "floor" in str(found)
    assert not any("replay" in note for note in gdn.explain("fused_gdn_decode", **plain_call).notes)
    assert "where every sequence has 3 entries" in gdn.explain("fold_states", **CALLS["fold_states"]()).notes[-1]


PUBLIC = sorted(name for name in gdn.__all__ if not name.startswith("_"))


@pytest.mark.parametrize("name", sorted({*registry.OPERATORS, *PUBLIC}))
def test_every_name_is_resolved_or_refused(name: str):
    """An operator's call without arguments is refused for the first one that is missing, and other names for themselves."""
    is_operator = name in registry.OPERATORS or any(name in op.functions for op in registry.OPERATORS.values())
    with pytest.raises(TypeError if is_operator else ValueError, match="missing .* required" if is_operator else "^op: expected"):
        gdn.explain(name)


def test_arguments_are_validated_as_by_a_call():
    arguments = CALLS["chunk_gated_delta_rule"]()
    with pytest.raises(TypeError):
        gdn.explain("chunk", arguments["q"])
    with pytest.raises((TypeError, ValueError), match="^v: expected"):
        gdn.explain("chunk", **{**arguments, "v": ones(1, T + 1, *arguments["v"].shape[2:])})
    with pytest.raises(ValueError, match="can run chunk, got 'tilelang' .* requires an SM90 .Hopper. GPU, got device cpu"):
        gdn.explain("chunk", **arguments, backend="tilelang")


def test_switches_are_shown(switch: Callable[..., env.Switches]):
    switch(VLLM_GDN_USE_BLADNN="1", GDN_BACKEND="tilelang", VLLM_QSA_PREFILL_ATTN_BACKEND="fa3")
    answer = gdn.explain("recurrent", **CALLS["fused_recurrent_gated_delta_rule"]())
    assert answer.switches == ("VLLM_GDN_USE_BLADNN=1", "GDN_BACKEND=tilelang")
    assert answer.backend == "reference" and "overrides" in answer.notes[0] and "prefers cute" in answer.notes[1]
    assert "switches: VLLM_GDN_USE_BLADNN=1, GDN_BACKEND=tilelang" in str(answer)
    assert gdn.explain("sparse_attention", **CALLS["sparse_attention"]()).switches == ("GDN_BACKEND=tilelang",)


def test_a_composed_function_names_all_that_it_runs():
    answer = gdn.explain("indexer_topk", **CALLS["indexer_topk"]())
    assert (answer.function, answer.op) == ("indexer_topk", "indexer_topk")
    assert str(answer).startswith("indexer_topk: mqa_logits, then topk\n  mqa_logits: reference")
    assert "\n  topk_indices: reference" in str(answer)


@pytest.fixture
def as_if_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "describe", lambda device: (H100, "NVIDIA H100 (SM90)"))


@pytest.mark.parametrize("op", [op for op in registry.OPERATORS.values() if op.modules and op.functions], ids=lambda op: op.name)
def test_on_an_h100_each_backend_can_be_ordered(as_if_h100: None, op: registry.Operator):
    before = compiled.compilations()
    for backend in op.modules:
        args, kwargs = call(op.functions[0])
        if op.name == "attention_prefill":
            kwargs |= {"max_query_len": 9}
        answer = gdn.explain(op.functions[0], *args, **kwargs, backend=backend)
        (answer,) = answer.parts or (answer,)
        assert (answer.backend, answer.decided_by) == (backend, "the argument")
        assert answer.config is not None and answer.config_source in ("table", "default")
        assert str(answer.config) in str(answer)
    assert compiled.compilations() == before


def test_on_an_h100_an_unserved_problem_says_why(as_if_h100: None):
    narrow = ones(1, T, 2, 48)
    arguments = {**CALLS["chunk_gated_delta_rule"](), "q": narrow, "k": narrow, "initial_state": None, "state_indices": None}
    answer = gdn.explain("chunk", **arguments)
    assert answer.backend == "reference" and "requires" in dict(answer.refusals)["tilelang"] and "48" in str(answer)
    with pytest.raises(ValueError, match="requires .* got .*48"):
        gdn.explain("chunk", **arguments, backend="tilelang")


def test_the_switch_of_a_combined_operator_is_reported_by_its_parts(switch: Any) -> None:
    switch(GDN_BACKEND_INDEXER_TOPK="reference")
    answer = gdn.explain("indexer_topk", **CALLS["indexer_topk"]())
    assert answer.parts[0].decided_by == "GDN_BACKEND_INDEXER_TOPK=reference"
    switch(GDN_BACKEND_INDEXER_TOPK="cute")
    with pytest.raises(ValueError, match=r"can run mqa_logits, got 'cute' \(by GDN_BACKEND_INDEXER_TOPK=cute\)"):
        gdn.indexer_topk(**CALLS["indexer_topk"]())


def test_the_fp8_switch_decides_where_there_is_no_cache(switch: Any) -> None:
    arguments = {name: value for name, value in CALLS["prepare_indexer"]().items() if name != "fp8"}
    arguments |= dict.fromkeys(("k", "k_norm", "cache", "slot_mapping", "v", "v_cache"))
    assert gdn.prepare_indexer(**arguments)[0].dtype == arguments["q"].dtype
    switch(VLLM_QSA_USE_FP8_INDEXER="1")
    assert gdn.prepare_indexer(**arguments)[0].dtype == torch.float8_e4m3fn
    assert gdn.prepare_indexer(**arguments, fp8=False)[0].dtype == arguments["q"].dtype
    assert gdn.explain("prepare_indexer", **arguments).problem.q_out_dtype == "float8_e4m3fn"  # type: ignore[union-attr]
