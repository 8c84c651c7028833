"""Public operators around replay decode: `fold_states`, `accept_draft_tree` and the choice of a ring, `ring_shape`."""

import torch
from torch import Tensor

from gdn.core import check, values
from gdn.core.call import always, launch, make, operator, prepare, reads_values
from gdn.core.check import FLOAT_DTYPES, INDEX_DTYPES, bad_type, bad_value, is_less
from gdn.core.kinds import kind_of
from gdn.core.modes import address, is_empty
from gdn.core.tensors import ALIGNMENT, as_int32, common_dtype, dtypes_of, given_of, is_aligned
from gdn.ops.delta_rule import checks
from gdn.ops.delta_rule import reference_replay as reference
from gdn.ops.delta_rule.checks_replay import MOST_COMMITTED, check_computed, check_ring, check_ring_layout
from gdn.ops.delta_rule.problem import (
    AcceptDraftTreeParams,
    AcceptDraftTreeProblem,
    FoldStatesParams,
    FoldStatesProblem,
    entry_width,
    most_tokens,
    ring_choice,
)
from gdn.runtime.registry import Backend


@operator(
    reference.fold_states,
    writes={"ssm_state": always, "state_tokens": always},
    returns=lambda _: (),
    varies=("state_indices", "num_computed_tokens"),
)
def fold_states(
    ssm_state: Tensor,
    state_indices: Tensor,
    ring: Tensor,
    state_tokens: Tensor,
    num_computed_tokens: Tensor,
    *,
    num_k_heads: int,
    fold_every: int,
    fold_phase: int = 0,
    num_accepted_tokens: Tensor | None = None,
    final_state_indices: Tensor | None = None,
    rounding_seed: Tensor | None = None,
    state_v_first: bool = False,
    null_slot: int = -1,
    backend: Backend | None = None,
) -> None:
    """Replay decode: bring states up to date, before anything but a decode call reads them.

    A decode call with a ring leaves the newest tokens of a sequence as entries of the ring. This puts the entries of all
    committed tokens into the state, for each of N sequences, and sets state_tokens[slot] = num_computed_tokens[n], which
    empties the ring:

        S = exp(sum of all g_j) S + sum_j exp(sum of g_m over m > j) k_j u_j^T

    Parameters
    ----------
    ssm_state : Tensor [slots, HS, K, V] or [layers, slots, HS, K, V]
        State pool, or those of all layers, float32 or bfloat16 (V before K with `state_v_first`), updated in place: inner three
        dimensions contiguous, other strides and address multiples of 16 bytes.
    state_indices : Tensor [N]
        Slots, int32 or int64, different ones. A slot <= `null_slot` is padding.
    ring : Tensor [ring slots, R, W] or [layers, ring slots, R, W]
        Entries of the newest tokens, as in `fused_recurrent_gated_delta_rule`; only read. A slot without a ring has none.
    state_tokens : Tensor [slots] of int32
        Tokens that each state contained when something other than a decode call last wrote it; one count for all layers. Written
        after all folds.
    num_computed_tokens : Tensor [N]
        Committed tokens of each sequence, int32 or int64. Fewer than state_tokens of its slot: padding, on the CPU and with
        ``GDN_VALIDATE=1`` an error.
    num_k_heads : int
        Key heads of an entry.
    fold_every, fold_phase : int, int
        As in the decode calls; fold_phase is that of layer 0, and layer l has (fold_phase + l) mod fold_every.
    num_accepted_tokens : Tensor [N], optional
        Accepted tokens of each sequence's last decode call, int32 or int64; None = 1. Outside of 1 to (R + 1 - fold_every) // 2:
        padding, on the CPU and with ``GDN_VALIDATE=1`` an error.
    final_state_indices : Tensor [N], optional
        Slots that get the folded states (copies where a sequence has no entries) and the counts instead. The source slot, its
        ring and its count stay as they are. A null one is not written.
    rounding_seed : Tensor [1] of int64, optional
        Seed of the stochastic rounding of a bfloat16 pool, as in `fused_recurrent_gated_delta_rule`.
    state_v_first, null_slot : bool, int
        Layout of a state, and largest slot index that means padding.
    backend : {"tilelang", "cute", "reference"}, optional
        Implementation to run; ValueError where it cannot. None = chosen by ``GDN_BACKEND`` and the tables, see `gdn.explain`.

    Raises
    ------
    TypeError, ValueError
        Named after the argument, before anything is launched or written; slots as for `chunk_gated_delta_rule`.

    References
    ----------
    .. [1] ReplaySSM, https://dao-lab.ai/blog/2026/replayssm/ (the idea of a ring of entries next to an older state).
    """
    check.tensor("ssm_state", ssm_state, dtypes=(*checks.STATE_DTYPES, torch.float64))
    if ssm_state.dim() not in (4, 5):
        expected = "shape [slots, HS, K, V] or [layers, slots, HS, K, V]"
        bad_value("ssm_state", expected, f"shape {list(ssm_state.shape)}")
    has_layers, device = ssm_state.dim() == 5, ssm_state.device
    check.null_slot(null_slot)
    check.at_least("num_k_heads", num_k_heads, 1)
    num_heads, *inner = ssm_state.shape[-3:]
    k_dim, v_dim = reversed(inner) if state_v_first else inner
    if is_empty(num_heads, k_dim, v_dim) or (isinstance(num_heads, int) and num_heads % num_k_heads):
        bad_value("num_k_heads", f"a number that divides the {num_heads} state heads", num_k_heads)
    _check_pools(ssm_state)
    check.indices("state_indices", state_indices, state_indices.shape[0] if state_indices.dim() else 0, device, ranks=(1,))
    count = state_indices.shape[0]
    if ssm_state.dtype == torch.float64 and isinstance(ring, Tensor) and ring.dtype != torch.float64:
        bad_type("ssm_state", "dtype torch.float32 or torch.bfloat16 (float64 with a ring of float64)", ssm_state.dtype)
    check_ring(ring, ssm_state, (num_k_heads, num_heads, k_dim, v_dim), fold_every, fold_phase, layers=has_layers)
    check.tensor("state_tokens", state_tokens, shape=(ssm_state.shape[-4],), dtypes=(torch.int32,), device=device)
    for name, x in (("num_computed_tokens", num_computed_tokens), ("num_accepted_tokens", num_accepted_tokens)):
        check.per_sequence(name, x, count, device, INDEX_DTYPES, has_offsets=False)
    if final_state_indices is not None:
        check.indices("final_state_indices", final_state_indices, count, device, ranks=(1,), has_offsets=False)
    check.optional("rounding_seed", rounding_seed, shape=(1,), dtypes=(torch.int64,), device=device)
    if reads_values(device):
        bounds = torch.arange(count + 1, device=device)
        touched = values.decode_slots("state_indices", bounds, state_indices, null_slot, final_indices=final_state_indices)
        _check_slots(touched, ssm_state.shape[-4], null_slot)
        slots = state_indices.long()
        if num_accepted_tokens is not None:
            a, most = num_accepted_tokens.long(), most_tokens(ring.shape[-2], fold_every)
            values.require("num_accepted_tokens", a, (touched.is_live & ((a < 1) | (a > most)), f"1 to {most}"))
        check_computed(state_tokens, num_computed_tokens, slots, touched.is_live, num_rings=ring.shape[-3])

    index_dtype = common_dtype(state_indices, final_state_indices)
    seed = rounding_seed if ssm_state.dtype == torch.bfloat16 else None
    pools, rings = (ssm_state, ring) if has_layers else (ssm_state[None], ring[None])
    problem = FoldStatesProblem(
        num_k_heads=num_k_heads,
        num_state_heads=num_heads,
        head_k_dim=k_dim,
        head_v_dim=v_dim,
        **dtypes_of(state=ssm_state),
        state_v_first=state_v_first,
        ring_rows=ring.shape[-2],
        fold_every=fold_every,
        index_dtype=check.dtype_name(index_dtype),
        **given_of(accepted=num_accepted_tokens, final_indices=final_state_indices, rounding=seed),
        num_layers=pools.shape[0],
        num_sequences=count,
    )
    prepared = prepare(problem, device, backend)
    if is_empty(count, pools.shape[0]):
        return
    indices, final = (checks.widened(x, index_dtype) for x in (state_indices, final_state_indices))
    accepted = None if num_accepted_tokens is None else make(as_int32, num_accepted_tokens)
    computed = make(as_int32, num_computed_tokens)
    params = FoldStatesParams(
        pools, rings, indices, state_tokens, computed, accepted, final, seed, fold_phase, null_slot
    )  # fmt: skip
    launch(prepared, params, (ssm_state,), aligned=(ssm_state, ring))


def _check_slots(touched: values.TouchedSlots, num_slots: int, null_slot: int) -> None:
    values.check_slots(touched, num_slots, null_slot)
    values.check_unshared(touched, num_slots)


def _check_pools(states: Tensor) -> None:
    """Checks the strides of pools [slots, HS, K, V] or [layers, slots, HS, K, V]."""
    shape = (states.shape[-3], states.shape[-2], states.shape[-1])
    checks.check_inner("ssm_state", states, shape)
    outer = [
        states.stride(dim)
        for dim in range(states.dim() - 3)
        if not (isinstance(states.shape[dim], int) and states.shape[dim] <= 1)
    ]
    if any(stride * states.element_size() % ALIGNMENT for stride in outer) or address(states) % ALIGNMENT:
        expected = f"strides of slots and layers, and an address, that are multiples of {ALIGNMENT} bytes"
        bad_value("ssm_state", expected, f"strides {states.stride()} at address {address(states):#x}")


@operator(
    reference.accept_draft_tree,
    writes={"ring": always, "conv_state": always, "num_accepted_tokens": always},
    returns=lambda _: (),
    varies=("parent_token", "query_start_loc"),
)
def accept_draft_tree(
    ring: Tensor,
    conv_state: Tensor | None,
    state_indices: Tensor,
    parent_token: Tensor,
    accepted_nodes: Tensor,
    num_computed_tokens: Tensor,
    num_accepted_tokens: Tensor,
    *,
    query_start_loc: Tensor,
    conv_width: int,
    null_slot: int = -1,
    backend: Backend | None = None,
) -> None:
    """Replay decode: after a draft tree was verified, move what belongs to the accepted path next to each other.

    A call with `parent_token` leaves the entry of node i in row (p + i) mod R of the ring, p = num_computed_tokens[n], and its
    input of the convolution in column w - 2 + i of the window. The accepted path is the node accepted_nodes[n] and its
    ancestors, m nodes in ascending order. Its i-th node moves to row (p + i) mod R and to column w - 2 + i, and
    num_accepted_tokens[n] becomes m: the next call goes on as after a line of drafts.

    Parameters
    ----------
    ring : Tensor [slots, R, W] or [layers, slots, R, W]
        Entries as in `fused_recurrent_gated_delta_rule`, of one layer or of all; whole rows move.
    conv_state : Tensor [slots, dim, columns] or [layers, slots, dim, columns], or None
        Windows as in `causal_conv1d_update` with 1-D indices; any strides, any float dtype. None: there are none.
    state_indices : Tensor [>= N]
        Slots of the verified step, int32 or int64. A slot <= `null_slot` is padding.
    parent_token : Tensor [tokens] of int32
        Parents of the verified step.
    accepted_nodes : Tensor [>= N] of int32
        Last accepted node of each sequence, counted within the sequence, >= 0.
    num_computed_tokens : Tensor [>= N]
        Committed tokens before the verified step, int32 or int64: p.
    num_accepted_tokens : Tensor [>= N] of int32
        The verified step's counts; the lengths of the accepted paths afterwards. Those of sequences without tokens or with a null
        slot stay as they are.
    query_start_loc : Tensor [N + 1]
        Token offsets of the verified step, int32 or int64.
    conv_width : int
        Width w of the convolution, >= 2.
    null_slot : int
        Largest slot index that means padding.
    backend : {"tilelang", "cute", "reference"}, optional
        Implementation to run; ValueError where it cannot. None = chosen by ``GDN_BACKEND`` and the tables, see `gdn.explain`.

    Raises
    ------
    TypeError, ValueError
        Named after the argument, before anything is launched or written. On the CPU and with ``GDN_VALIDATE=1`` also for slots
        beyond the ring or twice, parents that are no earlier node, nodes that the sequence does not have, and more tokens than
        rows or columns.

    References
    ----------
    .. [1] ReplaySSM, https://dao-lab.ai/blog/2026/replayssm/ (the idea of a ring of entries next to an older state).
    """
    check.tensor("ring", ring, dtypes=(torch.float32, torch.float64))
    if ring.dim() not in (3, 4):
        bad_value("ring", "shape [slots, R, W] or [layers, slots, R, W]", f"shape {list(ring.shape)}")
    check_ring_layout(ring)
    device, has_layers = ring.device, ring.dim() == 4
    check.null_slot(null_slot)
    check.at_least("conv_width", conv_width, 2)
    if conv_state is not None:
        outer = (ring.shape[0],) if has_layers else ()
        shape = (*outer, "slots", "dim", f"columns >= {conv_width - 1}")
        check.tensor("conv_state", conv_state, shape=shape, dtypes=FLOAT_DTYPES, device=device)
        if is_less(conv_state.shape[-1], conv_width - 1):
            bad_value("conv_state", f"at least {conv_width - 1} columns", f"shape {list(conv_state.shape)}")
        if is_less(conv_state.shape[-3], ring.shape[-3]):
            bad_value("conv_state", f"at least the {ring.shape[-3]} slots of the ring", f"shape {list(conv_state.shape)}")
    count = check.offsets("query_start_loc", query_start_loc, device, otherwise=0)
    check.indices("state_indices", state_indices, count, device, ranks=(1,))
    check.tensor("parent_token", parent_token, shape=("tokens",), dtypes=(torch.int32,), device=device)
    per_sequence = (
        ("accepted_nodes", accepted_nodes, (torch.int32,)),
        ("num_computed_tokens", num_computed_tokens, INDEX_DTYPES),
        ("num_accepted_tokens", num_accepted_tokens, (torch.int32,)),
    )
    for name, x, dtypes in per_sequence:
        check.per_sequence(name, x, count, device, dtypes)
    num_tokens = parent_token.shape[0]
    if reads_values(device):
        bounds = values.token_bounds("query_start_loc", query_start_loc, 1, num_tokens, device)
        touched = values.decode_slots("state_indices", bounds, state_indices, null_slot)
        _check_slots(touched, ring.shape[-3], null_slot)
        is_live, lengths, nodes = touched.is_live, bounds.diff(), accepted_nodes[:count].long()
        values.check_parents("parent_token", parent_token, bounds, is_live)
        is_missing = is_live & ((nodes < 0) | (nodes >= lengths))
        values.require("accepted_nodes", nodes, (is_missing, "a node of the sequence, counted from 0"))
        p = num_computed_tokens[:count].long()
        values.require("num_computed_tokens", p, (is_live & ((p < 0) | (p > MOST_COMMITTED)), "0 to 2**31 - 1"))
        most = ring.shape[-2] if conv_state is None else min(ring.shape[-2], conv_state.shape[-1] - conv_width + 2)
        values.require("query_start_loc", lengths, (is_live & (lengths > most), f"at most {most} tokens a sequence"))

    windows = None if conv_state is None else conv_state if has_layers else conv_state[None]
    problem = AcceptDraftTreeProblem(
        ring_rows=ring.shape[-2],
        ring_width=ring.shape[-1],
        conv_dim=None if conv_state is None else conv_state.shape[-2],
        conv_channels_contiguous=conv_state is not None and is_aligned(conv_state.mT),
        conv_width=conv_width,
        **dtypes_of(conv=conv_state, index=state_indices, cu_seqlens=query_start_loc),
        num_layers=ring.shape[0] if has_layers else 1,
        num_tokens=num_tokens,
        num_sequences=count,
    )
    prepared = prepare(problem, device, backend)
    if is_empty(count, num_tokens, problem.num_layers):
        return
    computed = make(as_int32, num_computed_tokens)
    params = AcceptDraftTreeParams(
        ring if has_layers else ring[None], windows, state_indices, parent_token.contiguous(), accepted_nodes, computed,
        num_accepted_tokens, query_start_loc.contiguous(), null_slot,
    )  # fmt: skip
    launch(prepared, params, (ring,), aligned=(ring, conv_state))


def ring_shape(
    num_key_heads: int,
    num_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    *,
    num_spec: int = 0,
    state_dtype: torch.dtype = torch.float32,
) -> tuple[int, int, int]:
    """Size of a ring for replay decode, and how often to fold: the choice with the fewest bytes, for `num_spec` drafts.

    A fold every 9 to 19 tokens costs the same within 1 % without drafts; memory favours fewer. With Tmax = 1 + num_spec tokens
    a call fold_every is max(15, 3 Tmax), for bfloat16 states max(11, 3 Tmax), and rows is fold_every - 1 + 2 Tmax.

    Parameters
    ----------
    num_key_heads, num_heads, head_k_dim, head_v_dim : int
        Key heads, state heads, and the head dims K and V.
    num_spec : int
        Most drafts of a sequence in one call.
    state_dtype : torch.dtype
        Of the states: float32 or bfloat16.

    Returns
    -------
    rows, width, fold_every : int
        R and W of a ring [slots, R, W], W a multiple of 4, and F.

    Raises
    ------
    TypeError, ValueError
        Named after the argument.

    References
    ----------
    .. [1] ReplaySSM, https://dao-lab.ai/blog/2026/replayssm/ (the idea of a ring of entries next to an older state).

    Examples
    --------
    >>> import gdn
    >>> gdn.ring_shape(16, 32, 128, 128)
    (16, 6176, 15)
    >>> gdn.ring_shape(16, 32, 128, 128, num_spec=3)
    (22, 6176, 15)
    """
    sizes = {"num_key_heads": num_key_heads, "num_heads": num_heads, "head_k_dim": head_k_dim, "head_v_dim": head_v_dim}
    for name, value in {**sizes, "num_spec": num_spec}.items():
        kind_of(int).check_type(name, value)
        check.at_least(name, value, 0 if name == "num_spec" else 1)
    if num_heads % num_key_heads:
        bad_value("num_heads", f"a multiple of {num_key_heads} key heads", num_heads)
    kind_of(torch.dtype).check_type("state_dtype", state_dtype)
    if state_dtype not in (*checks.STATE_DTYPES, torch.float64):
        bad_type("state_dtype", "torch.float32 or torch.bfloat16", state_dtype)
    rows, fold_every = ring_choice(1 + num_spec, check.dtype_name(state_dtype))
    width = -(-entry_width(num_key_heads, num_heads, head_k_dim, head_v_dim) // 4) * 4
    return rows, width, fold_every
