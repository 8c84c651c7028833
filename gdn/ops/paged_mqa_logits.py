"""Indexer logits of paged decode: `gdn.paged_mqa_logits` and its DeepGEMM-shaped forms."""

import torch

from gdn import reference
from gdn.ops import _rows, _values
from gdn.ops._call import always, launch, make, new, operator, prepare, reads_values, run_reference
from gdn.ops._checks import bad_value, check_at_least, check_tensor, dtype_name
from gdn.ops._delta_rule import contiguous_int32
from gdn.ops._kinds import Kind
from gdn.ops._logits_checks import (
    INDEX_DTYPES,
    QUERY_DTYPES,
    check_cache,
    check_heads,
    check_out,
    check_skipping,
    check_weights,
    flat_pages,
    kernel_weights,
    kernel_weights_dtype,
    product_dtype,
)
from gdn.ops._modes import is_empty
from gdn.problems import PagedMqaLogitsParams, PagedMqaLogitsProblem


@operator(
    reference=reference.paged_mqa_logits,
    writes={"out": always},
    memo=True,
    varies=("q", "block_tables"),
    contiguous=("q", "weights", "block_tables"),
)
def paged_mqa_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor | None,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_context_len: int,
    *,
    scale: float = 1.0,
    relu: bool = True,
    clean_logits: bool = True,
    out_dtype: torch.dtype = torch.float32,
    skip_rows_up_to: int = 0,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Scores of each sequence's next_n query tokens against its cached keys; the formula of `gdn.mqa_logits`.

    q [B, next_n, H, D] float8_e4m3fn or bfloat16 (float16, float32: reference), copied where not contiguous as a whole.
    cache: by dtype of its pages, the kv_heads axis may be missing where it is 1:
        uint8          [pages, page_size, kv_heads, D + 4]: a page holds its page_size * kv_heads * D e4m3 values first,
                       then its page_size * kv_heads float32 scales
        float8_e4m3fn  [pages, page_size, kv_heads, D]: no scales
        bfloat16       [pages, page_size, kv_heads, D]: for a q of any other dtype than float8_e4m3fn
        Contiguous inside a page, page stride any multiple of 16 bytes; page_size a multiple of 4 (kernels: of 16).
    weights [B * next_n, H] any float dtype and row stride; None = 1.
    context_lens [B, next_n]: keys that each draft sees, or [B]: draft i sees context_len - next_n + 1 + i. int32 (int64 is
        converted), read on the device only, clamped to [0, min(max_context_len, max_pages * page_size)]: they may change
        between replays of a CUDA graph. Lengths count key rows; compressed keys need the [B, next_n] form.
    block_tables [B, max_pages] int32, any row stride: page of each page_size keys. The caller's duty: entries of visible
        keys are pages of the cache. Other entries are not followed.
    max_context_len: columns of out.
    clean_logits: columns at or beyond a row's length are -inf (True) or unspecified (False).
    skip_rows_up_to: rows of at most this many visible keys may stay unscored; only without clean_logits.
    out: [B * next_n, max_context_len] of out_dtype (float32 or bfloat16), last dim contiguous; None = a new tensor.

    Returns out. ValueError or TypeError names the argument, before anything is written. With GDN_VALIDATE=1 page numbers
    of visible keys are checked too (costs a sync).
    """
    check_tensor("q", q, shape=["B", "next_n", "H", "D"], dtypes=QUERY_DTYPES)
    device = q.device
    batch, next_n, num_heads, head_dim = q.shape
    if next_n < 1:
        bad_value("q", "shape [B, next_n, H, D] with next_n >= 1", f"shape {list(q.shape)}")
    page_size, num_kv_heads = check_cache(cache, head_dim, device, q.dtype)
    check_heads(num_heads, num_kv_heads)
    check_weights(weights, batch * next_n, num_heads, device)
    check_lengths(context_lens, batch, next_n, device)
    check_block_tables(block_tables, batch, device)
    check_at_least("max_context_len", max_context_len)
    check_skipping(skip_rows_up_to, clean_logits)
    check_out(out, [batch * next_n, max_context_len], out_dtype, device)
    check_values(block_tables, context_lens, page_size, cache.shape[0], max_context_len)

    problem = PagedMqaLogitsProblem(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype_name(product_dtype(q.dtype, cache.dtype)),
        has_k_scale=cache.dtype == torch.uint8,
        weights_dtype=kernel_weights_dtype(weights),
        relu=relu,
        clean=clean_logits,
        out_dtype=dtype_name(out_dtype),
        page_size=page_size,
        next_n=next_n,
        per_draft_lengths=context_lens.dim() == 2,
        batch=batch,
        max_context_len=max_context_len,
    )
    prepared = prepare(problem, device, backend)
    if prepared.launch is None:
        run_reference()
    if out is None:
        out = new(out_dtype, device, batch * next_n, max_context_len)
    nothing_cached = is_empty(cache.shape[0], block_tables.shape[1])
    if nothing_cached and clean_logits:
        out.fill_(-torch.inf)
    if nothing_cached or is_empty(batch, max_context_len):
        return out
    params = PagedMqaLogitsParams(
        q=_rows.contiguous("q", q),
        cache=flat_pages(cache),
        weights=None if weights is None else make(kernel_weights, weights),
        context_lens=make(contiguous_int32, context_lens),
        block_tables=block_tables,
        out=out,
        scale=scale,
        skip_rows_up_to=skip_rows_up_to,
    )
    launch(prepared, params, (out,), aligned=(q, cache))
    return out


def check_lengths(context_lens: torch.Tensor, batch: int, next_n: int, device: torch.device) -> None:
    per_draft = isinstance(context_lens, torch.Tensor) and context_lens.dim() == 2
    shape = [batch, next_n] if per_draft else [batch]
    check_tensor("context_lens", context_lens, shape=shape, dtypes=INDEX_DTYPES, device=device)


def check_block_tables(block_tables: torch.Tensor, batch: int, device: torch.device) -> None:
    check_tensor(
        "block_tables",
        block_tables,
        shape=[batch, "max_pages"],
        dtypes=(torch.int32,),
        device=device,
    )


def check_values(
    block_tables: torch.Tensor, context_lens: torch.Tensor, page_size: int, num_pages: int, max_context_len: int
) -> None:
    """No sequence is longer than its row of block_tables, and pages of visible keys lie in the cache."""
    if reads_values(block_tables.device) and num_pages:
        _values.check_pages("block_tables", block_tables, context_lens, page_size, num_pages, max_context_len)
        _values.check_table_lengths("context_lens", context_lens, block_tables, page_size)


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    schedule_metadata: torch.Tensor | None = None,
    max_context_len: int | None = None,
    clean_logits: bool = False,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """`paged_mqa_logits` in the argument order of DeepGEMM's function of this name; float32 out, ReLU, scale 1.

    schedule_metadata is accepted and not needed. max_context_len None = what block_tables can address. indices must be
    None. Otherwise as `paged_mqa_logits`.
    """
    if indices is not None:
        bad_value("indices", "None", type(indices).__name__)
    if max_context_len is None:
        check_tensor("block_tables", block_tables, shape=["B", "max_pages"])
        check_tensor("cache", cache)
        if cache.dim() < 3:
            bad_value("cache", "shape [pages, page_size, kv_heads, D + 4]", f"shape {list(cache.shape)}")
        max_context_len = block_tables.shape[1] * cache.shape[1]
    return paged_mqa_logits(q, cache, weights, context_lens, block_tables, max_context_len, clean_logits=clean_logits)


def get_paged_mqa_logits_metadata(context_lens: torch.Tensor, block_kv: int, num_sms: int) -> torch.Tensor:
    """A placeholder [num_sms + 1, 2] int32 of zeros: these kernels schedule themselves on the device.

    Exists so that code written for DeepGEMM runs; pass the result as schedule_metadata, or nothing.
    """
    check_tensor("context_lens", context_lens, dtypes=INDEX_DTYPES)
    for name, value in {"block_kv": block_kv, "num_sms": num_sms}.items():
        check_at_least(name, Kind(int, False).check(name, value), 1)
    return torch.zeros(num_sms + 1, 2, dtype=torch.int32, device=context_lens.device)
