"""Public operator `gated_delta_rule`: a step's prefill and decode rows in one call, dealt to the two forms by length.

It has no kernel of its own: it calls `chunk_gated_delta_rule` and `fused_recurrent_gated_delta_rule` on contiguous parts of the
rows, after all checks of the whole call, and the chunk form first, which serves less than the recurrent form.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdn import runtime
from gdn.core import check, values
from gdn.core.call import NEW, always, check_memory, operator, reads_values
from gdn.core.check import bad_value
from gdn.core.constants import row_indices
from gdn.core.modes import has_memory, is_tracing
from gdn.core.ordered import ordered
from gdn.ops.delta_rule import checks, reference
from gdn.ops.delta_rule.checks import Sizes, States, Tokens
from gdn.ops.delta_rule.chunk import chunk_gated_delta_rule
from gdn.ops.delta_rule.crossing import recurrent_rows
from gdn.ops.delta_rule.problem import tells, tells_equal
from gdn.ops.delta_rule.recurrent import fused_recurrent_gated_delta_rule
from gdn.runtime import env
from gdn.runtime.registry import Backend

State = Tensor | None


def _in_place(arguments: dict[str, Any]) -> bool:
    indices = (arguments["state_indices"], arguments["ssm_state_indices"])
    return any(one is not None for one in indices) or arguments["inplace_final_state"] is True


def _returns(arguments: dict[str, Any]) -> tuple[str | None, str | None]:
    o = "out" if arguments["out"] is not None else NEW
    if not arguments["output_final_state"]:
        return o, None
    if _in_place(arguments):
        return o, "initial_state"
    return o, (None if arguments["disable_state_update"] else NEW)


@operator(
    reference.gated_delta_rule, writes={"out": always, "initial_state": _in_place}, returns=_returns, contiguous=("q", "k", "v")
)
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    *,
    cu_seqlens: Tensor,
    lengths_host: Sequence[int] | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    inplace_final_state: bool | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    state_indices: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    final_state_indices: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    parent_token: Tensor | None = None,
    disable_state_update: bool = False,
    rounding_seed: Tensor | None = None,
    null_slot: int = -1,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule for a whole step: prefill and decode rows, packed, on one state pool.

    The leading sequences of at most 8 tokens (`RECURRENT_TOKENS`) take the recurrent form (decode), all from the first longer
    one on the chunk form. So decode rows come first, as engines order them; any other order gives the same results, with
    short rows after a long one in the chunk form, which is slower for them. Nothing is copied but where `has_initial_state` says
    so, and no value is read back to the host. With ``GDN_BATCH_INVARIANT=1`` all rows take the chunk form, whose range of float16
    is that of `chunk_gated_delta_rule`.

    Parameters
    ----------
    q, k, v, g, beta, scale : Tensor [1, T, heads, K or V], Tensor [1, T, HS] or None, float or None
        Tokens of all sequences, packed, gates and factor, as for `chunk_gated_delta_rule`.
    cu_seqlens : Tensor [N + 1]
        Token offsets on the device, as for `chunk_gated_delta_rule`.
    lengths_host : tuple or list of int, optional
        Tokens of each of the N sequences, on the host: the differences of `cu_seqlens`. None = all rows take the chunk form,
        since finding their lengths would wait for the device.
    initial_state, output_final_state, inplace_final_state : Tensor or None, bool, bool or None
        Pool, or states [N, HS, K, V], as for the two forms. Without indices, inplace_final_state=True replaces `initial_state`,
        which must then meet the rules of a pool; else final states are a new float32 tensor.
    use_qk_l2norm_in_kernel, state_v_first, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel : bool or Tensor
        As for `chunk_gated_delta_rule`.
    state_indices, ssm_state_indices : Tensor [>= N] or [>= N, columns], optional
        Slots; two names of one argument, of which one is given. 2-D ones are those of speculative decoding: all rows then take
        the recurrent form, whatever their lengths, with its rules (and its name for the argument in errors about slots).
    has_initial_state : Tensor [>= N] of bool, optional
        False = that sequence starts from zero. Only the chunk form knows it: with a pool, the short leading rows are computed by
        both forms, each with the other's rows as padding, and added up (a copy of their rows of o). Refused with 2-D indices.
    final_state_indices : Tensor, optional
        As for the two forms.
    checkpoint_offsets, checkpoint_slots : Tensor [>= N, C], optional
        As for `chunk_gated_delta_rule`. Refused with 2-D indices and with `disable_state_update`.
    num_accepted_tokens, parent_token : Tensor, optional
        As for `fused_recurrent_gated_delta_rule`, with 2-D indices only.
    disable_state_update : bool
        True writes no state.
    rounding_seed : Tensor [1] of int64, optional
        Seed of stochastic rounding of the states that the recurrent form stores; those of the chunk form are rounded to nearest.
    null_slot, out : int, Tensor [1, T, HS, V] or None
        Largest slot index that means padding, and tensor to write o into, as for `chunk_gated_delta_rule`.
    backend : {"tilelang", "cute", "reference"}, optional
        Implementation of both forms; ValueError where one of them cannot run. None = chosen for each by ``GDN_BACKEND`` and the
        tables, see `gdn.explain`.

    Returns
    -------
    o : Tensor [1, T, HS, V]
        Output in the dtype of `v`; `out` itself where it is given.
    final_state : Tensor or None
        `initial_state` itself where it is updated in place, else a new float32 tensor [N, HS, K, V] (or V first). None without
        `output_final_state`, or where no state was to be written and none is in place.

    Raises
    ------
    TypeError, ValueError
        Named after the argument, before anything is launched or written; slots as for `chunk_gated_delta_rule`. That
        `lengths_host` agrees with `cu_seqlens` is checked on the CPU always, on a GPU with ``GDN_VALIDATE=1`` only.

    References
    ----------
    .. [1] S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", arXiv:2412.06464.

    Examples
    --------
    >>> import torch, gdn
    >>> q, k = torch.randn(2, 1, 72, 2, 64).unbind()  # two decode rows and a prompt of 70 tokens
    >>> v, pool = torch.randn(1, 72, 4, 64), torch.zeros(8, 4, 64, 64)
    >>> o, state = gdn.gated_delta_rule(
    ...     q, k, v, cu_seqlens=torch.tensor([0, 1, 2, 72]), lengths_host=[1, 1, 70], initial_state=pool,
    ...     state_indices=torch.tensor([5, 2, 7]), use_qk_l2norm_in_kernel=True, output_final_state=True,
    ... )
    >>> o.shape, state is pool
    (torch.Size([1, 72, 4, 64]), True)
    """
    indices_name = "state_indices" if ssm_state_indices is None else "ssm_state_indices"
    if state_indices is not None and ssm_state_indices is not None:
        bad_value("ssm_state_indices", "None with state_indices (two names of one argument)", "a tensor")
    indices = state_indices if ssm_state_indices is None else ssm_state_indices
    tokens = Tokens(q, k, v, g, beta, cu_seqlens, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel)
    sizes = checks.check_tokens(tokens, null_slot, out)
    device, count = q.device, sizes.num_sequences
    if indices is not None:
        check.indices(indices_name, indices, count, device, ranks=(1, 2))
    _check_lengths(lengths_host, cu_seqlens, sizes)
    options: dict[str, Any] = {
        "scale": scale, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "state_v_first": state_v_first,
        "use_gate_in_kernel": use_gate_in_kernel, "A_log": A_log, "dt_bias": dt_bias,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
    }  # fmt: skip

    if indices is not None and indices.dim() == 2:
        check.absent({"has_initial_state": has_initial_state}, f"with 2-D {indices_name}")
        check.absent({"checkpoint_offsets": checkpoint_offsets, "checkpoint_slots": checkpoint_slots}, f"with 2-D {indices_name}")
        with ordered(backend, "gated_delta_rule") as backend:
            return fused_recurrent_gated_delta_rule(
                q, k, v, g, beta, initial_state=initial_state, inplace_final_state=inplace_final_state, cu_seqlens=cu_seqlens,
                ssm_state_indices=indices, num_accepted_tokens=num_accepted_tokens, output_final_state=output_final_state,
                final_state_indices=final_state_indices, disable_state_update=disable_state_update, parent_token=parent_token,
                rounding_seed=rounding_seed, null_slot=null_slot, out=out, backend=backend, **options,
            )  # fmt: skip

    check.absent({"num_accepted_tokens": num_accepted_tokens, "parent_token": parent_token}, "without 2-D state_indices")
    check.optional("rounding_seed", rounding_seed, shape=(1,), dtypes=(torch.int64,), device=device)
    if indices is not None and inplace_final_state is False:
        bad_value("inplace_final_state", f"None or True with {indices_name}", False)
    is_in_place = indices is not None or inplace_final_state is True
    if indices is None and inplace_final_state:
        checks.check_pool("initial_state", initial_state, sizes, state_v_first, q, num_slots=count)
        indices, null_slot = row_indices(count, device), -1
        if final_state_indices is not None:
            bad_value("final_state_indices", "None without state_indices", "a tensor")
    if disable_state_update:
        unused = {"checkpoint_offsets": checkpoint_offsets, "checkpoint_slots": checkpoint_slots}
        check.absent(unused, "with disable_state_update")
    states = States(
        initial_state, indices, has_initial_state, final_state_indices, checkpoint_offsets, checkpoint_slots, state_v_first,
        null_slot,
    )  # fmt: skip
    checks.check_states(states, sizes, q, indices_name)
    if disable_state_update and indices is not None:
        states = states._replace(final_state_indices=torch.full((count,), null_slot, dtype=indices.dtype, device=device))
    if reads_values(device):
        checks.check_state_values(states, tokens, sizes, indices_name)
    check_memory()

    o = out if out is not None else torch.empty(1, sizes.length, sizes.num_heads, sizes.head_v_dim, dtype=v.dtype, device=device)
    keeps_state = output_final_state and not (disable_state_update and not is_in_place)
    if is_tracing():
        new = checks.new_state(sizes, q, state_v_first) if keeps_state and not is_in_place else None
        return o, (initial_state if keeps_state and is_in_place else new)
    with ordered(backend, "gated_delta_rule") as backend:
        step = _Step(tokens, sizes, options | {"backend": backend}, rounding_seed, o, max(lengths_host or (0,)) or None)
        # Which rows lead depends on the batch, and the forms differ in rounding.
        dealt = lengths_host if lengths_host is not None and not env.current().batch_invariant else ()
        lead = recurrent_rows(dealt)
        lead_tokens = sum(dealt[:lead])
        if lead_tokens == 0 and not is_in_place:
            final = step.chunk(states, output_final_state=keeps_state)
            return o, (final if keeps_state else None)
        if not is_in_place:
            states = _own_pool(states, sizes, q)
        step.run(states, lead, lead_tokens)
        return o, (states.initial_state if keeps_state else None)


def _check_lengths(lengths: Sequence[int] | None, cu_seqlens: Tensor, sizes: Sizes) -> None:
    """Checks lengths_host; its values against cu_seqlens where values are checked."""
    if lengths is None:
        return
    if len(lengths) != sizes.num_sequences:
        bad_value("lengths_host", f"{sizes.num_sequences} lengths, one per sequence of cu_seqlens", f"{len(lengths)}")
    if any(length < 0 for length in lengths) or sum(lengths) > sizes.num_tokens:
        bad_value("lengths_host", f"numbers >= 0 that sum to at most the {sizes.num_tokens} tokens", tuple(lengths))
    if not reads_values(cu_seqlens.device):
        return
    bounds = values.token_bounds("cu_seqlens", cu_seqlens, 1, sizes.length, cu_seqlens.device)
    if bounds.diff().tolist() != list(lengths):
        bad_value("lengths_host", f"the differences of cu_seqlens {cu_seqlens.tolist()}", tuple(lengths))


def _own_pool(states: States, sizes: Sizes, q: Tensor) -> States:
    """States without a pool as a new one, with slot n for sequence n: both forms update it in place."""
    pool = checks.new_state(sizes, q, states.state_v_first)
    checks.pass_through(states.initial_state, states.has_initial_state, pool)
    indices = row_indices(sizes.num_sequences, q.device)
    return States(pool, indices, None, None, None, None, states.state_v_first, -1)


@dataclass
class _Step:
    """The two forms on contiguous parts of a checked call."""

    tokens: Tokens
    sizes: Sizes
    options: dict[str, Any]  # keyword arguments of both forms
    rounding_seed: Tensor | None
    o: Tensor  # [1, T, HS, V], written
    longest: int | None  # tokens of the longest sequence, where the host knows them

    def run(self, states: States, lead: int, lead_tokens: int) -> None:
        """Computes all rows on a pool. lead: sequences that take the recurrent form, with lead_tokens tokens."""
        has_both = lead_tokens > 0 and (lead < self.sizes.num_sequences or states.has_initial_state is not None)
        if not has_both:
            _ = self.recurrent(states, self.o) if lead_tokens else self.chunk(states)
            return
        if has_memory() and _is_ordered(self.options["backend"]):
            with runtime.explaining():  # an order that a form must refuse, before the other one writes
                self._run_both(states, lead, lead_tokens)
        self._run_both(states, lead, lead_tokens)

    def _run_both(self, states: States, lead: int, lead_tokens: int) -> None:
        own = _rows(states, 0, lead)
        if states.has_initial_state is None:
            self.chunk(_rows(states, lead, None), lead, lead_tokens)
            self.recurrent(own, self.o[:, :lead_tokens], lead, lead_tokens)
            return
        assert states.state_indices is not None
        # Short rows that start from zero go through the chunk form, the others through the recurrent one. What is padding for a
        # form gets zeros from it, so the sum has the rows of both.
        starts_from_state = states.has_initial_state[:lead]
        slots = states.state_indices[: self.sizes.num_sequences].clone()
        slots[:lead].masked_fill_(starts_from_state, states.null_slot)
        self.chunk(states._replace(state_indices=slots))
        assert own.state_indices is not None
        slots = own.state_indices.masked_fill(~starts_from_state, states.null_slot)
        o = self.recurrent(own._replace(state_indices=slots), None, lead, lead_tokens)
        if has_memory():
            self.o[:, :lead_tokens] += o

    def chunk(self, states: States, row: int = 0, token: int = 0, output_final_state: bool = False) -> State:
        """The chunk form from a row and its first token on; returns the final state."""
        q, k, v, g, beta, cu_seqlens = self._from(slice(token, None), slice(row, None), token)
        longest, sizes = self.longest, (self.sizes.num_sequences - row, self.sizes.num_tokens - token)
        if longest is not None and not (tells(longest, *sizes) or tells_equal(longest, *sizes)):
            longest = None  # a call is then like others of its sizes
        return chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=states.initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
            state_indices=states.state_indices, has_initial_state=states.has_initial_state,
            final_state_indices=states.final_state_indices, checkpoint_offsets=states.checkpoint_offsets,
            checkpoint_slots=states.checkpoint_slots, max_seqlen=longest, null_slot=states.null_slot,
            out=self.o[:, token:] if token else self.o, **self.options,
        )[1]  # fmt: skip

    def recurrent(self, states: States, out: Tensor | None, rows: int | None = None, end: int | None = None) -> Tensor:
        """The recurrent form on the first rows, up to token `end`; returns o."""
        last = None if rows is None else rows + 1
        q, k, v, g, beta, cu_seqlens = self._from(slice(end), slice(last), 0)
        return fused_recurrent_gated_delta_rule(
            q, k, v, g, beta, initial_state=states.initial_state, cu_seqlens=cu_seqlens, ssm_state_indices=states.state_indices,
            output_final_state=False, final_state_indices=states.final_state_indices, rounding_seed=self.rounding_seed,
            null_slot=states.null_slot, out=out, **self.options,
        )[0]  # fmt: skip

    def _from(self, tokens: slice, offsets: slice, first: int) -> tuple[Any, ...]:
        """Views of the tokens of a part, and its offsets, which start at 0."""
        given = self.tokens
        q, k, v, g, beta = (None if x is None else x[:, tokens] for x in (given.q, given.k, given.v, given.g, given.beta))
        assert given.cu_seqlens is not None
        cu_seqlens = given.cu_seqlens[offsets]
        return q, k, v, g, beta, (cu_seqlens - first if first else cu_seqlens)


def _rows(states: States, first: int, last: int | None) -> States:
    """The states of some sequences."""
    part = slice(first, last)
    fields = ("state_indices", "has_initial_state", "final_state_indices", "checkpoint_offsets", "checkpoint_slots")
    sliced: dict[str, Any] = {name: x if x is None else x[part] for name in fields for x in [getattr(states, name)]}
    return states._replace(**sliced)


def _is_ordered(backend: Backend | None) -> bool:
    """Whether a form may have to refuse: a backend is ordered, or a missing table entry is an error."""
    switches = env.current()
    orders = (switches.backend_of.get(op, "auto") for op in ("chunk", "recurrent"))
    return backend is not None or switches.tuned == "strict" or any(order != "auto" for order in orders)
