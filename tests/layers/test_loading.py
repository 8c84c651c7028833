"""Tensors of Transformers to parameters and back: names, prefixes, experts one by one, tied embeddings, what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gdn.layers import loading
from gdn.layers.config import HybridConfig
from gdn.layers.model import HybridModel
from tests.layers import hf

KINDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp")


def parameters(tensors: dict[str, Tensor], config: HybridConfig, **options: Any) -> dict[str, Tensor]:
    return dict(loading.from_transformers(tensors, config, **options))


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.fixture(scope="module", params=KINDS)
def reference(request: pytest.FixtureRequest) -> Any:
    return hf.build(request.param, 1)


def test_there_and_back(reference: Any) -> None:
    model, config = hf.model_of(reference)
    assert_same(loading.to_transformers(model.state_dict(), config), reference.state_dict())


def test_a_token_wise_indexer_and_layer_scale_there_and_back() -> None:
    config = HybridConfig.from_transformers(hf.build("qwen3_5", 0).config)
    config = replace(config, index_topk=16, index_n_heads=4, index_head_dim=32, layer_scale=True, attn_output_gate=False)
    model = HybridModel(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
        if name.endswith("in_proj"):
            parameter[config.conv_dim + config.linear_value_dim + 2 * config.linear_num_value_heads :] = 0
    tensors = loading.to_transformers(model.state_dict(), config)
    assert tensors["model.layers.0.ffn_layer_scale"].shape == (1, 1, config.hidden_size)
    assert_same(parameters(tensors, config), model.state_dict())


def test_prefixes_and_what_is_skipped(reference: Any) -> None:
    config, tensors = HybridConfig.from_transformers(reference.config), reference.state_dict()
    wanted = parameters(tensors, config)
    others = {
        "mtp.fc.weight": torch.ones(1),
        "mtp.layers.0.mlp.gate_proj.weight": torch.ones(1),
        "model.visual.blocks.0.norm1.weight": torch.ones(1),
        "visual.patch_embed.proj.weight": torch.ones(1),
    }
    inside = {name.replace("model.", "model.language_model."): value for name, value in tensors.items()}
    assert_same(parameters(inside | others, config), wanted)
    bare = {name.removeprefix("model."): value for name, value in tensors.items()}
    assert_same(parameters(bare, config), wanted)


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe"])
def test_experts_one_by_one(kind: str) -> None:
    reference = hf.build(kind, 1)
    config, tensors = HybridConfig.from_transformers(reference.config), dict(reference.state_dict())
    wanted = parameters(tensors, config)
    for name in [name for name in tensors if ".experts." in name]:
        start, _, last = name.rpartition(".")
        for expert, value in enumerate(tensors.pop(name)):
            if last == "gate_up_proj":
                tensors[f"{start}.{expert}.gate_proj.weight"], tensors[f"{start}.{expert}.up_proj.weight"] = value.chunk(2)
            else:
                tensors[f"{start}.{expert}.down_proj.weight"] = value
    assert len(tensors) > 70
    assert_same(parameters(tensors, config), wanted)
    del tensors["model.layers.2.mlp.experts.7.up_proj.weight"]
    with pytest.raises(ValueError, match=r"missing tensors: layers\.2\.mlp\.experts\.7\.up_proj\.weight"):
        parameters(tensors, config)


def test_tied_embeddings() -> None:
    reference = hf.build("qwen3_5", 2, tie_word_embeddings=True)
    model, config = hf.model_of(reference)
    assert not hasattr(model, "lm_head")
    tensors = dict(reference.state_dict())
    assert "lm_head.weight" in tensors
    del tensors["lm_head.weight"]  # as in a checkpoint on disk
    assert_same(parameters(tensors, config), {name: value for name, value in model.named_parameters()})
    untied = replace(config, tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"missing tensors: lm_head\.weight"):
        parameters(tensors, untied)


# What the checkpoint has -> whether Transformers' model, and ours, has a head of its own.
HEADS = {"another head": True, "the embedding twice": False, "a head alone": False, "an embedding alone": False}


@pytest.mark.parametrize("case", HEADS)
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5", "qwen4_exp"])
def test_tied_embeddings_and_a_head_in_the_checkpoint(kind: str, case: str, tmp_path: Path) -> None:
    """As Transformers reads it, whatever `tie_word_embeddings` says."""
    hf.build(kind, 2, tie_word_embeddings=True).save_pretrained(tmp_path)
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    tensors = load_file(tmp_path / "model.safetensors")
    assert embedding in tensors and head not in tensors
    if case == "another head":
        tensors[head] = torch.randn(tensors[embedding].shape, generator=torch.Generator().manual_seed(3))
    elif case == "the embedding twice":
        tensors[head] = tensors[embedding].clone()
    elif case == "a head alone":
        tensors[head] = tensors.pop(embedding)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    theirs = hf.MODELS[kind][1].from_pretrained(tmp_path, dtype=torch.float32)
    config, found = loading.read_config(tmp_path), loading.SafetensorsFolder(tmp_path)
    assert config.tie_word_embeddings
    model = HybridModel(config, dtype=torch.float32)
    loading.load(model, found, config)
    has_own = theirs.lm_head.weight is not theirs.get_input_embeddings().weight
    assert has_own == hasattr(model, "lm_head") == HEADS[case]
    rows = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(model.compute_logits(rows), theirs.lm_head(rows))
    assert torch.equal(model.embed_tokens, theirs.get_input_embeddings().weight)
    again = loading.to_transformers(model.state_dict(), config)
    assert (head in again) == has_own
    assert_same(dict(loading.from_transformers(again, config)), dict(model.named_parameters()))

    loading.load(model, {name: one for name, one in again.items() if name != head}, config)
    assert not hasattr(model, "lm_head"), "the head of another checkpoint"
    assert torch.equal(model.compute_logits(rows), rows @ model.embed_tokens.T)


def test_a_head_of_another_dtype_is_another_head() -> None:
    reference = hf.build("qwen3_5", 2, tie_word_embeddings=True)
    config, tensors = HybridConfig.from_transformers(reference.config), dict(reference.state_dict())
    tensors["lm_head.weight"] = tensors["lm_head.weight"].double()
    assert "lm_head" in parameters(tensors, config)
    short = tensors | {"lm_head.weight": torch.ones(5, config.hidden_size)}
    with pytest.raises(ValueError, match=r"lm_head: expected shape \[131, 64\], got \[5, 64\]"):
        loading.load(HybridModel(config, dtype=torch.float32), short, config)


def test_what_does_not_match_is_refused() -> None:
    reference = hf.build("qwen3_next", 1)
    config, tensors = HybridConfig.from_transformers(reference.config), dict(reference.state_dict())
    with pytest.raises(ValueError, match=r"without a place in the model: layers\.0\.mlp\.gate\.bias, model_extra"):
        parameters(tensors | {"model_extra": torch.ones(1), "model.layers.0.mlp.gate.bias": torch.ones(1)}, config)
    with pytest.raises(ValueError, match="expected one norm.weight"):
        parameters(tensors | {"model.language_model.norm.weight": torch.ones(1)}, config)
    short = tensors | {"model.layers.0.linear_attn.in_proj_qkvz.weight": torch.ones(4, 64)}
    with pytest.raises(ValueError, match="in_proj_qkvz.weight: expected 192 rows"):
        parameters(short, config)
    narrow = tensors | {"model.norm.weight": torch.ones(63)}
    with pytest.raises(ValueError, match=r"norm\.weight: expected shape \[64\]"):
        loading.load(HybridModel(config, dtype=torch.float32), narrow, config)
    with pytest.raises(ValueError, match="rank: expected 0 to 1"):
        parameters(tensors, config, rank=2, size=2)


def test_first_layers_of_a_checkpoint() -> None:
    reference = hf.build("qwen3_next", 1)
    config, tensors = HybridConfig.from_transformers(reference.config), reference.state_dict()
    first = replace(config, num_hidden_layers=2, layer_types=config.layer_types[:2])
    with pytest.raises(ValueError, match=r"without a place in the model: layers\.2"):
        parameters(tensors, first)
    whole = parameters(tensors, config)
    wanted = {name: value for name, value in whole.items() if not name.startswith("layers.2")}
    assert_same(parameters(tensors, first, only_first_layers=True), wanted)


def test_a_folder_of_safetensors(reference: Any, tmp_path: Path) -> None:
    reference.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    config = loading.read_config(tmp_path)
    assert config == HybridConfig.from_transformers(reference.config)
    model, found = HybridModel(config, dtype=torch.float32), loading.SafetensorsFolder(tmp_path)
    assert len(list(found)) == len(found)
    loading.load(model, found, config)
    assert_same(model.state_dict(), hf.model_of(reference)[0].state_dict())


def test_a_folder_without_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="safetensors"):
        loading.SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_model_without_memory_gets_it_later(is_tied: bool) -> None:
    reference = hf.build("qwen3_5", 2, tie_word_embeddings=is_tied)
    wanted, config = hf.model_of(reference)
    model = HybridModel(config, device="meta", dtype=torch.float32).to_empty(device="cpu")
    loading.load(model, reference.state_dict(), config)
    assert_same(model.state_dict(), wanted.state_dict())
    assert torch.equal(model.rotary.cos_sin, wanted.rotary.cos_sin)
    rows = torch.ones(2, config.hidden_size)
    assert torch.equal(model.compute_logits(rows), wanted.compute_logits(rows))


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_shapes_of_published_sizes(kind: str, size: int) -> None:
    """The default configurations are those of the published models; tensors without memory have their shapes."""
    config_type, model_type = hf.MODELS[kind]
    indexer = hf.INDEXER | {"rope_parameters": hf.SMALL["rope_parameters"]}
    whole = config_type(**{"num_hidden_layers": 4} | (indexer if kind == "qwen4_exp" else {}))
    with torch.device("meta"):
        tensors = model_type(whole).state_dict()
    config = HybridConfig.from_transformers(whole)
    model = HybridModel(config.per_rank(size), device="meta", dtype=torch.bfloat16)
    wanted = {name: parameter.shape for name, parameter in model.named_parameters()}
    found = {name: value.shape for name, value in loading.from_transformers(tensors, config, size - 1, size)}
    assert found == wanted
