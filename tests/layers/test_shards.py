"""Tensor-parallel shards: the sum of the ranks' outputs is the unsharded layer's output."""

import pytest
import torch
from torch import Tensor

from gdn.layers import loading
from gdn.layers.config import HybridConfig
from gdn.layers.gated_delta_net import GatedDeltaNet
from gdn.layers.mlp import MLP, MoE
from gdn.layers.model import HybridModel
from tests.layers import hf
from tests.layers.paged import Batch
from tests.layers.serving import gdn_metadata

# Head counts that four ranks divide, but fewer key and value heads of attention than ranks.
SIZES = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_attention_heads": 8, "intermediate_size": 32}
KINDS = ("qwen3_next", "qwen3_5", "qwen4_exp")  # interleaved and flat projections, experts and dense, an indexer


def ranks(kind: str, size: int) -> tuple[HybridModel, list[HybridModel], HybridConfig]:
    """The whole model and its shards."""
    reference = hf.build(kind, 3, **SIZES)
    whole, config = hf.model_of(reference)
    shards = []
    for rank in range(size):
        shards.append(HybridModel(config.per_rank(size), dtype=torch.float32))
        loading.load(shards[-1], reference.state_dict(), config, rank, size)
    return whole, shards, config


def assert_sum(parts: list[Tensor], whole: Tensor) -> None:
    assert len(parts) > 1
    torch.testing.assert_close(torch.stack(parts).sum(0), whole, rtol=0, atol=2e-6 * float(whole.abs().max()))


def gdn_outputs(layer: GatedDeltaNet, heads: slice, seed: int = 0) -> list[Tensor]:
    """A prefill and a decode step of one layer on stale states; `heads`: the value heads of this rank."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(3, 8, 16, 16, generator=generator)[:, heads].contiguous()
    windows = torch.zeros(3, layer.conv_dim, 3)
    slots = torch.tensor([[2], [0]], dtype=torch.int32)
    outputs = []
    for queries, contexts in (([5, 70], [0, 0]), ([1, 1], [5, 70])):
        metadata = gdn_metadata(queries, contexts, [False, False], slots, [1, 1])
        hidden = torch.randn(sum(queries), layer.hidden_size, generator=generator)
        outputs.append(layer(hidden, metadata, windows, states))
    return outputs


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_gated_delta_net(kind: str, size: int) -> None:
    whole, shards, _ = ranks(kind, size)
    wanted = gdn_outputs(whole.layers[0].linear_attn, slice(None))
    each = 8 // size
    found = [gdn_outputs(shard.layers[0].linear_attn, slice(i * each, (i + 1) * each)) for i, shard in enumerate(shards)]
    for step, output in enumerate(wanted):
        assert_sum([one[step] for one in found], output)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_full_attention(kind: str, size: int) -> None:
    whole, shards, config = ranks(kind, size)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randn(length, config.hidden_size, generator=generator) for length in (40, 7)]
    token = [torch.randn(1, config.hidden_size, generator=generator) for _ in prompts]

    def outputs(model: HybridModel) -> list[Tensor]:
        batch = Batch(model.layers[1].self_attn, model.config, len(prompts), 48)
        return [torch.cat(batch.step(rows)) for rows in (prompts, token)]

    found = [outputs(shard) for shard in shards]
    for step, output in enumerate(outputs(whole)):
        assert_sum([one[step] for one in found], output)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("kind", "type_"), [("qwen3_5", MLP), ("qwen3_next", MoE)])
def test_mlp(kind: str, type_: type, size: int) -> None:
    whole, shards, config = ranks(kind, size)
    hidden = torch.randn(9, config.hidden_size, generator=torch.Generator().manual_seed(2))
    assert isinstance(whole.layers[0].mlp, type_)
    assert_sum([shard.layers[0].mlp(hidden) for shard in shards], whole.layers[0].mlp(hidden))


@pytest.mark.parametrize(
    ("changes", "size", "field"),
    [({}, 8, "linear_num_key_heads"), ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "num_key_value_heads")],
)
def test_heads_that_cannot_be_divided_are_refused(changes: dict[str, int], size: int, field: str) -> None:
    config = HybridConfig.from_transformers(hf.build("qwen3_5", 0, **SIZES | changes).config)
    with pytest.raises(ValueError, match=field):
        config.per_rank(size)
