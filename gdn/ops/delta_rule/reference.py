"""The gated delta rule in plain torch: the chunk form and the token recurrence, next to their formulas.

The formulas are for one head with state S [K, V]; the code computes all state heads of one sequence at once, in float32
(float64 where q is float64), on any device. Arguments are those of the public operators, already checked. Indices are compared
as Python ints, so that no integer width can change their meaning. `out` may be v: it is written at the end.

The recurrence is that of Gated DeltaNet (Yang et al., arXiv:2412.06464), where S is [V, K]; its chunk form follows the parallel
form of the delta rule (Yang et al., arXiv:2406.06484).

A step's rows, each in the form that `gdn.gated_delta_rule` deals it to: the two references, one after the other.

Both forms compute the same recurrence up to rounding. Which row takes which form shows where states are rounded stochastically,
since only the recurrent form knows the seed.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gdn.ops.delta_rule.crossing import recurrent_rows
from gdn.ops.delta_rule.reference_replay import Pool, Ring, replay_decode
from gdn.ops.delta_rule.tokens import Tokens, columns_of, load_state, sequences_of, store_state
from gdn.reference_modes import inference_only, listed, ranges

CHUNK_SIZE = 64  # tokens
_INVERSE_SCALE = 32.0  # by which a kernel multiplies the inverse in float16 with normalised keys


@inference_only
def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, beta: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None, head_first: bool = False, *, state_v_first: bool = False, use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None, use_beta_sigmoid_in_kernel: bool = False,
    state_indices: Tensor | None = None, has_initial_state: Tensor | None = None, final_state_indices: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None, checkpoint_slots: Tensor | None = None, checkpoint_states: Tensor | None = None,
    null_slot: int = -1, out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`gdn.chunk_gated_delta_rule`, chunk by chunk of 64 tokens."""
    if head_first:
        raise ValueError("head_first: expected False, got True")
    tokens = Tokens(
        q, k, v, g, beta, scale, use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel
    )
    o = tokens.zero_output()
    sequences = sequences_of(q, cu_seqlens)
    final_state = None
    if state_indices is None and output_final_state:
        final_state = tokens.new_state(len(sequences), state_v_first)

    read_slots = list(range(len(sequences))) if state_indices is None else state_indices.tolist()
    write_slots = read_slots if final_state_indices is None else final_state_indices.tolist()
    is_continued = listed(has_initial_state)
    checkpoints: list[list[tuple[int, int]]] = [[] for _ in sequences]
    kept = initial_state if checkpoint_states is None else checkpoint_states
    if checkpoint_offsets is not None and checkpoint_slots is not None:
        pairs = zip(checkpoint_offsets.tolist(), checkpoint_slots.tolist(), strict=True)
        checkpoints = [list(zip(offsets, slots, strict=True)) for offsets, slots in pairs]

    for n, (b, start, end) in enumerate(sequences):
        if state_indices is not None and (read_slots[n] <= null_slot or start == end):
            continue  # padding: no slot is read or written, its rows stay zero
        if initial_state is None or (is_continued is not None and not is_continued[n]):
            state = tokens.zero_state()
        else:
            state = load_state(initial_state, read_slots[n], state_v_first, tokens.dtype)

        for first in range(start, end, CHUNK_SIZE):
            last = min(first + CHUNK_SIZE, end)
            o_rows, state = _chunk(state, *tokens.rows(b, first, last))
            o[b, first:last] = o_rows.transpose(0, 1).to(o.dtype)
            for offset, slot in checkpoints[n]:
                if offset == last - start and offset % CHUNK_SIZE == 0 and slot > null_slot and kept is not None:
                    store_state(kept, slot, state, state_v_first)

        if state_indices is not None and initial_state is not None:
            if write_slots[n] > null_slot:
                store_state(initial_state, write_slots[n], state, state_v_first)
        elif final_state is not None:
            store_state(final_state, n, state, state_v_first)

    pool = initial_state if output_final_state else None
    return (o if out is None else out.copy_(o)), (final_state if state_indices is None else pool)


@inference_only
def largest_chunk_operand(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, beta: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None, *,
    state_v_first: bool = False, use_gate_in_kernel: bool = False, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False, state_indices: Tensor | None = None, has_initial_state: Tensor | None = None,
    null_slot: int = -1,
) -> tuple[float, str]:  # fmt: skip
    """The largest magnitude of all that a kernel of the chunk form rounds to the dtype of q, and what it belongs to.

    Nothing is written. (0, "") without tokens. NaN does not count: it comes from an argument, or from an infinity, which does.
    """
    tokens = Tokens(
        q, k, v, g, beta, scale, use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel
    )
    sequences, is_continued, largest = sequences_of(q, cu_seqlens), listed(has_initial_state), (0.0, "")
    slots = list(range(len(sequences))) if state_indices is None else state_indices.tolist()
    for n, (b, start, end) in enumerate(sequences):
        if start == end or (state_indices is not None and slots[n] <= null_slot):
            continue
        if initial_state is None or (is_continued is not None and not is_continued[n]):
            state = tokens.zero_state()
        else:
            state = load_state(initial_state, slots[n], state_v_first, tokens.dtype)
        for first in range(start, end, CHUNK_SIZE):
            last = min(first + CHUNK_SIZE, end)
            rows = tokens.rows(b, first, last)
            operands = [*_operands(state, rows, tokens.key_factors(b, first, last), use_qk_l2norm_in_kernel)]
            o, state = _chunk(state, *rows)
            for what, x in (*operands, ("a state", state), ("o", o)):  # o: the prefill step's norm reads it
                size = float(x.abs().nan_to_num(0.0, posinf=torch.inf).max())
                largest = max(largest, (size, what), key=lambda found: found[0])
    return largest


def _operands(state: Tensor, rows: tuple[Tensor, ...], key_factors: Tensor, use_qk_l2norm: bool) -> Iterator[tuple[str, Tensor]]:
    """What kernels round to 16 bits in a chunk, in one form or another of either DSL. state, rows: the arguments of `_chunk`.

    key_factors [HS, C]: 1 / |k|. Kernels multiply raw keys, and other operands by these factors.
    """
    q, k, v, g, beta = rows
    decay, keys, queries = _decay_between(g), k @ k.mT, (q @ k.mT).tril()
    from_start, to_end = g.cumsum(-1).exp()[:, :, None], decay[:, -1, :, None]
    column, row, factor = beta[:, None, :], beta[:, :, None], key_factors[:, :, None]
    difference = v - from_start * (k @ state)
    yield "a state", state
    yield "v - S^T k", difference
    by_column, by_row = (column * keys).tril(-1), (row * keys).tril(-1)  # L with beta in its columns, and in its rows
    inverse, inverse_by_row = _inverse(by_column), _inverse(by_row)
    for x in (by_column, by_row, queries / key_factors[:, None, :], column * decay * queries):
        yield "a product of keys or queries", x
    gated = inverse * decay
    strength = to_end * factor * row
    scaled = (_INVERSE_SCALE if use_qk_l2norm else 1.0) * factor * inverse_by_row
    for x in (inverse, scaled, strength * gated):
        yield "an inverse of products of keys", x
    for x in ((column * decay * queries) @ gated, column * decay * (queries @ inverse_by_row)):
        yield "an inverse of products of keys, times queries", x
    for x in ((strength / factor * gated).mT @ k, to_end * row * (inverse_by_row.mT @ k)):
        yield "an inverse of products of keys, times keys", x
    updates = gated @ difference
    yield "v - S^T k", updates
    yield "u / |k|" if use_qk_l2norm else "u", strength * updates


@inference_only
def chunk_summary(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, beta: Tensor | None = None, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None, *, state_v_first: bool = False, use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None, use_beta_sigmoid_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`gdn.chunk_summary`: final states from zeros, and from the identity without values."""
    tokens = Tokens(
        q, k, v, g, beta, None, use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel
    )
    sequences = sequences_of(q, cu_seqlens)
    found: list[Tensor] = []
    for column_dim in (v.shape[-1], k.shape[-1]):
        is_offset = not found
        states = q.new_zeros(len(sequences), tokens.num_heads, k.shape[-1], column_dim, dtype=tokens.dtype)
        if not is_offset:
            states.diagonal(dim1=-2, dim2=-1).fill_(1)
        for n, (b, start, end) in enumerate(sequences):
            for first in range(start, end, CHUNK_SIZE):
                q_rows, k_rows, v_rows, *gates = tokens.rows(b, first, min(first + CHUNK_SIZE, end))
                values = v_rows if is_offset else torch.zeros_like(k_rows)
                _, states[n] = _chunk(states[n], q_rows, k_rows, values, *gates)
        found.append(states.mT.contiguous() if state_v_first else states)
    return found[0], found[1]


@inference_only
def fused_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, beta: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, inplace_final_state: bool | None = None, cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None, num_accepted_tokens: Tensor | None = None, use_qk_l2norm_in_kernel: bool = False, *,
    state_v_first: bool = False, use_gate_in_kernel: bool = False, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False, output_final_state: bool = True, final_state_indices: Tensor | None = None,
    disable_state_update: bool = False, parent_token: Tensor | None = None, rounding_seed: Tensor | None = None,
    intermediate_states: Tensor | None = None, intermediate_indices: Tensor | None = None, ring: Tensor | None = None,
    state_tokens: Tensor | None = None, num_computed_tokens: Tensor | None = None, fold_every: int | None = None,
    fold_phase: int = 0, null_slot: int = -1, out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`gdn.fused_recurrent_gated_delta_rule`, token by token."""
    tokens = Tokens(
        q, k, v, g, beta, scale, use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel
    )
    o = tokens.zero_output()
    if ring is not None:
        assert initial_state is not None and ssm_state_indices is not None and fold_every is not None  # checked by the operator
        assert state_tokens is not None and num_computed_tokens is not None
        replay = Ring(ring, state_tokens, num_computed_tokens, num_accepted_tokens, fold_every, fold_phase, k.shape[2], null_slot)
        pool = Pool(initial_state, state_v_first, None if rounding_seed is None else int(rounding_seed.item()))
        replay_decode(tokens, cu_seqlens, ssm_state_indices, replay, pool, parent_token, o, is_written=not disable_state_update)
        return (o if out is None else out.copy_(o)), initial_state if output_final_state else None
    sequences = sequences_of(q, cu_seqlens)
    pooled = ssm_state_indices is not None
    every_token = ssm_state_indices is not None and ssm_state_indices.dim() == 2

    # States are stored in `target`; the caller gets `final_state`.
    target: Tensor | None = None
    if pooled or inplace_final_state:
        final_state = initial_state if output_final_state else None
        target = None if disable_state_update or intermediate_states is not None else initial_state
    else:
        wanted = output_final_state and not disable_state_update
        final_state = tokens.new_state(len(sequences), state_v_first) if wanted else None
        target = final_state

    # Slots as [N][columns]; one column where only the last state is kept.
    rows = [[n] for n in range(len(sequences))]
    read_slots = rows if ssm_state_indices is None else columns_of(ssm_state_indices)
    write_slots = read_slots if final_state_indices is None else columns_of(final_state_indices)
    accepted, kept_rows = listed(num_accepted_tokens), listed(intermediate_indices)
    seed = None if rounding_seed is None else int(rounding_seed.item())
    parents = None if parent_token is None else parent_token.flatten().tolist()

    for n, (b, start, end) in enumerate(sequences):
        column = 0 if accepted is None else accepted[n] - 1
        if pooled and (start == end or not 0 <= column < len(read_slots[n]) or read_slots[n][column] <= null_slot):
            continue  # padding: no slot is read or written, its rows stay zero
        slot = read_slots[n][column]
        first_state = (
            tokens.zero_state() if initial_state is None else load_state(initial_state, slot, state_v_first, tokens.dtype)
        )

        state = first_state
        history: list[Tensor] = []  # the state after each token; kept for tree drafts only
        q_rows, k_rows, v_rows, g_rows, beta_rows = tokens.rows(b, start, end)
        for i in range(end - start):
            if parents is not None:
                parent = parents[b * q.shape[1] + start + i]
                state = first_state if parent < 0 else history[parent]
            o_row, state = _step(state, q_rows[:, i], k_rows[:, i], v_rows[:, i], g_rows[:, i], beta_rows[:, i])
            o[b, start + i] = o_row.to(o.dtype)
            if parents is not None:
                history.append(state)
            if intermediate_states is not None and kept_rows is not None and i < intermediate_states.shape[1]:
                if kept_rows[n] > null_slot:
                    store_state(intermediate_states[kept_rows[n]], i, state, state_v_first)
            if every_token and target is not None and i < len(write_slots[n]) and write_slots[n][i] > null_slot:
                store_state(target, write_slots[n][i], state, state_v_first, seed)

        if not every_token and target is not None:
            slot = write_slots[n][0]
            if not pooled or slot > null_slot:
                store_state(target, slot, state, state_v_first, seed)

    return (o if out is None else out.copy_(o)), final_state


def _step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """One token. state [HS, K, V]; q, k [HS, K]; v [HS, V]; g, beta [HS] -> o [HS, V], the state after it.

    S = exp(g) S;   u = beta (v - S^T k);   S = S + k u^T;   o = S^T q
    """
    state = g.exp()[:, None, None] * state
    u = beta[:, None] * (v - _transposed_times(state, k))
    state = state + k[:, :, None] * u[:, None, :]
    return _transposed_times(state, q), state


def _transposed_times(state: Tensor, x: Tensor) -> Tensor:
    """S^T x for every head: [HS, K, V], [HS, K] -> [HS, V]."""
    return (x[:, None, :] @ state)[:, 0]


def _chunk(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Up to 64 tokens. state [HS, K, V]; q, k [HS, C, K]; v [HS, C, V]; g, beta [HS, C] -> o [HS, C, V], state.

    With c the inclusive running sum of g, and G_ij = exp(c_i - c_j) for i >= j, else 0:
        L  = strict_lower(diag(beta) K K^T);   A = (I + L)^-1
        W  = V - exp(c) (K S)
        Vn = (A * G * beta_column) W
        O  = exp(c) (Q S) + (G * (Q K^T)) Vn
        S' = exp(c_last) S + K^T (exp(c_last - c) Vn)
    """
    decay = _decay_between(g)
    decay_from_start = g.cumsum(-1).exp()[:, :, None]
    decay_to_end = decay[:, -1, :, None]
    inverse = _inverse((beta[:, :, None] * (k @ k.mT)).tril(-1))
    w = v - decay_from_start * (k @ state)
    v_new = (inverse * decay * beta[:, None, :]) @ w
    o = decay_from_start * (q @ state) + (decay * (q @ k.mT)) @ v_new
    state = decay_from_start[:, -1:] * state + k.mT @ (decay_to_end * v_new)
    return o, state


def _inverse(strict_lower: Tensor) -> Tensor:
    """(I + L)^-1 of a strictly lower triangular L [HS, C, C]."""
    identity = torch.eye(strict_lower.shape[-1], dtype=strict_lower.dtype, device=strict_lower.device)
    inverse: Tensor = torch.linalg.solve_triangular(
        identity + strict_lower, identity.expand_as(strict_lower), upper=False, unitriangular=True
    )
    return inverse


def _decay_between(g: Tensor) -> Tensor:
    """G [HS, C, C]: exp(g_{j+1} + ... + g_i) for i >= j, else 0, of log decays g [HS, C].

    Every exponent is a separate sum that starts after token j. The difference c_i - c_j of two running sums is the same number,
    but after a decay of -1e4 both are so large that their last digit is 1e-3, and after one of -inf it is NaN.
    """
    ones = torch.ones(g.shape[1], g.shape[1], dtype=torch.bool, device=g.device)
    exponent = torch.where(ones.tril(-1), g[:, :, None], 0.0).cumsum(1)
    return torch.where(ones.tril(), exponent, -torch.inf).exp()


@inference_only
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, beta: Tensor | None = None, scale: float | None = None, *,
    cu_seqlens: Tensor, lengths_host: Sequence[int] | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, inplace_final_state: bool | None = None, use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False, use_gate_in_kernel: bool = False, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False, state_indices: Tensor | None = None, ssm_state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None, final_state_indices: Tensor | None = None, checkpoint_offsets: Tensor | None = None,
    checkpoint_slots: Tensor | None = None, num_accepted_tokens: Tensor | None = None, parent_token: Tensor | None = None,
    disable_state_update: bool = False, rounding_seed: Tensor | None = None, null_slot: int = -1, out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`gdn.gated_delta_rule`."""
    indices = state_indices if state_indices is not None else ssm_state_indices
    count = cu_seqlens.numel() - 1
    both: dict[str, Any] = {
        "scale": scale, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "cu_seqlens": cu_seqlens,
        "state_v_first": state_v_first, "use_gate_in_kernel": use_gate_in_kernel, "A_log": A_log, "dt_bias": dt_bias,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel, "null_slot": null_slot,
    }  # fmt: skip
    is_in_place = indices is not None or inplace_final_state is True
    returns_state = output_final_state and (is_in_place or not disable_state_update)
    if indices is not None and indices.dim() == 2:
        return fused_recurrent_gated_delta_rule(
            q, k, v, g, beta, initial_state=initial_state, ssm_state_indices=indices, num_accepted_tokens=num_accepted_tokens,
            output_final_state=output_final_state, final_state_indices=final_state_indices, parent_token=parent_token,
            disable_state_update=disable_state_update, rounding_seed=rounding_seed, out=out, **both,
        )  # fmt: skip

    pool = initial_state
    if indices is None:
        indices, both["null_slot"] = torch.arange(count, device=q.device), -1
        if not is_in_place:
            pool = _new_states(q, k, v, initial_state, has_initial_state, count, state_v_first)
            has_initial_state = None
    short = 0 if lengths_host is None else recurrent_rows(lengths_host)
    starts = listed(has_initial_state)
    is_recurrent = [n < short and (starts is None or starts[n]) for n in range(count)]
    mask = torch.tensor(is_recurrent, dtype=torch.bool, device=q.device)
    final = torch.full_like(indices, both["null_slot"]) if disable_state_update else final_state_indices
    o, _ = chunk_gated_delta_rule(
        q, k, v, g, beta, initial_state=pool, state_indices=indices[:count].masked_fill(mask, both["null_slot"]),
        has_initial_state=has_initial_state, final_state_indices=final, checkpoint_offsets=checkpoint_offsets,
        checkpoint_slots=checkpoint_slots, **both,
    )  # fmt: skip
    o_recurrent, _ = fused_recurrent_gated_delta_rule(
        q, k, v, g, beta, initial_state=pool, ssm_state_indices=indices[:count].masked_fill(~mask, both["null_slot"]),
        final_state_indices=final, rounding_seed=rounding_seed, **both,
    )  # fmt: skip
    for n, (start, end) in enumerate(ranges(cu_seqlens)):
        if is_recurrent[n]:
            o[0, start:end] = o_recurrent[0, start:end]
    return (o if out is None else out.copy_(o)), (pool if returns_state else None)


def _new_states(
    q: Tensor, k: Tensor, v: Tensor, initial: Tensor | None, has_initial: Tensor | None, count: int, state_v_first: bool
) -> Tensor:
    """A state per sequence to start from, in the dtype of final states."""
    k_dim, v_dim = k.shape[-1], v.shape[-1]
    inner = (v_dim, k_dim) if state_v_first else (k_dim, v_dim)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    states = torch.zeros(count, max(q.shape[2], v.shape[2]), *inner, dtype=dtype, device=q.device)
    if initial is not None:
        states.copy_(initial)
        if has_initial is not None:
            states[~has_initial[:count]] = 0
    return states
