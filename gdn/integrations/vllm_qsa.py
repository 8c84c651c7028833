"""Qwen4Exp's sparse attention in vLLM: the selection of decode rows, and their attention over it, on vLLM's own pages.

vLLM has no extension point there, so functions of its modules are replaced. Prompts stay vLLM's: the function for attention names
the request of each row and not the bounds of the sequences, so that a prompt would be read as many sequences of one token.
"""

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch

import gdn
from gdn.integrations._calls import Calls, short_name, unserved
from gdn.integrations._points import Point, Undo, attribute, replace, resolve
from gdn.runtime import log

Tensor = torch.Tensor
OPS = "vllm.models.qwen4_exp.nvidia.ops"
SELECT = f"{OPS}.qsa_indexer.qsa_select_paged_decode"
ATTEND = f"{OPS}.qsa.qsa_sparse_paged_attention"
WARM_SELECT = f"{OPS}.qsa_indexer.warmup_qsa_mqa_paged_decode"
WARM_ATTEND = f"{OPS}.qsa.warmup_qsa_sparse_paged_attention"
_SCORED = (torch.bfloat16, torch.float8_e4m3fn)  # queries and keys of the indexer that have a kernel
_MOST_INDEXER_HEADS = 64
_TOPK = 512  # groups of keys in a warm-up: 2048 tokens by 4, as published; the host's warm-up does not say how many
_MOST_ROWS = 512  # of a warm-up where the host names no limit: its graphs hold as many


def select_refusal(
    q: Tensor, k_cache: Tensor, page_table: Tensor, visible_blocks: Tensor, token_topk: int, compress_ratio: int,
    decode_query_len: int, block_indices: Tensor, *, allow_reference: bool = False,
) -> str | None:  # fmt: skip
    """Why a selection is left to the host."""
    if reason := unserved(q, (q,), allow_reference):
        return reason
    if q.dtype != k_cache.dtype or (q.is_cuda and q.dtype not in _SCORED):
        return f"the queries are {short_name(q.dtype)}, the keys {short_name(k_cache.dtype)}"
    rows, heads, dim = q.shape
    if dim not in (64, 128):
        return f"the head dim of the indexer is {dim}"
    if heads > _MOST_INDEXER_HEADS:
        return f"the indexer has {heads} heads"
    if k_cache.shape[1] % 16:
        return f"a page holds {k_cache.shape[1]} keys, which is no multiple of 16"
    requests = page_table.shape[0]
    if rows != requests * decode_query_len or visible_blocks.shape != (rows,):
        return f"{rows} rows, {visible_blocks.shape[0]} lengths and {requests} requests of {decode_query_len} tokens"
    groups = token_topk // compress_ratio
    if block_indices.shape != (rows, groups) or not groups or block_indices.dtype != torch.int32:
        return f"the selection is {short_name(block_indices.dtype)} {list(block_indices.shape)}"
    return None


def select(
    q: Tensor, k_cache: Tensor, page_table: Tensor, visible_blocks: Tensor, token_topk: int, compress_ratio: int,
    decode_query_len: int, block_indices: Tensor,
) -> None:  # fmt: skip
    """`qsa_select_paged_decode`: the best groups of keys of each row, ascending, -1 behind them, into block_indices."""
    shape = (q.shape[0] // decode_query_len, decode_query_len)
    gdn.paged_indexer_topk(
        q.unflatten(0, shape), k_cache, None, visible_blocks.view(shape), page_table, token_topk // compress_ratio,
        out=block_indices,
    )  # fmt: skip


def attend_refusal(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, use_prefill_config: bool, out: Tensor | None,
    output_gate: Tensor, allow_reference: bool,
) -> str | None:  # fmt: skip
    """Why attention is left to the host."""
    if reason := unserved(q, (q,), allow_reference):
        return reason
    if use_prefill_config:
        return "the batch holds prompts, whose bounds the function is not given"
    for name, cache in (("cache", k_cache), ("cache", v_cache), ("gate", output_gate), ("result", q if out is None else out)):
        if cache.dtype != q.dtype:
            return f"the {name} is {short_name(cache.dtype)}, which has no kernel"
    heads, key_heads = q.shape[1], k_cache.shape[2]
    if q.shape[2] not in (128, 256) or heads % key_heads or heads > 16 * key_heads:
        return f"{heads} heads of dim {q.shape[2]} over {key_heads} key heads"
    if block_table.dtype != torch.int32 or not block_table.shape[0]:
        return f"the block table is {short_name(block_table.dtype)} {list(block_table.shape)}"
    return None


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, logical_indices: Tensor, block_table: Tensor, token_to_req: Tensor,
    use_prefill_config: bool, out: Tensor | None = None, k_scale: float | None = None, v_scale: float | None = None, *,
    output_gate: Tensor,
) -> Tensor:  # fmt: skip
    """`qsa_sparse_paged_attention` of decode rows: each row is a sequence of its own, whose last column counts its positions."""
    rows = q.shape[0]
    tables = block_table.index_select(0, token_to_req.clamp(0, block_table.shape[0] - 1))
    bounds = torch.arange(rows + 1, dtype=torch.int32, device=q.device)
    # The host selects no position after a row's own: a length beyond all of them masks nothing.
    longest = torch.full((rows,), block_table.shape[1] * k_cache.shape[1], dtype=torch.int32, device=q.device)
    out = torch.empty_like(q) if out is None else out
    gdn.sparse_attention(
        q, (k_cache, v_cache), logical_indices[:, :-1], tables, bounds, longest, topk_length=logical_indices[:, -1].contiguous(),
        max_query_len=1, gate=output_gate.view_as(q), out=out,
    )  # fmt: skip
    return out


def points() -> list[Point]:
    """The two functions, and those by which the host compiles its own kernels at start-up: ours are loaded behind them.

    None where the host has no such modules, or they cannot be imported: its other layers are served all the same.
    """
    try:
        for name in ("qsa", "qsa_indexer"):
            importlib.import_module(f"{OPS}.{name}")
    except Exception as error:  # of whatever the host's modules need
        log.once(f"vllm: sparse attention of Qwen4Exp is left to the host: {type(error).__name__}: {error}", level=logging.INFO)
        return []
    return [
        attribute(SELECT, select_refusal, select),
        attribute(ATTEND, attend_refusal, attend),
        _behind(WARM_SELECT, _warm_select),
        _behind(WARM_ATTEND, _warm_attend),
    ]


def _behind(path: str, also: Callable[..., None]) -> Point:
    """A function of the host that is called as before, and another one after it with the same arguments."""

    def install(calls: Calls) -> Undo:
        original = resolve(path)[2]

        @functools.wraps(original)
        def both(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if calls.active and calls.serves(None):
                also(*args, allow_reference=calls.allow_reference, **kwargs)
            return result

        return replace(original, both, (path,))

    return Point(path, (path,), install)


def _counts(most: int) -> list[int]:
    """1 to `most`, dense where few: the forms of the kernels change with the number of sequences."""
    found = [1]
    while found[-1] < most:
        found.append(min(most, max(found[-1] + 1, found[-1] * 5 // 4)))
    return found


def _warm_select(
    k_cache: Tensor, page_table: Tensor, *, num_heads: int, head_dim: int, max_decode_query_len: int, max_num_reqs: int,
    max_num_batched_tokens: int, allow_reference: bool,
) -> None:  # fmt: skip
    topk = min(_TOPK, page_table.shape[1] * k_cache.shape[1])
    for drafts in range(1, max_decode_query_len + 1):
        for requests in _counts(min(max_num_reqs, max_num_batched_tokens // drafts)):
            rows = requests * drafts
            q = k_cache.new_zeros(rows, num_heads, head_dim)
            table = page_table.new_zeros(requests, page_table.shape[1])
            visible = torch.zeros(rows, dtype=torch.int32, device=q.device)
            given = (q, k_cache, table, visible, topk, 1, drafts, visible.new_zeros(rows, topk))
            if select_refusal(*given, allow_reference=allow_reference) is None:
                select(*given)


def _warm_attend(
    kv_cache: Tensor, block_table: Tensor, *, num_query_heads: int, selection_width: int, allow_reference: bool
) -> None:
    dim = kv_cache.shape[-1] // 2
    keys, values = kv_cache.transpose(1, 2).split(dim, dim=-1)
    for rows in _counts(_MOST_ROWS):
        q = torch.zeros(rows, num_query_heads, dim, dtype=torch.bfloat16, device=kv_cache.device)
        if allow_reference:
            q = q.to(keys.dtype)
        picked = torch.zeros(rows, selection_width + 1, dtype=torch.int32, device=q.device)
        table, owner = block_table[:1].clone().zero_(), picked[:, 0].contiguous()
        if attend_refusal(q, keys, values, table, False, None, q, allow_reference) is None:
            attend(q, keys, values, picked, table, owner, False, output_gate=q)
