"""Public operators `paged_mqa_logits` and, with DeepGEMM's signatures, `fp8_paged_mqa_logits` and its metadata."""

import torch
from torch import Tensor

from gdn.core import check, values
from gdn.core.call import always, launch, make, new, operator, prepare, reads_values, record
from gdn.core.check import FLOAT_DTYPES, INDEX_DTYPES, bad_value
from gdn.core.kinds import Kind
from gdn.core.modes import is_empty
from gdn.core.tensors import contiguous, contiguous_int32
from gdn.ops.indexer import checks, reference
from gdn.ops.indexer.problem import PagedMqaLogitsParams, PagedMqaLogitsProblem
from gdn.runtime import Prepared
from gdn.runtime.registry import Backend


@operator(
    reference.paged_mqa_logits, writes={"out": always}, varies=("q", "block_tables"), contiguous=("q", "weights", "block_tables")
)
def paged_mqa_logits(
    q: Tensor,
    cache: Tensor,
    weights: Tensor | None,
    context_lens: Tensor,
    block_tables: Tensor,
    max_context_len: int,
    *,
    scale: float = 1.0,
    relu: bool = True,
    clean_logits: bool = True,
    out_dtype: torch.dtype = torch.float32,
    skip_rows_up_to: int = 0,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Scores of each sequence's next_n query tokens against its cached keys (paged decode of the indexer).

    The formula is that of `mqa_logits`. Lengths are read on the device only, so they may change between replays of a CUDA
    graph.

    Parameters
    ----------
    q : Tensor [B, next_n, H, D]
        Queries, as for `mqa_logits`.
    cache : Tensor
        Pages of keys; their dtype gives the form, and the kv_heads axis may be missing where it is 1:

        - uint8 [pages, page_size, kv_heads, D + 4]: a page holds its page_size * kv_heads * D e4m3 values first, then its
          page_size * kv_heads float32 scales;
        - float8_e4m3fn [pages, page_size, kv_heads, D]: no scales;
        - bfloat16 (float16, float32: reference only) [pages, page_size, kv_heads, D]: for a `q` of any dtype other than
          float8_e4m3fn.

        Contiguous inside a page, page stride any multiple of 16 bytes; page_size a multiple of 4 (kernels: of 16).
    weights : Tensor [B * next_n, H] or None
        Weight of each head, any float dtype and row stride. None = 1.
    context_lens : Tensor [B, next_n] or [B]
        [B, next_n]: number of keys that each draft sees. [B]: draft i sees context_len - next_n + 1 + i. int32 (int64 is
        converted), clamped to [0, min(max_context_len, max_pages * page_size)]. Lengths count key rows; compressed keys need
        the [B, next_n] form.
    block_tables : Tensor [B, max_pages] of int32
        Page of each page_size keys of a sequence, any row stride. The caller makes sure that entries of visible keys are pages
        of the cache. Other entries are not followed.
    max_context_len : int
        Columns of the result.
    scale, relu, clean_logits, out_dtype, skip_rows_up_to : float, bool, bool, torch.dtype, int
        See `mqa_logits`. The range of a row is the columns from 0 to its number of visible keys. A NaN in a query or a key is a
        NaN score, with `relu` too.
    out : Tensor [B * next_n, max_context_len], optional
        Tensor of `out_dtype` to write the scores into, last dimension contiguous.
    backend : {"tilelang", "cute", "reference"}, optional
        Implementation to run; ValueError where it cannot. None = chosen by ``GDN_BACKEND`` and the tables, see `gdn.explain`.

    Returns
    -------
    Tensor [B * next_n, max_context_len]
        Scores in `out_dtype`; `out` itself where it is given, else a new tensor.

    Raises
    ------
    TypeError, ValueError
        Named after the argument, before anything is launched or written. With ``GDN_VALIDATE=1`` (which waits for the device;
        on the CPU always) page numbers of visible keys, and lengths beyond what `block_tables` can address, are errors too.

    References
    ----------
    .. [1] The pages with scales are those of ``fp8_paged_mqa_logits`` in DeepGEMM, https://github.com/deepseek-ai/DeepGEMM.
    """
    pages = check_paged_operands(q, cache, weights, context_lens, block_tables)
    (batch, next_n), device = q.shape[:2], q.device
    check.at_least("max_context_len", max_context_len)
    checks.check_skipping(skip_rows_up_to, clean_logits)
    checks.check_logits_out(out, [batch * next_n, max_context_len], out_dtype, device)
    check_values(block_tables, context_lens, pages[0], cache.shape[0], max_context_len)
    problem = problem_of(q, cache, pages, weights, context_lens, max_context_len, relu, clean_logits, out_dtype)
    prepared = prepare(problem, device, backend)
    if out is None:
        out = new(out_dtype, device, batch * next_n, max_context_len)
    nothing_cached = is_empty(cache.shape[0], block_tables.shape[1])
    if nothing_cached and clean_logits:
        out.fill_(-torch.inf)
    if not (nothing_cached or is_empty(batch, max_context_len)):
        score(prepared, q, cache, weights, context_lens, block_tables, scale, skip_rows_up_to, out)
        record((out,), aligned=(q, cache))
    return out


def problem_of(
    q: Tensor, cache: Tensor, pages: tuple[int, int], weights: Tensor | None, context_lens: Tensor, max_context_len: int,
    relu: bool, clean_logits: bool, out_dtype: torch.dtype,
) -> PagedMqaLogitsProblem:  # fmt: skip
    """pages: page_size and kv_heads."""
    page_size, num_kv_heads = pages
    batch, next_n = q.shape[:2]
    return PagedMqaLogitsProblem(
        **checks.shared_fields(q, cache.dtype, num_kv_heads, weights, relu, clean_logits, out_dtype),
        has_k_scale=cache.dtype == torch.uint8, per_draft_lengths=context_lens.dim() == 2, page_size=page_size, next_n=next_n,
        batch=batch, max_context_len=max_context_len,
    )  # fmt: skip


def score(
    prepared: Prepared, q: Tensor, cache: Tensor, weights: Tensor | None, context_lens: Tensor, block_tables: Tensor,
    scale: float, skip_rows_up_to: int, out: Tensor,
) -> None:  # fmt: skip
    """Launches the kernel. The arguments are checked, and none is empty."""
    row_weights = None if weights is None else make(checks.kernel_weights, weights)
    rows, pages, lengths = contiguous("q", q), checks.flat_pages(cache), make(contiguous_int32, context_lens)
    params = PagedMqaLogitsParams(rows, pages, row_weights, lengths, block_tables, out, scale, skip_rows_up_to)
    launch(prepared, params)


def check_paged_operands(
    q: Tensor, cache: Tensor, weights: Tensor | None, context_lens: Tensor, block_tables: Tensor
) -> tuple[int, int]:
    """Checks the operands that `paged_mqa_logits` and `paged_indexer_topk` share; returns page_size and kv_heads."""
    check.tensor("q", q, shape=["B", "next_n", "H", "D"], dtypes=checks.QUERY_DTYPES)
    (batch, next_n, num_heads, head_dim), device = q.shape, q.device
    if next_n < 1:
        bad_value("q", "shape [B, next_n, H, D] with next_n >= 1", f"shape {list(q.shape)}")
    page_size, num_kv_heads = checks.check_cache(cache, head_dim, device, q.dtype)
    checks.check_heads(num_heads, num_kv_heads)
    check.optional("weights", weights, shape=[batch * next_n, num_heads], dtypes=FLOAT_DTYPES, device=device)
    per_draft = isinstance(context_lens, Tensor) and context_lens.dim() == 2
    lengths = [batch, next_n] if per_draft else [batch]
    check.tensor("context_lens", context_lens, shape=lengths, dtypes=INDEX_DTYPES, device=device)
    check.tensor("block_tables", block_tables, shape=[batch, "max_pages"], dtypes=(torch.int32,), device=device)
    return page_size, num_kv_heads


def check_values(block_tables: Tensor, context_lens: Tensor, page_size: int, num_pages: int, max_context_len: int) -> None:
    """Checks that no sequence is longer than its row of block_tables and that pages of visible keys are in the cache."""
    if reads_values(block_tables.device) and num_pages:
        values.check_pages("block_tables", block_tables, context_lens, page_size, num_pages, max_context_len)
        values.check_table_lengths("context_lens", context_lens, block_tables, page_size)


def fp8_paged_mqa_logits(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    schedule_metadata: Tensor | None = None,
    max_context_len: int | None = None,
    clean_logits: bool = False,
    indices: Tensor | None = None,
) -> Tensor:
    """`paged_mqa_logits` with the argument order of DeepGEMM's function of this name: float32 scores, ReLU, scale 1.

    Parameters
    ----------
    q, cache, weights, context_lens, block_tables : Tensor
        As for `paged_mqa_logits`; the cache of DeepGEMM is uint8 [pages, page_size, kv_heads, D + 4].
    schedule_metadata : Tensor, optional
        Accepted and not needed: these kernels schedule themselves on the device.
    max_context_len : int, optional
        Columns of the result. None = what `block_tables` can address.
    clean_logits, indices : bool, None
        `clean_logits`: see `paged_mqa_logits`. `indices` must be None.

    Returns
    -------
    Tensor [B * next_n, max_context_len]
        New float32 tensor.

    Raises
    ------
    TypeError, ValueError
        As raised by `paged_mqa_logits`.

    References
    ----------
    .. [1] ``fp8_paged_mqa_logits`` in DeepGEMM, https://github.com/deepseek-ai/DeepGEMM.
    """
    if indices is not None:
        bad_value("indices", "None", type(indices).__name__)
    if max_context_len is None:
        check.tensor("block_tables", block_tables, shape=["B", "max_pages"])
        check.tensor("cache", cache)
        if cache.dim() < 3:
            bad_value("cache", "shape [pages, page_size, kv_heads, D + 4]", f"shape {list(cache.shape)}")
        max_context_len = block_tables.shape[1] * cache.shape[1]
    return paged_mqa_logits(q, cache, weights, context_lens, block_tables, max_context_len, clean_logits=clean_logits)


def get_paged_mqa_logits_metadata(context_lens: Tensor, block_kv: int, num_sms: int) -> Tensor:
    """Placeholder for the schedule that DeepGEMM's `fp8_paged_mqa_logits` needs.

    These kernels schedule themselves on the device; the function exists so that code written for DeepGEMM runs. Pass its result
    as `schedule_metadata`, or nothing.

    Parameters
    ----------
    context_lens, block_kv, num_sms : Tensor, int, int
        Lengths, int32 or int64; page size and number of SMs to schedule for, both >= 1.

    Returns
    -------
    Tensor [num_sms + 1, 2] of int32
        Zeros, on the device of `context_lens`.

    Raises
    ------
    TypeError, ValueError
        Named after the argument.
    """
    check.tensor("context_lens", context_lens, dtypes=INDEX_DTYPES)
    for name, value in {"block_kv": block_kv, "num_sms": num_sms}.items():
        check.at_least(name, Kind(int, False).check(name, value), 1)
    return torch.zeros(num_sms + 1, 2, dtype=torch.int32, device=context_lens.device)
