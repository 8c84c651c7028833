"""Attention of each query token over the tokens that the indexer selected for it."""

import torch

from gdn import reference, runtime
from gdn.ops import _library_qsa
from gdn.ops._checks import bad_type, bad_value, check_number, check_tensor
from gdn.ops._logits_checks import INDEX_DTYPES, check_flag, reading_allowed
from gdn.runtime import env

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def sparse_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    topk_indices: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    topk_length: torch.Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * q k^T) v over the selected positions: o [tokens, heads, D], with return_lse also lse.

    q [tokens, heads, D] bfloat16 (float16, float32), last dim contiguous, tokens of all sequences packed.
    kv_cache: (k_cache, v_cache), each [num_blocks, block_size, kv_heads, D] of q's dtype with any block and token stride,
        or one tensor [2, num_blocks, block_size, kv_heads, D]. heads is a multiple of kv_heads; query head h reads key
        head h // (heads / kv_heads).
    topk_indices [tokens, k] int32 or int64, any row stride: positions in the query's own sequence, -1 = none, anywhere in
        the row; positions after the query's own do not count (causal). The caller's duty: no position twice in a row.
    block_tables [N, max_blocks] int32: block of each block_size positions; query_start_loc [N + 1] and seq_lens [N] int32
        or int64: sequence n's new tokens are rows [query_start_loc[n], query_start_loc[n + 1]) and stand at the end of its
        seq_lens[n] tokens, cached ones included. Rows behind the last sequence are padding.
    topk_length [tokens] int32 or int64: only the first ones of a row of topk_indices count; None = all.
    scale: None = D**-0.5. out: [tokens, heads, D] of q's dtype; None = a new tensor.

    lse [tokens, heads] float32: natural logarithm of the sum of exponentials. A row without a valid position gives o = 0
    and lse = -inf. ValueError or TypeError names the argument, before anything is written. With GDN_VALIDATE=1 the order
    of query_start_loc and the blocks of selected positions are checked too (costs a sync).
    """
    if torch.compiler.is_compiling():
        o, lse = _library_qsa.sparse_attention(
            q, kv_cache[0], kv_cache[1], topk_indices, block_tables, query_start_loc, seq_lens, topk_length, scale, backend
        )
        o = o if out is None else out.copy_(o)
        return (o, lse) if return_lse else o
    check_tensor("q", q, shape=["tokens", "heads", "D"], dtypes=DTYPES, last_contiguous=True)
    tokens, heads, dim = q.shape
    device = q.device
    k_cache, v_cache = _check_cache(kv_cache, q)
    kv_heads = k_cache.shape[2]
    if kv_heads < 1 or heads % kv_heads:
        bad_value("q", f"a number of heads that is a multiple of the {kv_heads} key heads", f"{heads} heads")
    check_tensor("topk_indices", topk_indices, shape=[tokens, "k"], dtypes=INDEX_DTYPES, device=device, last_contiguous=True)
    check_tensor("seq_lens", seq_lens, shape=["N"], dtypes=INDEX_DTYPES, device=device)
    sequences = seq_lens.shape[0]
    check_tensor("query_start_loc", query_start_loc, shape=[sequences + 1], dtypes=INDEX_DTYPES, device=device)
    check_tensor("block_tables", block_tables, shape=[sequences, "max_blocks"], dtypes=(torch.int32,), device=device)
    if topk_length is not None:
        check_tensor("topk_length", topk_length, shape=[tokens], dtypes=INDEX_DTYPES, device=device)
    if scale is not None:
        scale = check_number("scale", scale)
    check_flag("return_lse", return_lse)
    if out is not None:
        check_tensor("out", out, shape=[tokens, heads, dim], dtypes=(q.dtype,), device=device, last_contiguous=True)
    if env.current().validate and reading_allowed(device):
        _check_values(query_start_loc, seq_lens, block_tables, k_cache, tokens)
    phase = "prefill" if tokens > sequences else "decode"  # for the VLLM_QSA_*_ATTN_BACKEND switches
    runtime.reference_only("sparse_attention", backend, phase=phase)
    return reference.sparse_attention(
        q,
        (k_cache, v_cache),
        topk_indices,
        block_tables,
        query_start_loc,
        seq_lens,
        topk_length=topk_length,
        scale=scale,
        return_lse=return_lse,
        out=out,
    )


def _check_cache(
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], q: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    dim, device = q.shape[-1], q.device
    if isinstance(kv_cache, torch.Tensor):
        check_tensor("kv_cache", kv_cache, shape=[2, "num_blocks", "block_size", "kv_heads", dim])
    elif not isinstance(kv_cache, tuple | list) or len(kv_cache) != 2:
        bad_type("kv_cache", "a tensor [2, ...] or a pair (k_cache, v_cache)", type(kv_cache).__name__)
    k_cache, v_cache = kv_cache[0], kv_cache[1]
    check_tensor(
        "kv_cache[0]",
        k_cache,
        shape=["num_blocks", "block_size", "kv_heads", dim],
        dtypes=(q.dtype,),
        device=device,
        last_contiguous=True,
    )
    check_tensor("kv_cache[1]", v_cache, shape=list(k_cache.shape), dtypes=(q.dtype,), device=device, last_contiguous=True)
    if k_cache.shape[1] < 1:
        bad_value("kv_cache[0]", "blocks of at least one token", f"shape {list(k_cache.shape)}")
    return k_cache, v_cache


def _check_values(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_tables: torch.Tensor, k_cache: torch.Tensor, tokens: int
) -> None:
    """GDN_VALIDATE=1."""
    bounds = query_start_loc.tolist()
    if bounds[0] != 0 or bounds[-1] > tokens or any(b < a for a, b in zip(bounds, bounds[1:], strict=False)):
        bad_value("query_start_loc", f"ascending values from 0 to at most {tokens}", bounds)
    new = query_start_loc.diff().to(seq_lens.dtype)
    if bool((seq_lens < new).any()):
        bad_value("seq_lens", "at least the number of new tokens of each sequence", seq_lens.tolist())
    block_size, num_blocks = k_cache.shape[1], k_cache.shape[0]
    used = torch.arange(block_tables.shape[1], device=seq_lens.device) * block_size < seq_lens[:, None]
    wrong = used & ((block_tables < 0) | (block_tables >= num_blocks))
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        bad_value(f"block_tables[{row}, {column}]", f"a block in [0, {num_blocks})", int(block_tables[row, column]))
