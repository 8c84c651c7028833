"""DeepGEMM's functions of the indexer on the kernels of this project: to import where it is not installed, or to `enable` in it.

The functions have DeepGEMM's signatures: float32 scores (or `logits_dtype`) with ReLU and scale 1, FP8 queries and keys with
float32 scales. FP4, MX scales and the sparse functions, which SM100 alone has, are refused.

`enable` leaves DeepGEMM's own `get_paged_mqa_logits_metadata` in place: the schedule that it makes is ignored here and right for
the calls that are left to DeepGEMM. The placeholder of this module must never reach DeepGEMM's kernels.
"""

import inspect

import torch
from torch import Tensor

import gdn
from gdn.integrations import _handle, _hosts, _points
from gdn.integrations._calls import refused_by, unserved

HEAD_DIMS = (64, 128)  # of the kernels
MOST_HEADS = 64
_PAGE_MULTIPLE = 4  # keys
_FP8 = torch.float8_e4m3fn

Query = Tensor | tuple[Tensor, Tensor | None]


def _unserved_query(q: Query, allow_reference: bool) -> str | None:
    """Checks the queries, which decide the form of the call."""
    rows, scale = _parted(q)
    if rows.dtype != _FP8:
        return "the queries are not FP8 (e4m3)"
    if scale is not None:
        return "the queries have scales of their own (FP4 or MX)"
    if rows.shape[-1] not in HEAD_DIMS:
        return f"head dim {rows.shape[-1]} has no kernel"
    if rows.shape[-2] > MOST_HEADS:
        return f"{rows.shape[-2]} heads have no kernel"
    return unserved(rows, allow_reference=allow_reference)


def _parted(q: Query) -> tuple[Tensor, Tensor | None]:
    return (q[0], q[1]) if isinstance(q, tuple | list) else (q, None)


def _unserved_dtype(logits_dtype: torch.dtype) -> str | None:
    return None if logits_dtype in (torch.float32, torch.bfloat16) else "the scores are neither float32 nor bfloat16"


def _refuse_mqa(
    q: Query, kv: tuple[Tensor, Tensor], allow_reference: bool, logits_dtype: torch.dtype = torch.float32
) -> str | None:
    if reason := _unserved_query(q, allow_reference) or _unserved_dtype(logits_dtype):
        return reason
    k, k_scale = kv
    if k.dtype != _FP8 or k_scale.dtype != torch.float32:
        return "the keys are not FP8 (e4m3) with float32 scales"
    return None


def _refuse_paged(
    q: Query, kv_cache: Tensor, indices: Tensor | None, allow_reference: bool, logits_dtype: torch.dtype = torch.float32
) -> str | None:
    if reason := _unserved_query(q, allow_reference) or _unserved_dtype(logits_dtype):
        return reason
    if indices is not None:
        return "indices (sequences of varying numbers of queries)"
    if kv_cache.dtype != torch.uint8:
        return "the cache is not uint8"
    if kv_cache.shape[1] % _PAGE_MULTIPLE:
        return f"a page holds {kv_cache.shape[1]} keys, which is no multiple of {_PAGE_MULTIPLE}"
    return None


@refused_by(_refuse_mqa)
def fp8_mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> Tensor:
    """Scores of every query row against its range of keys, by `gdn.mqa_logits`.

    Parameters
    ----------
    q : Tensor [M, H, D] of float8_e4m3fn
        Queries, D = 64 or 128; their scales are folded into `weights`.
    kv : tuple of Tensor
        (k [Nk, D] float8_e4m3fn, k_scale [Nk] float32).
    weights : Tensor [M, H]
        Weight of each head.
    cu_seq_len_k_start, cu_seq_len_k_end : Tensor [M]
        First visible key of each row, and the end; int32.
    clean_logits : bool
        Whether columns outside of a row's range are -inf.
    max_seqlen_k : int
        Columns of the result, column 0 of row i being key cu_seq_len_k_start[i]. 0: the result is [M, Nk].

    Returns
    -------
    Tensor [M, Nk] or [M, max_seqlen_k]
        New float32 tensor.

    Raises
    ------
    gdn.integrations.Refused
        Where this project does not serve the call.
    TypeError, ValueError
        As raised by `gdn.mqa_logits`.
    """
    return _mqa(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k, torch.float32)


@refused_by(_refuse_mqa)
def fp8_fp4_mqa_logits(
    q: Query,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`fp8_mqa_logits` for `q` = (queries, scales or None), with scores in `logits_dtype`. Only FP8 without scales is served.

    Parameters
    ----------
    q : tuple of Tensor and None
        (queries [M, H, D] float8_e4m3fn, None).
    kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k : tuple, Tensor, Tensor, Tensor, bool, int
        As for `fp8_mqa_logits`.
    logits_dtype : torch.dtype
        float32 or bfloat16.

    Returns
    -------
    Tensor [M, Nk] or [M, max_seqlen_k]
        New tensor of `logits_dtype`.

    Raises
    ------
    gdn.integrations.Refused
        Where this project does not serve the call.
    TypeError, ValueError
        As raised by `gdn.mqa_logits`.
    """
    rows = _parted(q)[0]
    return _mqa(rows, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k, logits_dtype)


def _mqa(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    clean_logits: bool,
    max_seqlen_k: int,
    dtype: torch.dtype,
) -> Tensor:
    columns = max_seqlen_k if max_seqlen_k != 0 else None
    return gdn.mqa_logits(
        q, kv[0], weights, starts, ends, k_scale=kv[1], max_seqlen_k=columns, clean_logits=clean_logits, out_dtype=dtype
    )


@refused_by(_refuse_paged)
def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor,
    max_context_len: int,
    clean_logits: bool = False,
    indices: Tensor | None = None,
) -> Tensor:
    """Scores of each sequence's query tokens against its cached keys, by `gdn.paged_mqa_logits`.

    Parameters
    ----------
    q : Tensor [B, next_n, H, D] of float8_e4m3fn
        Queries, D = 64 or 128; their scales are folded into `weights`.
    kv_cache : Tensor [pages, page_size, 1, D + 4] of uint8
        Pages: the e4m3 values of all keys, then their float32 scales.
    weights : Tensor [B * next_n, H]
        Weight of each head.
    context_lens : Tensor [B, next_n] or [B] of int32
        Keys that each query token sees; [B]: those that the last one sees.
    block_table : Tensor [B, max_pages] of int32
        Pages of each sequence.
    schedule_meta : Tensor
        Accepted and not needed: these kernels schedule themselves on the device.
    max_context_len : int
        Columns of the result.
    clean_logits : bool
        Whether columns behind a row's keys are -inf.
    indices : None
        Only None is served.

    Returns
    -------
    Tensor [B * next_n, max_context_len]
        New float32 tensor.

    Raises
    ------
    gdn.integrations.Refused
        Where this project does not serve the call.
    TypeError, ValueError
        As raised by `gdn.paged_mqa_logits`.
    """
    return gdn.paged_mqa_logits(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits=clean_logits)


@refused_by(_refuse_paged)
def fp8_fp4_paged_mqa_logits(
    q: Query,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: Tensor | None = None,
) -> Tensor:
    """`fp8_paged_mqa_logits` for `q` = (queries, scales or None), with scores in `logits_dtype`.

    Parameters
    ----------
    q : tuple of Tensor and None
        (queries [B, next_n, H, D] float8_e4m3fn, None).
    kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits, indices
        As for `fp8_paged_mqa_logits`.
    logits_dtype : torch.dtype
        float32 or bfloat16.

    Returns
    -------
    Tensor [B * next_n, max_context_len]
        New tensor of `logits_dtype`.

    Raises
    ------
    gdn.integrations.Refused
        Where this project does not serve the call.
    TypeError, ValueError
        As raised by `gdn.paged_mqa_logits`.
    """
    return gdn.paged_mqa_logits(
        _parted(q)[0],
        kv_cache,
        weights,
        context_lens,
        block_table,
        max_context_len,
        clean_logits=clean_logits,
        out_dtype=logits_dtype,
    )


def get_paged_mqa_logits_metadata(context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None) -> Tensor:
    """Placeholder for the schedule of the paged functions of this module, which need none.

    Parameters
    ----------
    context_lens, block_kv, num_sms : Tensor, int, int
        Lengths, int32 or int64; page size and number of SMs to schedule for, both >= 1.
    indices : Tensor, optional
        Accepted and not needed; the paged functions refuse theirs.

    Returns
    -------
    Tensor [num_sms + 1, 2] of int32
        Zeros, on the device of `context_lens`. Not for DeepGEMM's own kernels.
    """
    return gdn.get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms)


def enable(*, strict: bool = False, allow_reference: bool = False) -> _handle.Handle:
    """Replaces the functions of the installed `deep_gemm` that score the indexer's queries, by those of this module.

    Parameters
    ----------
    strict : bool
        Raise where a function's signature is not the recorded one, instead of leaving it alone.
    allow_reference : bool
        Serve tensors on the CPU, by the plain-torch reference, on any machine. For tests.

    Returns
    -------
    Handle
        Reports and puts DeepGEMM's functions back. A second call with the same options returns the same handle.

    Raises
    ------
    ValueError
        If it is enabled with other options.
    RuntimeError
        With strict, if a function cannot be replaced.
    """
    replaced = (
        (_refuse_mqa, fp8_mqa_logits),
        (_refuse_paged, fp8_paged_mqa_logits),
        (_refuse_mqa, fp8_fp4_mqa_logits),
        (_refuse_paged, fp8_fp4_paged_mqa_logits),
    )
    points = [_points.attribute(f"deep_gemm.{one.__name__}", refusal, inspect.unwrap(one)) for refusal, one in replaced]
    notes = ["deep_gemm.get_paged_mqa_logits_metadata stays: its schedule is ignored here, and right for the calls that are left"]
    return _handle.enable(_hosts.DEEPGEMM, points, strict=strict, allow_reference=allow_reference, notes=notes)
