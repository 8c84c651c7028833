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
from gdn.cli.demo.engine import Engine, EngineSizes
from gdn.layers import HybridModel
from gdn.runtime import env
from tests.gpu.small_models import small_model

Tensor = torch.Tensor


def attention(backend: str, **arguments: Any) -> Any:
    with _backend(backend):
        return gdn.attention(**arguments)


def sparse_attention(backend: str, **arguments: Any) -> Any:
    with _backend(backend):
        return gdn.sparse_attention(**arguments)


@functools.cache
def _model(form: str, device: torch.device) -> HybridModel:
    model = small_model(form, device)
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
