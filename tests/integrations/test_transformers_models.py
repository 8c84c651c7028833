"""The adapter for Transformers on all four models: 64 greedy tokens in every way to make them, packed rows, compilation."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.integrations import transformers_host as host
from tests.integrations.transformers_host import KINDS, assert_close, exact_ties, generate, on, prompts, reasons, run, served

pytestmark = pytest.mark.cover

TOKENS = 64
LEVELS = ("layers", "functions")


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    changes: dict[str, Any] = {"output_gate_type": "sigmoid"} if request.param == "qwen4_exp" else {}
    model = host.build(request.param, **changes)
    with exact_ties():
        yield model


def _is_sparse(model: PreTrainedModel) -> bool:
    return model.config.model_type.startswith("qwen4_exp")


@pytest.mark.parametrize("level", LEVELS)
def test_greedy_tokens_with_both_caches(model: PreTrainedModel, level: str) -> None:
    ids, mask = prompts(21, 2, 9)
    wanted = generate(model, ids, TOKENS, attention_mask=mask)
    with on(model, level) as handle:
        for options in ({}, {"cache_implementation": "static", "disable_compile": True}):
            assert torch.equal(generate(model, ids, TOKENS, attention_mask=mask, **options), wanted)
        per_step = 2 if level == "layers" else 6
        by_indexer = level == "layers" and _is_sparse(model)
        assert served(handle) == 2 * TOKENS * (per_step + by_indexer)
        assert reasons(handle) == set()
    assert torch.equal(generate(model, ids, 8, attention_mask=mask), wanted[:, : ids.shape[1] + 8])


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
    wanted = generate(model, ids, 16, num_beams=3)
    with on(model, level) as handle:
        assert torch.equal(generate(model, ids, 16, num_beams=3), wanted)
        assert served(handle) > 0 and reasons(handle) == set()


@pytest.mark.parametrize("with_offsets", [True, False])
def test_packed_rows(model: PreTrainedModel, with_offsets: bool) -> None:
    lengths = (9, 1, 70, 2)
    ids, _ = prompts(sum(lengths))
    alone = torch.cat([run(model, one) for one in ids.split(lengths, dim=1)], dim=1)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    with on(model, "layers") as handle:
        found = run(model, ids, position_ids=positions, **({"cu_seq_lens_q": offsets} if with_offsets else {}))
        assert served(handle) == 2
    assert_close(found, alone)


def test_packed_rows_of_the_functions(model: PreTrainedModel) -> None:
    lengths = (9, 1, 30)
    ids, _ = prompts(sum(lengths))
    alone = torch.cat([run(model, one) for one in ids.split(lengths, dim=1)], dim=1)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    with on(model, "functions"):
        assert_close(run(model, ids, position_ids=positions, cu_seq_lens_q=offsets), alone)


@pytest.mark.parametrize("level", LEVELS)
def test_one_graph(level: str) -> None:
    """Dynamic prompts without a cache, and a static cache; the counters and the kept index tensors are no part of the graph."""
    model = host.build("qwen3_next" if level == "layers" else "qwen3_5")
    ids, _ = prompts(12, 12)
    wanted = run(model, ids)
    try:
        with on(model, level):
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
            assert_close(run(compiled, ids), wanted)
            cache = host.static(model, 32)
            parts = [run(compiled, ids[:, :9], cache), run(compiled, ids[:, 9:10], cache)]
            parts += [run(compiled, ids[:, step : step + 1], cache) for step in (10, 11)]
            assert_close(torch.cat(parts, dim=1), wanted)
    finally:
        torch._dynamo.reset()


def test_one_graph_of_packed_rows() -> None:
    model = host.build("qwen3_next")
    lengths = (4, 7, 1)
    ids, _ = prompts(sum(lengths))
    alone = torch.cat([run(model, one) for one in ids.split(lengths, dim=1)], dim=1)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
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
