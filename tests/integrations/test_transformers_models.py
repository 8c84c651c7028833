"""The adapter for Transformers on all four models: 64 greedy tokens in every way to make them, packed rows, compilation."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.integrations import transformers_host as host
from tests.integrations.transformers_host import KINDS, SHORT, assert_close, generate, on, packed, prompts, reasons, run, served
from tests.layers import hf

pytestmark = [pytest.mark.cover, pytest.mark.usefixtures("one_thread")]

TOKENS = 64
LEVELS = ("layers", "functions")


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    changes: dict[str, Any] = {"output_gate_type": "sigmoid"} if request.param == "qwen4_exp" else {}
    model = host.build(request.param, **changes)
    with hf.exact_ties():
        yield model


PADDED = prompts(21, 2, 9)


@pytest.fixture(scope="module")
def wanted(model: PreTrainedModel) -> torch.Tensor:
    """The host's own greedy tokens after padded prompts."""
    return generate(model, PADDED[0], TOKENS, attention_mask=PADDED[1])


def _is_sparse(model: PreTrainedModel) -> bool:
    return model.config.model_type.startswith("qwen4_exp")


@pytest.mark.parametrize("level", LEVELS)
def test_greedy_tokens_with_both_caches(model: PreTrainedModel, wanted: torch.Tensor, level: str) -> None:
    ids, mask = PADDED
    static = {"cache_implementation": "static", "disable_compile": True}
    tokens = {"dynamic": TOKENS, "static": TOKENS if level == "layers" else 8}
    with on(model, level) as handle:
        for kind, options in (("dynamic", {}), ("static", static)):
            count = tokens[kind]
            found = generate(model, ids, count, attention_mask=mask, **options)
            assert torch.equal(found, wanted[:, : ids.shape[1] + count])
        by_indexer = level == "layers" and _is_sparse(model)
        assert served(handle) == sum(tokens.values()) * ((2 if level == "layers" else 6) + by_indexer)
        assert reasons(handle) == set()
    assert torch.equal(generate(model, ids, 2, attention_mask=mask), wanted[:, : ids.shape[1] + 2])


@pytest.mark.parametrize("level", LEVELS)
def test_logits_of_prompts_of_any_length(model: PreTrainedModel, level: str) -> None:
    for lengths in ((1, 1), (3, 4), (65, 130)):
        ids, mask = prompts(*lengths)
        wanted = run(model, ids, attention_mask=mask)
        with on(model, level):
            assert_close(run(model, ids, attention_mask=mask)[mask.bool()], wanted[mask.bool()])


@pytest.mark.parametrize("level", LEVELS)
def test_beams(model: PreTrainedModel, level: str) -> None:
    ids, _ = prompts(12, 12)
    expected = generate(model, ids, 8, num_beams=3)
    with on(model, level) as handle:
        assert torch.equal(generate(model, ids, 8, num_beams=3), expected)
        assert served(handle) > 0 and reasons(handle) == set()


@pytest.mark.parametrize(("level", "with_offsets"), [("layers", True), ("layers", False), ("functions", True)])
def test_packed_rows(model: PreTrainedModel, level: str, with_offsets: bool) -> None:
    ids, positions, offsets, alone = packed(model, (9, 1, 70, 2))
    with on(model, level) as handle:
        found = run(model, ids, position_ids=positions, **({"cu_seq_lens_q": offsets} if with_offsets else {}))
        assert level == "functions" or served(handle) == 2
    assert_close(found, alone)


@pytest.mark.parametrize("level", LEVELS)
def test_one_graph(level: str) -> None:
    """Dynamic prompts without a cache, and a static cache; the counters and the kept index tensors are no part of the graph."""
    model = host.build("qwen3_next" if level == "layers" else "qwen3_5", **SHORT)
    ids, _ = prompts(12, 12)
    wanted = run(model, ids)
    try:
        with on(model, level):
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
            assert_close(run(compiled, ids), wanted)
            cache = host.static(model, 32)
            parts = [run(compiled, ids[:, :9], cache)]
            parts += [run(compiled, ids[:, step : step + 1], cache) for step in (9, 10, 11)]
            assert_close(torch.cat(parts, dim=1), wanted)
    finally:
        torch._dynamo.reset()


def test_one_graph_of_packed_rows() -> None:
    model = host.build("qwen3_next", **SHORT)
    ids, positions, offsets, alone = packed(model, (4, 7, 1))
    try:
        with on(model, "layers"):
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
            assert_close(run(compiled, ids, position_ids=positions, cu_seq_lens_q=offsets), alone)
            with pytest.raises(RuntimeError, match="position_ids: expected rows that do not restart.*pass cu_seq_lens_q"):
                run(compiled, ids, position_ids=positions)
            plain = torch.arange(ids.shape[1])[None]
            assert_close(run(compiled, ids, position_ids=plain), run(model, ids, position_ids=plain))
    finally:
        torch._dynamo.reset()


def test_attention_with_an_indexer_generates_from_one_graph() -> None:
    """A static cache through `generate`, whose steps are compiled without a break; the prompt is not."""
    from transformers import CompileConfig

    model = host.build("qwen4_exp", **SHORT)
    ids, mask = prompts(21, 9)
    config = CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    config._compile_all_devices = True
    options = {"cache_implementation": "static", "compile_config": config}
    try:
        with hf.exact_ties():
            wanted = generate(model, ids, 12, attention_mask=mask)
            with on(model, "layers") as handle:
                assert torch.equal(generate(model, ids, 12, attention_mask=mask, **options), wanted)
                assert reasons(handle) == set()
                points = {one.path.rpartition(".")[2]: one.served for one in handle.report().points}
                assert points["linear_attn"] == points["self_attn"] == 1, "the prompt; steps of a graph are not counted"
    finally:
        torch._dynamo.reset()
