"""`chunk_gated_delta_rule` over a process group.

A part of a sequence is an affine map of its start state, S -> P S + h. Each rank makes h and P of its parts with the chunk
operator itself, all ranks exchange them once, and each composes the state that its own part starts from:

    h        the final state from zeros (on the first rank, which knows the start: from the initial state)
    P        the final state from the identity with V = 0

The output of the pass from zeros lacks q^T P_t S at token t. Where a call has one sequence, that is one product more: the pass
for P has q^T P_t as its output. With several sequences, whose lengths the host does not know, a third pass starts from S.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

import gdn
from gdn.distributed.group import Ranks, without_modes
from gdn.distributed.slots import Slots
from gdn.ops import _delta_rule
from gdn.ops._call import reads_values
from gdn.ops._check import bad_value


class _Summary(NamedTuple):
    """What a rank sends, [ranks, ...] once received; views of one buffer."""

    h: Tensor  # [N, HS, K, V] (or V first)
    P: Tensor  # [N, HS, K, K], transposed with V first
    lengths: Tensor  # [N]: 1 where the part has tokens, else 0


class _Part:
    """This rank's part of every sequence."""

    def __init__(self, sizes: _delta_rule.Sizes, given: _delta_rule.Tokens, slots: Slots, options: dict[str, Any]) -> None:
        self.sizes, self.given, self.slots, self.options = sizes, given, slots, options
        self.v_first: bool = options["state_v_first"]

    def buffer(self) -> tuple[Tensor, _Summary]:
        """An empty summary, and the tensor that its fields are views of."""
        dtype = torch.float64 if self.given.q.dtype == torch.float64 else torch.float32
        sizes = self.sizes
        each = sizes.num_heads * sizes.head_k_dim * (sizes.head_v_dim + sizes.head_k_dim) + 1
        whole = torch.empty(sizes.num_sequences * each, dtype=dtype, device=self.given.q.device)
        return whole, self.views(whole)

    def views(self, whole: Tensor) -> _Summary:
        """The fields of a summary [numbers], or of those of all ranks [ranks, numbers]."""
        sizes, count = self.sizes, self.sizes.num_sequences
        shapes = [sizes.state_shape(self.v_first), (sizes.num_heads, sizes.head_k_dim, sizes.head_k_dim), ()]
        numbers = [count * torch.Size(shape).numel() for shape in shapes]
        parts = whole.split(numbers, dim=-1)
        return _Summary(*(x.view(*x.shape[:-1], count, *shape) for x, shape in zip(parts, shapes, strict=True)))

    def has_tokens(self) -> Tensor:
        """[N] of bool."""
        if self.given.cu_seqlens is not None:
            return self.given.cu_seqlens.diff() > 0
        return torch.full((self.sizes.num_sequences,), self.sizes.length > 0, device=self.given.q.device)

    def run(self, states: Tensor, v: Tensor, out: Tensor | None = None) -> Tensor:
        """A pass of the chunk operator; states [N, ...] are the start states, and then the final ones."""
        given = self.given
        o, _ = gdn.chunk_gated_delta_rule(
            given.q, given.k, v, given.g, given.beta, initial_state=states, state_indices=self.slots.private,
            cu_seqlens=given.cu_seqlens, out=out, **self.options,
        )  # fmt: skip
        return o

    def transition(self, P: Tensor) -> Tensor:
        """The pass for P; returns q^T P_t, [B, T, HS, K]."""
        P.zero_().diagonal(dim1=-2, dim2=-1).fill_(1)
        sizes, v = self.sizes, self.given.v
        # Zeros that overlap: next to nothing is read. Strides of 16 bytes, since copy engines may take no others.
        step = 16 // v.element_size()
        heads, tokens = sizes.num_v_heads, sizes.num_tokens
        zeros = v.new_zeros((tokens + heads) * step + sizes.head_k_dim)
        shape = (sizes.batch, sizes.length, heads, sizes.head_k_dim)
        return self.run(P, zeros.as_strided(shape, (sizes.length * step, step, step, 1)))

    def advance(self, state: Tensor, summary: _Summary, rank: int) -> Tensor:
        """The state after a rank's part."""
        h, P = summary.h[rank].flatten(0, 1), summary.P[rank].flatten(0, 1)
        first, second = (state.flatten(0, 1), P) if self.v_first else (P, state.flatten(0, 1))
        return torch.baddbmm(h, first, second).view(state.shape)

    def correct(self, o: Tensor, queries: Tensor, state: Tensor) -> None:
        """Adds to o what the start state of the one sequence contributes. queries: q^T P_t."""
        S = state[0].transpose(-1, -2) if self.v_first else state[0]
        o[0].transpose(0, 1).baddbmm_(queries[0].transpose(0, 1), S.to(o.dtype))


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
        From torch.distributed, where another rank does not make the exchange within the group's time-out.

    Notes
    -----
    Time, in passes of the chunk operator over a rank's tokens: the first rank 1. Each other rank 2 before the exchange, and after
    it 1, or with one sequence about half of that. `gdn.distributed.split_tokens` says how to part a sequence so that all finish
    together. The last rank makes one pass after the exchange alone, where there are several sequences and it gets the states.

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
    v, rank, last = part.given.v, ranks.rank, ranks.size - 1
    whole, own = part.buffer()
    own.lengths.copy_(part.has_tokens())
    is_corrected = part.sizes.num_sequences == 1
    ends_here = rank == final == last and not is_corrected  # the last pass leaves the final states, and nobody reads a summary
    o = queries = None
    if rank == 0:
        part.slots.start(initial_state, own.h)
        own.P.zero_()  # nobody reads it
        o = part.run(own.h, v, out)
    elif ends_here:
        own.h.zero_()
        own.P.zero_()
    else:
        o = part.run(own.h.zero_(), v, out)
        queries = part.transition(own.P)
    summaries = part.views(ranks.gather(whole))
    has_tokens = summaries.lengths.any(0)

    state = summaries.h[0]  # after the first rank's part
    for before in range(1, rank):
        state = part.advance(state, summaries, before)
    if rank > 0 and is_corrected:
        assert o is not None and queries is not None
        part.correct(o, queries, state)
    elif rank > 0:
        started = state.clone()
        o = part.run(started, v, out)
        if ends_here:
            return o, started, has_tokens
    assert o is not None
    if final is not None and final != rank:
        return o, None, has_tokens
    for after in range(max(rank, 1), ranks.size):
        state = part.advance(state, summaries, after)
    return o, state.clone() if ranks.size == 1 else state, has_tokens  # without sums it is part of the received tensor
