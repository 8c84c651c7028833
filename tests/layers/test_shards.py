"""Tensor-parallel shards: the sum of the ranks' outputs is the unsharded layer's output."""

import pytest
import torch
from torch import Tensor

from gdn.layers import loading
from gdn.layers.config import HybridConfig
from gdn.layers.mlp import MLP, MoE
from gdn.layers.model import HybridModel
from tests.layers import hf
from tests.layers.paged import Batch
from tests.layers.rank_cases import gdn_steps

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


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_layers(kind: str, size: int) -> None:
    """A prefill and a decode step of both kinds of layers."""
    whole, shards, config = ranks(kind, size)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randn(length, config.hidden_size, generator=generator) for length in (40, 7)]
    token = [torch.randn(1, config.hidden_size, generator=generator) for _ in prompts]

    def outputs(model: HybridModel, rank: int, size: int) -> list[Tensor]:
        batch = Batch(model.layers[1].self_attn, model.config, len(prompts), 48)
        attention = [torch.cat(batch.step(rows)) for rows in (prompts, token)]
        return [*gdn_steps(model.layers[0].linear_attn, config, prompts, token, rank, size), *attention]

    found = [outputs(shard, rank, size) for rank, shard in enumerate(shards)]
    for step, output in enumerate(outputs(whole, 0, 1)):
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
