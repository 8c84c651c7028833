"""`gdn demo` on a machine without a GPU: it says what it runs, and finds what is wrong in any operator's result."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import gdn
from gdn import reference
from gdn.cli import app, demo, demo_block, demo_expected
from gdn.models import MODELS
from gdn.runtime import env

OPERATORS = sorted({*demo_block.PREFILL, *demo_block.DECODE})


def run(*options: str) -> Any:
    return CliRunner().invoke(
        app.app, ["demo", "--model", "tiny", "--device", "cpu", "--steps", "2", *options], env={"COLUMNS": "200"}
    )


def rows(fp8: bool) -> list[demo.Row]:
    block = demo_block.Block(MODELS["tiny"], [37, 129, 64, 2], 2, fp8_indexer=fp8, device=torch.device("cpu"))
    phases = (block.prefill(), block.decode(), block.decode())
    return [demo.measure(call, None) for phase in phases for call in phase]


@pytest.mark.parametrize("fp8", ["0", "1"], ids=["bf16", "fp8"])
def test_it_says_what_it_runs(switch: Callable[..., env.Switches], fp8: str):
    switch(VLLM_QSA_USE_FP8_INDEXER=fp8)
    result = run()
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    shape = MODELS["tiny"]
    assert f"tiny, one of 1 tensor-parallel rank, random weights; hidden size {shape.hidden_size}" in text
    assert "2 q and k heads of 64, 4 v heads of 64, convolution of width 4 over 512 channels" in text
    assert f"top {shape.index_topk}, cache and logits in {'FP8' if fp8 == '1' else 'bf16'}" in text
    assert "prefill: 4 prompts of 37, 129, 64, 2 tokens in one ragged batch, every second one from a cached state" in text
    assert f"from a cached state {', '.join(demo_block.PREFILL)} decode" in text
    assert f"decode: 2 steps of one token for each sequence {', '.join(demo_block.DECODE)}" in text
    assert "22 calls (reference 22), each checked against an independent computation in float64, 0 wrong" in text


def test_the_steps_are_those_that_it_names():
    found = rows(fp8=False)
    assert [row.operator for row in found] == [*demo_block.PREFILL, *demo_block.DECODE, *demo_block.DECODE]
    assert set(demo_expected._EXPECTED) == set(OPERATORS)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_every_call_is_compared_with_something_that_is_not_the_reference(fp8: bool, monkeypatch: pytest.MonkeyPatch):
    """The reference runs once a call, as the operator; what it is compared with is computed with the reference out of reach."""
    true_pairs = demo_expected.pairs
    compared = []

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("the reference was asked what the reference should give")

    def pairs(call: demo_block.Call, before: dict[str, Any]) -> demo_expected.Pairs:
        compared.append(call.operator)
        with monkeypatch.context() as patch:
            for name in reference.__dict__:
                if callable(getattr(reference, name)):
                    patch.setattr(reference, name, forbidden)
            for operator in OPERATORS:
                patch.setattr(gdn, operator, forbidden)
            found = true_pairs(call, before)
        assert found and all(got.numel() == expected.numel() > 0 for got, expected in found)
        return found

    monkeypatch.setattr(demo, "pairs", pairs)
    found = rows(fp8)
    assert compared == [row.operator for row in found]
    assert all(row.passed for row in found)
    rounded = {row.operator for row in found if row.error > 0}
    assert {"chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "causal_conv1d_fn", "mqa_logits"} <= rounded


def test_the_expected_values_know_nothing_of_the_reference_or_the_operators():
    tree = ast.parse(Path(demo_expected.__file__).read_text(encoding="utf-8"))
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    ours = {module for module in modules if module.split(".")[0] == "gdn"}
    assert ours and all(module.startswith(("gdn.testing.", "gdn.cli.demo_block")) for module in ours)


def spoiled(value: Any, index: int) -> Any:
    """A result with one element of one of its tensors wrong."""
    if isinstance(value, tuple):
        return tuple(spoiled(item, index) if place == index else item for place, item in enumerate(value))
    if value is None:
        return None
    wrong = value.clone()
    flat = wrong.view(torch.uint8 if wrong.element_size() == 1 else wrong.dtype).view(-1)
    middle = flat.shape[0] // 2
    flat[middle] = flat[middle] + 64 if not wrong.is_floating_point() or wrong.element_size() == 1 else 1e3
    return wrong


RESULTS = [(name, 0) for name in OPERATORS] + [
    ("fused_qkvzba_split_reshape_cat", 1),
    ("fused_qkvzba_split_reshape_cat", 2),
    ("fused_qkvzba_split_reshape_cat", 3),
    ("chunk_gated_delta_rule", 1),
    ("fused_recurrent_gated_delta_rule", 1),
    ("prepare_indexer", 1),
]


@pytest.mark.parametrize("fp8", ["0", "1"], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("operator", "index"), RESULTS)
def test_a_wrong_element_of_any_result_is_found(
    switch: Callable[..., env.Switches], monkeypatch: pytest.MonkeyPatch, operator: str, index: int, fp8: str
):
    switch(VLLM_QSA_USE_FP8_INDEXER=fp8)
    true_run = demo_block.Call.run

    def run_wrongly(call: demo_block.Call) -> Any:
        result = true_run(call)
        if call.operator == operator:
            call.result = spoiled(result, index)
        return result

    monkeypatch.setattr(demo_block.Call, "run", run_wrongly)
    result = run("--steps", "1")
    assert result.exit_code == 1, result.output
    assert "WRONG" in result.output and ", 0 wrong" not in " ".join(result.output.split())
    wrong = {line.split()[0] for line in result.output.splitlines() if "WRONG" in line}
    assert operator in wrong


@pytest.mark.parametrize("name", ["causal_conv1d_fn", "causal_conv1d_update", "prepare_indexer"])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_a_wrong_element_of_a_pool_is_found(monkeypatch: pytest.MonkeyPatch, name: str, fp8: bool):
    true_run = demo_block.Call.run

    def run_wrongly(call: demo_block.Call) -> Any:
        result = true_run(call)
        if call.operator == name:
            pool = call.arguments[call.mutated[0]].view(-1)
            pool[0] += 3  # of slot 0, or page 0, which no sequence owns
        return result

    monkeypatch.setattr(demo_block.Call, "run", run_wrongly)
    assert {row.operator for row in rows(fp8) if not row.passed} >= {name}
