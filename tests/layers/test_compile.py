"""A whole model under torch.compile: one graph for each kind of step, with the results of eager calls."""

import dataclasses
from typing import Any

import pytest
import torch

from gdn.layers import AttentionMetadataBuilder, GDNMetadataBuilder, HybridCaches, HybridConfig, HybridModel, StepMetadata
from gdn.layers.named import NAMED
from gdn.layers.random_weights import fill_randomly

FORMS = {"token-wise": {}, "compressed": {"index_ratio": 4}, "no indexer": {"index_topk": 0, "index_n_heads": 0}}


# Steps of two sequences: new tokens of each, their lengths, and rows of the padded batch. Prompts longer than what the indexer
# keeps and shorter, then decode.
Steps = list[tuple[list[int], list[int], int | None]]
STEPS: Steps = [([70, 11], [70, 11], None), ([1, 1], [71, 12], 3)]
CHANGING: Steps = [*STEPS, ([1, 1], [72, 13], 3), ([1, 1], [73, 14], 2)]


def run(
    model: Any, config: HybridConfig, steps: Steps = STEPS, num_blocks: int = 8, device: Any = "cpu", dtype: Any = torch.float32
) -> list[torch.Tensor]:
    """Hidden states of each step, then keys and values of the last layer."""
    caches = HybridCaches(config, num_blocks, 64, 3, dtype=dtype, device=device)
    states = GDNMetadataBuilder(device, max_num_sequences=3)
    builder = AttentionMetadataBuilder(
        device, block_size=64, max_seq_len=256, index_ratio=config.index_ratio, max_num_sequences=3
    )
    slots, tables, found = [0, 1], [[2, 0], [1]], []
    with torch.inference_mode():
        for queries, lengths, pad in steps:
            step = StepMetadata(
                states.build(queries, lengths, slots, pad_to=pad), builder.build(queries, lengths, tables, slots, pad_to=pad)
            )
            rows = sum(queries) if pad is None else pad
            places = [place for new, all_ in zip(queries, lengths, strict=True) for place in range(all_ - new, all_)]
            positions = torch.tensor(places + [0] * (rows - len(places)), device=device)
            found.append(model(torch.arange(rows, device=device) % config.vocab_size, positions, step, caches))
    return [*found, *caches.kv.kv[-1]]


def make(form: str, device: Any = "cpu", dtype: Any = torch.float32) -> tuple[HybridModel, HybridConfig]:
    """A layer of each kind, with random weights."""
    types = ("linear_attention", "full_attention")
    config = dataclasses.replace(NAMED["tiny"], num_hidden_layers=2, layer_types=types, **FORMS[form])
    model = HybridModel(config, device=device, dtype=dtype)
    fill_randomly(model)
    return model, config


def compare(form: str, dynamic: bool | None, device: Any, dtype: Any, tolerance: float) -> None:
    """Inductor against eager calls, on caches of several numbers of blocks. tolerance: share of the largest magnitude."""
    model, config = make(form, device, dtype)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
    for num_blocks in (8, 11, 9):
        found, expected = (run(one, config, CHANGING, num_blocks, device, dtype) for one in (compiled, model))
        for place, (have, want) in enumerate(zip(found, expected, strict=True)):
            error = (have.float() - want.float()).abs().max()
            assert error <= tolerance * want.float().abs().max(), (num_blocks, place, float(error))


@pytest.mark.parametrize("form", ["token-wise", *(pytest.param(form, marks=pytest.mark.cover) for form in list(FORMS)[1:])])
def test_one_graph(form: str) -> None:
    model, config = make(form)
    torch._dynamo.reset()
    found = run(torch.compile(model, backend="aot_eager", fullgraph=True), config)
    for compiled, eager in zip(found, run(model, config), strict=True):
        assert torch.equal(compiled, eager)


@pytest.mark.cover
@pytest.mark.parametrize(("form", "dynamic"), [("token-wise", None), ("token-wise", True), ("compressed", None)])
def test_inductor(form: str, dynamic: bool | None) -> None:
    compare(form, dynamic, "cpu", torch.float32, 1e-4)
