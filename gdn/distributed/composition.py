"""Work of the ranks of `chunk_gated_delta_rule`: summaries of a part before the exchange, outputs after it.

A part of a sequence is an affine map of its start state, S -> P S + h (`gdn.chunk_summary`). Each rank makes h and P of its
parts, all ranks exchange them once, and each composes the state that its own part starts from. Then it makes its outputs with one
pass of the chunk operator, as if the part were a sequence of its own.

Where a rank's sequences are few, each part is cut further, into segments that run side by side in both phases.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gdn
from gdn import runtime
from gdn.device import H100
from gdn.distributed.group import Ranks
from gdn.distributed.parts import CHUNK
from gdn.distributed.slots import Slots
from gdn.ops import _delta_rule, chunk, chunk_summary
from gdn.ops._check import bad_value
from gdn.ops._tensors import ALIGNMENT
from gdn.ops.chunk_summary import serves

LEAST_SEGMENT = 4096  # tokens; with fewer, composing costs more than it gains
_MOST_SEGMENTS = 8


class _Summary(NamedTuple):
    """Message of a rank, [ranks, ...] once received; views of one buffer."""

    h: Tensor  # [N, HS, K, V] (or V first)
    P: Tensor  # [N, HS, K, K], transposed with V first
    lengths: Tensor  # [N]: 1 where the part has tokens, else 0


class Part:
    """This rank's part of every sequence, as S segments: [N, S, ...] below, sequence n's segments one after the other."""

    def __init__(self, sizes: _delta_rule.Sizes, given: _delta_rule.Tokens, slots: Slots, options: dict[str, Any]) -> None:
        self.sizes, self.slots, self.options = sizes, slots, options
        self.v_first: bool = options["state_v_first"]
        self.is_any = _has_tokens(sizes, given)
        self.segments = num_segments(sizes)
        self.given, self.private = given, slots.private
        if self.segments > 1:
            self.given = given._replace(cu_seqlens=_segment_offsets(sizes, given, self.segments))
            own = torch.arange(sizes.num_sequences * self.segments, dtype=torch.int32, device=given.q.device)
            self.private = torch.where(slots.is_live[:, None].expand(-1, self.segments).reshape(-1), own, -1)

    def prepare(self) -> None:
        """Chooses and compiles the kernels of the passes: ValueError where the backend that was asked for cannot run them.

        All ranks choose alike, whatever they will run: which backends serve a call does not depend on its numbers of tokens.
        """
        sizes, given, options = (
            replace(self.sizes, num_sequences=self.sizes.num_sequences * self.segments),
            self.given,
            self.options,
        )
        device, norm, backend = given.q.device, options["use_qk_l2norm_in_kernel"], options["backend"]
        size = self.dtype().itemsize * sizes.num_heads * sizes.head_k_dim
        if size * sizes.head_v_dim % ALIGNMENT or size * sizes.head_k_dim % ALIGNMENT:
            got = f"HS={sizes.num_heads}, K={sizes.head_k_dim}, V={sizes.head_v_dim}"
            bad_value("q, k, v", f"heads whose states and K x K matrices are multiples of {ALIGNMENT} bytes together", got)
        states = _delta_rule.States(
            given.q.new_empty(0, dtype=self.dtype()), self.private, None, None, None, None, self.v_first, -1
        )
        runtime.prepare(chunk.problem_of(sizes, given, states, norm, True), device, backend)
        if serves(self.sizes, given, norm, backend):
            runtime.prepare(chunk_summary.problem_of(sizes, given, norm, self.v_first), device, backend)
        else:
            square = replace(sizes, head_v_dim=sizes.head_k_dim)
            runtime.prepare(chunk.problem_of(square, given, states, norm, True), device, backend)

    def buffer(self) -> tuple[Tensor, _Summary]:
        """An empty summary, and the tensor that its fields are views of."""
        sizes = self.sizes
        each = sizes.num_heads * sizes.head_k_dim * (sizes.head_v_dim + sizes.head_k_dim) + 1
        numbers = -(-sizes.num_sequences * each // ALIGNMENT) * ALIGNMENT  # those of the next rank are aligned as these are
        whole = torch.empty(numbers, dtype=self.dtype(), device=self.given.q.device)
        return whole, self.views(whole)

    def dtype(self) -> torch.dtype:
        return torch.float64 if self.given.q.dtype == torch.float64 else torch.float32

    def views(self, whole: Tensor) -> _Summary:
        """The fields of a summary [numbers], or of those of all ranks [ranks, numbers]."""
        sizes, count = self.sizes, self.sizes.num_sequences
        shapes = [sizes.state_shape(self.v_first), (sizes.num_heads, sizes.head_k_dim, sizes.head_k_dim), ()]
        numbers = [count * torch.Size(shape).numel() for shape in shapes]
        parts = whole.split([*numbers, whole.shape[-1] - sum(numbers)], dim=-1)[:-1]
        return _Summary(*(x.view(*x.shape[:-1], count, *shape) for x, shape in zip(parts, shapes, strict=True)))

    def states(self) -> Tensor:
        """Room for the state before, and then after, each segment: [N, S, HS, K, V] (or V first)."""
        sizes = self.sizes
        shape = (sizes.num_sequences, self.segments, *sizes.state_shape(self.v_first))
        return torch.empty(shape, dtype=self.dtype(), device=self.given.q.device)

    def run(self, states: Tensor, out: Tensor | None, v: Tensor | None = None) -> Tensor:
        """A pass of the chunk operator; states [N, S, ...] are the start states, and then the final ones."""
        given = self.given
        o, _ = gdn.chunk_gated_delta_rule(
            given.q, given.k, given.v if v is None else v, given.g, given.beta, initial_state=states.flatten(0, 1),
            state_indices=self.private, cu_seqlens=given.cu_seqlens, out=out, **self.options,
        )  # fmt: skip
        return o

    def summaries(self) -> tuple[Tensor, Tensor]:
        """h and P of every segment, [N, S, ...]."""
        given, options = self.given, dict(self.options)
        del options["scale"]
        if serves(self.sizes, given, options["use_qk_l2norm_in_kernel"], options["backend"]):
            h, P = gdn.chunk_summary(given.q, given.k, given.v, given.g, given.beta, cu_seqlens=given.cu_seqlens, **options)
            return h.unflatten(0, (-1, self.segments)), P.unflatten(0, (-1, self.segments))
        h = self.states().zero_()
        self.run(h, None)
        P = h.new_zeros(*h.shape[:3], self.sizes.head_k_dim, self.sizes.head_k_dim)
        P.diagonal(dim1=-2, dim2=-1).fill_(1)
        self.run(P, None, given.v.new_zeros(*given.v.shape[:-1], self.sizes.head_k_dim))
        return h, P

    def advance(self, state: Tensor, h: Tensor, P: Tensor, out: Tensor | None = None) -> Tensor:
        """The state [N, ...] after tokens with this summary."""
        flat = None if out is None else out.flatten(0, 1)
        first, second = (state.flatten(0, 1), P.flatten(0, 1)) if self.v_first else (P.flatten(0, 1), state.flatten(0, 1))
        return torch.baddbmm(h.flatten(0, 1), first, second, out=flat).view(state.shape)

    def start(self, states: Tensor, first: Tensor, h: Tensor, P: Tensor) -> None:
        """Fills `states` [N, S, ...] with the states before the segments; first [N, ...]: before the part."""
        states[:, 0] = first
        for segment in range(1, self.segments):
            states[:, segment] = self.advance(states[:, segment - 1], h[:, segment - 1], P[:, segment - 1])

    def total(self, h: Tensor, P: Tensor, into: _Summary) -> None:
        """The summary of the part from those of its segments."""
        zero = torch.zeros((), dtype=h.dtype, device=h.device).expand_as(P[:, 0])
        offset, transition = h[:, 0], P[:, 0]
        for segment in range(1, self.segments):
            offset = self.advance(offset, h[:, segment], P[:, segment])
            transition = self.advance(transition, zero, P[:, segment])
        into.h.copy_(offset)
        into.P.copy_(transition)


def num_segments(sizes: _delta_rule.Sizes) -> int:
    """Segments of a part: as many as run side by side, with a block for every 64 V columns of a head.

    From sizes alone: the lengths are on the device.
    """
    if sizes.batch > 1 or not sizes.num_tokens or not sizes.num_sequences:
        return 1
    blocks = sizes.num_sequences * sizes.num_heads * max(sizes.head_v_dim // 64, 1)
    return max(min(H100.num_sms // blocks, sizes.num_tokens // (sizes.num_sequences * LEAST_SEGMENT), _MOST_SEGMENTS), 1)


def _has_tokens(sizes: _delta_rule.Sizes, given: _delta_rule.Tokens) -> Tensor:
    """[N] of bool."""
    if given.cu_seqlens is not None:
        return given.cu_seqlens.diff() > 0
    return torch.full((sizes.num_sequences,), sizes.length > 0, device=given.q.device)


def _segment_offsets(sizes: _delta_rule.Sizes, given: _delta_rule.Tokens, segments: int) -> Tensor:
    """[N S + 1]: offsets of the segments, whole chunks of a sequence but for its last tokens."""
    number = torch.arange(segments, device=given.q.device)
    if given.cu_seqlens is None:
        piece = -(-sizes.length // (segments * CHUNK)) * CHUNK
        return torch.arange(segments + 1, dtype=torch.int32, device=given.q.device).mul_(piece).clamp_(max=sizes.length)
    cu_seqlens = given.cu_seqlens
    lengths = cu_seqlens.diff()[:, None]
    pieces = (lengths + (segments * CHUNK - 1)) // (segments * CHUNK) * CHUNK
    first = cu_seqlens[:-1, None] + torch.minimum(pieces * number, lengths)
    return torch.cat([first.flatten(), cu_seqlens[-1:]]).to(cu_seqlens.dtype)


def compute(
    part: Part, ranks: Ranks, final: int | None, initial_state: Tensor | None, out: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """o; the final states where this rank gets them; and which sequences have tokens on any rank."""
    rank, last = ranks.rank, ranks.size - 1
    states = part.states()
    whole, own = part.buffer()
    own.lengths.copy_(part.is_any)
    ends_here = rank == final == last  # the pass leaves the final states, and nobody reads this rank's summary
    is_whole = ends_here and part.segments == 1
    h, P = (own.h[:, None], own.P[:, None]) if is_whole else part.summaries()
    if rank == 0:
        first = torch.empty_like(own.h)
        part.slots.start(initial_state, first)
        part.start(states, first, h, P)
        if is_whole:  # of all ranks
            own.h.zero_()
        else:
            part.advance(states[:, -1], h[:, -1], P[:, -1], own.h)
        own.P.zero_()  # nobody reads it
    elif ends_here:
        own.h.zero_()
        own.P.zero_()
    else:
        part.total(h, P, own)
    summaries = part.views(ranks.gather(whole))
    has_tokens = summaries.lengths.any(0)

    state = summaries.h[0]  # after the first rank's part
    for before in range(1, rank):
        state = part.advance(state, summaries.h[before], summaries.P[before])
    if rank > 0:
        part.start(states, state, h, P)
    o = part.run(states, out)
    if final is not None and final != rank:
        return o, None, has_tokens
    if ends_here:
        return o, states[:, -1], has_tokens
    for after in range(max(rank, 1), ranks.size):
        state = part.advance(state, summaries.h[after], summaries.P[after])
    return o, state.clone() if ranks.size == 1 else state, has_tokens  # without sums it is part of the received tensor
