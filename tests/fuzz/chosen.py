"""Calls whose kernels are chosen by the call: attention in any form, and whole models.

A model is an engine of a small hybrid model that prefills, decodes and verifies drafts. Its results are all logits.
Backends are "reference", or anything else for the kernels that are chosen.
"""

import functools
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import gdn
from gdn.cli.demo_engine import Engine, EngineSizes
from gdn.layers import HybridConfig, HybridModel
from gdn.layers.random_weights import fill_randomly
from gdn.runtime import env

Tensor = torch.Tensor
_FORMS: dict[str, dict[str, Any]] = {
    "token-wise": {"index_n_heads": 16}, "compressed": {"index_n_heads": 4, "index_ratio": 4}, "dense": {"index_topk": 0},
}  # fmt: skip


def attention(backend: str, **arguments: Any) -> Any:
    with _backend(backend):
        return gdn.attention(**arguments)


def sparse_attention(backend: str, **arguments: Any) -> Any:
    with _backend(backend):
        return gdn.sparse_attention(**arguments)


@functools.cache
def _model(form: str, device: torch.device) -> HybridModel:
    fields: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 512, "num_hidden_layers": 3, "intermediate_size": 256,
        "layer_types": ("linear_attention", "full_attention", "linear_attention"), "num_attention_heads": 8,
        "num_key_value_heads": 1, "head_dim": 256, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "index_topk": 128, "index_head_dim": 128,
    }  # fmt: skip
    model = HybridModel(HybridConfig(**{**fields, **_FORMS[form]}), device=device, dtype=torch.bfloat16)
    fill_randomly(model)
    if device.type == "cuda":
        torch.cuda.synchronize()  # any stream may read the weights from here on
    return model


@contextmanager
def _backend(name: str) -> Iterator[None]:
    before = os.environ.get("GDN_BACKEND")
    if name != "reference":
        yield
        return
    os.environ["GDN_BACKEND"] = name
    env.reload()
    try:
        yield
    finally:
        os.environ.pop("GDN_BACKEND")
        if before is not None:
            os.environ["GDN_BACKEND"] = before
        env.reload()


def engine(
    form: str, device: torch.device, prompts: list[list[int]], drafts: list[list[int]], backend: str
) -> tuple[Tensor, ...]:
    """Logits of every step."""
    with _backend(backend):
        sizes = EngineSizes(max_num_sequences=len(prompts), max_seq_len=512, num_spec=3)
        own = Engine(_model(form, device), sizes, use_graphs=False)
        found: list[Tensor] = []
        own.on_logits = lambda streams, rows, logits: found.append(logits.clone())
        own.prefill(prompts)
        for n, stream in enumerate(own.streams):
            stream.tokens[-1] = n  # not the model's choice, which a rounding may change
        own.decode(2, forced=[[token % 512 for token in (7, 11)]] * len(prompts))
        own.verify(drafts)
        return tuple(found)


def draw_engine(form: str, rng: random.Random, device: torch.device) -> dict[str, Any]:
    """Arguments of `engine`, without the backend."""
    lengths = [rng.choice([1, 3, 64, rng.randint(1, 200)]) for _ in range(rng.randint(1, 4))]
    prompts = [[rng.randrange(512) for _ in range(length)] for length in lengths]
    drafts = [[rng.randrange(512) for _ in range(rng.randint(0, 3))] for _ in lengths]
    return {"form": form, "device": device, "prompts": prompts, "drafts": drafts}
