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
from gdn.core.check import bad_value, dtype_name
from gdn.core.tensors import ALIGNMENT, constant, dtypes_of
from gdn.device import H100
from gdn.distributed.group import Ranks
from gdn.ops.context.kernel import Kernel
from gdn.ops.context.problem import (
    ContextPartsParams,
    ContextPartsProblem,
    ContextStartParams,
    ContextStartProblem,
    ContextTotalParams,
    ContextTotalProblem,
    message_numbers,
)
from gdn.ops.delta_rule import checks, chunk, chunk_summary
from gdn.ops.delta_rule.chunk_summary import serves

LEAST_SEGMENT = 4096  # tokens; with fewer, composing costs more than it gains
_MOST_SEGMENTS = 8


class Ends(NamedTuple):
    """A rank's number in its group, and which ranks keep the final states."""

    rank: int
    size: int
    final: int | None  # rank that gets the final states; None = all
    output_final_state: bool

    @property
    def ends_here(self) -> bool:
        """Whether the pass leaves the final states, and nobody reads this rank's summary."""
        return self.rank == self.final == self.size - 1


class Part:
    """A rank's part of every sequence, as S segments: what follows from the shapes, dtypes and flags of a call.

    It holds no tensor of the call, so it serves every call like it.
    """

    def __init__(
        self, sizes: checks.Sizes, given: checks.Tokens, states: checks.States, options: dict[str, Any], ends: Ends
    ) -> None:
        self.sizes, self.options, self.ends = sizes, options, ends
        self.v_first = states.state_v_first
        self.null_slot = states.null_slot
        self.segments = num_segments(sizes)
        self.device = given.q.device
        self.dtype = torch.float64 if given.q.dtype == torch.float64 else torch.float32
        self.rows = sizes.num_sequences * self.segments
        self.state_shape = sizes.state_shape(self.v_first)
        self.is_pooled = states.state_indices is not None
        ends_here = ends.ends_here
        self.has_summaries = not ends_here or self.segments > 1
        self.gets_final = ends.final in (None, ends.rank) and (self.is_pooled or ends.output_final_state)
        self.composes_final = self.gets_final and not ends_here

    def prepare(self, given: checks.Tokens, states: checks.States) -> None:
        """Chooses and compiles the kernels of the passes: ValueError where the backend that was asked for cannot run them.

        All ranks choose alike, whatever they will run: which backends serve a call does not depend on its numbers of tokens.
        """
        sizes, options = replace(self.sizes, num_sequences=self.rows), self.options
        device, norm, backend = given.q.device, options["use_qk_l2norm_in_kernel"], options["backend"]
        size = self.dtype.itemsize * sizes.num_heads * sizes.head_k_dim
        if size * sizes.head_v_dim % ALIGNMENT or size * sizes.head_k_dim % ALIGNMENT:
            got = f"HS={sizes.num_heads}, K={sizes.head_k_dim}, V={sizes.head_v_dim}"
            bad_value("q, k, v", f"heads whose states and K x K matrices are multiples of {ALIGNMENT} bytes together", got)
        like, slots = given.q.new_empty(0, dtype=self.dtype), given.q.new_empty(0, dtype=torch.int32)
        private = checks.States(like, slots, None, None, None, None, self.v_first, -1)
        runtime.prepare(chunk.problem_of(sizes, given, private, norm, True), device, backend)
        self.by_kernel = serves(self.sizes, given, norm, backend)
        if self.by_kernel:
            runtime.prepare(chunk_summary.problem_of(sizes, given, norm, self.v_first), device, backend)
        else:
            square = replace(sizes, head_v_dim=sizes.head_k_dim)
            runtime.prepare(chunk.problem_of(square, given, private, norm, True), device, backend)
        self._prepare_own(given, states)

    def _prepare_own(self, given: checks.Tokens, states: checks.States) -> None:
        """The kernels between the passes."""
        sizes, ends, count, pool = self.sizes, self.ends, self.sizes.num_sequences, states.initial_state
        dtype, backend = dtype_name(self.dtype), self.options["backend"]
        is_first, is_cut = ends.rank == 0, self.segments > 1
        sized: dict[str, Any] = {"num_sequences": count, "num_segments": self.segments}
        indices: dict[str, Any] = dtypes_of(index=states.state_indices)
        dims: dict[str, Any] = {
            "num_state_heads": sizes.num_heads, "head_k_dim": sizes.head_k_dim, "head_v_dim": sizes.head_v_dim,
            "sum_dtype": dtype, "state_v_first": self.v_first, **sized,
        }  # fmt: skip

        def kernel(problem: Any) -> Kernel:
            return Kernel(problem, self.device, backend)

        offsets: dict[str, Any] = dtypes_of(cu_seqlens=given.cu_seqlens)
        self.find_parts = kernel(ContextPartsProblem(sum_dtype=dtype, **offsets, **indices, has_segments=is_cut, **sized))
        own: dict[str, Any] = {"state_dtype": None, "index_dtype": None, "has_mask": False}
        if is_first and pool is not None:
            own = {"state_dtype": dtype_name(pool.dtype), **indices, "has_mask": states.has_initial_state is not None}
        total = ContextTotalProblem(**dims, is_first=is_first, has_summaries=self.has_summaries, **own)
        self.make_total = kernel(total) if is_first or not ends.ends_here else None
        nothing: dict[str, Any] = {"final_dtype": None, "index_dtype": None, "final_index_dtype": None}
        final = nothing | {"final_dtype": dtype}
        if self.is_pooled and pool is not None:
            final = {"final_dtype": dtype_name(pool.dtype), **indices, **dtypes_of(final_index=states.final_state_indices)}
        dims["num_ranks"] = ends.size
        composed = final if self.composes_final else nothing
        start = ContextStartProblem(
            **dims, has_segments=not is_first, is_cut=is_cut and not is_first, ends_here=False, **composed
        )
        self.compose = kernel(start) if not is_first or self.composes_final else None
        left = ContextStartProblem(**dims, has_segments=False, is_cut=False, ends_here=True, **final)
        self.store = kernel(left) if ends.ends_here and self.is_pooled else None
        _, self.flags_at, numbers = message_numbers(total)
        self.numbers = -(-numbers // ALIGNMENT) * ALIGNMENT  # those of the next rank are aligned as these are

    def run(self, given: checks.Tokens, states: Tensor, rows: Tensor, out: Tensor | None, v: Tensor | None = None) -> Tensor:
        """A pass of the chunk operator; states [N S, ...] are the start states, and then the final ones."""
        o, _ = gdn.chunk_gated_delta_rule(
            given.q, given.k, given.v if v is None else v, given.g, given.beta, initial_state=states, state_indices=rows,
            cu_seqlens=given.cu_seqlens, out=out, A_log=given.A_log, dt_bias=given.dt_bias, **self.options,
        )  # fmt: skip
        return o

    def summaries(self, given: checks.Tokens, rows: Tensor) -> tuple[Tensor, Tensor]:
        """h and P of every segment, [N S, ...]."""
        if self.by_kernel:
            options = self.options
            h, P = gdn.chunk_summary(
                given.q, given.k, given.v, given.g, given.beta, options["use_qk_l2norm_in_kernel"], given.cu_seqlens,
                state_v_first=self.v_first, use_gate_in_kernel=given.use_gate, A_log=given.A_log, dt_bias=given.dt_bias,
                use_beta_sigmoid_in_kernel=given.use_beta_sigmoid, backend=options["backend"],
            )  # fmt: skip
            return h, P
        K = self.sizes.head_k_dim
        h = self.states().zero_()
        self.run(given, h, rows, None)
        P = h.new_zeros(self.rows, self.sizes.num_heads, K, K)
        P.diagonal(dim1=-2, dim2=-1).fill_(1)
        self.run(given, P, rows, None, given.v.new_zeros(*given.v.shape[:-1], K))
        return h, P

    def states(self, rows: int | None = None) -> Tensor:
        """An empty tensor of states [rows, HS, K, V] (or V first). None = a row for each segment, N S."""
        count = self.rows if rows is None else rows
        return torch.empty(count, *self.state_shape, dtype=self.dtype, device=self.device)

    def parts(self, given: checks.Tokens, states: checks.States, message: Tensor) -> tuple[checks.Tokens, Tensor]:
        """The tokens with the offsets of the segments, and rows [N S] of their states; also the message's flags."""
        offsets = None
        rows = torch.empty(self.rows, dtype=torch.int32, device=self.device)
        if self.segments > 1:
            dtype = torch.int32 if given.cu_seqlens is None else given.cu_seqlens.dtype
            offsets = torch.empty(self.rows + 1, dtype=dtype, device=self.device)
        if self.rows:
            slots, length = states.state_indices, self.sizes.length
            self.find_parts(
                ContextPartsParams(
                    given.cu_seqlens, slots, offsets, rows, message, self.flags_at, length, self.segments, self.null_slot
                )
            )
        return given if offsets is None else given._replace(cu_seqlens=offsets), rows


def num_segments(sizes: checks.Sizes) -> int:
    """Segments of a part: as many as run side by side, with a block for every 64 V columns of a head.

    From sizes alone: the lengths are on the device.
    """
    if sizes.batch > 1 or not sizes.num_tokens or not sizes.num_sequences:
        return 1
    blocks = sizes.num_sequences * sizes.num_heads * max(sizes.head_v_dim // 64, 1)
    return max(min(H100.num_sms // blocks, sizes.num_tokens // (sizes.num_sequences * LEAST_SEGMENT), _MOST_SEGMENTS), 1)


def compute(
    part: Part, ranks: Ranks, given: checks.Tokens, pool: checks.States, out: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """o, and the final states [N, ...] where this rank gets them and there is no pool; in a pool they are stored."""
    rank, count, segments, null_slot = part.ends.rank, part.sizes.num_sequences, part.segments, part.null_slot
    message = torch.empty(part.numbers, dtype=part.dtype, device=part.device)
    states = part.states()
    given, rows = part.parts(given, pool, message)
    h, P = part.summaries(given, rows) if part.has_summaries else (None, None)
    if part.make_total is not None and count:
        initial = indices = mask = None
        if rank == 0 and pool.initial_state is not None:
            initial = pool.initial_state if part.is_pooled else constant(pool.initial_state)
            indices, mask = pool.state_indices, pool.has_initial_state
        made = states if rank == 0 else None
        part.make_total(ContextTotalParams(h, P, initial, indices, mask, made, message, count, segments, null_slot))
    messages = ranks.gather(message)

    final: Tensor | None = None
    if part.gets_final:
        final = pool.initial_state if part.is_pooled else part.states(count) if part.composes_final else None
    slots, final_slots = pool.state_indices, pool.final_state_indices
    if part.compose is not None and count:
        if segments == 1:
            h = P = None
        into, slots_of, final_of = (final, slots, final_slots) if part.composes_final else (None, None, None)
        made = states if rank > 0 else None
        own = (h, P) if rank > 0 else (None, None)
        part.compose(ContextStartParams(messages, *own, made, into, slots_of, final_of, rank, count, segments, null_slot))
    o = part.run(given, states, rows, out)
    if part.store is not None and count:
        left = ContextStartParams(messages, None, None, states, final, slots, final_slots, rank, count, segments, null_slot)
        part.store(left)
    if part.is_pooled or not part.gets_final:
        return o, None
    return o, states.unflatten(0, (count, segments))[:, -1] if part.ends.ends_here else final
