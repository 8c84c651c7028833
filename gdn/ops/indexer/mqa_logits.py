"""Public operators `mqa_logits` and, with DeepGEMM's signature, `fp8_mqa_logits`: indexer logits of ragged prefill."""

import torch
from torch import Tensor

from gdn.core import check, values
from gdn.core.call import always, launch, make, new, operator, prepare, record, validates
from gdn.core.check import FLOAT_DTYPES, FP8, INDEX_DTYPES, bad_type, bad_value, dtype_name
from gdn.core.kinds import Kind
from gdn.core.modes import is_empty
from gdn.core.tensors import contiguous, contiguous_int32
from gdn.ops.indexer import checks, reference
from gdn.ops.indexer.problem import MqaLogitsParams, MqaLogitsProblem
from gdn.runtime import Prepared
from gdn.runtime.registry import Backend


@operator(reference.mqa_logits, writes={"out": always}, varies=("q", "k"), contiguous=("q", "k", "weights"))
def mqa_logits(
    q: Tensor,
    k: Tensor,
    weights: Tensor | None,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    *,
    k_scale: Tensor | None = None,
    scale: float = 1.0,
    relu: bool = True,
    max_seqlen_k: int | None = None,
    clean_logits: bool = True,
    out_dtype: torch.dtype = torch.float32,
    skip_rows_up_to: int = 0,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Scores of every query row against its range of key rows (ragged prefill of the indexer).

        score(i, j) = scale * sum_g k_scale[j, g] * sum_{h in group g} weights[i, h] * relu(q[i, h] . k[j, g])

    with g = h // (H / kv_heads): the indexer of Qwen3-Next and the lightning indexer of DeepSeek-V3.2, in their published form
    sum_h w_h relu(q_h . k) / sqrt(D). No value is read back to the host without ``GDN_VALIDATE=1``.

    Parameters
    ----------
    q : Tensor [M, H, D]
        Queries, float8_e4m3fn or bfloat16 (float16 and float32: reference only); copied where not contiguous as a whole.
    k : Tensor [Nk, D] or [Nk, kv_heads, D]
        Keys, float8_e4m3fn with such a `q`, else bfloat16 or the dtype of `q`; copied where not contiguous as a whole. H is a
        multiple of kv_heads.
    weights : Tensor [M, H] or None
        Weight of each head, float32, bfloat16, float16 or float64, any row stride. None = 1. The scale of an FP8 `q` is folded
        in here.
    cu_seqlen_ks, cu_seqlen_ke : Tensor [M]
        First visible key row of each query row, and the end, int32 (int64 is converted). Not a cumulative sum: one range
        [cu_seqlen_ks[i], cu_seqlen_ke[i]) per row, clamped to [0, Nk]; empty where ks >= ke.
    k_scale : Tensor [Nk] or [Nk, kv_heads] of float32, optional
        Scale of each key row, for FP8 keys only. None = 1.
    scale, relu : float, bool
        Factor of the scores (D**-0.5 goes here or into `weights`, never both); False leaves the products as they are. A NaN in
        a query or a key is a NaN score either way, which `topk_indices` never selects.
    max_seqlen_k : int, optional
        None: the result is [M, Nk]. A number: the result is [M, max_seqlen_k] and column 0 of row i is key cu_seqlen_ks[i];
        keys beyond the last column are left out.
    clean_logits, out_dtype : bool, torch.dtype
        Whether columns outside a row's range are -inf (True) or unspecified (False); float32 or bfloat16.
    skip_rows_up_to : int
        Rows with at most this many visible keys may stay unscored. Only with ``clean_logits=False``.
    out : Tensor [M, columns], optional
        Tensor of `out_dtype` to write the scores into, last dimension contiguous.
    backend : {"tilelang", "cute", "reference"}, optional
        Implementation to run; ValueError where it cannot. None = chosen by ``GDN_BACKEND`` and the tables, see `gdn.explain`.
        The reference sums in float32 and runs on any device.

    Returns
    -------
    Tensor [M, columns]
        Scores in `out_dtype`; `out` itself where it is given, else a new tensor.

    Raises
    ------
    TypeError, ValueError
        Named after the argument, before anything is launched or written. With ``GDN_VALIDATE=1`` (which waits for the device)
        negative starts and ranges longer than `max_seqlen_k` are errors too.

    References
    ----------
    .. [1] DeepSeek-AI, "DeepSeek-V3.2-Exp: Boosting Long-Context Efficiency with DeepSeek Sparse Attention", report, 2025.
    .. [2] Ranges and columns follow ``fp8_mqa_logits`` in DeepGEMM, https://github.com/deepseek-ai/DeepGEMM.

    Examples
    --------
    >>> import torch, gdn
    >>> q, k, weights = torch.randn(3, 16, 128), torch.randn(10, 128), torch.rand(3, 16)
    >>> starts, ends = torch.tensor([0, 0, 4]), torch.tensor([8, 9, 10])
    >>> logits = gdn.mqa_logits(q, k, weights, starts, ends, scale=128**-0.5)
    >>> logits.shape, logits[0].isfinite().sum().item()
    (torch.Size([3, 10]), 8)
    """
    check_operands(q, k, weights, cu_seqlen_ks, cu_seqlen_ke, k_scale)
    device = q.device
    checks.check_skipping(skip_rows_up_to, clean_logits)
    check.at_least("max_seqlen_k", max_seqlen_k)
    problem = problem_of(q, k, weights, k_scale, relu, max_seqlen_k, clean_logits, out_dtype)
    shape = problem.num_queries, problem.num_columns
    checks.check_logits_out(out, [*shape], out_dtype, device)
    if validates(device):
        values.check_ranges(cu_seqlen_ks, cu_seqlen_ke, problem.num_keys, max_seqlen_k)
    prepared = prepare(problem, device, backend)
    if out is None:
        out = new(out_dtype, device, *shape)
    if is_empty(problem.num_keys) and clean_logits:
        out.fill_(-torch.inf)
    if not is_empty(*shape, problem.num_keys):
        score(prepared, q, k, weights, cu_seqlen_ks, cu_seqlen_ke, k_scale, scale, skip_rows_up_to, out)
        record((out,), aligned=(q, k, k_scale))
    return out


def problem_of(
    q: Tensor, k: Tensor, weights: Tensor | None, k_scale: Tensor | None, relu: bool, max_seqlen_k: int | None,
    clean_logits: bool, out_dtype: torch.dtype,
) -> MqaLogitsProblem:  # fmt: skip
    num_keys, num_kv_heads = k.shape[0], (1 if k.dim() == 2 else k.shape[1])
    return MqaLogitsProblem(
        **checks.shared_fields(q, k.dtype, num_kv_heads, weights, relu, clean_logits, out_dtype),
        has_k_scale=k_scale is not None, packed=max_seqlen_k is not None, num_queries=q.shape[0], num_keys=num_keys,
        num_columns=num_keys if max_seqlen_k is None else max_seqlen_k,
    )  # fmt: skip


def score(
    prepared: Prepared, q: Tensor, k: Tensor, weights: Tensor | None, cu_seqlen_ks: Tensor, cu_seqlen_ke: Tensor,
    k_scale: Tensor | None, scale: float, skip_rows_up_to: int, out: Tensor,
) -> None:  # fmt: skip
    """Launches the kernel. The arguments are checked, and none is empty."""
    scales = None
    if k_scale is not None:
        scales = contiguous("k_scale", k_scale[:, None] if k_scale.dim() == 1 else k_scale)
    row_weights = None if weights is None else make(checks.kernel_weights, weights)
    ranges = make(contiguous_int32, cu_seqlen_ks), make(contiguous_int32, cu_seqlen_ke)
    rows, keys = contiguous("q", q), contiguous("k", checks.with_kv_heads(k))
    params = MqaLogitsParams(rows, keys, scales, row_weights, *ranges, out, scale, skip_rows_up_to)
    launch(prepared, params)


def check_operands(
    q: Tensor, k: Tensor, weights: Tensor | None, cu_seqlen_ks: Tensor, cu_seqlen_ke: Tensor, k_scale: Tensor | None
) -> None:
    """Checks the operands that `mqa_logits` and `indexer_topk` share."""
    check.tensor("q", q, shape=["M", "H", "D"], dtypes=checks.QUERY_DTYPES)
    device = q.device
    num_queries, num_heads, head_dim = q.shape
    if not isinstance(k, Tensor) or k.dim() != 2:
        check.tensor("k", k, shape=["Nk", "kv_heads", head_dim])
    dtypes = (FP8,) if q.dtype == FP8 else tuple({torch.bfloat16: None, q.dtype: None})  # the cache's dtype, or that of q
    check.tensor("k", k, shape=["Nk", head_dim] if k.dim() == 2 else None, dtypes=dtypes, device=device)
    num_keys, num_kv_heads = k.shape[0], (1 if k.dim() == 2 else k.shape[1])
    checks.check_heads(num_heads, num_kv_heads)
    if k_scale is not None:
        if q.dtype != FP8:
            bad_value("k_scale", f"None for {dtype_name(k.dtype)} keys", "a tensor")
        flat = isinstance(k_scale, Tensor) and k_scale.dim() == 1 and num_kv_heads == 1
        shape = [num_keys] if flat else [num_keys, num_kv_heads]
        check.tensor("k_scale", k_scale, shape=shape, dtypes=(torch.float32,), device=device)
    check.optional("weights", weights, shape=[num_queries, num_heads], dtypes=FLOAT_DTYPES, device=device)
    check.tensor("cu_seqlen_ks", cu_seqlen_ks, shape=[num_queries], dtypes=INDEX_DTYPES, device=device)
    check.tensor("cu_seqlen_ke", cu_seqlen_ke, shape=[num_queries], dtypes=INDEX_DTYPES, device=device)


def fp8_mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> Tensor:
    """`mqa_logits` with the argument order of DeepGEMM's function of this name: float32 scores, ReLU, scale 1.

    Parameters
    ----------
    q : Tensor [M, H, D] of float8_e4m3fn
        Queries; their scales are folded into `weights`.
    kv : tuple of Tensor
        (k [Nk, D] float8_e4m3fn, k_scale [Nk] float32).
    weights, cu_seqlen_ks, cu_seqlen_ke, clean_logits : Tensor, Tensor, Tensor, bool
        As for `mqa_logits`.
    max_seqlen_k : int
        Columns of the result, column 0 of row i being key cu_seqlen_ks[i]. 0: the result is [M, Nk].

    Returns
    -------
    Tensor [M, Nk] or [M, max_seqlen_k]
        New float32 tensor.

    Raises
    ------
    TypeError, ValueError
        As raised by `mqa_logits`.

    References
    ----------
    .. [1] ``fp8_mqa_logits`` in DeepGEMM, https://github.com/deepseek-ai/DeepGEMM.
    """
    if not isinstance(kv, tuple | list) or len(kv) != 2:
        bad_type("kv", "a pair (k, k_scale)", type(kv).__name__)
    k, k_scale = kv
    Kind(int, False).check_type("max_seqlen_k", max_seqlen_k)
    columns = max_seqlen_k if max_seqlen_k != 0 else None
    ranges = (cu_seqlen_ks, cu_seqlen_ke)
    return mqa_logits(q, k, weights, *ranges, k_scale=k_scale, max_seqlen_k=columns, clean_logits=clean_logits)
