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

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
T, H, HV, D, SLOTS, PAGE = 6, 2, 4, 64, 5, 16


def ones(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def arange(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=I32)


def delta_rule() -> dict[str, Any]:
    return {
        "q": ones(1, T, H, D),
        "k": ones(1, T, H, D),
        "v": ones(1, T, HV, D),
        "g": -ones(1, T, HV, dtype=F32),
        "beta": ones(1, T, HV, dtype=F32),
        "initial_state": ones(SLOTS, HV, D, D, dtype=F32),
        "cu_seqlens": torch.tensor([0, 2, T], dtype=I32),
    }


def logits() -> dict[str, Any]:
    return {"q": ones(T, H, D), "k": ones(T, D), "weights": ones(T, H), "cu_seqlen_ks": arange(T), "cu_seqlen_ke": arange(T) + 1}


def fp8_logits() -> dict[str, Any]:
    kv = (ones(T, D).to(torch.float8_e4m3fn), ones(T, dtype=F32))
    values = {name: value for name, value in logits().items() if name != "k"}
    return {**values, "q": ones(T, H, D).to(torch.float8_e4m3fn), "kv": kv, "weights": ones(T, H, dtype=F32)}


def paged() -> dict[str, Any]:
    return {
        "q": ones(2, 1, H, D),
        "cache": ones(SLOTS, PAGE, D),
        "weights": ones(2, H),
        "context_lens": arange(2) + 3,
        "block_tables": arange(4).view(2, 2),
    }


def fp8_paged() -> dict[str, Any]:
    cache = torch.zeros(SLOTS, PAGE, 1, D + 4, dtype=torch.uint8)
    q = ones(2, 1, H, D).to(torch.float8_e4m3fn)
    return {**paged(), "q": q, "weights": ones(2, H, dtype=F32), "cache": cache, "max_context_len": 2 * PAGE}


def decode() -> dict[str, Any]:
    channels = 2 * H * D + HV * D
    return {
        "mixed_qkv": ones(2, channels),
        "z": ones(2, HV, D),
        "b": ones(2, HV),
        "a": ones(2, HV),
        "conv_state": ones(SLOTS, channels, 3),
        "conv_weight": ones(channels, 4),
        "A_log": ones(HV, dtype=F32),
        "dt_bias": ones(HV, dtype=F32),
        "norm_weight": ones(D),
        "ssm_state": ones(SLOTS, HV, D, D, dtype=F32),
        "state_indices": arange(2),
        "num_k_heads": H,
        "head_k_dim": D,
        "head_v_dim": D,
    }


def fold() -> dict[str, Any]:
    return {
        "ssm_state": ones(SLOTS, HV, D, D, dtype=F32),
        "state_indices": arange(2),
        "ring": -ones(SLOTS, 16, H * D + HV * (D + 1), dtype=F32),
        "state_tokens": torch.zeros(SLOTS, dtype=I32),
        "num_computed_tokens": arange(2),
        "num_k_heads": H,
        "fold_every": 15,
    }


def accept() -> dict[str, Any]:
    return {
        "ring": ones(SLOTS, 16, 16, dtype=F32),
        "conv_state": None,
        "state_indices": arange(1),
        "parent_token": torch.tensor([-1, 0], dtype=I32),
        "accepted_nodes": arange(1),
        "num_computed_tokens": arange(1),
        "num_accepted_tokens": torch.ones(1, dtype=I32),
        "query_start_loc": torch.tensor([0, 2], dtype=I32),
        "conv_width": 4,
    }


def prefill() -> dict[str, Any]:
    one = decode()
    one["conv_states"] = one.pop("conv_state")
    return {**one, "query_start_loc": arange(3)}


def indexer() -> dict[str, Any]:
    return {
        "positions": arange(T),
        "cos_sin": ones(32, 32, dtype=F32),
        "k_norm": ones(D),
        "cache": ones(SLOTS, PAGE, 1, D),
        "slot_mapping": arange(T),
        "rotary_dim": 32,
    }


def attention() -> dict[str, Any]:
    return {
        "q": ones(T, H, 128),
        "kv_cache": (ones(SLOTS, PAGE, 1, 128), ones(SLOTS, PAGE, 1, 128)),
        "topk_indices": arange(T).view(T, 1) % 2,
        "block_tables": arange(4).view(2, 2),
        "query_start_loc": torch.tensor([0, 2, T], dtype=I32),
        "seq_lens": torch.tensor([2, 4], dtype=I32),
    }


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    **{name: partial(plain.call, name, T, BF16) for name in described.every()},
    "chunk_gated_delta_rule": lambda: {**delta_rule(), "state_indices": arange(2)},
    "chunk_summary": lambda: {name: x for name, x in delta_rule().items() if name != "initial_state"},
    "fused_recurrent_gated_delta_rule": lambda: {**delta_rule(), "ssm_state_indices": arange(2)},
    "gated_delta_rule": lambda: {
        **delta_rule(), "state_indices": arange(2), "lengths_host": (2, T - 2), "has_initial_state": arange(2) > 0,
    },
    "fused_gdn_decode": decode,
    "fused_gdn_prefill": prefill,
    "fold_states": fold,
    "accept_draft_tree": accept,
    "fused_gdn_gating": lambda: {"A_log": ones(HV), "a": ones(T, HV), "b": ones(T, HV), "dt_bias": ones(HV)},
    "fused_qkvzba_split_reshape_cat": lambda: {
        "mixed_qkvz": ones(T, 2 * H * D + 2 * HV * D),
        "mixed_ba": ones(T, 2 * HV),
        "num_heads_qk": H,
        "num_heads_v": HV,
        "head_qk": D,
        "head_v": D,
    },
    "causal_conv1d_fn": lambda: {"x": ones(T, D), "weight": ones(D, 4)},
    "causal_conv1d_update": lambda: {"x": ones(2, D), "conv_state": ones(2, D, 3), "weight": ones(D, 4)},
    "add_rms_norm": lambda: {"x": ones(T, D), "residual": ones(T, D), "weight": ones(D)},
    "rms_norm_gated": lambda: {"x": ones(T, D), "z": ones(T, D), "weight": ones(D)},
    "quantize_fp8": lambda: {"x": ones(T, 128)},
    "write_indexer_cache": lambda: {"k": ones(T, D), "cache": ones(SLOTS, PAGE, 1, D), "slot_mapping": arange(T)},
    "prepare_indexer": lambda: {
        **indexer(), "q": ones(T, H, D), "k": ones(T, D), "weights": ones(T, H), "q_norm": ones(D),
    },
    "compress_indexer_keys": lambda: {
        **indexer(), "raw_k": ones(T, D), "ring": ones(SLOTS, 8, D), "ring_slots": arange(T) * 0,
    },
    "gather_indexer_cache": lambda: {
        "cache": ones(SLOTS, PAGE, 1, D), "block_tables": arange(4).view(2, 2), "cu_seqlens": torch.tensor([0, 2, T], dtype=I32),
    },
    "expand_topk_groups": lambda: {"group_indices": arange(T).view(T, 1), "positions": arange(T)},
    "mqa_logits": logits,
    "fp8_mqa_logits": fp8_logits,
    "paged_mqa_logits": lambda: {**paged(), "max_context_len": 2 * PAGE},
    "fp8_paged_mqa_logits": fp8_paged,
    "topk_indices": lambda: {"logits": ones(T, 9, dtype=F32), "k": 2},
    "indexer_topk": lambda: {**logits(), "topk": 2},
    "paged_indexer_topk": lambda: {**paged(), "topk": 2},
    "attention": lambda: {key: value for key, value in attention().items() if key != "topk_indices"},
    "sparse_attention": attention,
}  # fmt: skip


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
    assert answer.op in [one.name for one in registry.operators(name)] and [part.op for part in answer.parts] == list(
        operator.composed_of
    )
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
    given = decode() | {
        "ring": -ones(SLOTS, 22, H * D + HV * (D + 1), dtype=F32), "state_tokens": torch.zeros(SLOTS, dtype=I32),
        "num_computed_tokens": arange(2), "fold_every": 15,
    }  # fmt: skip
    rows = given["state_indices"].shape[0]
    given["num_computed_tokens"] = torch.zeros(rows, dtype=I32)
    found = gdn.explain("fused_gdn_decode", **given)
    assert (found.problem.ring_rows, found.problem.fold_every) == (22, 15)  # type: ignore[union-attr]
    assert found.notes[-2] == "replay: at most 1 token of a sequence in a call"
    assert "a mean of 8 live entries a sequence, a fold every 15 tokens" in found.notes[-1] and "floor" in str(found)
    assert not any("replay" in note for note in gdn.explain("fused_gdn_decode", **decode()).notes)
    assert "where every sequence has 8 entries" in gdn.explain("fold_states", **fold()).notes[-1]


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
        gdn.explain("chunk", **{**arguments, "v": ones(1, T + 1, HV, D)})
    with pytest.raises(ValueError, match="can run chunk, got 'tilelang' .* requires an SM90 .Hopper. GPU, got device cpu"):
        gdn.explain("chunk", **arguments, backend="tilelang")


def test_switches_are_shown(switch: Callable[..., env.Switches]):
    switch(VLLM_GDN_USE_BLADNN="1", GDN_BACKEND="tilelang", VLLM_QSA_PREFILL_ATTN_BACKEND="fa3")
    answer = gdn.explain("recurrent", **CALLS["fused_recurrent_gated_delta_rule"]())
    assert answer.switches == ("VLLM_GDN_USE_BLADNN=1", "GDN_BACKEND=tilelang")
    assert answer.backend == "reference" and "overrides" in answer.notes[0] and "prefers cute" in answer.notes[1]
    assert "switches: VLLM_GDN_USE_BLADNN=1, GDN_BACKEND=tilelang" in str(answer)
    assert gdn.explain("sparse_attention", **attention()).switches == ("GDN_BACKEND=tilelang",)


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
        answer = gdn.explain(op.functions[0], *args, **kwargs, backend=backend)
        assert (answer.backend, answer.decided_by) == (backend, "the argument")
        assert answer.config is not None and answer.config_source in ("table", "default")
        assert str(answer.config) in str(answer)
    assert compiled.compilations() == before


def test_on_an_h100_an_unserved_problem_says_why(as_if_h100: None):
    arguments = {**delta_rule(), "q": ones(1, T, H, 48), "k": ones(1, T, H, 48), "initial_state": None}
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
    arguments |= {"k": None, "k_norm": None, "cache": None, "slot_mapping": None}
    assert gdn.prepare_indexer(**arguments)[0].dtype == arguments["q"].dtype
    switch(VLLM_QSA_USE_FP8_INDEXER="1")
    assert gdn.prepare_indexer(**arguments)[0].dtype == torch.float8_e4m3fn
    assert gdn.prepare_indexer(**arguments, fp8=False)[0].dtype == arguments["q"].dtype
    assert gdn.explain("prepare_indexer", **arguments).problem.q_out_dtype == "float8_e4m3fn"  # type: ignore[union-attr]
