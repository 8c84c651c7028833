"""Public operator `fused_recurrent_gated_delta_rule`: the gated delta rule token by token, for decode."""

import functools
from typing import Any

import torch
from torch import Tensor

from gdn.core import check, values
from gdn.core.call import NEW, always, launch, make, operator, prepare, reads_values, validates
from gdn.core.check import INDEX_DTYPES, bad_value
from gdn.core.constants import row_indices
from gdn.core.modes import is_empty
from gdn.core.tensors import as_int32, common_dtype, constant, dtypes_of, given_of
from gdn.ops.delta_rule import checks, reference
from gdn.ops.delta_rule.checks import check_intermediate, check_intermediate_values
from gdn.ops.delta_rule.checks_replay import Replay, Sequences, check_replay, check_replay_values
from gdn.ops.delta_rule.problem import RecurrentParams, RecurrentProblem
from gdn.runtime.registry import Backend


def _in_place(arguments: dict[str, Any]) -> bool:
    return arguments["ssm_state_indices"] is not None or arguments["inplace_final_state"] is True


def _returns(arguments: dict[str, Any]) -> tuple[str | None, str | None]:
    o = "out" if arguments["out"] is not None else NEW
    if not arguments["output_final_state"]:
        return o, None
    if _in_place(arguments):
        return o, "initial_state"
    return o, (None if arguments["disable_state_update"] else NEW)


@operator(
    reference.fused_recurrent_gated_delta_rule,
    writes={"out": always, "initial_state": _in_place, "intermediate_states": always, "ring": always},
    returns=_returns,
    varies=("q", "cu_seqlens"),
    contiguous=("q", "k", "v"),
)
def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool | None = None,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    state_v_first: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    output_final_state: bool = True,
    final_state_indices: Tensor | None = None,
    disable_state_update: bool = False,
    parent_token: Tensor | None = None,
    rounding_seed: Tensor | None = None,
    intermediate_states: Tensor | None = None,
    intermediate_indices: Tensor | None = None,
    ring: Tensor | None = None,
    state_tokens: Tensor | None = None,
    num_computed_tokens: Tensor | None = None,
    fold_every: int | None = None,
    fold_phase: int = 0,
    null_slot: int = -1,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule for decode: few tokens per sequence, one after the other, with a state pool.

    For each state head, with the state S [K, V]:

        S = exp(g) S;   u = beta (v - S^T k);   S = S + k u^T;   o = S^T q * scale

    State, modes and symbols as in `chunk_gated_delta_rule`: B rows of T tokens, or B = 1 and N packed sequences; HS state heads.
    Without `cu_seqlens` N is B, and what is [>= N] here has exactly N rows, else those beyond N are ignored.

    Parameters
    ----------
    q, k, v : Tensor [B, T, Hq, K], [B, T, Hk, K], [B, T, HV, V]
        Queries, keys and values, as for `chunk_gated_delta_rule`.
    g, beta, scale : Tensor [B, T, HS] or None, Tensor [B, T, HS] or None, float or None
        Log decay, write strength (raw gate a and raw b with the flags below) and factor, as for `chunk_gated_delta_rule`.
    initial_state : Tensor [N, HS, K, V], optional
        State before the first token of each sequence, float32 or bfloat16; [N, HS, V, K] with `state_v_first`. None = zeros.
        With `ssm_state_indices` the state pool [slots, HS, K, V] (or V first), which is required then and always updated in
        place: inner three dimensions contiguous, slot stride and address multiples of 16 bytes.
    inplace_final_state : bool, optional
        Without indices: True replaces `initial_state` by the final states; None and False leave it untouched and return a new
        tensor. With indices the pool is always updated in place and False is refused.
    cu_seqlens : Tensor [N + 1], optional
        Token offsets of packed sequences, as for `chunk_gated_delta_rule`.
    ssm_state_indices : Tensor [>= N] or [>= N, columns], optional
        Slots in the pool, int32 or int64, any strides.
        [>= N]: sequence n starts from slot ssm_state_indices[n], and only the state after its last token is stored there.
        [>= N, columns], speculative decoding: the state before the first token is in slot
        ssm_state_indices[n, num_accepted_tokens[n] - 1] (column 0 without `num_accepted_tokens`), and the state after token i
        goes to slot ssm_state_indices[n, i]; tokens beyond the last column are not stored.
        A slot to read that is <= `null_slot` is padding: rows of o are zero, no slot is read or written. A null slot to write
        skips that write alone. A sequence without tokens touches nothing.
    num_accepted_tokens : Tensor [>= N], optional
        Accepted tokens of the previous step, int32 (or int64), with 2-D indices or a ring. Outside 1..columns the sequence is
        padding.
    use_qk_l2norm_in_kernel, state_v_first, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel : bool or Tensor
        Norm, state layout and raw gates, as for `chunk_gated_delta_rule`.
    output_final_state : bool
        Whether to return the final state.
    final_state_indices : Tensor, optional
        Slots to write instead of those of `ssm_state_indices`, of the same rank and number of columns; a null one skips that
        write alone.
    disable_state_update : bool
        True writes no state and no ring (a verification that is committed later).
    parent_token : Tensor [tokens] or [B, T] of int32, optional
        Draft tree, with 2-D indices, `intermediate_states` or a ring: token i of a sequence continues the state after token
        parent_token[i] of the same sequence (less than i), or the starting state where it is -1.
    rounding_seed : Tensor [1] of int64, optional
        Seed on the device: states stored in a bfloat16 pool are rounded stochastically, with the noise that
        `gdn.ops.delta_rule.tokens` defines. None = rounded to nearest. No effect on float32 states.
    intermediate_states, intermediate_indices : Tensor [rows, T_max, HS, K, V] and Tensor [>= N], optional
        A verification that is committed later: the state after token i of sequence n goes to
        intermediate_states[intermediate_indices[n], i], and nothing to the pool. Both together, with 1-D `ssm_state_indices`, the
        slots to start from. float32 or bfloat16, [rows, T_max, HS, V, K] with `state_v_first`: inner three dimensions contiguous,
        the two strides and the address multiples of 16 bytes; rows int32 or int64. Tokens from T_max on are not stored; a row
        <= `null_slot` stores nothing.
    ring, state_tokens, num_computed_tokens, fold_every : Tensor [ring slots, R, W], Tensor [slots], Tensor [>= N], int, optional
        Replay decode, all four together, with 1-D `ssm_state_indices`: a state is a few tokens old, `ring` has an entry (key,
        correction, log decay) of each later token, and the state is written once in `fold_every` tokens. Position j of a
        sequence is row j mod R of its slot: [k of all key heads | u of all state heads | g of all state heads], float32, W at
        least Hk * K + HS * (V + 1), R at least fold_every + 1; last dimension contiguous, other strides and address multiples
        of 16 bytes. Slots of the pool beyond those of the ring are for states alone. state_tokens (int32): the tokens that the
        state of a slot contained when something other than a decode call last wrote it; whoever does so sets it, which empties
        the ring. num_computed_tokens (int32 or int64): committed tokens of each sequence before this call. Both are only read.
        A sequence may have (R + 1 - fold_every) // 2 tokens in a call, without `num_accepted_tokens` one. More tokens, a count
        of accepted tokens outside of 1 to that, fewer committed tokens than state_tokens, or a slot without a ring: padding, on
        the CPU and with ``GDN_VALIDATE=1`` an error. See `ring_shape`, `fold_states` and `accept_draft_tree`.
    fold_phase : int
        0 to fold_every - 1, one of each layer: folds are where position + fold_phase passes a multiple of `fold_every`.
    null_slot, out : int, Tensor [B, T, HS, V] or None
        Largest slot index that means padding, and tensor to write o into, as for `chunk_gated_delta_rule`.
    backend : {"tilelang", "cute", "reference"}, optional
        Implementation to run; ValueError where it cannot. None = chosen by ``GDN_BACKEND`` and the tables, see `gdn.explain`.

    Returns
    -------
    o : Tensor [B, T, HS, V]
        Output in the dtype of `v`; `out` itself where it is given.
    final_state : Tensor or None
        `initial_state` itself where it is updated in place, else a new float32 tensor [N, HS, K, V] (or V first). None without
        `output_final_state`, or where no state was to be written and none is in place.

    Raises
    ------
    TypeError, ValueError
        Named after the argument, before anything is launched or written; slots as for `chunk_gated_delta_rule`.

    References
    ----------
    .. [1] The positional arguments are those of ``fused_recurrent_gated_delta_rule`` in vLLM, which extends the function of
       flash-linear-attention by the pool and the accepted tokens.

    Examples
    --------
    >>> import torch, gdn
    >>> q, k = torch.randn(2, 1, 3, 2, 64).unbind()
    >>> v, pool = torch.randn(1, 3, 4, 64), torch.zeros(8, 4, 64, 64)
    >>> o, state = gdn.fused_recurrent_gated_delta_rule(  # three sequences, one token each
    ...     q, k, v, initial_state=pool, cu_seqlens=torch.arange(4), ssm_state_indices=torch.tensor([4, 1, 6])
    ... )
    >>> o.shape, state is pool
    (torch.Size([1, 3, 4, 64]), True)
    """
    is_inplace = ssm_state_indices is not None or inplace_final_state is True
    given = checks.Tokens(q, k, v, g, beta, cu_seqlens, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel)
    sizes = checks.check_tokens(given, null_slot, out)
    count, device = sizes.num_sequences, q.device
    if ssm_state_indices is not None:
        has_offsets = cu_seqlens is not None
        check.indices("ssm_state_indices", ssm_state_indices, count, device, ranks=(1, 2), has_offsets=has_offsets)
        checks.check_pool("initial_state", initial_state, sizes, state_v_first, q)
        if inplace_final_state is False:
            expected = "None or True with ssm_state_indices (in place always; disable_state_update=True leaves the pool as it is)"
            bad_value("inplace_final_state", expected, False)
    elif inplace_final_state:
        checks.check_pool("initial_state", initial_state, sizes, state_v_first, q, num_slots=count)
    elif initial_state is not None:
        checks.check_state("initial_state", initial_state, sizes, state_v_first, q)
    check_intermediate(
        intermediate_states, intermediate_indices, sizes, state_v_first, q, starts=("ssm_state_indices", ssm_state_indices),
        unused={"final_state_indices": final_state_indices, "rounding_seed": rounding_seed}, has_offsets=cu_seqlens is not None,
    )  # fmt: skip
    is_kept = intermediate_states is not None
    replay = Replay(ring, state_tokens, num_computed_tokens, fold_every, fold_phase)
    length = sizes.length if cu_seqlens is None else None
    called = Sequences(count, ("ssm_state_indices", ssm_state_indices), num_accepted_tokens, length, cu_seqlens is not None)
    heads = (sizes.num_k_heads, sizes.num_heads, sizes.head_k_dim, sizes.head_v_dim)
    has_ring = check_replay(
        replay, called, ("initial_state", initial_state), heads,
        {"final_state_indices": final_state_indices, "intermediate_states": intermediate_states},
    )  # fmt: skip
    keeps_nodes = is_kept or has_ring
    _check_optional(
        sizes, given, ssm_state_indices, final_state_indices, num_accepted_tokens, parent_token, keeps_nodes, has_ring
    )
    check.optional("rounding_seed", rounding_seed, shape=(1,), dtypes=(torch.int64,), device=device)
    if reads_values(device):
        bounds = values.token_bounds("cu_seqlens", cu_seqlens, sizes.batch, sizes.length, device)
        is_live = None
        if ssm_state_indices is not None and initial_state is not None:
            touched = values.decode_slots(
                "ssm_state_indices", bounds, ssm_state_indices, null_slot,
                num_accepted_tokens=None if has_ring else num_accepted_tokens,
                final_indices=final_state_indices, is_updated=not (disable_state_update or is_kept),
            )  # fmt: skip
            if num_accepted_tokens is not None and not has_ring and validates(device):
                values.check_accepted(num_accepted_tokens, ssm_state_indices.shape[1], bounds, ssm_state_indices, null_slot)
            if parent_token is not None:
                values.check_parents("parent_token", parent_token, bounds, touched.is_live)
            values.check_touched(touched, initial_state, null_slot)
            check_replay_values(replay, touched, ("ssm_state_indices", ssm_state_indices), bounds, num_accepted_tokens)
            is_live = touched.is_live
            check_intermediate_values(intermediate_states, intermediate_indices, is_live, null_slot)
        checks.check_decays(given, bounds, is_live)

    # In place without indices: initial_state is a pool with one slot per sequence.
    index_dtype = common_dtype(ssm_state_indices, final_state_indices, intermediate_indices)
    writes = not (disable_state_update or is_kept) and (is_inplace or output_final_state)
    if not writes:
        final_state_indices = None
    is_bfloat16 = initial_state is not None and initial_state.dtype == torch.bfloat16
    if not (writes and is_inplace and is_bfloat16):
        rounding_seed = None
    problem = RecurrentProblem(
        **checks.static_fields(sizes, given, initial_state, index_dtype if is_inplace else None, state_v_first),
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        has_final_state=writes,
        write_every_token=ssm_state_indices is not None and ssm_state_indices.dim() == 2,
        **dtypes_of(intermediate=intermediate_states),
        ring_rows=None if ring is None else ring.shape[1],
        fold_every=fold_every,
        **given_of(final_indices=final_state_indices, accepted=num_accepted_tokens, parent=parent_token, rounding=rounding_seed),
    )
    prepared = prepare(problem, device, backend)
    final_state = checks.new_state(sizes, q, state_v_first) if writes and not is_inplace else None
    returned = (initial_state if is_inplace else final_state) if output_final_state else None
    o, written = checks.output(sizes, v, out)
    if is_empty(sizes.num_tokens, count):
        o.zero_()
        if not is_inplace:
            checks.pass_through(initial_state, None, final_state)
        return o, returned

    tokens, cu_seqlens = checks.pack(sizes, given, by_descriptor=False)
    indices, final_state_indices, intermediate_indices = (
        checks.widened(x, index_dtype) for x in (ssm_state_indices, final_state_indices, intermediate_indices)
    )
    if is_inplace and indices is None:
        indices, null_slot = make(functools.partial(row_indices, count, device)), -1
    if not is_inplace and initial_state is not None:
        initial_state = constant(initial_state)
    accepted, computed = (None if x is None else make(as_int32, x) for x in (num_accepted_tokens, num_computed_tokens))
    parents = None if parent_token is None else parent_token.reshape(-1).contiguous()
    scale = sizes.head_k_dim**-0.5 if scale is None else scale
    params = RecurrentParams(
        *tokens, initial_state, indices, accepted, final_state, final_state_indices, cu_seqlens, parents, rounding_seed,
        intermediate_states, intermediate_indices, ring, state_tokens, computed, written, scale, null_slot,
        None if ring is None else fold_phase,
    )  # fmt: skip
    launch(prepared, params, (o, returned), aligned=(q, k, v, initial_state, intermediate_states, ring, out))
    return checks.finish(o, written), returned


def _check_optional(
    sizes: checks.Sizes, given: checks.Tokens, slots: Tensor | None, last: Tensor | None, accepted: Tensor | None,
    parent: Tensor | None, keeps_nodes: bool, has_ring: bool,
) -> None:  # fmt: skip
    """Checks the arguments that need indices: final_state_indices, num_accepted_tokens and parent_token.

    keeps_nodes: intermediate_states or a ring are given, which serve a draft tree too.
    """
    count, device, has_columns = sizes.num_sequences, given.q.device, slots is not None and slots.dim() == 2
    has_offsets = given.cu_seqlens is not None
    if last is not None:
        if slots is None:
            bad_value("final_state_indices", "None without ssm_state_indices", "a tensor")
        check.indices("final_state_indices", last, count, device, ranks=(slots.dim(),), has_offsets=has_offsets)
        if has_columns and last.shape[1] != slots.shape[1]:
            bad_value("final_state_indices", f"{slots.shape[1]} columns", f"shape {list(last.shape)}")
    check.per_sequence("num_accepted_tokens", accepted, count, device, INDEX_DTYPES, has_offsets=has_offsets)
    if parent is not None:
        shape = (sizes.num_tokens,) if parent.dim() == 1 else (sizes.batch, sizes.length)
        check.tensor("parent_token", parent, shape=shape, dtypes=(torch.int32,), device=device)
    if accepted is not None and not (has_columns or has_ring):
        bad_value("num_accepted_tokens", "None without 2-D ssm_state_indices or a ring", "a tensor")
    if parent is not None and not (has_columns or keeps_nodes):
        bad_value("parent_token", "None without 2-D ssm_state_indices, intermediate_states or a ring", "a tensor")
