"""No forward reads a value back to the host: whole steps run on fake tensors, which have none."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from gdn.layers import AttentionMetadataBuilder, GDNMetadataBuilder, HybridCaches, HybridConfig, HybridModel, StepMetadata
from gdn.layers.mlp import MoE
from gdn.layers.random_weights import fill_randomly
from tests.layers import hf
from tests.layers.test_decode_launches import Launches

# New tokens of two sequences, their tokens before, and their drafts.
STEPS = {
    "decode": ([1, 1], [3, 40], [-1, -1]), "spec": ([2, 1], [3, 40], [1, 0]), "prefill": ([20, 9], [0, 40], [-1, -1]),
    "mixed": ([2, 9], [30, 4], [1, -1]),
}  # fmt: skip


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5", "qwen4_exp"])
def model(request: pytest.FixtureRequest) -> HybridModel:
    built = HybridModel(HybridConfig.from_transformers(hf.build(request.param, 0).config), dtype=torch.bfloat16)
    fill_randomly(built)
    return built


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5", "qwen4_exp"])
def ranks(request: pytest.FixtureRequest) -> Iterator[HybridModel]:
    """The first of two ranks, of a group that exchanges nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    config = HybridConfig.from_transformers(hf.build(request.param, 0).config)
    built = HybridModel(config, tp_group=dist.group.WORLD, dtype=torch.bfloat16)
    fill_randomly(built)
    yield built
    dist.destroy_process_group()


def fake(mode: FakeTensorMode, metadata: Any) -> Any:
    """The same metadata, with fake tensors."""
    fields = {field.name: getattr(metadata, field.name) for field in dataclasses.fields(metadata)}
    tensors = {name: mode.from_tensor(value) for name, value in fields.items() if isinstance(value, torch.Tensor)}
    return dataclasses.replace(metadata, **tensors)


def run(model: HybridModel, kind: str) -> list[str]:
    """Runs a step without lengths on the host; returns the names of the operators that ran."""
    queries, contexts, drafts = STEPS[kind]
    lengths = [new + old for new, old in zip(queries, contexts, strict=True)]
    caches = HybridCaches(model.config, 8, 16, 2, num_spec=2)
    states = GDNMetadataBuilder("cpu", num_spec=2).build(queries, lengths, [[0, 1, 2], [3, 4, 5]], num_draft_tokens=drafts)
    builder = AttentionMetadataBuilder("cpu", block_size=16, max_seq_len=64, index_ratio=model.config.index_ratio)
    attention = builder.build(queries, lengths, torch.arange(8).view(2, 4), torch.tensor([0, 1]))
    attention = dataclasses.replace(attention, seq_lens_host=None, query_lens_host=None)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    step = StepMetadata(fake(mode, states), fake(mode, attention))
    ids = mode.from_tensor(torch.zeros(sum(queries), dtype=torch.int64))
    with mode, torch.no_grad(), Launches() as launches:
        logits = model.compute_logits(model(ids, ids.clone(), step, caches))
        assert model.greedy_tokens(logits).shape == ids.shape
    assert logits.shape == (sum(queries), model.config.vocab_size)
    return launches.names


@pytest.mark.parametrize("kind", STEPS)
def test_a_step_without_lengths_on_the_host(model: HybridModel, kind: str) -> None:
    names = run(model, kind)
    assert len(names) > 50 and not {"allreduce_", "broadcast_"} & set(names)


@pytest.mark.parametrize("kind", STEPS)
def test_a_rank_exchanges_two_sums_a_layer_and_the_tokens(ranks: HybridModel, kind: str) -> None:
    names = run(ranks, kind)
    assert (names.count("allreduce_"), names.count("broadcast_")) == (2 * ranks.config.num_hidden_layers, 1)
    assert not [name for name in names if "wait" in name or "gather" in name]


def test_experts_grouped_by_offsets_on_the_device() -> None:
    config = HybridConfig.from_transformers(hf.build("qwen3_next", 0).config)
    with FakeTensorMode(), torch.no_grad():
        moe, hidden = MoE(config, dtype=torch.bfloat16), torch.empty(5, config.hidden_size, dtype=torch.bfloat16)
        assert moe._grouped(hidden, *moe.route(hidden)).shape == hidden.shape
        with pytest.raises(DataDependentOutputException):  # what a read would give
            hidden.sum().item()
