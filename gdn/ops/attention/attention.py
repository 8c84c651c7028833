"""Public operator `attention`: dense causal attention on the paged cache of keys and values.

Decode rows take the kernel of sparse decode, which walks all positions where it gets no indices. Prefill rows take a kernel of
their own (prefill.py), and where none serves them torch's attention on gathered keys and values (gathered.py), for which the
lengths must be known on the host.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gdn import runtime
from gdn.core import check
from gdn.core.call import NEW, always, check_memory, make, new, operator, part, record
from gdn.core.kinds import Kind
from gdn.core.library import out_or_new
from gdn.core.modes import has_memory, is_empty, is_tracing
from gdn.core.ordered import ordered
from gdn.ops.attention import gathered, prefill, reference, torch_attention
from gdn.ops.attention.host_lengths import HostSequence, check_bounds, check_lengths, sequences_of
from gdn.ops.attention.pages import Pages, leading_columns, rounded_columns
from gdn.ops.attention.sparse_attention import MOST_DECODE_TOKENS, attend_checked, check_call, check_values, is_decode, split_pair
from gdn.runtime import Choice, env, registry
from gdn.runtime.registry import Backend


def attention(
    q: Tensor,
    kv_cache: Tensor | tuple[Tensor, Tensor],
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    seq_lens_host: Sequence[int] | None = None,
    query_lens_host: Sequence[int] | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    gate: Tensor | None = None,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Dense causal attention of each query token over its sequence, in a paged cache.

        o = softmax(scale * q k^T) v [* sigmoid(gate)], over the positions up to the query's own; float32 inside

    The leading sequences of at most 8 new tokens (decode, drafts included) take the kernel of decode, all from the first longer
    one on that of prefill. Which they are is known from the lengths on the host. Without them all rows take one kernel: that of
    decode where `max_query_len`, or the average number of tokens a sequence, is at most 8, else that of prefill. With
    ``GDN_BATCH_INVARIANT=1`` every sequence goes by its own length, and to the kernel of decode where the host does not know it.

    The kernel of prefill serves bfloat16 and float16, head dims of 128 and 256, cache blocks of a multiple of 16 positions and
    cache rows at multiples of 16 bytes. It deals the positions of a few queries on a long context to several SMs. Their number
    depends on the numbers of new tokens and of sequences, and on what the host knows of the longest context: the lengths on
    the host, else `max_seq_len`, else the width of `block_tables`. In batch-invariant calls it depends on none of these.

    Other calls take torch's flash attention on a copy of their keys and values, or matrix products in float32 where flash
    does not serve them either (another dtype, a head dim above 256, a scale that is not above 0). Without lengths on the
    host, and in batch-invariant calls, they take the kernel of decode. No call ever waits for the device.

    Parameters
    ----------
    q : Tensor [tokens, heads, D]
        Queries, as for `sparse_attention`.
    kv_cache, block_tables, query_start_loc, seq_lens : Tensor or tuple of Tensor, Tensor, Tensor, Tensor
        Keys and values, blocks [N, max_blocks], offsets [N + 1] and lengths [N] of the sequences, as for `sparse_attention`.
    scale, return_lse : float or None, bool
        Factor of the products (None = D**-0.5); whether to return the log-sum-exp too.
    seq_lens_host, query_lens_host : tuple or list of int, optional
        `seq_lens` and the differences of `query_start_loc` on the host. None for one of them = all rows take one kernel.
    max_query_len, max_seq_len : int, optional
        Bounds on the lengths of all sequences: with max_query_len <= 8 all rows take the kernel of decode; max_seq_len bounds
        the part of `block_tables` that is read.
    gate : Tensor [tokens, heads, D], optional
        Output gate, as for `sparse_attention`.
    out : Tensor [tokens, heads, D], optional
        Tensor to write o into, dtype of `q`, last dimension contiguous.
    backend : {"tilelang", "cute", "reference"}, optional
        Implementation of both kernels; ValueError where it cannot run decode rows. Prefill rows that it does not serve take
        torch's attention. "reference" applies to all rows, from ``GDN_BACKEND`` too. None = chosen by ``GDN_BACKEND`` and the
        tables, see `gdn.explain`.

    Returns
    -------
    o : Tensor [tokens, heads, D]
        Output in the dtype of `q`; `out` itself where it is given. Zero in rows after the last sequence.
    lse : Tensor [tokens, heads] of float32
        Natural logarithm of the sum of exponentials, -inf in rows after the last sequence. Only with `return_lse`.

    Raises
    ------
    TypeError, ValueError
        Named after the argument, before anything is written. With ``GDN_VALIDATE=1`` (which waits for the device; on the CPU
        always) lengths, blocks of visible positions and the agreement with the lengths and bounds on the host are checked too.

    References
    ----------
    .. [1] A. Vaswani et al., "Attention Is All You Need", arXiv:1706.03762.
    .. [2] W. Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", arXiv:2309.06180.
    """
    k_cache, v_cache = split_pair(kv_cache)
    return_lse = Kind(bool, False).check("return_lse", return_lse)
    o, lse = _dense(
        q, k_cache, v_cache, block_tables, query_start_loc, seq_lens, scale, return_lse, seq_lens_host, query_lens_host,
        max_query_len, max_seq_len, gate, out, backend,
    )  # fmt: skip
    return (o, lse) if return_lse else o


@operator(
    reference.attention,
    name="attention", writes={"out": always}, returns=lambda a: (*out_or_new(a), NEW), varies=("q", "block_tables"),
    contiguous=("q", "block_tables", "gate"),
)  # fmt: skip
def _dense(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float | None,
    return_lse: bool,
    seq_lens_host: Sequence[int] | None,
    query_lens_host: Sequence[int] | None,
    max_query_len: int | None,
    max_seq_len: int | None,
    gate: Tensor | None,
    out: Tensor | None,
    backend: Backend | None,
) -> tuple[Tensor, Tensor]:
    """`attention` on two caches. The log-sum-exp of prefill rows is there only where it is asked for."""
    check_call(q, k_cache, v_cache, block_tables, query_start_loc, seq_lens, max_query_len, gate, out)
    check.at_least("max_seq_len", max_seq_len)
    check.one_of("backend", backend, (*registry.BACKENDS, None))  # torch's part asks no kernel
    check_values(q, k_cache, None, block_tables, query_start_loc, seq_lens, None)
    check_lengths(query_lens_host, seq_lens_host, query_start_loc, seq_lens)
    check_bounds({"max_query_len": max_query_len, "max_seq_len": max_seq_len}, query_start_loc, seq_lens)
    block_size, (tokens, _, dim), count = k_cache.shape[1], q.shape, seq_lens.shape[0]
    known = sequences_of(
        query_lens_host, seq_lens_host, tokens=tokens, addressed=block_tables.shape[1] * block_size, max_seq_len=max_seq_len
    )
    if is_tracing():
        check_memory()
        o = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        return o, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)

    if max_seq_len is not None:
        columns = rounded_columns(max_seq_len, block_size)
        if columns < block_tables.shape[1]:
            block_tables = make(functools.partial(leading_columns, columns), block_tables)
    pages = Pages(k_cache, v_cache, block_tables, query_start_loc, seq_lens)
    switches = env.current()
    with ordered(backend, "attention") as backend:
        parts = _parts(known, tokens, count, max_query_len, switches.batch_invariant)
        longer = [one for one in parts if not one.is_decode]
        if (backend or switches.backend) == "reference" or is_empty(tokens, k_cache.shape[0], *block_tables.shape):
            longer = []
        kernel = None
        if longer:
            # A batch-invariant call may have several such parts, whose sizes do not choose tiles: the first stands for all.
            sequences, rows = longer[0].sequences, longer[0].rows
            num_rows, members = rows.stop - rows.start, sequences.stop - sequences.start
            kernel = prefill.prepare(q, pages, num_rows, members, known[sequences], gate is not None, backend)
            if kernel is None and (switches.batch_invariant or not known):
                longer = []  # torch's sums depend on the batch, and it needs the lengths
        if not longer:
            return attend_checked(q, pages, None, None, scale, max_query_len, gate, out, backend)
        check_memory()
        o = new(q.dtype, q.device, *q.shape) if out is None else out
        lse = new(torch.float32, q.device, *q.shape[:2])  # the kernels write all rows, padding too
        factor = dim**-0.5 if scale is None else scale
        if kernel is None:
            lse.fill_(-torch.inf)
        for one in parts:
            own = pages.of(one.sequences, one.rows.start)
            own_q, own_o, own_lse = (part(x, one.rows) for x in (q, o, lse))
            own_gate = None if gate is None else part(gate, one.rows)
            if one.is_decode:
                attend_checked(own_q, own, None, None, scale, None, own_gate, own_o, backend, own_lse)
            elif kernel is not None:
                prefill.attend(kernel, own_q, own, factor, own_gate, own_o, own_lse)
            else:
                _by_torch(q, pages, known[one.sequences], factor, gate, o, lse)
        if kernel is not None:
            record((o, lse), aligned=(q, k_cache, v_cache, gate))
    return o, lse


def _by_torch(
    q: Tensor, pages: Pages, sequences: Sequence[HostSequence], scale: float, gate: Tensor | None, o: Tensor, lse: Tensor
) -> None:
    """Attention of the last sequences of a call."""
    reason = torch_attention.refusal(q, scale)
    form = "torch's flash kernel" if reason is None else f"matrix products in torch, since its flash kernel {reason}"
    runtime.record(Choice("attention", "torch", decided_by=f"prefill rows: {form}"))
    if has_memory():
        gathered.attend(q, pages, sequences, scale, gate, o, lse)


class _Part(NamedTuple):
    """Neighbouring sequences that one kernel serves. Rows after the last sequence belong to the last part."""

    is_decode: bool
    sequences: slice
    rows: slice  # of q


def _parts(known: Sequence[HostSequence], tokens: int, count: int, max_query_len: int | None, is_invariant: bool) -> list[_Part]:
    """Deals the sequences of a call to the kernels of decode and of prefill.

    In a batch-invariant call a sequence goes by its own length alone, and all of them to the kernel of decode where that is not
    known: bounds and averages depend on the batch.
    """
    is_bounded = max_query_len is not None and max_query_len <= MOST_DECODE_TOKENS
    if not known or is_bounded:
        few = is_bounded or is_invariant or is_decode(tokens, count, max_query_len)
        return [_Part(few, slice(0, count), slice(0, tokens))]
    few_of = [one.query_len <= MOST_DECODE_TOKENS for one in known]
    if not is_invariant:  # from the first longer sequence on, one launch for all
        few_of = list(itertools.accumulate(few_of, bool.__and__))
    firsts = [n for n, few in enumerate(few_of) if n == 0 or few != few_of[n - 1]]
    ends = [*firsts[1:], count]
    starts = [known[n].token for n in firsts]
    rows = map(slice, starts, [*starts[1:], tokens])
    return [_Part(few_of[n], slice(n, end), part) for n, end, part in zip(firsts, ends, rows, strict=True)]
