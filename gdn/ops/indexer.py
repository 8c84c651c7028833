"""Steps around the indexer's logits: quantisation, norm and RoPE, the cache write, compressed keys, the prefix gather.

Formulas: gdn/reference/indexer.py.
"""

from typing import Any

import torch

from gdn import reference
from gdn.ops import _rows, _values
from gdn.ops._call import NEW, always, launch, new, operator, prepare, reads_values, run_reference, settle
from gdn.ops._checks import bad_type, bad_value, check_at_least, check_not_negative, check_tensor, dtype_name
from gdn.ops._delta_rule import check_null_slot
from gdn.ops._logits_checks import FP8, INDEX_DTYPES, WEIGHT_DTYPES, check_cache, flat_pages
from gdn.ops._modes import is_empty, last_value
from gdn.problems import (
    CompressIndexerKeysParams,
    CompressIndexerKeysProblem,
    GatherIndexerCacheParams,
    GatherIndexerCacheProblem,
    PrepareIndexerParams,
    PrepareIndexerProblem,
    QuantizeFp8Params,
    QuantizeFp8Problem,
    WriteIndexerCacheParams,
    WriteIndexerCacheProblem,
)
from gdn.runtime import env

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _name(tensor: torch.Tensor | None) -> str | None:
    return None if tensor is None else dtype_name(tensor.dtype)


def _grouped(x: torch.Tensor, group: int) -> torch.Tensor:
    """x as [rows, groups, group]: a view where its strides allow one. Contiguous groups are all rows."""
    if x.is_contiguous():
        return x.view(-1, 1, group)
    if x.dim() == 2:
        return x.view(x.shape[0], -1, group) if x.stride(1) == 1 else x.contiguous().view(-1, 1, group)
    return x if x.dim() == 3 and x.shape[2] == group else x.contiguous().view(-1, 1, group)


@operator(reference=reference.quantize_fp8, returns=lambda _: (NEW, NEW), memo=True, contiguous=("x",))
def quantize_fp8(x: torch.Tensor, group_size: int = 128, *, backend: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values and one float32 scale per group of min(group_size, D) elements along the last dim.

    x [..., D] bfloat16, float16 or float32, D a multiple of the group -> x_fp8 [..., D], scale [..., D / group]:
    scale = max(amax, 1e-4) / 448, x_fp8 = x / scale to nearest even, saturated. TypeError or ValueError by argument.
    backend: as in chunk_gated_delta_rule.
    """
    check_tensor("x", x, dtypes=DTYPES)
    check_at_least("group_size", group_size, 1)
    if x.dim() < 1 or x.shape[-1] < 1:
        bad_value("x", "shape [..., D] with D >= 1", f"shape {list(x.shape)}")
    group = min(group_size, x.shape[-1])
    if x.shape[-1] % group:
        bad_value("x", f"a last dimension that is a multiple of group_size {group}", f"shape {list(x.shape)}")
    rows = x.new_empty(0, 1, group) if is_empty(*x.shape) else _grouped(x, group)
    problem = QuantizeFp8Problem(num_groups=rows.shape[1], group_dim=group, dtype=dtype_name(x.dtype), num_tokens=rows.shape[0])
    prepared = prepare(problem, x.device, backend)
    if prepared.launch is None:
        run_reference()
    x_fp8 = new(FP8, x.device, *x.shape)
    scale = new(torch.float32, x.device, *x.shape[:-1], x.shape[-1] // group)
    if not is_empty(*x.shape):
        params = QuantizeFp8Params(x=_rows.aligned("x", rows), x_fp8=x_fp8.view(rows.shape), scale=scale.view(rows.shape[:2]))
        launch(prepared, params, (x_fp8, scale), aligned=(x,))
    return x_fp8, scale


def _check_slots(slot_mapping: torch.Tensor | None, tokens: int, device: torch.device) -> None:
    check_tensor("slot_mapping", slot_mapping, shape=[tokens], dtypes=INDEX_DTYPES, device=device)


def _check_keys(name: str, k: torch.Tensor, tokens: int | None, device: torch.device) -> int:
    """k [tokens, D] or [tokens, kv_heads, D]: its kv_heads."""
    check_tensor(name, k, dtypes=DTYPES, device=device)
    if k.dim() not in (2, 3) or (isinstance(tokens, int) and isinstance(k.shape[0], int) and k.shape[0] != tokens):
        wanted = "tokens" if tokens is None else tokens
        bad_value(name, f"shape [{wanted}, D] or [{wanted}, kv_heads, D]", f"shape {list(k.shape)}")
    return k.shape[1] if k.dim() == 3 else 1


def _with_heads(k: torch.Tensor) -> torch.Tensor:
    """[tokens, D] as [tokens, 1, D]."""
    return k[:, None] if k.dim() == 2 else k


def _same_kv_heads(name: str, kv_heads: int, of_cache: int) -> None:
    if kv_heads != of_cache:
        bad_value(name, f"{of_cache} key heads, as the cache", f"{kv_heads}")


@operator(
    reference=reference.write_indexer_cache,
    writes={"cache": always},
    returns=lambda _: (),
    memo=True,
    varies=("k", "cache"),
    contiguous=("k",),
)
def write_indexer_cache(k: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, *, backend: str | None = None) -> None:
    """Writes key rows into the indexer cache, in the form of the cache's dtype.

    k [tokens, D] or [tokens, kv_heads, D] bfloat16, float16 or float32, any row stride.
    cache: as `gdn.paged_mqa_logits`. uint8: e4m3 values and one float32 scale per (row, kv head), scale =
        max(amax, 1e-4) / 448; float8_e4m3fn: plain saturating casts; bfloat16: a cast.
    slot_mapping [tokens] int64 (or int32): row page * page_size + offset of each token; negative = skip. The caller's
        duty: slots lie in the cache (checked with GDN_VALIDATE=1, costs a sync) and are distinct.
    backend: as in chunk_gated_delta_rule.

    TypeError or ValueError names the argument; the cache is untouched then.
    """
    check_tensor("k", k)
    kv_heads = _check_keys("k", k, None, k.device)
    page_size, cache_heads = check_cache(cache, k.shape[-1], k.device, None)
    _same_kv_heads("k", kv_heads, cache_heads)
    _check_slots(slot_mapping, k.shape[0], k.device)
    if reads_values(k.device):
        _values.check_slot_mapping("slot_mapping", slot_mapping, cache.shape[0] * page_size)
    problem = WriteIndexerCacheProblem(
        num_kv_heads=kv_heads,
        head_dim=k.shape[-1],
        cache_dtype=dtype_name(cache.dtype),
        dtype=dtype_name(k.dtype),
        slot_dtype=dtype_name(slot_mapping.dtype),
        num_tokens=k.shape[0],
    )
    prepared = prepare(problem, k.device, backend)
    if prepared.launch is None:
        run_reference()
    if not is_empty(k.shape[0], cache.shape[0]):
        params = WriteIndexerCacheParams(k=_rows.aligned("k", _with_heads(k)), cache=flat_pages(cache), slot_mapping=slot_mapping)
        launch(prepared, params, (cache,), aligned=(k, cache))


def _check_rope(
    positions: torch.Tensor, cos_sin: torch.Tensor, rotary_dim: int, tokens: int, head_dim: int, device: torch.device
) -> None:
    check_tensor("positions", positions, shape=[tokens], dtypes=INDEX_DTYPES, device=device)
    check_at_least("rotary_dim", rotary_dim)
    if rotary_dim % 2 or rotary_dim > head_dim:
        bad_value("rotary_dim", f"an even number up to head_dim {head_dim}", rotary_dim)
    check_tensor("cos_sin", cos_sin, shape=["max_positions", rotary_dim], dtypes=DTYPES, device=device)
    if is_empty(cos_sin.shape[0]) and not is_empty(tokens):  # positions are clamped to its rows
        bad_value("cos_sin", f"shape [max_positions >= 1, {rotary_dim}]", f"shape {list(cos_sin.shape)}")


def _is_fp8(cache: torch.Tensor | None, fp8: bool | None) -> bool:
    """Whether the query is quantised: as the cache is, else as the argument says, else as VLLM_QSA_USE_FP8_INDEXER says."""
    if cache is not None:
        return cache.dtype in (torch.uint8, FP8)
    return env.current().qsa_use_fp8_indexer if fp8 is None else fp8


def _folds_weights(weights: torch.Tensor | None, cache: torch.Tensor | None, fp8: bool | None) -> bool:
    """Whether prepare_indexer returns new weights (FP8 with scales), rather than the ones it got."""
    if cache is not None:
        return cache.dtype == torch.uint8
    return _is_fp8(cache, fp8) and weights is not None


def _prepared(arguments: dict[str, Any]) -> tuple[str | None, str | None]:
    folds = _folds_weights(arguments["weights"], arguments["cache"], arguments["fp8"])
    return NEW, (NEW if folds else None if arguments["weights"] is None else "weights")


@operator(
    reference=reference.prepare_indexer,
    writes={"cache": always},
    returns=_prepared,
    memo=True,
    varies=("q", "cache"),
    contiguous=("q", "k"),
)
def prepare_indexer(
    q: torch.Tensor,
    k: torch.Tensor | None,
    weights: torch.Tensor | None,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor | None,
    cache: torch.Tensor | None,
    slot_mapping: torch.Tensor | None,
    *,
    rotary_dim: int,
    eps: float = 1e-6,
    zero_centred: bool = True,
    fp8: bool | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Norm, RoPE, quantisation, scale folding and cache write of one step of the indexer.

    q [tokens, H, D], k [tokens, D] or [tokens, kv_heads, D], weights [tokens, H] or None: bfloat16, float16 or float32,
        any row stride. positions [tokens] int32 or int64.
    cos_sin [max_positions, rotary_dim]: cosines in the first half of a row, sines in the second; neox pairs
        (i, i + rotary_dim / 2) of the first rotary_dim dims are rotated.
    q_norm, k_norm [D]: RMS norm weights, gain 1 + weight (zero_centred) or weight.
    cache, slot_mapping: as `gdn.write_indexer_cache`. k, k_norm, cache and slot_mapping may be None together (compressed
        keys go through `gdn.compress_indexer_keys`): then only the query is prepared.
    fp8: None = as the cache is; a bool must agree with the cache, and decides where there is none (with scales if weights
        are given, else plain casts).
    backend: as in chunk_gated_delta_rule.

    Returns (q, weights) for the logits operators:
        bf16 cache            q in its dtype, weights as given: pass scale = D**-0.5 to the logits
        uint8 cache           q e4m3 and weights * q_scale / sqrt(D) float32 (also where weights is None): scale = 1
        float8_e4m3fn cache   q plainly cast, weights as given: pass scale = D**-0.5 to the logits
    TypeError or ValueError names the argument; the cache is untouched then.
    """
    check_tensor("q", q, shape=["tokens", "H", "D"], dtypes=DTYPES)
    tokens, heads, dim = q.shape
    device = q.device
    if weights is not None:
        check_tensor("weights", weights, shape=[tokens, heads], dtypes=WEIGHT_DTYPES, device=device)
    _check_rope(positions, cos_sin, rotary_dim, tokens, dim, device)
    check_tensor("q_norm", q_norm, shape=[dim], dtypes=DTYPES, device=device)
    check_not_negative("eps", eps)
    given = {"k": k, "k_norm": k_norm, "cache": cache, "slot_mapping": slot_mapping}
    missing = [name for name, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        bad_type(missing[0], "a torch.Tensor, or None together with k, k_norm, cache and slot_mapping", "None")
    if k is not None and k_norm is not None and cache is not None:
        kv_heads = _check_keys("k", k, tokens, device)
        check_tensor("k_norm", k_norm, shape=[dim], dtypes=DTYPES, device=device)
        if k.shape[-1] != dim:
            bad_value("k", f"a last dimension of {dim}, as q", f"shape {list(k.shape)}")
        page_size, cache_heads = check_cache(cache, dim, device, None)
        _same_kv_heads("k", kv_heads, cache_heads)
        _check_slots(slot_mapping, tokens, device)
        if slot_mapping is not None and reads_values(device):
            _values.check_slot_mapping("slot_mapping", slot_mapping, cache.shape[0] * page_size)
        if fp8 is not None and fp8 != (cache.dtype in (torch.uint8, FP8)):
            bad_value("fp8", f"{not fp8} or None for a {cache.dtype} cache", fp8)
    if reads_values(device):
        _values.check_rope_positions("positions", positions, cos_sin.shape[0])
    folds, is_fp8 = _folds_weights(weights, cache, fp8), _is_fp8(cache, fp8)
    settle(fp8=is_fp8)
    problem = PrepareIndexerProblem(
        num_kv_heads=0 if k is None else k.shape[1] if k.dim() == 3 else 1,
        head_dim=dim,
        cache_dtype=_name(cache),
        rotary_dim=rotary_dim,
        zero_centred=zero_centred,
        dtype=dtype_name(q.dtype),
        position_dtype=dtype_name(positions.dtype),
        cos_sin_dtype=dtype_name(cos_sin.dtype),
        k_norm_dtype=_name(k_norm),
        slot_dtype=_name(slot_mapping),
        num_heads=heads,
        k_dtype=_name(k),
        weights_dtype=_name(weights) if folds else None,
        q_norm_dtype=dtype_name(q_norm.dtype),
        q_out_dtype="float8_e4m3fn" if is_fp8 else dtype_name(q.dtype),
        folds_weights=folds,
        num_tokens=tokens,
    )
    prepared = prepare(problem, device, backend)
    if prepared.launch is None or (cache is not None and is_empty(cache.shape[0])):
        run_reference()
    q_out = new(FP8 if is_fp8 else q.dtype, device, tokens, heads, dim)
    weights_out = new(torch.float32, device, tokens, heads) if folds else None
    results = (q_out, weights_out if folds else weights)
    if not is_empty(tokens):
        params = PrepareIndexerParams(
            q=_rows.aligned("q", q),
            k=None if k is None else _rows.aligned("k", _with_heads(k)),
            weights=weights if folds else None,
            positions=positions,
            cos_sin=_rows.aligned("cos_sin", cos_sin),
            q_norm=_rows.constant(q_norm),
            k_norm=None if k_norm is None else _rows.constant(k_norm),
            cache=None if cache is None else flat_pages(cache),
            slot_mapping=slot_mapping,
            q_out=q_out,
            weights_out=weights_out,
            eps=eps,
        )
        launch(prepared, params, results, aligned=(q, k, cos_sin, q_norm, k_norm, cache))
    return results


@operator(
    reference=reference.compress_indexer_keys,
    writes={"ring": always, "cache": always},
    returns=lambda _: (),
    memo=True,
    varies=("raw_k", "ring"),
    contiguous=("raw_k",),
)
def compress_indexer_keys(
    raw_k: torch.Tensor,
    ring: torch.Tensor,
    cache: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_norm: torch.Tensor,
    ring_slots: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    ratio: int = 4,
    rotary_dim: int,
    eps: float = 1e-6,
    zero_centred: bool = True,
    null_slot: int = -1,
    backend: str | None = None,
) -> None:
    """Compressed keys: the mean of each finished group of `ratio` tokens goes to the cache, raw keys to a ring.

    raw_k [tokens, D] or [tokens, kv_heads, D] bfloat16 (float16, float32), any row stride. Tokens of one sequence are
        neighbours, with positions ascending by one. positions [tokens] int32 or int64: a token whose position is negative, or
        larger than int32 holds, is skipped whole.
    ring [sequences, size, D] or [sequences, size, kv_heads, D] of raw_k's dtype: raw key of position p at row p % size of
        the sequence's slot; size a multiple of ratio (ratio plus drafts, rounded up). Read before it is overwritten.
    ring_slots [tokens] int32 or int64: slot of the token's sequence; negative or null_slot: the token is skipped whole.
    cache: as `gdn.paged_mqa_logits`, its rows counting groups. slot_mapping [tokens] int64 or int32: the cache row of the
        token's group, read at tokens with (pos + 1) % ratio == 0; negative, or larger than int32 holds, = skip.
    cos_sin, rotary_dim, k_norm, eps, zero_centred: as `gdn.prepare_indexer`; the rotation is that of the group's first
        position.
    backend: as in chunk_gated_delta_rule.

    A group's key: float32 mean of its raw keys, rounded to their dtype, RMS norm, RoPE. TypeError or ValueError names the
    argument; ring and cache are untouched then.
    """
    check_tensor("raw_k", raw_k)
    device = raw_k.device
    kv_heads = _check_keys("raw_k", raw_k, None, device)
    tokens, dim = raw_k.shape[0], raw_k.shape[-1]
    check_at_least("ratio", ratio, 1)
    check_tensor("ring", ring, dtypes=(raw_k.dtype,), device=device, last_contiguous=True)
    if ring.dim() not in (3, 4) or ring.shape[-1] != dim or (ring.shape[2] if ring.dim() == 4 else 1) != kv_heads:
        bad_value("ring", f"shape [sequences, size, {kv_heads}, {dim}]", f"shape {list(ring.shape)}")
    if ring.shape[1] < ratio or ring.shape[1] % ratio:
        bad_value("ring", f"a size that is a positive multiple of ratio {ratio}", ring.shape[1])
    if tokens and ring.shape[0] == 0:
        bad_value("ring", "at least one sequence", f"shape {list(ring.shape)}")
    page_size, cache_heads = check_cache(cache, dim, device, None)
    _same_kv_heads("raw_k", kv_heads, cache_heads)
    _check_rope(positions, cos_sin, rotary_dim, tokens, dim, device)
    check_tensor("k_norm", k_norm, shape=[dim], dtypes=DTYPES, device=device)
    check_tensor("ring_slots", ring_slots, shape=[tokens], dtypes=INDEX_DTYPES, device=device)
    check_null_slot(null_slot)
    _check_slots(slot_mapping, tokens, device)
    if reads_values(device):
        is_kept = _values.ring_tokens(ring_slots, null_slot)
        _values.check_rope_positions("positions", positions, cos_sin.shape[0], is_read=is_kept, before=ratio - 1)
        _values.check_ring_slots("ring_slots", ring_slots, positions, ring.shape[0], null_slot)
        is_whole = _values.finished_groups(positions, ring_slots, ratio, null_slot)
        _values.check_slot_mapping("slot_mapping", slot_mapping, cache.shape[0] * page_size, is_whole)
    check_not_negative("eps", eps)
    ring_rows = ring.unsqueeze(2) if ring.dim() == 3 else ring
    problem = CompressIndexerKeysProblem(
        num_kv_heads=kv_heads,
        head_dim=dim,
        cache_dtype=dtype_name(cache.dtype),
        rotary_dim=rotary_dim,
        zero_centred=zero_centred,
        dtype=dtype_name(raw_k.dtype),
        position_dtype=dtype_name(positions.dtype),
        cos_sin_dtype=dtype_name(cos_sin.dtype),
        k_norm_dtype=dtype_name(k_norm.dtype),
        slot_dtype=dtype_name(slot_mapping.dtype),
        ratio=ratio,
        ring_slot_dtype=dtype_name(ring_slots.dtype),
        ring_aligned=_rows.is_aligned(ring_rows),
        num_tokens=tokens,
    )
    prepared = prepare(problem, device, backend)
    if prepared.launch is None or is_empty(cache.shape[0]):
        run_reference()
    if not is_empty(tokens):
        params = CompressIndexerKeysParams(
            raw_k=_rows.aligned("raw_k", _with_heads(raw_k)),
            ring=ring_rows,
            cache=flat_pages(cache),
            positions=positions,
            cos_sin=_rows.aligned("cos_sin", cos_sin),
            k_norm=_rows.constant(k_norm),
            ring_slots=ring_slots,
            slot_mapping=slot_mapping,
            eps=eps,
            null_slot=null_slot,
        )
        launch(prepared, params, (ring,), aligned=(raw_k, ring, cache, cos_sin, k_norm))


def _gathered(arguments: dict[str, Any]) -> tuple[str | None, str | None]:
    return NEW, (NEW if arguments["cache"].dtype == torch.uint8 else None)


@operator(reference=reference.gather_indexer_cache, returns=_gathered, memo=True, varies=("block_tables", "cu_seqlens"))
def gather_indexer_cache(
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    num_rows: int | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Cached key rows of N sequences, packed for `gdn.mqa_logits`: (k, k_scale or None).

    cache: as `gdn.paged_mqa_logits`. block_tables [N, max_pages] int32; cu_seqlens [N + 1] int32 or int64: sequence n's
    first cu_seqlens[n + 1] - cu_seqlens[n] rows go to rows from cu_seqlens[n].
    num_rows: rows of the result; None reads cu_seqlens[N] back to the host. Rows at or beyond cu_seqlens[N] are zero.
    backend: as in chunk_gated_delta_rule.

    k [rows, kv_heads, D] (without kv_heads where the cache has none) float8_e4m3fn or bfloat16; k_scale [rows, kv_heads]
    float32 for a uint8 cache. TypeError or ValueError names the argument.
    """
    check_tensor("cache", cache)
    device = cache.device
    head_dim = cache.shape[-1] - (4 if cache.dtype == torch.uint8 else 0) if cache.dim() else 0
    page_size, kv_heads = check_cache(cache, max(1, head_dim), device, None)
    check_tensor("cu_seqlens", cu_seqlens, shape=["N + 1"], dtypes=INDEX_DTYPES, device=device)
    if cu_seqlens.shape[0] < 1:
        bad_value("cu_seqlens", "shape [N + 1]", f"shape {list(cu_seqlens.shape)}")
    sequences = cu_seqlens.shape[0] - 1
    check_tensor("block_tables", block_tables, shape=[sequences, "max_pages"], dtypes=(torch.int32,), device=device)
    if num_rows is not None:
        check_at_least("num_rows", num_rows)
    if reads_values(device):
        _values.check_offsets("cu_seqlens", cu_seqlens)
        lengths = cu_seqlens.diff()
        _values.check_table_lengths("cu_seqlens", lengths, block_tables, page_size)
        _values.check_pages("block_tables", block_tables, lengths, page_size, cache.shape[0])
        if num_rows is not None:
            _values.check_num_rows("num_rows", num_rows, cu_seqlens)
    rows = _last_offset(cu_seqlens) if num_rows is None else num_rows
    settle(num_rows=rows)
    scaled = cache.dtype == torch.uint8
    problem = GatherIndexerCacheProblem(
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        cache_dtype=dtype_name(cache.dtype),
        cu_seqlens_dtype=dtype_name(cu_seqlens.dtype),
        num_rows=rows,
        num_sequences=sequences,
    )
    prepared = prepare(problem, device, backend)
    if prepared.launch is None or is_empty(rows, cache.shape[0], *block_tables.shape):
        run_reference()
    k = new(FP8 if scaled else cache.dtype, device, rows, kv_heads * head_dim)
    k_scale = new(torch.float32, device, rows, kv_heads) if scaled else None
    params = GatherIndexerCacheParams(
        cache=flat_pages(cache), block_tables=block_tables, cu_seqlens=cu_seqlens, k=k, k_scale=k_scale
    )
    if cache.dim() == 3:
        results = (k, None if k_scale is None else k_scale[:, 0])
    else:
        results = (k.view(rows, kv_heads, head_dim), k_scale)
    if num_rows is None:  # read back from the device: another call may have another number
        prepared.launch(params)
    else:
        launch(prepared, params, results, aligned=(cache,))
    return results


def _last_offset(cu_seqlens: torch.Tensor) -> int:
    last = last_value(cu_seqlens)
    if last is None:
        if cu_seqlens.is_meta:
            bad_value("num_rows", "an int with tensors that have no values", None)
        return torch.library.get_ctx().new_dynamic_size()  # type: ignore[return-value]
    if last < 0:
        bad_value("cu_seqlens", "a last offset >= 0", last)
    return last
