"""Reference of what context parallel computes between its passes. Every function takes the Params of a launch and writes what
the kernel writes, in the dtype of the summaries."""

from typing import Any

import torch
from torch import Tensor

from gdn.ops.context.problem import (
    ContextPartsParams,
    ContextPartsProblem,
    ContextStartParams,
    ContextStartProblem,
    ContextTotalParams,
    ContextTotalProblem,
    message_numbers,
)

CHUNK = 64  # tokens that the chunk form takes at once: segments are whole chunks but for a sequence's last tokens


def context_parts(problem: ContextPartsProblem, params: ContextPartsParams) -> None:
    """Offsets and rows of the segments, and which sequences have tokens."""
    p, segments = params, params.num_segments
    count = p.rows.shape[0] // segments
    device = p.rows.device
    cu_seqlens = p.cu_seqlens
    if cu_seqlens is None:
        cu_seqlens = torch.arange(count + 1, device=device) * p.length
    lengths = cu_seqlens.diff()
    p.message[p.flags_at : p.flags_at + count].copy_(lengths > 0)
    own = torch.arange(count * segments, dtype=p.rows.dtype, device=device)
    if p.state_indices is not None:
        own = torch.where((p.state_indices[:count] > p.null_slot).repeat_interleave(segments), own, -1)
    p.rows.copy_(own)
    if p.offsets is not None:
        pieces = (lengths + (segments * CHUNK - 1)) // (segments * CHUNK) * CHUNK
        first = torch.minimum(pieces[:, None] * torch.arange(segments, device=device), lengths[:, None])
        p.offsets[:-1].copy_((cu_seqlens[:-1, None] + first).flatten())
        p.offsets[-1:].copy_(cu_seqlens[-1:])


def context_total(problem: ContextTotalProblem, params: ContextTotalParams) -> None:
    """h and P of a rank's part; on the first rank the states before its segments, and the one after its part as h."""
    p, segments = params, params.num_segments
    into_h, into_P, _ = (part[0] for part in parts_of(problem, p.message[None]))
    h, P = (None if x is None else x.unflatten(0, (-1, segments)) for x in (p.h, p.P))
    if problem.is_first:
        states = p.states.unflatten(0, (-1, segments))
        _start(p, states[:, 0])
        if h is None:
            return
        assert P is not None
        for segment in range(1, segments):
            states[:, segment] = after(problem, states[:, segment - 1], h[:, segment - 1], P[:, segment - 1])
        into_h.copy_(after(problem, states[:, -1], h[:, -1], P[:, -1]))
        return
    assert h is not None and P is not None
    zero = torch.zeros((), dtype=h.dtype, device=h.device).expand_as(P[:, 0])
    offset, transition = h[:, 0], P[:, 0]
    for segment in range(1, segments):
        offset = after(problem, offset, h[:, segment], P[:, segment])
        transition = after(problem, transition, zero, P[:, segment])
    into_h.copy_(offset)
    into_P.copy_(transition)


def context_start(problem: ContextStartProblem, params: ContextStartParams) -> None:
    """States before a rank's segments; states after the last rank's part, stored where they belong."""
    p, segments = params, params.num_segments
    states = None if p.states is None else p.states.unflatten(0, (-1, segments))
    h_of, P_of, flags = parts_of(problem, p.messages)
    if problem.ends_here:
        assert states is not None
        _store(p, states[:, -1], flags.any(0))
        return
    state = h_of[0]  # after the first rank's part
    for rank in range(1, p.rank):
        state = after(problem, state, h_of[rank], P_of[rank])
    if problem.has_segments:
        assert states is not None
        h, P = (None if x is None else x.unflatten(0, (-1, segments)) for x in (p.h, p.P))
        states[:, 0] = state
        for segment in range(1, segments):
            assert h is not None and P is not None
            states[:, segment] = after(problem, states[:, segment - 1], h[:, segment - 1], P[:, segment - 1])
    if p.final_state is not None:
        for rank in range(max(p.rank, 1), p.messages.shape[0]):
            state = after(problem, state, h_of[rank], P_of[rank])
        _store(p, state, flags.any(0))


def parts_of(problem: Any, messages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of messages [R, numbers]: h [R, N, HS, K, V] (or V first), P [R, N, HS, K, K], flags [R, N]."""
    ranks, count, heads, K, V = (
        len(messages),
        problem.num_sequences,
        problem.num_state_heads,
        problem.head_k_dim,
        problem.head_v_dim,
    )
    before_P, before_flags, end = message_numbers(problem)
    inner = (V, K) if problem.state_v_first else (K, V)
    h = messages[:, :before_P].view(ranks, count, heads, *inner)
    return h, messages[:, before_P:before_flags].view(ranks, count, heads, K, K), messages[:, before_flags:end]


def after(problem: Any, state: Tensor, h: Tensor, P: Tensor) -> Tensor:
    """The state [N, ...] after tokens with this summary."""
    first, second = (state, P) if problem.state_v_first else (P, state)
    return torch.baddbmm(h.flatten(0, 1), first.flatten(0, 1), second.flatten(0, 1)).view(state.shape)


def _start(p: ContextTotalParams, into: Tensor) -> None:
    count = into.shape[0]
    is_continued = torch.ones(count, dtype=torch.bool, device=into.device)
    slots = torch.arange(count, device=into.device)
    if p.state_indices is not None:
        slots = p.state_indices[:count].long()
        is_continued = slots > p.null_slot
    if p.has_initial_state is not None:
        is_continued = is_continued & p.has_initial_state[:count]
    start(p.initial_state, slots, is_continued, into)


def start(pool: Tensor | None, slots: Tensor, is_continued: Tensor, into: Tensor) -> None:
    """Fills `into` [N, ...] with the sequences' rows of the pool, zeros where they start from zero."""
    if pool is None or not pool.shape[0]:
        into.zero_()
        return
    into.copy_(pool.index_select(0, torch.where(is_continued, slots, 0)))
    into.masked_fill_(~is_continued.view(-1, *[1] * (into.dim() - 1)), 0)


def _store(p: ContextStartParams, rows: Tensor, has_tokens: Tensor) -> None:
    if p.state_indices is None:
        p.final_state.copy_(rows)
        return
    final = p.state_indices if p.final_state_indices is None else p.final_state_indices
    count = rows.shape[0]
    is_written = (p.state_indices[:count] > p.null_slot) & has_tokens
    store(rows, p.final_state, final[:count].long(), is_written, p.null_slot)


def store(rows: Tensor, pool: Tensor, target: Tensor, is_written: Tensor, null_slot: int) -> None:
    """Writes rows [N, ...] to slots `target` of the pool, but those that are not to be written or whose slot is null.

    A row that is not written goes where a written one goes, with the same contents, so that nothing depends on the order; where
    no row is written, slot 0 gets its own bits.
    """
    count = rows.shape[0]
    if not count or not pool.shape[0]:
        return
    is_written = is_written & (target > null_slot)
    shape = [1] * rows.dim()
    if count == 1:
        target = torch.where(is_written, target, 0)
        contents = torch.where(is_written.view(shape), rows.to(pool.dtype), pool.index_select(0, target))
        pool.index_copy_(0, target, contents)
        return
    place = torch.where(is_written, torch.arange(count, device=rows.device), is_written.int().argmax())
    target = torch.where(is_written.any(), target[place], 0)
    contents = rows.to(pool.dtype).index_select(0, place)
    pool.index_copy_(0, target, torch.where(is_written.any().view(shape), contents, pool[:1]))
