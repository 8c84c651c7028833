"""A whole model under torch.compile: one graph for each kind of step, with the results of eager calls."""

import dataclasses

import pytest
import torch

from gdn.layers import AttentionMetadataBuilder, GDNMetadataBuilder, HybridCaches, HybridConfig, HybridModel, StepMetadata
from gdn.layers.named import NAMED
from gdn.layers.random_weights import fill_randomly

FORMS = {"token-wise": {}, "compressed": {"index_ratio": 4}, "no indexer": {"index_topk": 0, "index_n_heads": 0}}


def run(model: torch.nn.Module, config: HybridConfig) -> list[torch.Tensor]:
    """Hidden states of two prompts, longer than what the indexer keeps and shorter, then of a padded decode step."""
    caches = HybridCaches(config, 8, 64, 3, dtype=torch.float32)
    states = GDNMetadataBuilder("cpu", max_num_sequences=3)
    builder = AttentionMetadataBuilder("cpu", block_size=64, max_seq_len=256, index_ratio=config.index_ratio, max_num_sequences=3)
    slots, tables, found = [0, 1], [[2, 0], [1]], []
    with torch.inference_mode():
        for queries, lengths, pad in (([70, 11], [70, 11], None), ([1, 1], [71, 12], 3)):
            step = StepMetadata(
                states.build(queries, lengths, slots, pad_to=pad), builder.build(queries, lengths, tables, slots, pad_to=pad)
            )
            rows = sum(queries) if pad is None else pad
            places = [place for new, all_ in zip(queries, lengths, strict=True) for place in range(all_ - new, all_)]
            positions = torch.tensor(places + [0] * (rows - len(places)))
            found.append(model(torch.arange(rows) % config.vocab_size, positions, step, caches))
    return found


@pytest.mark.parametrize("form", ["token-wise", *(pytest.param(form, marks=pytest.mark.cover) for form in list(FORMS)[1:])])
def test_one_graph(form: str) -> None:
    types = ("linear_attention", "full_attention")
    config = dataclasses.replace(NAMED["tiny"], num_hidden_layers=2, layer_types=types, **FORMS[form])
    model = HybridModel(config, dtype=torch.float32)
    fill_randomly(model)
    torch._dynamo.reset()
    found = run(torch.compile(model, backend="aot_eager", fullgraph=True), config)  # type: ignore[arg-type]
    for compiled, eager in zip(found, run(model, config), strict=True):
        assert torch.equal(compiled, eager)
