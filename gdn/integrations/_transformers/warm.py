"""Runs every form of call that a served layer can make, so that nothing is compiled inside a capture or while serving."""

import importlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from gdn.integrations._transformers import layer

Key = tuple[Any, ...]


def distinct_layers(layers: Sequence[nn.Module]) -> Iterator[tuple[layer.Facts, nn.Module]]:
    """One layer of each kind: those that differ in sizes, device and dtypes only need a run of their own."""
    seen: set[Key] = set()
    for module in layers:
        facts = layer.Facts.of(module)
        parameters = tuple((one.device, one.dtype) for one in module.parameters())
        key = (facts.heads, facts.shapes, tuple(facts.options.items()), parameters)
        if key not in seen:
            seen.add(key)
            yield facts, module


def run(facts: layer.Facts, module: Any, batch: int, length: int) -> None:
    """A new prompt, a continued one, a decode step, and packed rows, on zeros and on a cache of their own."""
    weight = module.out_proj.weight
    hidden = torch.zeros(batch, length, weight.shape[0], device=weight.device, dtype=module.conv1d.weight.dtype)
    host = importlib.import_module("transformers.cache_utils")  # by name: type checkers would read all of it
    cache = SimpleNamespace(layers={facts.layer_idx: host.LinearAttentionLayer()})
    for tokens in (hidden, hidden, hidden[:, :1]):
        layer.step(facts, module, tokens, cache, None, None)
    offsets = torch.tensor([0, batch * length], dtype=torch.int32, device=weight.device)
    layer.step(facts, module, hidden, None, None, offsets)
