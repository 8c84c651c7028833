"""Public operator `sparse_attention`: attention over the positions that the indexer selected."""

from typing import Any

import torch
from torch import Tensor

from gdn.core import check
from gdn.core import values as _values
from gdn.core.call import NEW, always, choose, launch, make, new, operator, reads_values
from gdn.core.check import INDEX_DTYPES, INPUT_DTYPES, bad_type, bad_value
from gdn.core.kinds import Kind
from gdn.core.library import out_or_new
from gdn.core.modes import has_memory, is_empty, is_tracing
from gdn.core.overlap import overlaps_itself
from gdn.core.tensors import aligned, contiguous, contiguous_int32, dtypes_of, given_of
from gdn.ops.attention import reference
from gdn.ops.attention.pages import Pages, fields_of
from gdn.ops.attention.problem import SparseDecodeParams, SparseDecodeProblem, SparsePrefillParams, SparsePrefillProblem
from gdn.runtime.registry import Backend

MOST_DECODE_TOKENS = 8  # tokens of a sequence in one decode step: its token and its drafts


def sparse_attention(
    q: Tensor,
    kv_cache: Tensor | tuple[Tensor, Tensor],
    topk_indices: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    topk_length: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    max_query_len: int | None = None,
    gate: Tensor | None = None,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each query token over the positions that the indexer selected for it.

        o = softmax(scale * q k^T) v [* sigmoid(gate)], over the selected positions; float32 inside

    Parameters
    ----------
    q : Tensor [tokens, heads, D]
        Queries, bfloat16 (float16, float32), the tokens of all sequences packed; copied where the last dimension is not
        contiguous.
    kv_cache : Tensor [2, num_blocks, block_size, kv_heads, D] or tuple of Tensor
        Keys and values: one tensor, or a pair (k_cache, v_cache), each [num_blocks, block_size, kv_heads, D] in the dtype of
        `q`, with any block and token stride. heads is a multiple of kv_heads; query head h reads key head
        h // (heads / kv_heads).
    topk_indices : Tensor [tokens, k]
        Positions in the query's own sequence, int32 or int64, any row stride; -1 = none, anywhere in the row. Positions after
        the query's own do not count (causal). The caller makes sure that no position is twice in a row.
    block_tables : Tensor [N, max_blocks] of int32
        Block of each block_size positions of a sequence.
    query_start_loc : Tensor [N + 1]
        Token offsets, int32 or int64: the new tokens of sequence n are rows [query_start_loc[n], query_start_loc[n + 1]). Rows
        after the last sequence are padding.
    seq_lens : Tensor [N]
        Tokens of each sequence, cached ones included, int32 or int64; the new tokens are the last ones of them.
    topk_length : Tensor [tokens], optional
        Number of leading entries of each row of `topk_indices` that count, int32 or int64. None = all.
    scale, return_lse : float or None, bool
        Factor of the products (None = D**-0.5); whether to return the log-sum-exp too.
    max_query_len : int, optional
        Largest number of new tokens of a sequence. Up to 8 the step counts as decode, with drafts or without, else as prefill;
        None = decode where there are at most 8 tokens a sequence on average. It decides which of the
        ``VLLM_QSA_*_ATTN_BACKEND`` switches applies.
    gate : Tensor [tokens, heads, D], optional
        Output gate, dtype of `q`, any token and head stride; copied where rows are not contiguous or do not start at multiples
        of 16 bytes. o, rounded to the dtype, is multiplied by sigmoid(gate) in float32 and rounded once more.
    out : Tensor [tokens, heads, D], optional
        Tensor to write o into, dtype of `q`, last dimension contiguous.
    backend : {"tilelang", "cute", "reference"}, optional
        Implementation to run; ValueError where it cannot. None = chosen by ``GDN_BACKEND`` and the tables, see `gdn.explain`.

    Returns
    -------
    o : Tensor [tokens, heads, D]
        Output in the dtype of `q`; `out` itself where it is given. Zero in rows without a valid position.
    lse : Tensor [tokens, heads] of float32
        Natural logarithm of the sum of exponentials, -inf in rows without a valid position. Only with `return_lse`.

    Raises
    ------
    TypeError, ValueError
        Named after the argument, before anything is written. With ``GDN_VALIDATE=1`` (which waits for the device; on the CPU
        always) the order of `query_start_loc`, `seq_lens` and `topk_length`, selected positions and the blocks of visible
        positions are checked too.

    References
    ----------
    .. [1] DeepSeek-AI, "DeepSeek-V3.2-Exp: Boosting Long-Context Efficiency with DeepSeek Sparse Attention", report, 2025.
    """
    k_cache, v_cache = split_pair(kv_cache)
    return_lse = Kind(bool, False).check("return_lse", return_lse)
    if topk_indices is None:
        bad_type("topk_indices", "a torch.Tensor", "NoneType")
    o, lse = attend(
        q, k_cache, v_cache, topk_indices, block_tables, query_start_loc, seq_lens, topk_length, scale, max_query_len, gate,
        out, backend,
    )  # fmt: skip
    return (o, lse) if return_lse else o


@operator(
    reference.sparse_attention,
    name="sparse_attention", writes={"out": always}, returns=lambda a: (*out_or_new(a), NEW), varies=("q", "topk_indices"),
    contiguous=("q", "topk_indices", "block_tables", "gate"),
)  # fmt: skip
def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    topk_indices: Tensor | None,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    topk_length: Tensor | None,
    scale: float | None,
    max_query_len: int | None,
    gate: Tensor | None,
    out: Tensor | None,
    backend: Backend | None,
) -> tuple[Tensor, Tensor]:
    """`sparse_attention` on two caches, with its log-sum-exp; topk_indices None: all positions, by the kernel of decode."""
    check_call(q, k_cache, v_cache, block_tables, query_start_loc, seq_lens, max_query_len, gate, out)
    tokens, device = q.shape[0], q.device
    check.optional("topk_indices", topk_indices, shape=[tokens, "k"], dtypes=INDEX_DTYPES, device=device)
    check.optional("topk_length", topk_length, shape=[tokens], dtypes=INDEX_DTYPES, device=device)
    if topk_indices is None and topk_length is not None:
        bad_value("topk_length", "None without topk_indices", "a tensor")
    check_values(q, k_cache, topk_indices, block_tables, query_start_loc, seq_lens, topk_length)
    pages = Pages(k_cache, v_cache, block_tables, query_start_loc, seq_lens)
    return attend_checked(q, pages, topk_indices, topk_length, scale, max_query_len, gate, out, backend)


def attend_checked(
    q: Tensor, pages: Pages, topk_indices: Tensor | None, topk_length: Tensor | None, scale: float | None,
    max_query_len: int | None, gate: Tensor | None, out: Tensor | None, backend: Backend | None, lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`attend` of checked arguments, as a part of the call that is running.

    lse: where the log-sum-exp of some rows of a call goes; None = a new tensor, and this is the one launch of the call.
    """
    k_cache, v_cache, block_tables, query_start_loc, seq_lens = pages
    (tokens, heads, dim), (num_blocks, block_size) = q.shape, k_cache.shape[:2]
    sequences, device = seq_lens.shape[0], q.device
    most = block_tables.shape[1] * block_size
    k = most if topk_indices is None else topk_indices.shape[1]
    shared: dict[str, Any] = {
        **fields_of(q, k_cache, v_cache), **dtypes_of(index=topk_indices), **given_of(topk_length=topk_length, gate=gate),
        "num_tokens": tokens, "num_sequences": sequences, "k": k,
    }  # fmt: skip
    problem: SparseDecodeProblem | SparsePrefillProblem
    if topk_indices is None or is_decode(tokens, sequences, max_query_len):
        problem = SparseDecodeProblem(**shared, dense=topk_indices is None)
    else:
        problem = SparsePrefillProblem(**shared, max_context_len=most)
    prepared = choose(problem, device, backend)
    if prepared.launch is None:
        found: tuple[Tensor, Tensor] = reference.sparse_attention(  # type: ignore[assignment]
            q, (k_cache, v_cache), topk_indices, block_tables, query_start_loc, seq_lens, topk_length=topk_length, scale=scale,
            return_lse=True, gate=gate, out=out,
        )  # fmt: skip
        return found if lse is None else (found[0], lse.copy_(found[1]))
    if out is None:
        out = new(q.dtype, device, tokens, heads, dim)
    is_whole = lse is None
    if lse is None:
        lse = new(torch.float32, device, tokens, heads)
    if is_empty(tokens, heads, k, num_blocks, sequences, most):
        return out.zero_(), lse.fill_(-torch.inf)
    values: dict[str, Any] = {
        "q": contiguous("q", q), "k_cache": k_cache, "v_cache": v_cache, "topk_indices": topk_indices,
        "block_tables": block_tables, "query_start_loc": make(contiguous_int32, query_start_loc),
        "seq_lens": make(contiguous_int32, seq_lens), "out": out, "lse": lse,
        "topk_length": None if topk_length is None else make(contiguous_int32, topk_length),
        "gate": None if gate is None else aligned("gate", gate),
        "workspace": new(torch.uint8, device, prepared.workspace_bytes) if prepared.workspace_bytes else None,
        "scale": dim**-0.5 if scale is None else scale,
    }  # fmt: skip
    kind: Any = SparseDecodeParams if isinstance(problem, SparseDecodeProblem) else SparsePrefillParams
    launch(prepared, kind(**values), (out, lse) if is_whole else None, aligned=(q, k_cache, v_cache, gate))
    return out, lse


def is_decode(tokens: int, sequences: int, max_query_len: int | None) -> bool:
    if is_tracing():  # one graph serves both phases
        return True
    return max_query_len <= MOST_DECODE_TOKENS if max_query_len is not None else tokens <= MOST_DECODE_TOKENS * sequences


def check_call(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, query_start_loc: Tensor, seq_lens: Tensor,
    max_query_len: int | None, gate: Tensor | None, out: Tensor | None,
) -> None:  # fmt: skip
    """Checks what sparse and dense attention share."""
    check.tensor("q", q, shape=["tokens", "heads", "D"], dtypes=INPUT_DTYPES)
    if is_empty(*q.shape[1:]):
        bad_value("q", "at least one head and one element per head", f"shape {list(q.shape)}")
    _check_caches(q, k_cache, v_cache)
    check.tensor("seq_lens", seq_lens, shape=["N"], dtypes=INDEX_DTYPES, device=q.device)
    sequences = seq_lens.shape[0]
    check.tensor("query_start_loc", query_start_loc, shape=[sequences + 1], dtypes=INDEX_DTYPES, device=q.device)
    check.tensor("block_tables", block_tables, shape=[sequences, "max_blocks"], dtypes=(torch.int32,), device=q.device)
    check.at_least("max_query_len", max_query_len)
    check.optional("gate", gate, shape=q.shape, dtypes=(q.dtype,), device=q.device)
    check.out(out, q.shape, q.dtype, q.device)


def _check_caches(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Checks both caches against the queries."""
    heads, dim = q.shape[1:]
    shape: list[int | str] = ["num_blocks", "block_size", "kv_heads", dim]
    check.tensor("kv_cache[0]", k_cache, shape=shape, dtypes=(q.dtype,), device=q.device, last_contiguous=True)
    check.tensor("kv_cache[1]", v_cache, shape=k_cache.shape, dtypes=(q.dtype,), device=q.device, last_contiguous=True)
    if is_empty(k_cache.shape[1]):
        bad_value("kv_cache[0]", "blocks of at least one token", f"shape {list(k_cache.shape)}")
    for name, cache in {"kv_cache[0]": k_cache, "kv_cache[1]": v_cache}.items():
        if has_memory() and overlaps_itself(cache):
            bad_value(name, "rows that do not overlap", f"shape {list(cache.shape)}, strides {cache.stride()}")
    kv_heads = k_cache.shape[2]
    if kv_heads < 1 or heads % kv_heads:
        bad_value("q", f"a number of heads that is a multiple of the {kv_heads} key heads", f"{heads} heads")


def check_values(
    q: Tensor, k_cache: Tensor, topk_indices: Tensor | None, block_tables: Tensor, query_start_loc: Tensor, seq_lens: Tensor,
    topk_length: Tensor | None,
) -> None:  # fmt: skip
    """Checks lengths, blocks and positions, where values are checked."""
    if not reads_values(q.device):
        return
    bounds = _values.token_bounds("query_start_loc", query_start_loc, 1, q.shape[0], q.device)
    _values.check_new_tokens("seq_lens", seq_lens, bounds)
    num_blocks, block_size = k_cache.shape[:2]
    lengths = torch.where(bounds.diff() > 0, seq_lens.long(), 0)  # nothing is read of sequences without query tokens
    _values.check_table_lengths("seq_lens", lengths, block_tables, block_size)
    _values.check_pages("block_tables", block_tables, lengths, block_size, num_blocks)
    if topk_indices is not None:
        _values.check_selected_positions("topk_indices", topk_indices, bounds, seq_lens, topk_length)
        if topk_length is not None:
            _values.check_topk_length("topk_length", topk_length, topk_indices.shape[1], bounds)


def split_pair(kv_cache: Any) -> tuple[Tensor, Tensor]:
    """Splits kv_cache into the caches of keys and values, which the operator checks."""
    if isinstance(kv_cache, Tensor):
        check.layout("kv_cache", kv_cache)
        if kv_cache.dim() != 5 or kv_cache.shape[0] != 2:
            bad_value("kv_cache", "shape [2, num_blocks, block_size, kv_heads, D]", f"shape {list(kv_cache.shape)}")
    elif not isinstance(kv_cache, tuple | list) or len(kv_cache) != 2:
        bad_type("kv_cache", "a tensor [2, ...] or a pair (k_cache, v_cache)", type(kv_cache).__name__)
    k_cache, v_cache = kv_cache[0], kv_cache[1]
    check.layout("kv_cache[0]", k_cache)
    check.layout("kv_cache[1]", v_cache)
    return k_cache, v_cache
