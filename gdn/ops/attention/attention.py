"""Public operator `attention`: dense causal attention on the paged cache of keys and values.

Decode rows take the kernel of sparse decode, which walks all positions where it gets no indices. Prefill rows take torch's
attention (`_torch_attention`) on keys and values gathered from the pages, where the caller knows their lengths on the host.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gdn import runtime
from gdn.core import check
from gdn.core.call import NEW, always, check_memory, operator, reads_values
from gdn.core.check import bad_value
from gdn.core.kinds import Kind
from gdn.core.library import out_or_new
from gdn.core.modes import has_memory, is_tracing
from gdn.core.ordered import ordered
from gdn.ops.attention import reference, torch_attention
from gdn.ops.attention.sparse_attention import MOST_DECODE_TOKENS, attend, check_call, check_values, split_pair
from gdn.runtime import Choice, env, registry
from gdn.runtime.registry import Backend

_GATHERED_BYTES = 2**30  # of keys and values gathered at a time, or one sequence's


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

    The leading sequences of at most 8 new tokens (decode, drafts included) take the paged kernel. All from the first longer one
    on take torch's flash attention on a copy of their keys and values, or matrix products in float32 where flash does not serve
    the call (another dtype, a head dim above 256, a scale that is not above 0). That needs both lengths on the host: without
    them, and with ``GDN_BATCH_INVARIANT=1``, all rows take the paged kernel. No call ever waits for the device.

    Parameters
    ----------
    q : Tensor [tokens, heads, D]
        Queries, as for `sparse_attention`.
    kv_cache, block_tables, query_start_loc, seq_lens : Tensor or tuple of Tensor, Tensor, Tensor, Tensor
        Keys and values, blocks [N, max_blocks], offsets [N + 1] and lengths [N] of the sequences, as for `sparse_attention`.
    scale, return_lse : float or None, bool
        Factor of the products (None = D**-0.5); whether to return the log-sum-exp too.
    seq_lens_host, query_lens_host : tuple or list of int, optional
        `seq_lens` and the differences of `query_start_loc` on the host. None for one of them = all rows take the paged kernel.
    max_query_len, max_seq_len : int, optional
        Bounds on the lengths of all sequences: with max_query_len <= 8 all rows take the paged kernel; max_seq_len bounds the
        part of `block_tables` that is read.
    gate : Tensor [tokens, heads, D], optional
        Output gate, as for `sparse_attention`.
    out : Tensor [tokens, heads, D], optional
        Tensor to write o into, dtype of `q`, last dimension contiguous.
    backend : {"tilelang", "cute", "reference"}, optional
        Implementation of the paged kernel; ValueError where it cannot run. "reference" applies to all rows, from ``GDN_BACKEND``
        too. None = chosen by ``GDN_BACKEND`` and the tables, see `gdn.explain`.

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
    name="attention", writes={"out": always}, returns=lambda a: (*out_or_new(a), NEW), contiguous=("q", "block_tables", "gate")
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
    _check_lengths(query_lens_host, seq_lens_host, query_start_loc, seq_lens)
    _check_bounds({"max_query_len": max_query_len, "max_seq_len": max_seq_len}, query_start_loc, seq_lens)
    block_size = k_cache.shape[1]
    items = _sequences(q, block_tables.shape[1] * block_size, max_seq_len, seq_lens_host, query_lens_host)
    check_memory()
    if is_tracing():
        o = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        return o, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)

    if max_seq_len is not None:
        # To a power of two: a width of its own for each step would be a problem of its own, with tiles and plan of its own.
        block_tables = block_tables[:, : 1 << (-(-max_seq_len // block_size) - 1).bit_length()]
    decodes = list(itertools.takewhile(lambda one: one.query_len <= MOST_DECODE_TOKENS, items))
    switches = env.current()
    prefills = [] if switches.batch_invariant else items[len(decodes) :]  # torch's sums depend on the batch
    is_decode = max_query_len is not None and max_query_len <= MOST_DECODE_TOKENS
    with ordered(backend, "attention") as backend:
        if not prefills or is_decode or (backend or switches.backend) == "reference":
            return attend(
                q, k_cache, v_cache, None, block_tables, query_start_loc, seq_lens, None, scale, max_query_len, gate, out, backend
            )
        o = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
        first = prefills[0].token
        if first:
            own = slice(len(decodes))
            lse[:first] = attend(
                q[:first], k_cache, v_cache, None, block_tables[own], query_start_loc[: len(decodes) + 1], seq_lens[own], None,
                scale, None, None if gate is None else gate[:first], o[:first], backend,
            )[1]  # fmt: skip
    factor = q.shape[2] ** -0.5 if scale is None else scale
    reason = torch_attention.refusal(q, factor)
    form = "torch's flash kernel" if reason is None else f"matrix products in torch, since its flash kernel {reason}"
    runtime.record(Choice("attention", "torch", decided_by=f"prefill rows: {form}"))
    if has_memory():
        last = prefills[-1]
        o[last.token + last.query_len :].zero_()
        for group in _groups(prefills, k_cache):
            _prefill(q, (k_cache, v_cache), block_tables, group, factor, gate, o, lse)
    return o, lse


class _Sequence(NamedTuple):
    """A sequence of the call, on the host."""

    row: int
    token: int  # first row of q
    query_len: int
    seq_len: int


def _check_lengths(
    query_lens: Sequence[int] | None, host_lens: Sequence[int] | None, query_start_loc: Tensor, seq_lens: Tensor
) -> None:
    """Checks lengths on the host: their number, and where values are checked that they are those on the device."""
    count = seq_lens.shape[0]
    for name, lengths in (("query_lens_host", query_lens), ("seq_lens_host", host_lens)):
        if lengths is None:
            continue
        if len(lengths) != count:
            bad_value(name, f"{count} lengths, one per sequence", len(lengths))
        if reads_values(seq_lens.device):
            values = (seq_lens if name == "seq_lens_host" else query_start_loc.diff()).tolist()
            if values != list(lengths):
                bad_value(name, f"the lengths on the device {values}", tuple(lengths))


def _check_bounds(bounds: dict[str, int | None], query_start_loc: Tensor, seq_lens: Tensor) -> None:
    """Checks bounds on the lengths, where values are checked."""
    given = {name: bound for name, bound in bounds.items() if bound is not None}
    if not given or not seq_lens.numel() or not reads_values(seq_lens.device):
        return
    queries = query_start_loc.diff()
    longest = {"max_query_len": queries, "max_seq_len": torch.where(queries > 0, seq_lens, 0)}  # others are not read
    for name, bound in given.items():
        if bound < (most := int(longest[name].max())):
            bad_value(name, f"at least {most}, the longest of the sequences", bound)


def _sequences(
    q: Tensor, addressed: int, max_seq_len: int | None, seq_lens: Sequence[int] | None, query_lens: Sequence[int] | None
) -> list[_Sequence]:
    """The sequences, checked against each other and the bound; none without both lengths.

    addressed: positions that a block table addresses.
    """
    if seq_lens is None or query_lens is None:
        return []
    most = addressed if max_seq_len is None else min(addressed, max_seq_len)
    for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
        if query_len < 0 or query_len > max(seq_len, 0):
            bad_value("query_lens_host", f"numbers >= 0, none above the sequence's {seq_len} tokens", query_len)
        if query_len and seq_len > most:
            if seq_len > addressed:
                bad_value("seq_lens_host", f"at most {addressed} tokens, which block_tables address", seq_len)
            bad_value("max_seq_len", f"at least {seq_len}, a sequence of seq_lens_host", max_seq_len)
    if sum(query_lens) > q.shape[0]:
        bad_value("query_lens_host", f"numbers that sum to at most the {q.shape[0]} rows of q", sum(query_lens))
    starts = itertools.accumulate(query_lens, initial=0)
    return [_Sequence(n, *one) for n, one in enumerate(zip(starts, query_lens, seq_lens, strict=False))]


def _groups(items: Sequence[_Sequence], cache: Tensor) -> Iterator[list[_Sequence]]:
    """Neighbours of equal lengths, as many as may be gathered at a time; sequences without new tokens are left out."""
    row_bytes = 2 * cache.shape[2] * cache.shape[3] * cache.element_size()
    live = [one for one in items if one.query_len]
    while live:
        first, most = live[0], max(1, _GATHERED_BYTES // (row_bytes * live[0].seq_len))
        lengths = [(one.row - n, one.query_len, one.seq_len) for n, one in enumerate(live[:most])]
        count = next((n for n, one in enumerate(lengths) if one != (first.row, first.query_len, first.seq_len)), len(lengths))
        yield live[:count]
        live = live[count:]


def _prefill(
    q: Tensor, caches: tuple[Tensor, Tensor], block_tables: Tensor, group: Sequence[_Sequence], scale: float,
    gate: Tensor | None, o: Tensor, lse: Tensor,
) -> None:  # fmt: skip
    """Attention of sequences of equal lengths, through torch."""
    (first, token, query_len, seq_len), count, block_size = group[0], len(group), caches[0].shape[1]
    pages = block_tables[first : first + count, : -(-seq_len // block_size)]
    keys, values = (
        cache.index_select(0, pages.flatten()).unflatten(0, pages.shape).flatten(1, 2)[:, :seq_len] for cache in caches
    )  # [sequences, seq_len, kv_heads, D]
    rows, shape = slice(token, token + count * query_len), (count, query_len)
    found, found_lse = torch_attention.attend(q[rows].unflatten(0, shape), keys, values, scale)
    target = o[rows].unflatten(0, shape)
    if gate is None:
        target.copy_(found)
    else:
        torch.ops.aten.glu.out(torch.cat([found, gate[rows].unflatten(0, shape)], dim=-1), -1, out=target)
    lse[rows].unflatten(0, shape).copy_(found_lse)
