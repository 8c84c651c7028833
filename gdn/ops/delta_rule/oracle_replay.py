"""What a ring holds, by the token recurrence: for expected results of calls by replay (see gdn.ops.delta_rule.problem_replay).

A state and the entries of its ring stand for the state after all of these tokens: `brought_up_to_date` runs the token recurrence
over the entries, one by one in float64, which the reference does not.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


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
