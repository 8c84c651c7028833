"""Public operators `write_indexer_cache` and `gather_indexer_cache`: keys into the indexer's pages, and out of them."""

from typing import Any

import torch
from torch import Tensor

from gdn.core import check, values
from gdn.core.call import NEW, always, launch, new, operator, prepare, reads_values, run_reference, settle
from gdn.core.check import FP8, INDEX_DTYPES, bad_value, dtype_name
from gdn.core.modes import is_empty, last_value
from gdn.core.tensors import aligned, dtypes_of
from gdn.ops.indexer import checks, reference
from gdn.ops.indexer.problem import (
    GatherIndexerCacheParams,
    GatherIndexerCacheProblem,
    WriteIndexerCacheParams,
    WriteIndexerCacheProblem,
)
from gdn.runtime.registry import Backend


@operator(reference.write_indexer_cache, writes={"cache": always}, returns=lambda _: (), varies=("k", "cache"), contiguous=("k",))
def write_indexer_cache(k: Tensor, cache: Tensor, slot_mapping: Tensor, *, backend: Backend | None = None) -> None:
    """Write key rows into the indexer cache, in the form that the cache's dtype gives.

    Parameters
    ----------
    k : Tensor [tokens, D] or [tokens, kv_heads, D]
        Keys, bfloat16, float16 or float32, any row stride; a last dimension that is not contiguous is copied, logged once.
    cache : Tensor [pages, page_size, kv_heads, D + 4 or D]
        Pages as for `paged_mqa_logits`, updated in place. uint8: e4m3 values and one float32 scale per (row, kv head),
        scale = max(amax, 1e-4) / 448; float8_e4m3fn: plain saturating casts; bfloat16 (float16, float32): a cast.
    slot_mapping : Tensor [tokens]
        Cache row of each token, page * page_size + offset, int64 (or int32); negative = skip. The caller makes sure that slots
        lie in the cache and are distinct (always checked on the CPU, on a GPU with ``GDN_VALIDATE=1``, which waits for the
        device).
    backend : {"tilelang", "cute", "reference"}, optional
        Implementation to run; ValueError where it cannot. None = chosen by ``GDN_BACKEND`` and the tables, see `gdn.explain`.

    Raises
    ------
    TypeError, ValueError
        Named after the argument; the cache is untouched then.

    References
    ----------
    .. [1] The pages with scales are those of ``fp8_paged_mqa_logits`` in DeepGEMM; the slot mapping is vLLM's.
    """
    check.tensor("k", k)
    kv_heads = checks.check_keys("k", k, None, k.device)
    num_rows = checks.check_written("k", k, kv_heads, cache, slot_mapping)
    if reads_values(k.device):
        values.check_slot_mapping("slot_mapping", slot_mapping, num_rows)
    dtypes: dict[str, Any] = {"dtype": dtype_name(k.dtype), **dtypes_of(cache=cache, slot=slot_mapping)}
    problem = WriteIndexerCacheProblem(num_kv_heads=kv_heads, head_dim=k.shape[-1], **dtypes, num_tokens=k.shape[0])
    prepared = prepare(problem, k.device, backend)
    if not is_empty(k.shape[0], cache.shape[0]):
        params = WriteIndexerCacheParams(aligned("k", checks.with_kv_heads(k)), checks.flat_pages(cache), slot_mapping)
        launch(prepared, params, (cache,), aligned=(k, cache))


def _gathered(arguments: dict[str, Any]) -> tuple[str | None, str | None]:
    return NEW, (NEW if arguments["cache"].dtype == torch.uint8 else None)


@operator(reference.gather_indexer_cache, returns=_gathered, varies=("block_tables", "cu_seqlens"))
def gather_indexer_cache(
    cache: Tensor, block_tables: Tensor, cu_seqlens: Tensor, *, num_rows: int | None = None, backend: Backend | None = None
) -> tuple[Tensor, Tensor | None]:
    """Gather the cached key rows of N sequences, packed for `mqa_logits` (prefill with a cached prefix).

    Parameters
    ----------
    cache : Tensor [pages, page_size, kv_heads, D + 4 or D]
        Pages as for `paged_mqa_logits`.
    block_tables : Tensor [N, max_pages] of int32
        Page of each page_size keys of a sequence.
    cu_seqlens : Tensor [N + 1]
        Row offsets of the result, int32 or int64: the first cu_seqlens[n + 1] - cu_seqlens[n] rows of sequence n go to the rows
        from cu_seqlens[n] on.
    num_rows : int, optional
        Rows of the result; rows at or beyond cu_seqlens[N] are zero. None reads cu_seqlens[N] back to the host, which waits for
        the device.
    backend : {"tilelang", "cute", "reference"}, optional
        Implementation to run; ValueError where it cannot. None = chosen by ``GDN_BACKEND`` and the tables, see `gdn.explain`.

    Returns
    -------
    k : Tensor [rows, kv_heads, D]
        New tensor, float8_e4m3fn for a uint8 cache, else of the cache's dtype; without the kv_heads axis where the cache has
        none.
    k_scale : Tensor [rows, kv_heads] of float32 or None
        Scales of a uint8 cache, without the kv_heads axis where the cache has none.

    Raises
    ------
    TypeError, ValueError
        Named after the argument, before anything is launched.

    References
    ----------
    .. [1] The pages with scales are those of ``fp8_paged_mqa_logits`` in DeepGEMM.
    """
    check.tensor("cache", cache)
    device = cache.device
    head_dim = cache.shape[-1] - (4 if cache.dtype == torch.uint8 else 0) if cache.dim() else 0
    page_size, kv_heads = checks.check_cache(cache, max(1, head_dim), device, None)
    check.tensor("cu_seqlens", cu_seqlens, shape=["N + 1"], dtypes=INDEX_DTYPES, device=device)
    if cu_seqlens.shape[0] < 1:
        bad_value("cu_seqlens", "shape [N + 1]", f"shape {list(cu_seqlens.shape)}")
    sequences = cu_seqlens.shape[0] - 1
    check.tensor("block_tables", block_tables, shape=[sequences, "max_pages"], dtypes=(torch.int32,), device=device)
    check.at_least("num_rows", num_rows)
    if reads_values(device):
        values.check_offsets("cu_seqlens", cu_seqlens)
        lengths = cu_seqlens.diff()
        values.check_table_lengths("cu_seqlens", lengths, block_tables, page_size)
        values.check_pages("block_tables", block_tables, lengths, page_size, cache.shape[0])
        if num_rows is not None and num_rows < int(cu_seqlens[-1]):
            bad_value("num_rows", f"at least {int(cu_seqlens[-1])}, the last of cu_seqlens", num_rows)
    rows = _last_offset(cu_seqlens) if num_rows is None else num_rows
    settle(num_rows=rows)
    scaled = cache.dtype == torch.uint8
    sizes: dict[str, Any] = {"num_kv_heads": kv_heads, "head_dim": head_dim, "num_rows": rows, "num_sequences": sequences}
    problem = GatherIndexerCacheProblem(**dtypes_of(cache=cache, cu_seqlens=cu_seqlens), **sizes)
    prepared = prepare(problem, device, backend)
    if is_empty(rows, cache.shape[0], *block_tables.shape):
        run_reference("nothing to gather")
    k = new(FP8 if scaled else cache.dtype, device, rows, kv_heads * head_dim)
    k_scale = new(torch.float32, device, rows, kv_heads) if scaled else None
    params = GatherIndexerCacheParams(checks.flat_pages(cache), block_tables, cu_seqlens, k, k_scale)
    results = (k.view(rows, kv_heads, head_dim), k_scale)
    if cache.dim() == 3:
        results = (k, None if k_scale is None else k_scale[:, 0])
    # Rows that were read back from the device are no plan: the next call may have another number.
    launch(prepared, params, None if num_rows is None else results, aligned=(cache,))
    return results


def _last_offset(cu_seqlens: Tensor) -> int:
    last = last_value(cu_seqlens)
    if last is None:
        if cu_seqlens.is_meta:
            bad_value("num_rows", "an int with tensors that have no values", None)
        return torch.library.get_ctx().new_dynamic_size()  # type: ignore[return-value]
    if last < 0:
        bad_value("cu_seqlens", "a last offset >= 0", last)
    return last
