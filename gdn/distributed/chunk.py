"""`chunk_gated_delta_rule` over a process group.

A part of a sequence is an affine map of its start state, S -> P S + h (`gdn.chunk_summary`). Each rank makes h and P of its
parts, all ranks exchange them once, and each composes the state that its own part starts from. Then it makes its outputs with one
pass of the chunk operator, as if the part were a sequence of its own.

Where a rank's sequences are few, each part is cut further, into segments that run side by side in both phases.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

import gdn
from gdn.device import H100
from gdn.distributed.group import Ranks, without_modes
from gdn.distributed.parts import CHUNK
from gdn.distributed.slots import Slots
from gdn.ops import _delta_rule
from gdn.ops._call import reads_values
from gdn.ops._check import bad_value
from gdn.ops.chunk_summary import serves

LEAST_SEGMENT = 4096  # tokens; with fewer, composing costs more than it gains
_MOST_SEGMENTS = 8


class _Summary(NamedTuple):
    """Message of a rank, [ranks, ...] once received; views of one buffer."""

    h: Tensor  # [N, HS, K, V] (or V first)
    P: Tensor  # [N, HS, K, K], transposed with V first
    lengths: Tensor  # [N]: 1 where the part has tokens, else 0


class _Part:
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

    def buffer(self) -> tuple[Tensor, _Summary]:
        """An empty summary, and the tensor that its fields are views of."""
        sizes = self.sizes
        each = sizes.num_heads * sizes.head_k_dim * (sizes.head_v_dim + sizes.head_k_dim) + 1
        whole = torch.empty(sizes.num_sequences * each, dtype=self.dtype(), device=self.given.q.device)
        return whole, self.views(whole)

    def dtype(self) -> torch.dtype:
        return torch.float64 if self.given.q.dtype == torch.float64 else torch.float32

    def views(self, whole: Tensor) -> _Summary:
        """The fields of a summary [numbers], or of those of all ranks [ranks, numbers]."""
        sizes, count = self.sizes, self.sizes.num_sequences
        shapes = [sizes.state_shape(self.v_first), (sizes.num_heads, sizes.head_k_dim, sizes.head_k_dim), ()]
        numbers = [count * torch.Size(shape).numel() for shape in shapes]
        parts = whole.split(numbers, dim=-1)
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


@without_modes
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    *,
    state_v_first: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    final_state_indices: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
    null_slot: int = -1,
    out: Tensor | None = None,
    backend: str | None = None,
    group: Any,
    final_rank: int | None = -1,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule over sequences whose tokens lie on the ranks of a process group, in rank order.

    Every rank calls with the same number of sequences, each with its part of them: any number of tokens, also none. One exchange
    carries 4 HS K (K + V) bytes of each sequence from every rank to every other. Nothing waits for the device, and the results
    are the same bits from call to call.

    Parameters
    ----------
    q, k, v, g, beta, scale, use_qk_l2norm_in_kernel, head_first, state_v_first, use_gate_in_kernel, A_log, dt_bias, \
use_beta_sigmoid_in_kernel, null_slot, out, backend
        As for `gdn.chunk_gated_delta_rule`, for this rank's tokens.
    cu_seqlens : Tensor [N + 1], optional
        Offsets of this rank's tokens of each sequence; the same N on all ranks.
    initial_state, has_initial_state : Tensor, Tensor, optional
        As for `gdn.chunk_gated_delta_rule`. The first rank's alone are read; on the others a pool must still be given to be
        written.
    output_final_state : bool
        Whether `final_rank` returns the states after the last tokens of the sequences.
    state_indices, final_state_indices : Tensor [>= N], optional
        Slots in this rank's pool. A sequence is padding on all ranks or on none.
    checkpoint_offsets, checkpoint_slots : None
        Not served: states inside of a sequence are not kept.
    group : torch.distributed.ProcessGroup
        Ranks that hold the sequences.
    final_rank : int or None
        Rank that gets the final states, or in whose pool they are stored: 0 to size - 1, or negative from the last. None = all.

    Returns
    -------
    o : Tensor [B, T, HS, V]
        Output of this rank's tokens.
    final_state : Tensor or None
        As for `gdn.chunk_gated_delta_rule` on `final_rank`; None on other ranks.

    Raises
    ------
    TypeError, ValueError
        Named after the argument, before anything is sent or written. Whether the ranks agree on the sizes is checked where
        values are: on the CPU, and with ``GDN_VALIDATE=1``.
    RuntimeError
        From torch.distributed, where another rank does not make the exchange within the group's time-out. With NCCL, for which
        the host does not wait, torch's watchdog ends the process then.

    Notes
    -----
    Every rank goes over its tokens twice, for the summaries before the exchange and for the outputs after it, so all finish
    together with equal parts (`gdn.distributed.split_tokens`).

    References
    ----------
    .. [1] S. Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", arXiv:2406.06484.

    Examples
    --------
    >>> import torch, torch.distributed as dist, gdn.distributed  # in a process per rank, after init_process_group
    >>> q, k, v = torch.randn(3, 1, 96, 4, 64).unbind()  # this rank's 96 tokens
    >>> o, state = gdn.distributed.chunk_gated_delta_rule(q, k, v, output_final_state=True, group=dist.group.WORLD)
    """
    if head_first:
        bad_value("head_first", "False (tokens before heads: [B, T, H, D])", head_first)
    for name, value in (("checkpoint_offsets", checkpoint_offsets), ("checkpoint_slots", checkpoint_slots)):
        if value is not None:
            bad_value(name, "None with a process group", "a tensor")
    ranks = Ranks(group)
    final = ranks.number("final_rank", final_rank)
    given = _delta_rule.Tokens(q, k, v, g, beta, cu_seqlens, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel)
    sizes = _delta_rule.check_tokens(given, null_slot, out)
    states = _delta_rule.States(
        initial_state, state_indices, has_initial_state, final_state_indices, None, None, state_v_first, null_slot
    )
    _delta_rule.check_states(states, sizes, q)
    if reads_values(q.device):
        _delta_rule.check_state_values(states, cu_seqlens, sizes, q.device)
    same = {"sequences": sizes.num_sequences, "state heads": sizes.num_heads, "K": sizes.head_k_dim, "V": sizes.head_v_dim}
    ranks.agree(q.device, **same, state_v_first=state_v_first, final_rank=-1 if final is None else final)

    options = {
        "scale": scale, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "state_v_first": state_v_first,
        "use_gate_in_kernel": use_gate_in_kernel, "A_log": A_log, "dt_bias": dt_bias,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel, "backend": backend,
    }  # fmt: skip
    slots = Slots(state_indices, has_initial_state, null_slot, sizes.num_sequences, q.device)
    part = _Part(sizes, given, slots, options)
    o, last, has_tokens = _compute(part, ranks, final, initial_state, out)
    if last is None:
        return o, None
    if state_indices is None:
        return o, last if output_final_state else None
    assert initial_state is not None  # checked
    slots.store(last, initial_state, has_tokens, final_state_indices)
    return o, initial_state if output_final_state else None


def _compute(
    part: _Part, ranks: Ranks, final: int | None, initial_state: Tensor | None, out: Tensor | None
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
