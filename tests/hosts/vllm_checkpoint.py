"""Writes a seeded checkpoint for the configuration of a small model, so that values mean something: dummy weights are near zero.

usage: python3 -m tests.hosts.vllm_checkpoint weights SOURCE TARGET [--seed N]
       python3 -m tests.hosts.vllm_checkpoint heads SOURCE TARGET

`weights`: the files of SOURCE (config.json, tokenizer), and tensors with the names of published checkpoints of Qwen3-Next and
Qwen3.5, which vLLM and Transformers both load. Weights have a standard deviation of 0.02, norms are about 1, and decays are
0.9 to 0.999 a token. `heads`: the files of SOURCE with 16 and 32 linear heads and a vocabulary of 16384, without weights.
"""

import argparse
import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

STD = 0.02
ROUTER_STD = 0.16  # sharp: a host's rounding then picks another last expert as often, but one of little weight
SLOWEST, FASTEST = 0.004, 0.045  # -log of the decay of a token with a = 0; a spreads it to about a third and twice that
DIGEST = "digest.txt"
HEADS = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "vocab_size": 16384}


def shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors of a configuration of Qwen3-Next or Qwen3.5 (dense text model)."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for index, kind in enumerate(config["layer_types"]):
        start = f"model.layers.{index}"
        yield f"{start}.input_layernorm.weight", (hidden,)
        yield f"{start}.post_attention_layernorm.weight", (hidden,)
        mixer = _linear_attention(config) if kind == "linear_attention" else _attention(config)
        mlp = _experts(config) if config.get("num_experts") else _mlp("mlp", hidden, config["intermediate_size"])
        for name, shape in (*mixer, *mlp):
            yield f"{start}.{name}", shape
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def _linear_attention(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    channels = 2 * keys + values
    if config["model_type"] == "qwen3_next":
        projections = {"qkvz": channels + values, "ba": 2 * heads}
    else:
        projections = {"qkv": channels, "z": values, "b": heads, "a": heads}
    for name, rows in projections.items():
        yield f"linear_attn.in_proj_{name}.weight", (rows, hidden)
    yield "linear_attn.conv1d.weight", (channels, 1, config["linear_conv_kernel_dim"])
    yield "linear_attn.A_log", (heads,)
    yield "linear_attn.dt_bias", (heads,)
    yield "linear_attn.norm.weight", (config["linear_value_head_dim"],)
    yield "linear_attn.out_proj.weight", (hidden, values)


def _attention(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, dim = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    yield "self_attn.q_proj.weight", (2 * queries, hidden)  # with the output gate
    yield "self_attn.k_proj.weight", (keys, hidden)
    yield "self_attn.v_proj.weight", (keys, hidden)
    yield "self_attn.o_proj.weight", (hidden, queries)
    yield "self_attn.q_norm.weight", (dim,)
    yield "self_attn.k_norm.weight", (dim,)


def _experts(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = config["hidden_size"]
    yield "mlp.gate.weight", (config["num_experts"], hidden)
    yield "mlp.shared_expert_gate.weight", (1, hidden)
    yield from _mlp("mlp.shared_expert", hidden, config["shared_expert_intermediate_size"])
    for expert in range(config["num_experts"]):
        yield from _mlp(f"mlp.experts.{expert}", hidden, config["moe_intermediate_size"])


def _mlp(name: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.gate_proj.weight", (width, hidden)
    yield f"{name}.up_proj.weight", (width, hidden)
    yield f"{name}.down_proj.weight", (hidden, width)


def tensors(config: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """All tensors of a configuration: bfloat16, A_log float32. The same numbers in every version of torch's CPU generator."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes(config):
        if name.endswith("A_log"):
            continue  # drawn with its dt_bias
        if name.endswith("dt_bias"):
            bias = (1 + 2 * torch.rand(shape, generator=generator)).bfloat16()
            rates = torch.rand(shape, generator=generator) * math.log(FASTEST / SLOWEST) + math.log(SLOWEST)
            found[name] = bias
            found[name.removesuffix("dt_bias") + "A_log"] = rates - torch.nn.functional.softplus(bias.float()).log()
        else:  # norms hold what is added to 1, but the gated norm, which holds the factor
            mean = 1.0 if name.endswith("linear_attn.norm.weight") else 0.0
            std = ROUTER_STD if name.endswith("mlp.gate.weight") else STD
            found[name] = (mean + std * torch.randn(shape, generator=generator)).bfloat16()
    return found


def digest(values: Mapping[str, Tensor]) -> str:
    """SHA-256 of names and bytes, to tell that two machines have the same checkpoint."""
    found = hashlib.sha256()
    for name in sorted(values):
        found.update(name.encode())
        found.update(values[name].contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def write(source: Path, target: Path, seed: int = 0) -> str:
    """Writes the checkpoint as two safetensors files with an index, and its digest; returns the digest."""
    from safetensors.torch import save_file

    config = _copy(source, target, {})
    values = tensors(config, seed)
    names = list(values)
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    places = {}
    for number, half in enumerate(halves, 1):
        file = f"model-{number:05d}-of-{len(halves):05d}.safetensors"
        save_file({name: values[name] for name in half}, target / file, metadata={"format": "pt"})
        places |= dict.fromkeys(half, file)
    size = sum(value.nbytes for value in values.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    found = digest(values)
    (target / DIGEST).write_text(found)
    return found


def _copy(source: Path, target: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Copies a model's folder without weights, with other fields of its configuration, which is returned."""
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and path.suffix in (".json", ".jinja") and "index" not in path.name:
            shutil.copy(path, target)
    config: dict[str, Any] = json.loads((source / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config, indent=1))
    return config


def write_heads(source: Path, target: Path) -> None:
    """Writes the folder with more linear heads."""
    _copy(source, target, HEADS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["weights", "heads"])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.what == "weights":
        print(f"{options.target}: {write(options.source, options.target, options.seed)}")
    else:
        write_heads(options.source, options.target)


if __name__ == "__main__":
    main()
