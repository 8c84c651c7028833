"""Attention of qwen4_exp with its indexer: `indexer_topk` selects, `sparse_attention` attends, and no mask of selections is made.

The host loops over the queries to select tokens, and then attends to the whole context under a mask. A group of the indexer is
`ratio` neighbouring tokens that are no padding, so tokens are counted by rank among those here, and mapped to their columns.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import gdn
from gdn.integrations import _indices as indices
from gdn.integrations._calls import unserved
from gdn.integrations._transformers import packed

_BLOCK = 64  # tokens of a block of keys and values: compiled in
_HEAD_DIMS, _HEADS_A_KEY_HEAD = (128, 256), 16  # of attention with a kernel
_INDEXER_HEAD_DIMS, _INDEXER_HEADS = (64, 128), 64


def refusal(
    layer: Any, hidden_states: Tensor, attention_mask: Any, unserved_mask: str | None, allow_reference: bool = False
) -> str | None:
    """Why a call of an attention layer is left to the host; None where it is served.

    Parameters
    ----------
    layer : Module
        The host's layer.
    hidden_states : Tensor [B, T, hidden]
        Input of the layer.
    attention_mask : Tensor [B, 1, T, columns]
        Visible columns of the cache; bool, or 0 where visible.
    unserved_mask : str or None
        Why the mask may hide more than padding and later tokens; None where it does not.
    allow_reference : bool
        Serve tensors on the CPU.
    """
    reason = unserved(hidden_states, layer.parameters(), allow_reference)
    if reason is not None:
        return reason
    if torch.compiler.is_compiling():  # a graph knows nothing of the model's mask, and needs to for more than one query
        if hidden_states.shape[1] != 1:
            return "more than one token of attention with an indexer in a compiled call"
        unserved_mask = None
    if torch.is_autocast_enabled(hidden_states.device.type):
        return "autocast is on"
    if layer.training and layer.attention_dropout:
        return "dropout"
    if unserved_mask is not None:
        return unserved_mask
    if attention_mask.dim() != 4:
        return f"a mask of {attention_mask.dim()} dimensions"
    if hidden_states.numel() == 0:
        return "no tokens"
    return _without_kernel(layer) if hidden_states.is_cuda else None


def _without_kernel(layer: Any) -> str | None:
    """Why the operators have no kernel for a layer; None where they have."""
    indexer = layer.indexer
    if layer.head_dim not in _HEAD_DIMS or indexer.index_head_dim not in _INDEXER_HEAD_DIMS:
        return f"no kernel for head dims {layer.head_dim} and {indexer.index_head_dim} of the indexer"
    heads = layer.q_proj.out_features // (2 * layer.k_proj.out_features)  # the queries come with a gate
    if heads > _HEADS_A_KEY_HEAD or indexer.index_n_heads > _INDEXER_HEADS:
        return f"no kernel for {heads} heads a key head and {indexer.index_n_heads} heads of the indexer"
    return None


def step(
    layer: Any,
    rotate: Callable[..., Any],
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    mask: Tensor,
    cache: Any,
) -> tuple[Tensor, None]:
    """One served call: what the host's forward returns, with the cache updated by its own methods.

    Parameters
    ----------
    layer : Module
        The host's layer.
    rotate : callable
        The host's `apply_rotary_pos_emb`.
    hidden_states : Tensor [B, T, hidden]
        Input of the layer.
    position_embeddings : tuple of Tensor
        Cosines and sines [B, positions, dims] of all tokens, cached ones included.
    mask : Tensor [B, 1, T, columns]
        Visible columns of the cache.
    cache : Cache or None
        The host's cache.
    """
    batch, length, _ = hidden_states.shape
    heads = (batch, length, -1, layer.head_dim)
    # Before the cache of keys and values, as in the host.
    selected = _select(layer.indexer, rotate, hidden_states, position_embeddings, mask, cache)
    cos, sin = (one[:, -length:] for one in position_embeddings)
    q, gate = layer.q_proj(hidden_states).view(batch, length, -1, 2 * layer.head_dim).chunk(2, dim=-1)
    q = layer.q_norm(q).transpose(1, 2)
    k = layer.k_norm(layer.k_proj(hidden_states).view(heads)).transpose(1, 2)
    v = layer.v_proj(hidden_states).view(heads).transpose(1, 2)
    q, k = rotate(q, k, cos, sin)
    if cache is not None:
        k, v = cache.update(k, v, layer.layer_idx)
    columns = k.shape[2]
    device, blocks = q.device, -(-columns // _BLOCK)
    o: Any = gdn.sparse_attention(
        q.transpose(1, 2).reshape(batch * length, -1, layer.head_dim),
        (_in_blocks(k, blocks), _in_blocks(v, blocks)),
        selected,
        indices.slots(batch * blocks, device).view(batch, blocks),
        indices.offsets(batch, length, device),
        # What is selected is no later than its query, so that no more has to be hidden.
        torch.full((batch,), columns, dtype=torch.int32, device=device),
        scale=layer.scaling,
        max_query_len=length,
        gate=gate.reshape(batch * length, -1, layer.head_dim),
    )
    return layer.o_proj(o.view(batch, length, -1)), None


def _in_blocks(heads: Tensor, blocks: int) -> Tensor:
    """Keys or values [B, heads, columns, D] as pages [B * blocks, 64, heads, D]; what fills the last page is never selected."""
    batch, count, columns, dim = heads.shape
    pages = heads.new_empty(batch, blocks * _BLOCK, count, dim)
    pages[:, :columns] = heads.transpose(1, 2)
    return pages.view(batch * blocks, _BLOCK, count, dim)


def _select(
    indexer: Any,
    rotate: Callable[..., Any],
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    mask: Tensor,
    cache: Any,
) -> Tensor:
    """Columns [B * T, budget + ratio - 1] that each query attends to, int32, -1 where there are fewer."""
    batch, length, _ = hidden_states.shape
    heads, dim, ratio = indexer.index_n_heads, indexer.index_head_dim, indexer.compress_ratio
    cos, sin = position_embeddings
    q, raw = indexer.index_qk_proj(hidden_states).split([heads * dim, indexer.index_kv_heads * dim], dim=-1)
    q = indexer.q_layernorm(q.reshape(batch, length, heads, dim))
    q = rotate(q, cos=cos[:, -length:], sin=sin[:, -length:], unsqueeze_dim=2)
    if cache is not None:
        raw = cache.update_indexer(raw, indexer.layer_idx)

    visible = packed.visible(mask)
    counts = visible.sum(-1).flatten()  # of each query
    # Columns of the tokens that are no padding, in order; the last query sees all of them. Others come last and are in no group.
    columns = (~visible[:, -1]).to(torch.int8).argsort(dim=-1, stable=True)
    groups = max(mask.shape[-1] // ratio, 1)
    members = columns[:, : groups * ratio].clamp(max=raw.shape[1] - 1)
    keys = raw.gather(1, members[..., None].expand(-1, -1, dim))
    if keys.shape[1] < groups * ratio:  # fewer columns than a group has tokens: nothing is complete
        keys = torch.nn.functional.pad(keys, (0, 0, 0, groups * ratio - keys.shape[1]))
    keys = keys.view(batch, groups, ratio, dim).float().mean(dim=2).to(raw.dtype)
    starts = members[:, ::ratio, None].clamp(max=cos.shape[1] - 1).expand(-1, -1, cos.shape[-1])
    keys = rotate(indexer.k_layernorm(keys)[:, :, None], cos=cos.gather(1, starts), sin=sin.gather(1, starts), unsqueeze_dim=2)

    first = indices.slots(batch, mask.device).repeat_interleave(length) * groups
    ranks = gdn.indexer_topk(
        q.reshape(batch * length, heads, dim),
        keys.reshape(batch * groups, dim),
        None,
        first,
        first + counts // ratio,
        indexer.block_topk,
        scale=dim**-0.5,
        max_seqlen_k=groups,
        ratio=ratio,
        positions=counts - 1,
    )
    ranks = ranks.view(batch, -1)
    found = columns.gather(1, ranks.clamp(min=0).long())
    return torch.where(ranks >= 0, found, -1).to(torch.int32).view(batch * length, -1)
