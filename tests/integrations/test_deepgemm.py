"""The DeepGEMM adapter: recorded signatures, values by position and by keyword, what is refused and where it goes then."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gdn
from gdn.integrations import Refused, _hosts, _signatures, deepgemm
from gdn.ops.indexer.inputs import MqaInputs, PagedInputs, make_mqa_inputs, make_paged_inputs
from gdn.ops.indexer.oracle import exact_mqa_logits, exact_paged_mqa_logits, logits_error
from gdn.ops.indexer.problem import MqaLogitsProblem, PagedMqaLogitsProblem
from tests.integrations import record, stand_in

NAMES = [name.rpartition(".")[2] for name in _hosts.DEEPGEMM.functions]


@pytest.mark.parametrize("name", NAMES)
def test_signatures_are_the_recorded_ones(name: str) -> None:
    recorded = stand_in.parameters("deepgemm", f"deep_gemm.{name}")
    assert _signatures.difference(recorded, _signatures.of_object(getattr(deepgemm, name))) is None
    assert inspect.signature(getattr(deepgemm, name)).return_annotation is not inspect.Signature.empty


def test_signatures_of_functions_that_pybind_made() -> None:
    line = (
        "f(q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], clean: bool = True, n: typing.SupportsInt = 0) -> torch.Tensor"
    )
    told = _signatures.of_docstring(line + "\n")
    assert told == [["q", "any"], ["kv", "any"], ["clean", "any", "True"], ["n", "any", "0"]]
    assert (
        _signatures.of_docstring("f(d: torch.dtype = <dtype at 0x7f>) -> None") is None and _signatures.of_docstring("") is None
    )
    text = """m.def("f", &f, py::arg("q"), py::arg("n") = 0,
        py::arg("d") = torch::kFloat32, py::arg("i") = std::nullopt); m.def("g", &g);"""
    assert record.of_pybind(text, "f") == [["q", "any"], ["n", "any", "0"], ["d", "any", "?"], ["i", "any", "None"]]
    assert record.of_pybind(text, "g") == [] and record.of_pybind(text, "h") is None


COMMON: dict[str, Any] = {
    "num_heads": 8, "num_kv_heads": 1, "head_dim": 64, "dtype": "float8_e4m3fn", "has_k_scale": True, "weights_dtype": "float32",
    "relu": True, "clean": True, "out_dtype": "float32",
}  # fmt: skip
RAGGED = MqaLogitsProblem(**COMMON, packed=False, num_queries=9, num_keys=40, num_columns=40)
PAGED = PagedMqaLogitsProblem(**COMMON, page_size=16, next_n=2, per_draft_lengths=True, batch=3, max_context_len=70)


def ragged(ranges: str = "hard") -> tuple[MqaInputs, dict[str, Any]]:
    """Inputs, and DeepGEMM's arguments by name."""
    inputs = make_mqa_inputs(RAGGED, ranges=ranges)
    assert inputs.k_scale is not None
    kv = (inputs.k[:, 0], inputs.k_scale[:, 0])
    ends = {"cu_seq_len_k_start": inputs.cu_seqlen_ks, "cu_seq_len_k_end": inputs.cu_seqlen_ke}
    return inputs, {"q": inputs.q, "kv": kv, "weights": inputs.weights, **ends}


def paged() -> tuple[PagedInputs, dict[str, Any]]:
    inputs = make_paged_inputs(PAGED, lengths=[[70, 69], [1, 0], [33, 34]])
    schedule = deepgemm.get_paged_mqa_logits_metadata(inputs.context_lens, PAGED.page_size, num_sms=4, indices=None)
    assert schedule.shape == (5, 2) and not schedule.any()
    rest = {"context_lens": inputs.context_lens, "block_table": inputs.block_tables, "schedule_meta": schedule}
    return inputs, {"q": inputs.q, "kv_cache": inputs.cache, "weights": inputs.weights, **rest, "max_context_len": 70}


@pytest.mark.parametrize("by_keyword", [True, False])
@pytest.mark.parametrize("max_seqlen_k", [0, 24])
def test_ragged_scores(by_keyword: bool, max_seqlen_k: int) -> None:
    inputs, given = ragged("sequences")
    exact = exact_mqa_logits(inputs, max_seqlen_k=max_seqlen_k or None)
    options = {"clean_logits": True, "max_seqlen_k": max_seqlen_k}
    for function, dtype in ((deepgemm.fp8_mqa_logits, None), (deepgemm.fp8_fp4_mqa_logits, torch.bfloat16)):
        more: dict[str, Any] = options if dtype is None else {**options, "logits_dtype": dtype}
        q = given["q"] if dtype is None else (given["q"], None)
        arguments = {**given, "q": q, **more}
        call: Any = function
        got = call(**arguments) if by_keyword else call(*arguments.values())
        assert got.dtype == (dtype or torch.float32) and logits_error(got, exact, fp8=True) is None


@pytest.mark.parametrize("by_keyword", [True, False])
def test_paged_scores(by_keyword: bool) -> None:
    inputs, given = paged()
    exact = exact_paged_mqa_logits(inputs)
    for function, dtype in ((deepgemm.fp8_paged_mqa_logits, None), (deepgemm.fp8_fp4_paged_mqa_logits, torch.bfloat16)):
        more: dict[str, Any] = {"clean_logits": True} if dtype is None else {"clean_logits": True, "logits_dtype": dtype}
        arguments = {**given, "q": given["q"] if dtype is None else (given["q"], None), **more}
        call: Any = function
        got = call(**arguments) if by_keyword else call(*arguments.values())
        assert got.dtype == (dtype or torch.float32) and logits_error(got, exact, fp8=True) is None


def test_lengths_of_one_dimension() -> None:
    inputs, given = paged()
    lengths = torch.tensor([70, 1, 34], dtype=torch.int32)
    expected = gdn.paged_mqa_logits(inputs.q, inputs.cache, inputs.weights, lengths, inputs.block_tables, 70)
    got = deepgemm.fp8_paged_mqa_logits(**{**given, "context_lens": lengths}, clean_logits=True)
    assert torch.equal(got, expected)


def fp4(q: torch.Tensor) -> torch.Tensor:
    return torch.zeros(q.shape, dtype=torch.int8)


RAGGED_REFUSALS = {
    "the queries are not FP8": lambda one: {"q": fp4(one["q"])},
    "the queries have scales of their own": lambda one: {"q": (one["q"], torch.ones(9, 8))},
    "head dim 32 has no kernel": lambda one: {"q": one["q"][..., :32]},
    "65 heads have no kernel": lambda one: {"q": one["q"][:, :1].expand(-1, 65, -1)},
    "the scores are neither float32 nor bfloat16": lambda one: {"logits_dtype": torch.float16},
    "the keys are not FP8": lambda one: {"kv": (one["kv"][0], one["kv"][1].to(torch.int32))},
    "the tokens are on meta": lambda one: {"q": one["q"].to("meta")},
}
PAGED_REFUSALS = {
    "the queries are not FP8": lambda one: {"q": fp4(one["q"])},
    "the queries have scales of their own": lambda one: {"q": (one["q"], torch.ones(3, 2, 8))},
    "the scores are neither float32 nor bfloat16": lambda one: {"logits_dtype": torch.float16},
    "indices": lambda one: {"indices": torch.zeros(3, dtype=torch.int32)},
    "a page holds 2 keys, which is no multiple of 4": lambda one: {"kv_cache": one["kv_cache"][:, :2]},
    "the cache is not uint8": lambda one: {"kv_cache": one["kv_cache"].view(torch.int8)},
}


REFUSALS: dict[str, tuple[Callable[[], tuple[Any, dict[str, Any]]], dict[str, Any]]] = {
    "fp8_fp4_mqa_logits": (ragged, RAGGED_REFUSALS), "fp8_fp4_paged_mqa_logits": (paged, PAGED_REFUSALS),
}  # fmt: skip


@pytest.mark.parametrize(("name", "reason"), [(name, reason) for name, (_, reasons) in REFUSALS.items() for reason in reasons])
def test_refused_calls(name: str, reason: str) -> None:
    make, reasons = REFUSALS[name]
    _, given = make()
    with pytest.raises(Refused, match=f"{name}: {reason}"):
        getattr(deepgemm, name)(**given | reasons[reason](given))


def test_enabled_calls_are_served_or_left_with_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    made = stand_in.install(monkeypatch, _hosts.DEEPGEMM)
    inputs, given = ragged()
    paged_inputs, paged_given = paged()
    with deepgemm.enable(strict=True, allow_reference=True) as handle:
        assert deepgemm.enable(strict=True, allow_reference=True) is handle
        import deep_gemm  # type: ignore[import-not-found]

        assert deep_gemm.get_paged_mqa_logits_metadata is made["deep_gemm.get_paged_mqa_logits_metadata"], "the host's own"
        exact = exact_mqa_logits(inputs)
        assert logits_error(deep_gemm.fp8_mqa_logits(**given), exact, fp8=True) is None
        assert logits_error(deep_gemm.fp8_fp4_mqa_logits(**{**given, "q": (given["q"], None)}), exact, fp8=True) is None
        assert (
            logits_error(
                deep_gemm.fp8_paged_mqa_logits(**paged_given, clean_logits=True), exact_paged_mqa_logits(paged_inputs), fp8=True
            )
            is None
        )
        packed = fp4(given["q"])
        left, name, arguments = deep_gemm.fp8_fp4_mqa_logits(packed, given["kv"], given["weights"], None, None, max_seqlen_k=7)
        assert (
            (left, name) == (stand_in.HOST, "fp8_fp4_mqa_logits") and arguments["q"] is packed and arguments["max_seqlen_k"] == 7
        )
        indices = torch.zeros(3, dtype=torch.int32)
        assert deep_gemm.fp8_paged_mqa_logits(**paged_given, indices=indices)[2]["indices"] is indices
        counts = {one.path: (one.replaced, one.served, sum(one.left.values())) for one in handle.report().points}
    assert counts == {
        "deep_gemm.fp8_mqa_logits": (True, 1, 0),
        "deep_gemm.fp8_paged_mqa_logits": (True, 1, 1),
        "deep_gemm.fp8_fp4_mqa_logits": (True, 1, 1),
        "deep_gemm.fp8_fp4_paged_mqa_logits": (True, 0, 0),
    }
    assert all(getattr(deep_gemm, name) is made[f"deep_gemm.{name}"] for name in NAMES)


def test_a_version_with_other_signatures_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in.install(monkeypatch, _hosts.DEEPGEMM)
    import deep_gemm

    def fp8_mqa_logits(q, kv, weights, ks, ke, clean_logits=False, max_seqlen_k=0):  # type: ignore[no-untyped-def]
        return stand_in.HOST

    monkeypatch.setattr(deep_gemm, "fp8_mqa_logits", fp8_mqa_logits)
    with deepgemm.enable(allow_reference=True) as handle:
        assert deep_gemm.fp8_mqa_logits is fp8_mqa_logits
        first = handle.report().points[0]
        assert not first.replaced and first.why is not None and "expected parameter cu_seq_len_k_start, got ks" in first.why


def test_the_cpu_is_left_to_the_host_without_allow_reference(monkeypatch: pytest.MonkeyPatch, hopper: None) -> None:
    stand_in.install(monkeypatch, _hosts.DEEPGEMM)
    import deep_gemm

    with deepgemm.enable() as handle:
        assert deep_gemm.fp8_mqa_logits(**ragged()[1])[0] == stand_in.HOST
        assert dict(handle.report().points[0].left) == {"the tokens are on cpu": 1}
