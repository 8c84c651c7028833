"""`chunk_gated_delta_rule` over a process group: its arguments, and the states that it leaves."""

from typing import Any

import torch
from torch import Tensor

import gdn
from gdn.core import check
from gdn.core.call import operator_of, reads_values, validates
from gdn.core.check import bad_value
from gdn.distributed import composition
from gdn.distributed.composition import Ends, Part, compute
from gdn.distributed.group import Ranks, without_modes
from gdn.distributed.known import Known
from gdn.distributed.slots import live
from gdn.ops.delta_rule import checks
from gdn.runtime.registry import Backend

# Flags of every pass of the chunk operator that are this rank's as they are.
_OF_A_PASS = (
    "scale", "use_qk_l2norm_in_kernel", "state_v_first", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "backend",
)  # fmt: skip

_known = Known()  # parts of calls


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
    backend: Backend | None = None,
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
        Slots in this rank's pool. A sequence is padding on all ranks or on none, and they are given on all or on none.
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
        Named after the argument, before any part is exchanged or anything written. Where values are checked (on the CPU, and with
        ``GDN_VALIDATE=1``, on all ranks or on none) also where the ranks' calls do not fit together, and on all ranks where one
        refuses its own. Elsewhere the others wait for such a rank. A state that leaves float16's range with the part of other
        ranks is found after the exchange, by its rank alone, when states may be written.
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
    ranks = Ranks(group)
    given = checks.Tokens(q, k, v, g, beta, cu_seqlens, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel)
    states = checks.States(
        initial_state, state_indices, has_initial_state, final_state_indices, checkpoint_offsets, checkpoint_slots, state_v_first,
        null_slot,
    )  # fmt: skip
    tensors = (
        q, k, v, cu_seqlens, g, beta, A_log, dt_bias, initial_state, state_indices, has_initial_state, final_state_indices,
        checkpoint_offsets, checkpoint_slots, out,
    )  # fmt: skip
    flags = (
        scale, output_final_state, use_qk_l2norm_in_kernel, head_first, state_v_first, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, null_slot, backend, final_rank, ranks.rank, ranks.size, composition.LEAST_SEGMENT,
    )  # fmt: skip
    part = _known.find(tensors, flags)
    if part is None:
        names = operator_of(gdn.chunk_gated_delta_rule).kinds
        # None for what this function does not have.
        arguments = dict.fromkeys(names) | {name: value for name, value in locals().items() if name in names}
        with ranks.refusing(q, k, v):
            final = ranks.number("final_rank", final_rank)
            part = _checked(arguments, ranks, final)
        ranks.agree(q.device, _shared(part, given) | {"final_rank": -1 if final is None else final})
        if ranks.size > 1 and reads_values(q.device):
            is_live = live(state_indices, null_slot, part.sizes.num_sequences, q.device)
            ranks.agree_on_padding("state_indices", is_live)
        pool = None if state_indices is None else initial_state
        _known.keep(tensors, flags, part, written=[pool, out], aligned=[pool])
    o, last = compute(part, ranks, given, states, out)
    if not part.gets_final:
        return o, None
    return o, last if state_indices is None else initial_state if output_final_state else None


def _checked(arguments: dict[str, Any], ranks: Ranks, final: int | None) -> Part:
    """This rank's part, after every check that the operators called on it would make. Nothing has been sent or written."""
    operator = operator_of(gdn.chunk_gated_delta_rule)
    given = operator.check_types(arguments)
    if given["head_first"]:
        bad_value("head_first", "False (tokens before heads: [B, T, H, D])", True)
    check.absent({name: given[name] for name in ("checkpoint_offsets", "checkpoint_slots")}, "with a process group")
    names = ("q", "k", "v", "g", "beta", "cu_seqlens", "use_gate_in_kernel", "A_log", "dt_bias", "use_beta_sigmoid_in_kernel")
    tokens = checks.Tokens(*(given[name] for name in names))
    sizes = checks.check_tokens(tokens, given["null_slot"], given["out"])
    states = checks.States(**{name: given[name] for name in checks.States._fields})
    checks.check_states(states, sizes, tokens.q, has_offsets=tokens.cu_seqlens is not None)
    if reads_values(tokens.q.device):
        checks.check_state_values(states, tokens, sizes)
        if tokens.q.dtype == torch.float16 and validates(tokens.q.device):
            # Of this rank's tokens alone: the others' part of a state comes later, and this rank then refuses it alone.
            own = states if ranks.rank == 0 else states._replace(initial_state=None)
            checks.check_float16_range(own, tokens, given["scale"], given["use_qk_l2norm_in_kernel"])
    operator.check_places(arguments, given)
    ends = Ends(ranks.rank, ranks.size, final, given["output_final_state"])
    part = Part(sizes, tokens, states, {name: given[name] for name in _OF_A_PASS}, ends)
    part.prepare(tokens, states)
    return part


def _shared(part: Part, given: checks.Tokens) -> dict[str, int | float | torch.dtype]:
    """Values that must be the same on all ranks: shapes of the exchange, and what the results depend on."""
    sizes, options = part.sizes, part.options
    scale = options["scale"]
    return {
        "sequences": sizes.num_sequences, "state heads": sizes.num_heads, "K": sizes.head_k_dim, "V": sizes.head_v_dim,
        "q heads": sizes.num_q_heads, "k heads": sizes.num_k_heads, "v heads": sizes.num_v_heads, "dtype": given.q.dtype,
        "presence of g": given.g is not None, "presence of beta": given.beta is not None,
        "presence of dt_bias": given.dt_bias is not None, "scale": sizes.head_k_dim**-0.5 if scale is None else scale,
        **{name: options[name] for name in _OF_A_PASS if name.startswith("use_")}, "state_v_first": part.v_first,
    }  # fmt: skip
