"""The attention layer on the GPU: its error next to plain torch in the same dtype, and captured decode steps.

Which positions the indexer selects is taken as it is (its own tests judge it): both results attend to them, in float64 and in the
layer's dtype.
"""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gdn.layers import AttentionMetadataBuilder
from gdn.layers.config import HybridConfig
from gdn.layers.rotary import apply_rotary
from gdn.layers.sparse_attention import SparseAttention
from tests.gpu import graphs
from tests.layers import oracle
from tests.layers.paged import Batch

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
DTYPE = torch.bfloat16
LENGTHS = [1700, 40, 900]
STEPS = 8
_BASE: dict[str, Any] = dict(
    vocab_size=64, hidden_size=1024, num_hidden_layers=1, layer_types=("full_attention",), num_attention_heads=16,
    num_key_value_heads=2, head_dim=256, linear_num_key_heads=1, linear_num_value_heads=1, linear_key_head_dim=64,
    linear_value_head_dim=64, max_position_embeddings=4096, index_topk=512,
)  # fmt: skip
# Indexer, and the dtype of its cache.
FORMS: dict[str, tuple[dict[str, Any], torch.dtype | None]] = {
    "no indexer": (dict(index_topk=0), None),
    "token-wise": (dict(index_n_heads=16), DTYPE),
    "token-wise, FP8": (dict(index_n_heads=16), torch.uint8),
    "compressed": (dict(index_n_heads=4, index_ratio=4), DTYPE),
    "compressed, FP8": (dict(index_n_heads=4, index_ratio=4), torch.float8_e4m3fn),
    "token-wise, no gate, one key head": (dict(index_n_heads=16, attn_output_gate=False, num_key_value_heads=1), DTYPE),
}


def made(form: str, device: torch.device, ranks: int = 1) -> tuple[SparseAttention, HybridConfig, torch.dtype | None]:
    """The layer as one of the ranks holds it."""
    changes, cache_dtype = FORMS[form]
    config = HybridConfig(**_BASE | changes).per_rank(ranks)
    layer = SparseAttention(config, use_fp8_indexer="FP8" in form, device=device, dtype=DTYPE)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in layer.named_parameters():
        scale = 0.3 if "norm" in name else parameter.shape[-1] ** -0.5
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return layer, config, cache_dtype


def plain(layer: SparseAttention, hidden: Tensor, mask: Tensor) -> Tensor:
    """The layer in plain torch, in its own dtype."""
    sizes = [layer.q_width, layer.kv_width, layer.kv_width]
    heads, k, v = layer.qkv_proj(hidden).split(sizes, dim=-1)
    heads = heads.unflatten(-1, (layer.num_heads, -1))
    k, v = (x.unflatten(-1, (layer.num_kv_heads, -1)) for x in (k, v))
    angles = layer.rotary.cos_sin[: len(hidden)]
    both = ((heads[..., : layer.head_dim], layer.q_norm.weight), (k, layer.k_norm.weight))
    q, k = (apply_rotary(oracle.norm(x.float(), gain.float(), layer.eps).to(x.dtype), angles) for x, gain in both)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)
    if layer.has_gate:
        out = out * heads[..., layer.head_dim :].sigmoid()
    result: Tensor = layer.o_proj(out.flatten(1))
    return result


def row_error(found: Tensor, wanted: Tensor) -> float:
    """Largest error of a row: norm of the difference over the norm of what is wanted."""
    return float(((found.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


def outputs(
    layer: SparseAttention, config: HybridConfig, rows: list[Tensor], cache_dtype: torch.dtype | None, device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """Results of prompts in two chunks, the second with a cached prefix, then of decode steps; and masks of what was selected."""
    batch = Batch(layer, config, len(rows), 1712, dtype=DTYPE, cache_dtype=cache_dtype, device=device)
    selected: list[list[Tensor]] = [[] for _ in rows]
    queries: list[int] = []

    def keep(_: Any, __: Any, indices: Tensor | None) -> None:
        for kept, count in zip(selected, queries, strict=True):
            kept.append(torch.full((count, 0), -1, device=device) if indices is None else indices[:count])
            indices = None if indices is None else indices[count:]

    hook = None if layer.indexer is None else layer.indexer.register_forward_hook(keep)
    parts: list[list[Tensor]] = [[] for _ in rows]
    shares = [[length // 2 for length in LENGTHS], [length - length // 2 - STEPS for length in LENGTHS], *[[1] * 3] * STEPS]
    with torch.inference_mode():
        for share in shares:
            queries[:] = share
            new = [one[old : old + count] for one, old, count in zip(rows, batch.lengths, share, strict=True)]
            for kept, one in zip(parts, batch.step(new), strict=True):
                kept.append(one)
    if hook is not None:
        hook.remove()
    masks = [torch.ones(len(row), len(row), dtype=torch.bool, device=device).tril() for row in rows]
    if layer.indexer is not None:
        masks = [mask & mask_of(indices, len(mask)) for mask, indices in zip(masks, selected, strict=True)]
    return [torch.cat(kept) for kept in parts], masks


def prompts(config: HybridConfig, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(length, config.hidden_size, generator=generator).to(device, DTYPE) for length in LENGTHS]


SHARES = [(form, ranks) for form in ("no indexer", "token-wise, FP8", "compressed") for ranks in (2, 8)]


@pytest.mark.parametrize(("form", "ranks"), [*((form, 1) for form in FORMS), *SHARES])
def test_error_next_to_torch(form: str, ranks: int, device: torch.device) -> None:
    """A rank's share too, whose sum tests/layers/test_shards.py holds. Eight ranks are more than there are key heads."""
    layer, config, cache_dtype = made(form, device, ranks)
    rows = prompts(config, device)
    with torch.inference_mode():
        for row, found, mask in zip(rows, *outputs(layer, config, rows, cache_dtype, device), strict=True):
            wanted = oracle.attention(dict(layer.named_parameters()), row, config, mask).out
            error, of_torch = row_error(found, wanted), row_error(plain(layer, row, mask), wanted)
            assert error <= 2 * of_torch, (error, of_torch)


def mask_of(parts: list[Tensor], tokens: int) -> Tensor:
    """Mask [tokens, tokens] of the selected positions; rows that attended densely have none, and see all."""
    width = max(one.shape[1] for one in parts)
    indices = torch.cat([F.pad(one, (0, width - one.shape[1]), value=-1) for one in parts])
    columns = torch.where(indices < 0, tokens, indices).long()
    mask = torch.zeros(tokens, tokens + 1, dtype=torch.bool, device=indices.device).scatter_(1, columns, True)[:, :tokens]
    return mask | ~mask.any(dim=1, keepdim=True)


@pytest.mark.parametrize("form", FORMS)
def test_captured_decode(form: str, device: torch.device) -> None:
    layer, config, cache_dtype = made(form, device)
    count, rows, longest = 3, 5, 1800
    generator = torch.Generator().manual_seed(1)
    batch = Batch(layer, config, count, longest, dtype=DTYPE, cache_dtype=cache_dtype, device=device)
    builder = AttentionMetadataBuilder(
        device, block_size=batch.block_size, max_seq_len=longest, index_ratio=config.index_ratio, max_num_sequences=rows
    )
    tables, slots = batch.block_tables.cpu(), batch.slots.cpu()

    def prepare(step: int) -> dict[str, Any]:
        nonlocal metadata
        lengths = [length + step + 1 for length in LENGTHS]
        metadata = builder.build([1] * count, lengths, tables, slots, pad_to=rows)
        positions = [*[length - 1 for length in lengths], *[0] * (rows - count)]
        return {"hidden": torch.randn(rows, config.hidden_size, generator=generator), "positions": positions}

    def run(hidden: Tensor, positions: Tensor, **caches: Any) -> Tensor:
        k, v, *others = caches.values()
        result: Tensor = layer(hidden, positions, metadata, (k, v), *others)
        padding.append(result[count:])
        return result

    metadata: Any = None
    padding: list[Tensor] = []
    with torch.inference_mode():
        batch.step([torch.randn(length, config.hidden_size, generator=generator).to(device, DTYPE) for length in LENGTHS])
        caches = dict(zip(("k", "v", "keys", "ring"), (*batch.kv, batch.keys, batch.ring), strict=True))
        first = prepare(0)
        arguments = {"hidden": first["hidden"].to(device, DTYPE), "positions": torch.tensor(first["positions"], device=device)}
        written = [name for name, cache in caches.items() if cache is not None]
        graphs.check(run, arguments | caches, written, [partial(prepare, step) for step in range(6)], device)
        assert not any(bool(one.any()) for one in padding)
