"""Decode steps of decoder layers without MLPs, each layer with weights and caches of its own (`python -m benchmarks layers`)."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import gdn
from gdn.layers import AttentionMetadataBuilder, DecoderLayer, GDNMetadataBuilder, HybridCaches, HybridConfig, StepMetadata
from gdn.layers.random_weights import fill_randomly
from gdn.layers.rotary import RotaryEmbedding

BLOCK_SIZE = 64  # tokens of a cache block
_ROWS_AT_ONCE = 1 << 18  # of an indexer's cache, when it is filled


@dataclass(frozen=True)
class Stack:
    """Layers of one kind, one after the other, and one decode step of a batch.

    A layer takes the output of the one before as if it came from an MLP, so that every layer has two residual norms.
    """

    layers: list[DecoderLayer]
    caches: HybridCaches
    step: StepMetadata
    hidden_states: Tensor
    residual: Tensor
    positions: Tensor

    @torch.inference_mode()
    def run(self) -> None:
        """Runs the step."""
        hidden_states, residual = self.hidden_states, self.residual
        for layer in self.layers:
            hidden_states, total = layer(hidden_states, residual, self.positions, self.step, self.caches)
            assert total is not None
            residual = total

    @torch.inference_mode()
    def run_layer(self, layer: int) -> None:
        """Runs one layer on the inputs of the step."""
        self.layers[layer](self.hidden_states, self.residual, self.positions, self.step, self.caches)


def shaped(config: HybridConfig, kind: str, layers: int, **changes: Any) -> HybridConfig:
    """The configuration with `layers` layers of one kind and a plain residual stream; `Stack` leaves out the MLPs."""
    changes |= {"layer_types": (kind,) * layers, "num_hidden_layers": layers, "residual": "plain"}
    return replace(config, num_experts=0, intermediate_size=1, **changes)


def make_stack(
    config: HybridConfig, batch: int, context: int, device: torch.device, *, use_fp8: bool = False, seed: int = 0
) -> Stack:
    """A decode step of `batch` sequences of `context` tokens, the new ones included, in bfloat16 with float32 states.

    Weights, states and cached keys and values are random. Sequences have shuffled blocks; metadata is in the buffers of a
    captured batch. Without replay: a step that is repeated has the same positions each time, and would always fold or never.
    """
    generator, dtype = torch.Generator(device).manual_seed(seed), torch.bfloat16
    blocks = batch * -(-context // BLOCK_SIZE)
    options: dict[str, Any] = {"use_fp8_indexer": use_fp8, "dtype": dtype, "device": device, "replay": False}
    caches = HybridCaches(config, blocks, BLOCK_SIZE, batch, **options)
    rotary = RotaryEmbedding(config, device=device)
    layers = [DecoderLayer(config, place, rotary, device=device, dtype=dtype) for place in range(config.num_hidden_layers)]
    for place, layer in enumerate(layers):
        layer.mlp = nn.Identity()
        if layer.layer_type == "full_attention" and layer.self_attn.indexer is not None:
            layer.self_attn.indexer.use_fp8 = use_fp8
        fill_randomly(layer, seed + place)
    fill(caches, generator)

    def rows() -> Tensor:
        return torch.randn(batch, config.hidden_size, generator=generator, dtype=torch.float32, device=device).to(dtype)

    positions = torch.full((batch,), context - 1, dtype=torch.int64, device=device)
    return Stack(layers, caches, decode_step(config, batch, context, device, seed), rows(), rows(), positions)


def decode_step(config: HybridConfig, batch: int, context: int, device: torch.device, seed: int = 0) -> StepMetadata:
    """Metadata of a decode step of `batch` sequences of `context` tokens, in the buffers of a captured batch."""
    ones, lengths, slots = [1] * batch, [context] * batch, list(range(batch))
    states = GDNMetadataBuilder(device, max_num_sequences=batch).build(ones, lengths, [[slot] for slot in slots], pad_to=batch)
    builder = AttentionMetadataBuilder(
        device, block_size=BLOCK_SIZE, max_seq_len=context, index_ratio=config.index_ratio, max_num_sequences=batch
    )
    blocks = -(-context // BLOCK_SIZE)
    order = torch.randperm(batch * blocks, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return StepMetadata(states, builder.build(ones, lengths, order.view(batch, blocks), slots, pad_to=batch))


def fill(caches: HybridCaches, generator: torch.Generator) -> None:
    """Fills caches randomly. Keys of the indexer go through its own operator, which makes their scales."""
    for windows, states in zip(caches.gdn.conv_states, caches.gdn.ssm_states, strict=True):
        windows.normal_(generator=generator)
        states.normal_(0.0, 0.1, generator=generator)
    for pair in caches.kv.kv:
        for cache in pair:
            cache.normal_(generator=generator)
    for pages, ring in zip(caches.indexer.keys, caches.indexer.rings, strict=True):
        width = pages.shape[3] - (4 if pages.dtype == torch.uint8 else 0)
        count = pages.shape[0] * pages.shape[1]
        for first in range(0, count, _ROWS_AT_ONCE):
            slots = torch.arange(first, min(count, first + _ROWS_AT_ONCE), device=pages.device)
            keys = torch.randn(len(slots), pages.shape[2], width, generator=generator, dtype=torch.float32, device=pages.device)
            gdn.write_indexer_cache(keys.bfloat16(), pages, slots)
        if ring is not None:
            ring.normal_(generator=generator)
