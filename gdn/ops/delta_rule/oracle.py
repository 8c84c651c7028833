"""Oracle of the delta rule: the token recurrence in float64, independent of the references.

Takes a call of either delta-rule operator and returns the exact content of every tensor afterwards; no argument is modified.

What a ring holds, by the token recurrence: for expected results of calls by replay (see gdn.ops.delta_rule.problem).

A state and the entries of its ring stand for the state after all of these tokens: `brought_up_to_date` runs the token recurrence
over the entries, one by one in float64, which the reference does not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn.testing.compare import after_summary
from gdn.testing.expected import Arguments, Call, Expected, Pair, Pairs, often, once


@dataclass
class DeltaRuleResult:
    """o [B, T, HS, V] float64, zero in rows that no live sequence owns; state: see oracle_delta_rule."""

    o: Tensor
    state: Tensor | None
    offsets: list[int]  # [N + 1]: token ranges in o.flatten(0, 1)
    live: list[bool]  # [N]: False = padding or empty
    written_slots: set[int]  # rows of the pool that the call may change


def oracle_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, beta: Tensor | None = None, *, scale: float | None = None,
    initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None, use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False, use_gate_in_kernel: bool = False, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False, state_indices: Tensor | None = None, ssm_state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None, num_accepted_tokens: Tensor | None = None,
    final_state_indices: Tensor | None = None, checkpoint_offsets: Tensor | None = None, checkpoint_slots: Tensor | None = None,
    parent_token: Tensor | None = None, disable_state_update: bool = False, null_slot: int = -1, **ignored: Any,
) -> DeltaRuleResult:  # fmt: skip
    """Computes a call of either operator from its arguments by name (those without an effect on values are ignored).

    With indices (1-D or 2-D, under either name) the result's state is the pool afterwards in float64, its untouched rows
    being the values they had, and `written_slots` says which rows may have changed. Without, it is one final state per
    sequence [N, HS, ...]. Stored states are exact here: the caller allows for the rounding of a bfloat16 pool.
    """
    indices = ssm_state_indices if state_indices is None else state_indices
    f64 = torch.float64
    (batch, length, _, k_dim), v_dim, heads = q.shape, v.shape[-1], max(q.shape[2], v.shape[2])
    factor = k_dim**-0.5 if scale is None else scale

    def flat(x: Tensor) -> Tensor:
        """[B, T, heads, D] -> [B * T, HS, D] in float64, heads shared by their groups."""
        return x.to(f64).flatten(0, 1).repeat_interleave(heads // x.shape[2], dim=1)

    qs, ks, vs = flat(q), flat(k), flat(v)
    if use_qk_l2norm_in_kernel:
        qs, ks = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (qs, ks))
    qs = qs * factor

    alpha = torch.ones(batch * length, heads, dtype=f64, device=q.device)
    if g is not None:
        log_decay = g.to(f64).reshape(batch * length, heads)
        if use_gate_in_kernel:
            assert A_log is not None
            a = log_decay + (0.0 if dt_bias is None else dt_bias.to(f64))
            log_decay = -torch.exp(A_log.to(f64)) * torch.where(a > 20, a, torch.log1p(torch.exp(a.clamp(max=20))))
        alpha = torch.exp(log_decay)
    b = torch.ones_like(alpha)
    if beta is not None:
        b = beta.to(f64).reshape(batch * length, heads)
        if use_beta_sigmoid_in_kernel:
            b = 1 / (1 + torch.exp(-b))

    offsets = [n * length for n in range(batch + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    num_sequences = len(offsets) - 1

    def stored(state: Tensor) -> Tensor:
        return state.transpose(-1, -2) if state_v_first else state

    source_states = None if initial_state is None else initial_state.to(f64)
    result = stored(torch.zeros(num_sequences, heads, k_dim, v_dim, dtype=f64, device=q.device))
    if indices is not None:
        assert source_states is not None
        result = source_states.clone()
    written: set[int] = set()

    def write(slot: int, state: Tensor) -> None:
        if slot > null_slot:
            result[slot] = stored(state)
            written.add(slot)

    targets = indices if final_state_indices is None else final_state_indices
    index_rows, target_rows = (None if one is None else one.reshape(len(one), -1).tolist() for one in (indices, targets))
    per_token = indices is not None and indices.dim() == 2

    # Per token and head, vectors and numbers as matrices of one row.
    keys, queries, values = (x[:, :, None] for x in (ks, qs, vs))
    decay, strength = alpha[:, :, None, None], b[:, :, None, None]
    o = torch.zeros(batch * length, heads, 1, v_dim, dtype=f64, device=q.device)
    live = []
    for n in range(num_sequences):
        first, last = offsets[n], max(offsets[n], offsets[n + 1])
        column = 0 if num_accepted_tokens is None else int(num_accepted_tokens[n]) - 1
        is_live, slot = last > first, n
        if index_rows is not None:
            slot = index_rows[n][column] if 0 <= column < len(index_rows[n]) else null_slot
            is_live = is_live and slot > null_slot
        live.append(is_live)
        if index_rows is not None and not is_live:
            continue
        start = torch.zeros(heads, k_dim, v_dim, dtype=f64, device=q.device)
        if source_states is not None and (has_initial_state is None or bool(has_initial_state[n])):
            start = stored(source_states[slot])
        state = start
        nodes: list[Tensor] = []
        for t in range(first, last):
            if parent_token is not None:
                parent = int(parent_token[t])
                state = start if parent < 0 else nodes[parent]
            state = decay[t] * state
            u = strength[t] * (values[t] - keys[t] @ state)
            state = state + keys[t].mT * u
            o[t] = queries[t] @ state
            if parent_token is not None:
                nodes.append(state)
            done = t - first + 1
            if per_token and target_rows is not None and not disable_state_update and done <= len(target_rows[n]):
                write(target_rows[n][done - 1], state)
            if checkpoint_offsets is not None and checkpoint_slots is not None and done % 64 == 0:
                for offset, checkpoint in zip(checkpoint_offsets[n].tolist(), checkpoint_slots[n].tolist(), strict=True):
                    if offset == done:
                        write(checkpoint, state)
        if target_rows is None:
            result[n] = stored(state)
        elif not per_token and not disable_state_update:
            write(target_rows[n][0], state)
    return DeltaRuleResult(o.view(batch, length, heads, v_dim), result, offsets, live, written)


def oracle_of(arguments: Mapping[str, Any]) -> DeltaRuleResult:
    """oracle_delta_rule on arguments from gdn.ops.delta_rule.inputs."""
    return oracle_delta_rule(**arguments)


class Place(NamedTuple):
    """Entries of a sequence: positions first to end of its slot."""

    slot: int
    first: int
    end: int


def live_places(given: dict[str, Any], fold_phase: int, lengths: Sequence[int]) -> tuple[list[Place], list[Place]]:
    """Live entries of the sequences with tokens before a call that appends `lengths` entries, and after its folds.

    given: arguments of a decode call, or of `fold_states`.
    """
    every, written = given["fold_every"], given["state_tokens"].tolist()
    slots, committed = given["state_indices"].tolist(), given["num_computed_tokens"].tolist()
    accepted = [1] * len(slots) if given["num_accepted_tokens"] is None else given["num_accepted_tokens"].tolist()

    def held(slot: int, tokens: int) -> int:
        """Tokens that a state in memory contains."""
        return max(int(written[slot]), int(every * ((tokens + fold_phase) // every) - fold_phase))

    before, after = [], []
    for slot, p, a, length in zip(slots, committed, accepted, lengths, strict=False):
        if slot > given["null_slot"] and length:
            before.append(Place(slot, held(slot, p - a), p))
            after.append(Place(slot, held(slot, p), p + length))
    return before, after


def brought_up_to_date(states: Tensor, ring: Tensor, places: Sequence[Place], key_heads: int, *, v_first: bool) -> Tensor:
    """A pool [slots, heads, K, V] (or V first) in float64, whose named slots hold the states after all of their entries."""
    pool = states.double()
    heads, *inner = pool.shape[1:]
    k_dim, v_dim = inner[::-1] if v_first else inner
    for slot, first, end in places:
        for position in range(first, end):
            row = ring[slot, position % ring.shape[1]].double()
            k, u, g = row[: key_heads * k_dim + heads * (v_dim + 1)].split([key_heads * k_dim, heads * v_dim, heads])
            k, u = k.view(key_heads, k_dim).repeat_interleave(heads // key_heads, 0), u.view(heads, v_dim)
            added = u[:, :, None] * k[:, None, :] if v_first else k[:, :, None] * u[:, None, :]
            pool[slot] = pool[slot] * g.exp()[:, None, None] + added
    return pool


def without_new(ring: Tensor, places: Sequence[Place], lengths: Sequence[int]) -> Tensor:
    """The ring with zeros in the last rows of each place, those of a call's tokens."""
    kept = ring.clone()
    for (slot, _, end), length in zip(places, lengths, strict=True):
        for position in range(end - length, end):
            kept[slot, position % ring.shape[1]] = 0
    return kept


def _delta_rule(call: Call, before: Arguments) -> Pairs:
    """The token recurrence."""
    exact = oracle_delta_rule(**before)
    assert exact.state is not None
    # o [1, tokens, heads, V] is compared head by head.
    output = Pair(call.result[0][0].transpose(0, 1), exact.o[0].transpose(0, 1), often(before["q"]))
    return [output, Pair(call.after["initial_state"], exact.state, often(before["q"]))]


def _summary(call: Call, before: Arguments) -> Pairs:
    """The token recurrence from zeros, and from the identity without values; judged by what they make of a random state."""
    h, P = call.result
    identity = torch.eye(P.shape[-1], device=P.device, dtype=torch.float64).expand(P.shape).contiguous()
    zeros = torch.zeros(*before["v"].shape[:-1], P.shape[-1], dtype=torch.float32, device=P.device)
    runs = (oracle_delta_rule(**before), oracle_delta_rule(**before | {"v": zeros, "initial_state": identity}))
    exact = [one.state for one in runs]
    assert exact[0] is not None and exact[1] is not None
    v_first = before["state_v_first"]
    return [Pair(after_summary(h, P, v_first), after_summary(exact[0], exact[1], v_first), often(before["q"]))]


def _folded(call: Call, before: Arguments) -> Pairs:
    """The states of all layers after all of their entries, and the counts."""
    found, counts = [], before["state_tokens"].clone()
    for layer, (states, ring) in enumerate(zip(before["ssm_state"], before["ring"], strict=True)):
        phase = (before["fold_phase"] + layer) % before["fold_every"]
        places, _ = live_places(before, phase, [1] * len(before["state_indices"]))
        exact = brought_up_to_date(states, ring, places, before["num_k_heads"], v_first=before["state_v_first"])
        found.append(Pair(call.after["ssm_state"][layer], exact, once(states)))
        for place in places:
            counts[place.slot] = place.end
    return [*found, Pair(call.after["state_tokens"], counts, 0.0)]


EXPECTED: Expected = {
    "fold_states": _folded,
    "chunk_gated_delta_rule": _delta_rule,
    "chunk_summary": _summary,
}
