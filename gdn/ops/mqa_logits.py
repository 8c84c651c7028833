"""Indexer logits of ragged prefill: `gdn.mqa_logits` and its DeepGEMM-shaped form `gdn.fp8_mqa_logits`."""

import torch

from gdn import reference
from gdn.ops import _rows, _values
from gdn.ops._call import always, launch, make, new, operator, prepare, run_reference, validates
from gdn.ops._checks import bad_type, bad_value, check_at_least, check_tensor, dtype_name
from gdn.ops._delta_rule import contiguous_int32
from gdn.ops._kinds import Kind
from gdn.ops._logits_checks import (
    FP8,
    INDEX_DTYPES,
    QUERY_DTYPES,
    check_heads,
    check_out,
    check_skipping,
    check_weights,
    kernel_weights,
    kernel_weights_dtype,
    product_dtype,
)
from gdn.ops._modes import is_empty
from gdn.problems import MqaLogitsParams, MqaLogitsProblem


@operator(reference=reference.mqa_logits, writes={"out": always}, memo=True, varies=("q", "k"), contiguous=("q", "k", "weights"))
def mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor | None,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    scale: float = 1.0,
    relu: bool = True,
    max_seqlen_k: int | None = None,
    clean_logits: bool = True,
    out_dtype: torch.dtype = torch.float32,
    skip_rows_up_to: int = 0,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Scores of every query row against its range of key rows.

        score(i, j) = scale * sum_g k_scale[j, g] * sum_{h in group g} weights[i, h] * relu(q[i, h] . k[j, g])

    with g = h // (H / kv_heads): the indexer of Qwen3-Next and the lightning indexer of DeepSeek-V3.2, in their
    published form sum_h w_h relu(q_h . k) / sqrt(D).

    q [M, H, D] float8_e4m3fn or bfloat16 (float16, float32: reference), copied where not contiguous as a whole.
    k [Nk, D] or [Nk, kv_heads, D], float8_e4m3fn with such a q, else bfloat16 or the dtype of q; H is a multiple of kv_heads.
    weights [M, H] float32, bfloat16, float16 or float64, any row stride; None = 1.
    cu_seqlen_ks, cu_seqlen_ke [M] int32 (int64 is converted): row i sees keys [ks[i], ke[i]), counted in key rows.
        A range is clamped to [0, Nk]; ks >= ke is empty. Not cumulative sums: one pair per row.
    k_scale [Nk] or [Nk, kv_heads] float32, FP8 only; None = 1.
    scale: D**-0.5 goes here or into weights, never both. A q scale of FP8 goes into weights.
    relu: False leaves the products as they are.
    max_seqlen_k: None = out is [M, Nk]; a number = out is [M, max_seqlen_k] and column 0 of row i is key ks[i]; keys
        beyond the last column are left out.
    clean_logits: columns outside a row's range are -inf (True) or unspecified (False).
    skip_rows_up_to: rows of at most this many visible keys may stay unscored; only without clean_logits.
    out: [M, columns] of out_dtype (float32 or bfloat16), last dim contiguous; None = a new tensor.
    backend: 'tilelang', 'cute', 'reference' or None; 'reference' sums in float32 and runs on any device.

    Returns out. ValueError or TypeError names the argument, before anything is written. With GDN_VALIDATE=1 negative
    starts, and ranges longer than max_seqlen_k, are errors too (costs a sync). No host read otherwise.
    """
    check_operands(q, k, weights, cu_seqlen_ks, cu_seqlen_ke, k_scale)
    device = q.device
    num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads = k.shape[0], (1 if k.dim() == 2 else k.shape[1])
    check_skipping(skip_rows_up_to, clean_logits)
    num_columns = num_keys
    if max_seqlen_k is not None:
        check_at_least("max_seqlen_k", max_seqlen_k)
        num_columns = max_seqlen_k
    check_out(out, [num_queries, num_columns], out_dtype, device)
    if validates(device):
        _values.check_ranges(cu_seqlen_ks, cu_seqlen_ke, num_keys, max_seqlen_k)

    problem = MqaLogitsProblem(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype_name(product_dtype(q.dtype, k.dtype)),
        has_k_scale=k_scale is not None,
        weights_dtype=kernel_weights_dtype(weights),
        relu=relu,
        clean=clean_logits,
        out_dtype=dtype_name(out_dtype),
        packed=max_seqlen_k is not None,
        num_queries=num_queries,
        num_keys=num_keys,
        num_columns=num_columns,
    )
    prepared = prepare(problem, device, backend)
    if prepared.launch is None:
        run_reference()
    if out is None:
        out = new(out_dtype, device, num_queries, num_columns)
    if is_empty(num_keys) and clean_logits:
        out.fill_(-torch.inf)
    if is_empty(num_queries, num_columns, num_keys):
        return out
    scales = None
    if k_scale is not None:
        scales = _rows.contiguous("k_scale", k_scale[:, None] if k_scale.dim() == 1 else k_scale)
    k_rows = _rows.contiguous("k", k if k.dim() == 3 else k[:, None])
    params = MqaLogitsParams(
        q=_rows.contiguous("q", q),
        k=k_rows,
        k_scale=scales,
        weights=None if weights is None else make(kernel_weights, weights),
        cu_seqlen_ks=make(contiguous_int32, cu_seqlen_ks),
        cu_seqlen_ke=make(contiguous_int32, cu_seqlen_ke),
        out=out,
        scale=scale,
        skip_rows_up_to=skip_rows_up_to,
    )
    launch(prepared, params, (out,), aligned=(q, k, k_scale))
    return out


def check_operands(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor | None,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    k_scale: torch.Tensor | None,
) -> None:
    """Raises TypeError or ValueError where the operands of scores are not those of `mqa_logits`."""
    check_tensor("q", q, shape=["M", "H", "D"], dtypes=QUERY_DTYPES)
    device = q.device
    num_queries, num_heads, head_dim = q.shape
    if not isinstance(k, torch.Tensor) or k.dim() != 2:
        check_tensor("k", k, shape=["Nk", "kv_heads", head_dim])
    dtypes = (FP8,) if q.dtype == FP8 else tuple({torch.bfloat16: None, q.dtype: None})  # as the cache is, or as q
    check_tensor("k", k, shape=["Nk", head_dim] if k.dim() == 2 else None, dtypes=dtypes, device=device)
    num_keys, num_kv_heads = k.shape[0], (1 if k.dim() == 2 else k.shape[1])
    check_heads(num_heads, num_kv_heads)
    if k_scale is not None:
        if q.dtype != FP8:
            bad_value("k_scale", f"None for {dtype_name(k.dtype)} keys", "a tensor")
        flat = isinstance(k_scale, torch.Tensor) and k_scale.dim() == 1 and num_kv_heads == 1
        shape = [num_keys] if flat else [num_keys, num_kv_heads]
        check_tensor("k_scale", k_scale, shape=shape, dtypes=(torch.float32,), device=device)
    check_weights(weights, num_queries, num_heads, device)
    check_tensor("cu_seqlen_ks", cu_seqlen_ks, shape=[num_queries], dtypes=INDEX_DTYPES, device=device)
    check_tensor("cu_seqlen_ke", cu_seqlen_ke, shape=[num_queries], dtypes=INDEX_DTYPES, device=device)


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> torch.Tensor:
    """`mqa_logits` in the argument order of DeepGEMM's function of this name; float32 out, ReLU, scale 1.

    q [M, H, D] float8_e4m3fn; kv = (k [Nk, D] float8_e4m3fn, k_scale [Nk] float32); weights [M, H]; max_seqlen_k 0 = out
    is [M, Nk]. Errors as `mqa_logits`.
    """
    if not isinstance(kv, tuple | list) or len(kv) != 2:
        bad_type("kv", "a pair (k, k_scale)", type(kv).__name__)
    k, k_scale = kv
    Kind(int, False).check_type("max_seqlen_k", max_seqlen_k)
    return mqa_logits(
        q,
        k,
        weights,
        cu_seqlen_ks,
        cu_seqlen_ke,
        k_scale=k_scale,
        max_seqlen_k=max_seqlen_k if max_seqlen_k != 0 else None,
        clean_logits=clean_logits,
    )
