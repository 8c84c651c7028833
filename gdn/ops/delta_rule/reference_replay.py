"""Replay decode in plain torch, next to its formulas, sequence by sequence and token by token.

One state head; S [K, V] is a state that contains the first c tokens, entries (k_j [K], u_j [V], g_j) are those of the committed
tokens c <= j < p, and new token i has the position p + i:

    tail_j = sum of g_m over j < m < p;   total = sum of g_m over c <= m < p
    D_i    = exp(total + s_i)             s_i: sum of the new tokens' g up to i
    w_ij   = exp(tail_j + s_i)            d_ij = exp(sum of the new tokens' g after j up to i)
    u_i    = beta_i (v_i - D_i S^T k_i - sum_j w_ij (k_j . k_i) u_j - sum_(new j < i) d_ij (k_j . k_i) u_j)
    o_i    = D_i S^T q_i + sum_j w_ij (k_j . q_i) u_j + sum_(new j < i) d_ij (k_j . q_i) u_j + (k_i . q_i) u_i
    fold   S = exp(sum of g over [c, c')) S + sum_(c <= j < c') exp(sum of g over j < m < c') k_j u_j^T

In a draft tree "new j < i" are the ancestors of i. Logarithms are added from the newest token back; sums are never subtracted.
Rows of the ring that are not live are not read. Places (p, c, rows, padding) are those of `gdn.ops.delta_rule.problem`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gdn.ops.delta_rule.problem import entry_width, most_tokens, state_position
from gdn.ops.delta_rule.tokens import Tokens, load_state, sequences_of, store_state
from gdn.reference_modes import inference_only, listed, ranges


@dataclass
class Entries:
    """Entries of consecutive tokens or of a path, oldest first, for all HS state heads."""

    k: Tensor  # [HS, n, K]
    u: Tensor  # [HS, n, V]
    g: Tensor  # [HS, n]

    def first(self, count: int) -> "Entries":
        return Entries(self.k[:, :count], self.u[:, :count], self.g[:, :count])

    def log_decays(self, later: Tensor) -> tuple[Tensor, Tensor]:
        """Log decays of each entry [HS, n] and of what was before all of them [HS]; `later` [HS] comes after the newest."""
        tails, tail = [], later
        for j in reversed(range(self.g.shape[1])):
            tails.append(tail)
            tail = self.g[:, j] + tail
        return torch.stack(tails[::-1], 1) if tails else self.g, tail

    def read(self, x: Tensor, decays: Tensor) -> Tensor:
        """sum_j decays_j (k_j . x) u_j: [HS, K], [HS, n] -> [HS, V]."""
        weights = decays * (self.k @ x[:, :, None])[:, :, 0]
        return (weights[:, None, :] @ self.u)[:, 0]

    def folded(self, state: Tensor) -> Tensor:
        """State [HS, K, V] after these entries."""
        tails, total = self.log_decays(self.g.new_zeros(self.g.shape[0]))
        return total.exp()[:, None, None] * state + (tails.exp()[:, :, None] * self.k).mT @ self.u


@dataclass(frozen=True)
class Ring:
    """A ring and its integers."""

    rows: Tensor  # [slots, R, W]
    state_tokens: Tensor  # [slots of the pool]
    num_computed_tokens: Tensor  # [>= N]
    num_accepted_tokens: Tensor | None  # [>= N]
    fold_every: int
    fold_phase: int
    num_k_heads: int
    null_slot: int

    def places(self, slots: list[int], lengths: list[int], most: int | None = None) -> Iterator[tuple[int, int, int] | None]:
        """(slot, c, p) of each sequence; None for padding. most: the most tokens that something else allows."""
        committed, written = self.num_computed_tokens.tolist(), self.state_tokens
        accepted = [1] * len(lengths) if self.num_accepted_tokens is None else self.num_accepted_tokens.tolist()
        allowed = most_tokens(self.rows.shape[1], self.fold_every) if self.num_accepted_tokens is not None else 1
        allowed = allowed if most is None else min(allowed, most)
        for n, length in enumerate(lengths):
            slot, p, a = slots[n], committed[n], accepted[n]
            if length == 0 or slot <= self.null_slot or slot >= self.rows.shape[0] or not 1 <= a <= allowed or length > allowed:
                yield None
                continue
            p0 = int(written[slot])
            yield None if p < p0 else (slot, state_position(p0, p - a, self.fold_every, self.fold_phase), p)

    def fold_places(self, slots: list[int]) -> Iterator[tuple[int, int, int] | None]:
        """(slot, c, p) of each sequence whose entries are to be folded; None for padding. Without a ring nothing is live."""
        committed = self.num_computed_tokens.tolist()
        accepted = [1] * len(slots) if self.num_accepted_tokens is None else self.num_accepted_tokens.tolist()
        for n, slot in enumerate(slots):
            p, a = committed[n], accepted[n]
            p0 = p + 1 if slot <= self.null_slot else int(self.state_tokens[slot])
            if p < p0 or not 1 <= a <= most_tokens(self.rows.shape[1], self.fold_every):
                yield None
            elif slot >= self.rows.shape[0]:
                yield (slot, p, p) if p == p0 else None
            else:
                yield slot, state_position(p0, p - a, self.fold_every, self.fold_phase), p

    def live(self, slot: int, first: int, end: int, heads: int, k_dim: int, v_dim: int) -> Entries:
        """Entries of positions first..end."""
        num_rows, key_heads = self.rows.shape[1], self.num_k_heads
        at = [position % num_rows for position in range(first, end)]
        width = entry_width(key_heads, heads, k_dim, v_dim)
        sizes = [key_heads * k_dim, heads * v_dim, heads]
        k, u, g = self.rows[slot, at, :width].split_with_sizes(sizes, 1)
        k = k.view(-1, key_heads, k_dim).repeat_interleave(heads // key_heads, 1)
        return Entries(k.transpose(0, 1), u.view(-1, heads, v_dim).transpose(0, 1), g.t())

    def append(self, slot: int, position: int, entry: Entries) -> None:
        """Writes one entry."""
        keys = entry.k[:: entry.k.shape[0] // self.num_k_heads, 0]  # one state head of each key head
        values = torch.cat([keys.flatten(), entry.u.flatten(), entry.g.flatten()])
        self.rows[slot, position % self.rows.shape[1], : values.numel()] = values.to(self.rows.dtype)


@dataclass(frozen=True)
class Pool:
    """States that a call reads and pool."""

    states: Tensor  # [slots, HS, K, V] or V first
    state_v_first: bool
    seed: int | None  # of the rounding to bfloat16; None = to nearest


def replay_decode(
    tokens: Tokens, cu_seqlens: Tensor | None, slots: Tensor, ring: Ring, pool: Pool, parent_token: Tensor | None,
    out: Tensor, *, is_written: bool,
) -> None:  # fmt: skip
    """Computes the tokens of a call into out [B, T, HS, V], zero before. is_written False: neither ring nor states change."""
    sequences = sequences_of(tokens.q, cu_seqlens)
    parents = None if parent_token is None else parent_token.flatten().tolist()
    lengths = [end - start for _, start, end in sequences]
    for (b, start, end), place in zip(sequences, ring.places(slots.tolist(), lengths), strict=True):
        if place is None:
            continue
        slot, c, p = place
        state = load_state(pool.states, slot, pool.state_v_first, tokens.dtype)
        live = ring.live(slot, c, p, *state.shape)
        live = Entries(live.k.to(tokens.dtype), live.u.to(tokens.dtype), live.g.to(tokens.dtype))
        rows = tokens.rows(b, start, end)
        own = parents
        if parents is not None:
            first = b * tokens.q.shape[1] + start
            own = parents[first : first + end - start]
        outputs, new = _decode(state, live, rows, own)
        out[b, start:end] = outputs.transpose(0, 1).to(out.dtype)
        if not is_written:
            continue
        for i in range(end - start):
            ring.append(slot, p + i, Entries(new.k[:, i : i + 1], new.u[:, i : i + 1], new.g[:, i : i + 1]))
        folded = state_position(int(ring.state_tokens[slot]), p, ring.fold_every, ring.fold_phase)
        if folded > c:
            store_state(pool.states, slot, live.first(folded - c).folded(state), pool.state_v_first, pool.seed)


def _decode(state: Tensor, live: Entries, rows: tuple[Tensor, ...], parents: list[int] | None) -> tuple[Tensor, Entries]:
    """Outputs [HS, T, V] and entries of new tokens. rows: q, k [HS, T, K], v [HS, T, V], g, beta [HS, T]."""
    q, k, v, g, beta = rows
    u, outputs = torch.zeros_like(v), torch.zeros_like(v)
    for i in range(q.shape[1]):
        path = _ancestors(i, parents)
        near = Entries(k[:, path], u[:, path], g[:, path])
        near_tails, since = near.log_decays(g[:, i])
        live_tails, total = live.log_decays(since)
        decays = (total.exp(), live_tails.exp(), near_tails.exp())
        u[:, i] = beta[:, i, None] * (v[:, i] - _seen(k[:, i], state, live, near, decays))
        own = (k[:, i] * q[:, i]).sum(-1, keepdim=True) * u[:, i]
        outputs[:, i] = _seen(q[:, i], state, live, near, decays) + own
    return outputs, Entries(k, u, g)


def _seen(x: Tensor, state: Tensor, live: Entries, near: Entries, decays: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """What a key or query [HS, K] reads from the state, the live entries and the ancestors: [HS, V]."""
    of_state, of_live, of_near = decays
    return of_state[:, None] * (x[:, None, :] @ state)[:, 0] + live.read(x, of_live) + near.read(x, of_near)


def _ancestors(node: int, parents: list[int] | None) -> list[int]:
    """The new tokens that a token continues, oldest first."""
    if parents is None:
        return list(range(node))
    path = []
    while (node := parents[node]) >= 0:
        path.append(node)
    return path[::-1]


@inference_only
def fold_states(
    ssm_state: Tensor, state_indices: Tensor, ring: Tensor, state_tokens: Tensor, num_computed_tokens: Tensor, *,
    num_k_heads: int, fold_every: int, fold_phase: int = 0, num_accepted_tokens: Tensor | None = None,
    final_state_indices: Tensor | None = None, rounding_seed: Tensor | None = None, state_v_first: bool = False,
    null_slot: int = -1,
) -> None:  # fmt: skip
    """`gdn.fold_states`, layer by layer, then the counts."""
    pools, rings = (ssm_state[None], ring[None]) if ssm_state.dim() == 4 else (ssm_state, ring)
    slots, targets = state_indices.tolist(), listed(final_state_indices)
    seed = None if rounding_seed is None else int(rounding_seed.item())
    integers = Ring(rings, state_tokens, num_computed_tokens, num_accepted_tokens, fold_every, fold_phase, num_k_heads, null_slot)
    counts: dict[int, int] = {}
    for layer, pool in enumerate(pools):
        one = replace(integers, rows=rings[layer], fold_phase=(fold_phase + layer) % fold_every)
        for n, place in enumerate(one.fold_places(slots)):
            target = slots[n] if targets is None else targets[n]
            if place is None or target <= null_slot:
                continue
            slot, c, p = place
            counts[target] = p
            if c < p:
                state = load_state(pool, slot, state_v_first, ring.dtype)
                folded = one.live(slot, c, p, *state.shape).folded(state)
                store_state(pool, target, folded, state_v_first, seed)
            elif target != slot:
                pool[target] = pool[slot]
    for slot, tokens in counts.items():
        state_tokens[slot] = tokens


@inference_only
def accept_draft_tree(
    ring: Tensor, conv_state: Tensor | None, state_indices: Tensor, parent_token: Tensor, accepted_nodes: Tensor,
    num_computed_tokens: Tensor, num_accepted_tokens: Tensor, *, query_start_loc: Tensor, conv_width: int, null_slot: int = -1,
) -> None:  # fmt: skip
    """`gdn.accept_draft_tree`, sequence by sequence."""
    rings = ring[None] if ring.dim() == 3 else ring
    windows = None if conv_state is None else conv_state[None] if conv_state.dim() == 3 else conv_state
    slots, nodes, committed = state_indices.tolist(), accepted_nodes.tolist(), num_computed_tokens.tolist()
    parents, num_rows = parent_token.tolist(), rings.shape[2]
    for n, (start, end) in enumerate(ranges(query_start_loc)):
        slot, node = slots[n], nodes[n]
        if start == end or slot <= null_slot or slot >= rings.shape[1] or not 0 <= node < end - start:
            continue
        path = [*_ancestors(node, parents[start:end]), node]
        for i, source in enumerate(path):
            p = committed[n]
            rings[:, slot, (p + i) % num_rows] = rings[:, slot, (p + source) % num_rows].clone()
            if windows is not None:
                columns = conv_width - 2 + source, conv_width - 2 + i
                windows[:, slot, :, columns[1]] = windows[:, slot, :, columns[0]].clone()
        num_accepted_tokens[n] = len(path)
