"""Public operators `quantize_fp8`, `prepare_indexer` and `compress_indexer_keys`: the steps before the indexer's logits.

Formulas: gdn/ops/indexer/reference.py.
"""

from typing import Any

import torch
from torch import Tensor

from gdn.core import check
from gdn.core import values as _values
from gdn.core.call import NEW, always, launch, new, operator, prepare, reads_values, run_reference, settle
from gdn.core.check import FLOAT_DTYPES, FP8, INDEX_DTYPES, INPUT_DTYPES, bad_type, bad_value, dtype_name
from gdn.core.modes import is_empty
from gdn.core.tensors import aligned, constant, dtypes_of, is_aligned, optional
from gdn.ops.indexer import checks, reference
from gdn.ops.indexer.problem import (
    CompressIndexerKeysParams,
    CompressIndexerKeysProblem,
    PrepareIndexerParams,
    PrepareIndexerProblem,
    QuantizeFp8Params,
    QuantizeFp8Problem,
)
from gdn.runtime import env
from gdn.runtime.registry import Backend


def _grouped(x: Tensor, group: int) -> Tensor:
    """x as [rows, groups, group], a view where its strides allow it. In a contiguous x every group is a row."""
    if x.is_contiguous():
        return x.view(-1, 1, group)
    if x.dim() == 2:
        return x.view(x.shape[0], -1, group) if x.stride(1) == 1 else x.contiguous().view(-1, 1, group)
    return x if x.dim() == 3 and x.shape[2] == group else x.contiguous().view(-1, 1, group)


@operator(reference.quantize_fp8, returns=lambda _: (NEW, NEW), varies=("x",), contiguous=("x",))
def quantize_fp8(x: Tensor, group_size: int = 128, *, backend: Backend | None = None) -> tuple[Tensor, Tensor]:
    """Quantise to e4m3 with one float32 scale per group along the last dimension.

        scale = max(amax, 1e-4) / 448;   x_fp8 = x / scale, rounded to nearest even, saturated

    for each group of min(group_size, D) elements, amax the largest magnitude in it.

    Parameters
    ----------
    x : Tensor [..., D]
        Values, bfloat16, float16 or float32, copied where the last dimension is not contiguous; D is a multiple of the group.
    group_size : int
        Elements per group, >= 1; a group is never longer than D.
    backend : {"tilelang", "cute", "reference"}, optional
        Implementation to run; ValueError where it cannot. None = chosen by ``GDN_BACKEND`` and the tables, see `gdn.explain`.

    Returns
    -------
    x_fp8, scale : Tensor [..., D] of float8_e4m3fn, Tensor [..., D / group] of float32
        Quantised values, and scale of each group: new and contiguous.

    Raises
    ------
    TypeError, ValueError
        Named after the argument, before anything is launched.

    References
    ----------
    .. [1] P. Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433 (e4m3).
    """
    check.tensor("x", x, dtypes=INPUT_DTYPES)
    check.at_least("group_size", group_size, 1)
    if x.dim() < 1 or x.shape[-1] < 1:
        bad_value("x", "shape [..., D] with D >= 1", f"shape {list(x.shape)}")
    group = min(group_size, x.shape[-1])
    if x.shape[-1] % group:
        bad_value("x", f"a last dimension that is a multiple of group_size {group}", f"shape {list(x.shape)}")
    rows = x.new_empty(0, 1, group) if is_empty(*x.shape) else _grouped(x, group)
    dtype = dtype_name(x.dtype)
    problem = QuantizeFp8Problem(num_groups=rows.shape[1], group_dim=group, dtype=dtype, num_tokens=rows.shape[0])
    prepared = prepare(problem, x.device, backend)
    x_fp8 = new(FP8, x.device, *x.shape)
    scale = new(torch.float32, x.device, *x.shape[:-1], x.shape[-1] // group)
    if not is_empty(*x.shape):
        params = QuantizeFp8Params(aligned("x", rows), x_fp8.view(rows.shape), scale.view(rows.shape[:2]))
        launch(prepared, params, (x_fp8, scale), aligned=(x,))
    return x_fp8, scale


def _is_fp8(cache: Tensor | None, fp8: bool | None) -> bool:
    """Whether the query is quantised: decided by the cache, else by the argument, else by VLLM_QSA_USE_FP8_INDEXER."""
    if cache is not None:
        return cache.dtype in (torch.uint8, FP8)
    return env.current().qsa_use_fp8_indexer if fp8 is None else fp8


def _folds_weights(weights: Tensor | None, cache: Tensor | None, fp8: bool | None) -> bool:
    """Whether prepare_indexer returns new weights (FP8 with scales) instead of its argument."""
    if cache is not None:
        return cache.dtype == torch.uint8
    return _is_fp8(cache, fp8) and weights is not None


def _prepared(arguments: dict[str, Any]) -> tuple[str | None, str | None]:
    folds = _folds_weights(arguments["weights"], arguments["cache"], arguments["fp8"])
    return NEW, (NEW if folds else None if arguments["weights"] is None else "weights")


@operator(
    reference.prepare_indexer,
    writes={"cache": always, "v_cache": always},
    returns=_prepared,
    varies=("q", "cache"),
    contiguous=("q", "k", "v"),
)
def prepare_indexer(
    q: Tensor,
    k: Tensor | None,
    weights: Tensor | None,
    positions: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor,
    k_norm: Tensor | None,
    cache: Tensor | None,
    slot_mapping: Tensor | None,
    *,
    rotary_dim: int,
    eps: float = 1e-6,
    zero_centred: bool = True,
    fp8: bool | None = None,
    v: Tensor | None = None,
    v_cache: Tensor | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Prepare one step of the indexer: norm, RoPE, quantisation, scale folding and cache write.

    Attention takes the same steps on its queries and keys; its values go to their own cache in the same launch.

        norm          x * rsqrt(mean(x^2) + eps) * gain, in float32
        RoPE (neox)   (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), pairs (i, i + rotary_dim / 2) of the first rotary_dim dims

    Parameters
    ----------
    q : Tensor [tokens, H, D]
        Raw queries, bfloat16, float16 or float32, any row stride; copied where the last dimension is not contiguous.
    k : Tensor [tokens, D] or [tokens, kv_heads, D] or None
        Raw keys, dtype and strides as for `q`. `k`, `k_norm`, `cache` and `slot_mapping` may be None together (compressed keys
        go through `compress_indexer_keys`): then only the query is prepared.
    weights : Tensor [tokens, H] or None
        Raw weight of each head, any float dtype and row stride.
    positions, cos_sin : Tensor [tokens], Tensor [max_positions, rotary_dim]
        Position of each token, int32 or int64, 0 to max_positions - 1, of padding too; rows of cosines (first half) and sines,
        bfloat16, float16 or float32. Other positions are refused on the CPU and with ``GDN_VALIDATE=1``. Without, on a GPU, the
        kernels take the nearest row of the table: the last one for all later positions, the first one for negative ones.
    q_norm, k_norm : Tensor [D], Tensor [D] or None
        Weights of the RMS norms of queries and keys, bfloat16, float16 or float32.
    cache, slot_mapping : Tensor or None
        Pages, updated in place, and cache row of each token [tokens], as for `write_indexer_cache`.
    rotary_dim, eps : int, float
        Number of leading dimensions that are rotated, even, at most D; added to the mean square of the norms, finite, >= 0.
    zero_centred : bool
        Whether the gain of the norms is 1 + weight (True) or weight (False).
    fp8 : bool, optional
        Whether the query is quantised. A bool must agree with the cache, and decides where there is none (with scales if
        `weights` are given, else plain casts). None = as the cache is; without one, as ``VLLM_QSA_USE_FP8_INDEXER`` says.
    v, v_cache : Tensor or None
        Values, shape and dtype as `k`, and their pages, key heads and dtype as `cache`, updated in place: row `slot_mapping` of
        them gets each token's values, without norm and RoPE. Given together, and with keys.
    backend : {"tilelang", "cute", "reference"}, optional
        Implementation to run; ValueError where it cannot. None = chosen by ``GDN_BACKEND`` and the tables, see `gdn.explain`.

    Returns
    -------
    q : Tensor [tokens, H, D]
        Queries for the logits operators: in their own dtype with a cache of bfloat16 (float16, float32), quantised to e4m3 with
        a uint8 cache, plainly cast to e4m3 with a float8_e4m3fn cache.
    weights : Tensor [tokens, H] or None
        Weights for the logits operators. uint8 cache: weights * q_scale / sqrt(D) in float32 (also where `weights` is None), to
        be used with scale = 1. Other caches: `weights` itself, to be used with scale = D**-0.5.

    Raises
    ------
    TypeError, ValueError
        Named after the argument; the caches are untouched then.

    References
    ----------
    .. [1] B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.
    .. [2] J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864.
    """
    check.tensor("q", q, shape=["tokens", "H", "D"], dtypes=INPUT_DTYPES)
    tokens, heads, dim = q.shape
    device = q.device
    check.optional("weights", weights, shape=[tokens, heads], dtypes=FLOAT_DTYPES, device=device)
    checks.check_rope(positions, cos_sin, rotary_dim, tokens, dim, device)
    check.tensor("q_norm", q_norm, shape=[dim], dtypes=INPUT_DTYPES, device=device)
    check.not_negative("eps", eps)
    given = {"k": k, "k_norm": k_norm, "cache": cache, "slot_mapping": slot_mapping}
    missing = [name for name, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        bad_type(missing[0], "a Tensor, or None together with k, k_norm, cache and slot_mapping", "None")
    if (v is None) != (v_cache is None):
        bad_type("v" if v is None else "v_cache", "a Tensor, or None together with v and v_cache", "None")
    if v is not None and k is None:
        bad_value("v", "None without k", "a tensor")
    if k is not None and k_norm is not None and cache is not None:
        kv_heads = checks.check_keys("k", k, tokens, device)
        check.tensor("k_norm", k_norm, shape=[dim], dtypes=INPUT_DTYPES, device=device)
        if k.shape[-1] != dim:
            bad_value("k", f"a last dimension of {dim}, as q", f"shape {list(k.shape)}")
        num_rows = checks.check_written("k", k, kv_heads, cache, slot_mapping)
        if v is not None and v_cache is not None:
            num_rows = min(num_rows, _check_values(v, v_cache, k, kv_heads, cache))
        if slot_mapping is not None and reads_values(device):
            _values.check_slot_mapping("slot_mapping", slot_mapping, num_rows)
        if fp8 is not None and fp8 != (cache.dtype in (torch.uint8, FP8)):
            bad_value("fp8", f"{not fp8} or None for a {cache.dtype} cache", fp8)
    if reads_values(device):
        _values.check_rope_positions("positions", positions, cos_sin.shape[0])
    folds, is_fp8 = _folds_weights(weights, cache, fp8), _is_fp8(cache, fp8)
    settle(fp8=is_fp8)
    shared: dict[str, Any] = {"head_dim": dim, "rotary_dim": rotary_dim, "zero_centred": zero_centred, "num_tokens": tokens}
    problem = PrepareIndexerProblem(
        **shared,
        num_kv_heads=0 if k is None else k.shape[1] if k.dim() == 3 else 1,
        dtype=dtype_name(q.dtype),
        **dtypes_of(cache=cache, position=positions, cos_sin=cos_sin, k_norm=k_norm, slot=slot_mapping, k=k, q_norm=q_norm),
        num_heads=heads,
        weights_dtype=dtype_name(weights.dtype) if folds and weights is not None else None,
        q_out_dtype="float8_e4m3fn" if is_fp8 else dtype_name(q.dtype),
        folds_weights=folds,
        has_values=v is not None,
    )
    prepared = prepare(problem, device, backend)
    if any(pages is not None and is_empty(pages.shape[0]) for pages in (cache, v_cache)):
        run_reference("a cache without pages")
    q_out = new(FP8 if is_fp8 else q.dtype, device, tokens, heads, dim)
    weights_out = new(torch.float32, device, tokens, heads) if folds else None
    results = (q_out, weights_out if folds else weights)
    if not is_empty(tokens):
        keys = None if k is None else aligned("k", checks.with_kv_heads(k))
        values = None if v is None else aligned("v", checks.with_kv_heads(v))
        params = PrepareIndexerParams(
            aligned("q", q), keys, weights if folds else None, positions, aligned("cos_sin", cos_sin), constant(q_norm),
            optional(constant, k_norm), optional(checks.flat_pages, cache), slot_mapping, q_out, weights_out, values,
            optional(checks.flat_pages, v_cache), eps,
        )  # fmt: skip
        launch(prepared, params, results, aligned=(q, k, cos_sin, q_norm, k_norm, cache, v, v_cache))
    return results


def _check_values(v: Tensor, v_cache: Tensor, k: Tensor, kv_heads: int, cache: Tensor) -> int:
    """Checks values against checked keys, and their pages; returns the number of rows of the pages."""
    check.tensor("v", v, shape=list(k.shape), dtypes=(k.dtype,), device=k.device)
    check.tensor("v_cache", v_cache, dtypes=(cache.dtype,), device=k.device)
    page_size, cache_heads = checks.check_cache(v_cache, k.shape[-1], k.device, None, name="v_cache")
    if cache_heads != kv_heads:
        bad_value("v_cache", f"{kv_heads} key heads, as the cache", f"{cache_heads}")
    return v_cache.shape[0] * page_size


@operator(
    reference.compress_indexer_keys,
    writes={"ring": always, "cache": always},
    returns=lambda _: (),
    varies=("raw_k", "ring"),
    contiguous=("raw_k",),
)
def compress_indexer_keys(
    raw_k: Tensor,
    ring: Tensor,
    cache: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_norm: Tensor,
    ring_slots: Tensor,
    slot_mapping: Tensor,
    *,
    ratio: int = 4,
    rotary_dim: int,
    eps: float = 1e-6,
    zero_centred: bool = True,
    null_slot: int = -1,
    backend: Backend | None = None,
) -> None:
    """Write compressed keys: the mean of each finished group of `ratio` tokens to the cache, raw keys to a ring.

    The key of a group is the float32 mean of its raw keys, rounded to their dtype, then RMS norm, then RoPE at the position of
    the group's first token.

    Parameters
    ----------
    raw_k : Tensor [tokens, D] or [tokens, kv_heads, D]
        Raw keys, bfloat16 (float16, float32), any row stride; a last dimension that is not contiguous is copied, logged once.
        Tokens of one sequence are adjacent, with positions ascending by one.
    ring : Tensor [sequences, size, D] or [sequences, size, kv_heads, D]
        Raw keys of unfinished groups, dtype of `raw_k`, updated in place: the raw key of position p is row p % size of the
        sequence's slot. size is a multiple of `ratio` (ratio plus drafts, rounded up). Old rows are read before they are
        overwritten.
    cache : Tensor [pages, page_size, kv_heads, D + 4 or D]
        Pages as for `write_indexer_cache`, their rows counting groups; updated in place.
    positions : Tensor [tokens]
        Position of each token, int32 or int64; a token whose position is negative, or larger than int32 holds, is skipped.
    cos_sin, k_norm : Tensor [max_positions, rotary_dim], Tensor [D]
        Cosines and sines, and weight of the RMS norm, as for `prepare_indexer`. Positions from max_positions + ratio - 1 on,
        whose group begins after the table, are refused on the CPU and with ``GDN_VALIDATE=1``. Without, on a GPU, the kernel
        takes the last row of the table for the key of such a group.
    ring_slots : Tensor [tokens]
        Slot of each token's sequence in the ring, int32 or int64; a token with a negative slot or `null_slot` is skipped.
    slot_mapping : Tensor [tokens]
        Cache row of the token's group, int64 or int32, read at tokens with (pos + 1) % ratio == 0; negative, or larger
        than int32 holds, = skip.
    ratio, rotary_dim, eps, zero_centred : int, int, float, bool
        Tokens per group, >= 1; the others as for `prepare_indexer`.
    null_slot : int
        Slot that is never written, >= -1.
    backend : {"tilelang", "cute", "reference"}, optional
        Implementation to run; ValueError where it cannot. None = chosen by ``GDN_BACKEND`` and the tables, see `gdn.explain`.

    Raises
    ------
    TypeError, ValueError
        Named after the argument; `ring` and `cache` are untouched then. Slots as for `chunk_gated_delta_rule`.

    References
    ----------
    .. [1] ``Qwen4ExpTextQSAIndexer`` of ``qwen4_exp`` in Hugging Face Transformers, 5.23 or newer.
    """
    check.tensor("raw_k", raw_k)
    device = raw_k.device
    kv_heads = checks.check_keys("raw_k", raw_k, None, device)
    tokens, dim = raw_k.shape[0], raw_k.shape[-1]
    check.at_least("ratio", ratio, 1)
    check.tensor("ring", ring, dtypes=(raw_k.dtype,), device=device, last_contiguous=True)
    if ring.dim() not in (3, 4) or ring.shape[-1] != dim or (ring.shape[2] if ring.dim() == 4 else 1) != kv_heads:
        bad_value("ring", f"shape [sequences, size, {kv_heads}, {dim}]", f"shape {list(ring.shape)}")
    if ring.shape[1] < ratio or ring.shape[1] % ratio:
        bad_value("ring", f"a size that is a positive multiple of ratio {ratio}", ring.shape[1])
    if tokens and ring.shape[0] == 0:
        bad_value("ring", "at least one sequence", f"shape {list(ring.shape)}")
    num_rows = checks.check_written("raw_k", raw_k, kv_heads, cache, slot_mapping)
    checks.check_rope(positions, cos_sin, rotary_dim, tokens, dim, device)
    check.tensor("k_norm", k_norm, shape=[dim], dtypes=INPUT_DTYPES, device=device)
    check.tensor("ring_slots", ring_slots, shape=[tokens], dtypes=INDEX_DTYPES, device=device)
    check.null_slot(null_slot)
    if reads_values(device):
        is_kept = _values.ring_tokens(ring_slots, positions, null_slot)
        _values.check_rope_positions("positions", positions, cos_sin.shape[0], is_read=is_kept, before=ratio - 1)
        _values.check_ring_slots("ring_slots", ring_slots, positions, ring.shape[0], null_slot)
        is_whole = _values.finished_groups(positions, ring_slots, ratio, null_slot)
        _values.check_slot_mapping("slot_mapping", slot_mapping, num_rows, is_whole)
    check.not_negative("eps", eps)
    ring_rows = ring.unsqueeze(2) if ring.dim() == 3 else ring
    shared: dict[str, Any] = {"head_dim": dim, "rotary_dim": rotary_dim, "zero_centred": zero_centred, "num_tokens": tokens}
    problem = CompressIndexerKeysProblem(
        **shared,
        num_kv_heads=kv_heads,
        dtype=dtype_name(raw_k.dtype),
        **dtypes_of(cache=cache, position=positions, cos_sin=cos_sin, k_norm=k_norm, slot=slot_mapping, ring_slot=ring_slots),
        ratio=ratio,
        ring_aligned=is_aligned(ring_rows),
    )
    prepared = prepare(problem, device, backend)
    if is_empty(cache.shape[0]):
        run_reference("a cache without pages")
    if not is_empty(tokens):
        keys, table = aligned("raw_k", checks.with_kv_heads(raw_k)), aligned("cos_sin", cos_sin)
        pages, gain = checks.flat_pages(cache), constant(k_norm)
        params = CompressIndexerKeysParams(
            keys, ring_rows, pages, positions, table, gain, ring_slots, slot_mapping, eps, null_slot
        )
        launch(prepared, params, (ring,), aligned=(raw_k, ring, cache, cos_sin, k_norm))
