"""Spoilings of the counts that say which entries of a ring are live."""

import random

import torch

from tests.ops.spoiling.call import Call
from tests.ops.spoiling.indices import FAR, copied, places_looked_at, register_entry, with_value
from tests.ops.spoiling.live import indices_of, live_sequences
from tests.ops.spoiling.rings import has_ring
from tests.ops.spoiling.spoiling import Spoiled, spoiling

Tensor = torch.Tensor

register_entry("a count of -1", lambda call, path: -1)
register_entry("2**31 committed tokens", lambda call, path: 2**31)
register_entry("2**33 + 1 committed tokens", lambda call, path: FAR + 1)


@spoiling("fewer tokens than its state")
def _fewer(call: Call, path: str, rng: random.Random) -> Spoiled | None:
    tensor, live, name = copied(call, path), live_sequences(call), indices_of(call)
    if tensor is None or name is None or not live:
        return None
    n = rng.choice(live)
    tensor[n] = call.index("state_tokens")[call.index(name)[n]] - 1
    return with_value(call, path, tensor, "state_tokens")


@spoiling("more tokens than are committed")
def _more(call: Call, path: str, rng: random.Random) -> Spoiled | None:
    tensor, live, name = copied(call, path), live_sequences(call), indices_of(call)
    if tensor is None or name is None or not live:
        return None
    n = rng.choice(live)
    tensor[call.index(name)[n]] = call.index("num_computed_tokens")[n] + 1
    return with_value(call, path, tensor, "num_computed_tokens")


@spoiling("a slot without a ring")
def _no_ring(call: Call, path: str, rng: random.Random) -> Spoiled | None:
    tensor, places = copied(call, path), places_looked_at(call, path)
    if tensor is None or not has_ring(call) or not places:
        return None
    state = call.get("ssm_state") if "ssm_state" in call.arguments else call.get("initial_state")
    if call.get("ring").shape[0] == state.shape[0]:
        return None
    tensor[rng.choice(places)] = call.get("ring").shape[0]
    return with_value(call, path, tensor)


@spoiling("anything where no sequence is live")
def _of_nobody(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """Counts out of every range, of sequences without tokens or slots and of slots that no live sequence has."""
    tensor, places = copied(call, path), places_looked_at(call, path)
    if tensor is None:
        return None
    dead = [n for n in range(tensor.shape[0]) if (n,) not in places]
    if not dead:
        return None
    tensor[dead] = -(2**31)
    return with_value(call, path, tensor)


@spoiling("too few rows")
def _few_rows(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """As many rows as tokens from one fold to the next."""
    ring = call.get(path)
    if not isinstance(ring, Tensor):
        return None
    return Spoiled(call.with_values({path: ring[..., : call.arguments["fold_every"], :]}))


@spoiling("rows too short for an entry")
def _short_rows(call: Call, path: str, _: random.Random) -> Spoiled | None:
    ring = call.get(path)
    return Spoiled(call.with_values({path: ring[..., :4]})) if isinstance(ring, Tensor) else None


@spoiling("as long as a period")
def _long_phase(call: Call, path: str, _: random.Random) -> Spoiled | None:
    return Spoiled(call.with_values({path: call.arguments["fold_every"]})) if "fold_every" in call.arguments else None
