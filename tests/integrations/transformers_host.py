"""Small models of Transformers, run plainly and enabled, under the argument names of any tested version."""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, StaticCache

from gdn.integrations import Handle
from gdn.integrations.transformers import enable
from tests.layers import hf

TOLERANCE = 5e-5  # of the largest logit, float32
KINDS = tuple(hf.MODELS)
VOCABULARY = 131
SHORT = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


def build(kind: str = "qwen3_next", **changes: Any) -> PreTrainedModel:
    """A float32 model on the CPU. SDPA: the eager attention of 5.20 makes left-padded rows of qwen4_exp NaN."""
    model = hf.build(kind, 0, **changes)
    model.set_attn_implementation("sdpa")
    return model


def cache_name(module: Any) -> str:
    """What this version calls the cache in the forward of a model or layer."""
    return next(name for name in inspect.signature(type(module).forward).parameters if name in _NAMES)


_NAMES = ("cache", "past_key_values", "cache_params")


def run(model: Any, ids: Tensor, cache: Any = None, **options: Any) -> Tensor:
    """Logits [B, T, vocab] of a call without gradients; without a cache none is made."""
    options = {"use_cache": cache is not None, **options}
    if cache is not None:
        options[cache_name(getattr(model, "_orig_mod", model))] = cache
    with torch.inference_mode():
        logits: Tensor = model(ids, **options).logits
    return logits


def generate(model: Any, ids: Tensor, tokens: int, **options: Any) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model.generate(
            ids, max_new_tokens=tokens, min_new_tokens=tokens, **{"do_sample": False, "pad_token_id": 0, **options}
        )
    return found


def on(model: Any, level: str) -> Handle:
    return enable(model if level == "layers" else None, allow_reference=True, strict=True)


def prompts(*lengths: int) -> tuple[Tensor, Tensor]:
    """Left-padded token ids and their mask."""
    generator = torch.Generator().manual_seed(len(lengths))
    ids = torch.randint(1, VOCABULARY, (len(lengths), max(lengths)), generator=generator)
    mask = torch.tensor([[0] * (max(lengths) - length) + [1] * length for length in lengths])
    return ids * mask, mask


def packed(model: Any, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sequences in one row: token ids, their positions, where each begins and ends, and the logits of each alone."""
    ids, _ = prompts(sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return ids, positions, offsets, torch.cat([run(model, one) for one in ids.split(lengths, dim=1)], dim=1)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    assert hf.error(found, wanted) <= TOLERANCE


def dynamic(model: Any) -> Any:
    return DynamicCache(config=model.config)


def static(model: Any, length: int = 64) -> Any:
    return StaticCache(config=model.config, max_cache_len=length)


def linear_layers(model: Any) -> list[Any]:
    return [module for name, module in model.named_modules() if name.endswith("linear_attn")]


def served(handle: Handle) -> int:
    """Calls that layers, or the functions of modules, served."""
    return sum(one.served for one in handle.report().points if "position_ids" not in one.path)


def reasons(handle: Handle) -> set[str]:
    return {reason for one in handle.report().points for reason in one.left}
