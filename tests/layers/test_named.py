"""Named configurations are those of Transformers' models, with the indexers that these leave out."""

import dataclasses

import pytest
from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_next import Qwen3NextConfig
from transformers.models.qwen4_exp import Qwen4ExpTextConfig

from gdn.layers.config import HybridConfig
from gdn.layers.named import NAMED, first_layers
from gdn.models import MODELS
from tests.layers import hf


def test_they_are_those_of_transformers() -> None:
    token_wise = {"index_topk": 2048, "index_n_heads": 16, "index_head_dim": 128}
    rotary = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    expected = {
        "qwen3-next-80b": dataclasses.replace(HybridConfig.from_transformers(Qwen3NextConfig()), **token_wise),
        "qwen3.5-35b": HybridConfig.from_transformers(Qwen3_5MoeTextConfig()),
        "qwen3.8-flash-next": HybridConfig.from_transformers(Qwen4ExpTextConfig(**hf.INDEXER, rope_parameters=rotary)),
    }
    for name, config in expected.items():
        assert NAMED[name] == config
    assert NAMED.keys() == {*expected, "tiny"} and MODELS.keys() <= NAMED.keys()


def test_the_first_layers_of_a_model() -> None:
    config = first_layers(NAMED["qwen3-next-80b"], 4)
    assert (config.num_linear_layers, config.num_full_layers) == (3, 1)
    assert first_layers(config, 4) == config
    with pytest.raises(ValueError, match="layers: expected 1 to 4, got 5"):
        first_layers(config, 5)
