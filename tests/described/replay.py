"""Operators around replay decode: calls, what their arguments may be, their results."""

import torch

from gdn.ops.delta_rule.problem import entry_width, state_position
from tests.described import Described
from tests.described.delta_rule import give_some_seed, parents_of, slots_of, some_null
from tests.ops.spoiling import kinds_sequences as sequences
from tests.ops.spoiling.call import Call, Draw
from tests.ops.spoiling.kinds import COUNT, INT32, OFFSETS, PER_SEQUENCE, SLOTS, STATE_POOL, WHOLE, WINDOWS, Kind, but
from tests.ops.spoiling.live import live_sequences, slots_mask, written_slots
from tests.ops.spoiling.rings import ring_of
from tests.ops.spoiling.verdict import SAME, TYPE, VALUE

HEADS = ((2, 4), (2, 2), (2, 6), (1, 3))  # of keys, of states


def fold(draw: Draw) -> Call:
    call = Call("fold_states")
    (key_heads, heads), k_dim, v_dim = draw.pick(*HEADS), draw.size(4, 8, served=64), draw.size(4, 8, 12, served=64)
    count, most, fold_every = draw.tokens(1, 2, 3), draw.pick(2, 1, 4), draw.pick(5, 1, 2)
    rows, layers = fold_every - 1 + 2 * most + draw.pick(0, 3), draw.pick(0, 0, 1, 2)
    slots, size = slots_of(draw, call, count, columns=2)
    v_first = call.arguments["state_v_first"] = draw.maybe()
    shape, dims = ((heads, v_dim, k_dim), "H V K") if v_first else ((heads, k_dim, v_dim), "H K V")
    outer, named = ((layers,), "L ") if layers else ((), "")
    state = draw.floats(*outer, size, *shape, dtype=draw.pick(torch.float32, torch.bfloat16))
    call.give("ssm_state", draw.pool(state), f"{named}slots {dims}")
    ring = ring_of(draw, max(layers, 1) * size, rows, entry_width(key_heads, heads, k_dim, v_dim))
    ring = ring.unflatten(0, (layers, size)) if layers else ring
    call.give("ring", ring, f"{named}~ ~ ~")
    written = [draw.random.randint(0, 40) for _ in range(size)]
    reads = some_null(draw, call, slots[:count])
    call.give("state_tokens", torch.tensor(written, dtype=torch.int32), "slots")
    call.give("state_indices", draw.indices(reads), "N")
    call.sizes["accepted"] = (rows + 1 - fold_every) // 2
    accepted = [draw.random.randint(1, call.sizes["accepted"]) for _ in range(count)]
    if draw.maybe():
        call.give("num_accepted_tokens", draw.indices(accepted), "N")
    call.give("num_computed_tokens", draw.indices([written[slot] + draw.pick(0, 1, 3, 20) for slot in reads]), "N")
    if draw.maybe(0.4):
        call.give("final_state_indices", draw.indices(some_null(draw, call, slots[count:], 0.2)), "N")
    give_some_seed(draw, call, state)
    call.arguments |= {"num_k_heads": key_heads, "fold_every": fold_every}
    if draw.maybe():
        call.arguments["fold_phase"] = draw.random.randrange(fold_every)
    call.sizes["N"] = count
    return call


def has_entries(call: Call, n: int) -> bool:
    """Whether a sequence has live entries."""
    slot, p = call.index("state_indices")[n], call.index("num_computed_tokens")[n]
    a = 1 if call.get("num_accepted_tokens") is None else call.index("num_accepted_tokens")[n]
    phase = call.arguments.get("fold_phase", 0)
    return state_position(call.index("state_tokens")[slot], p - a, call.arguments["fold_every"], phase) < p


def accept(draw: Draw) -> Call:
    call = Call("accept_draft_tree")
    lengths, layers, width = draw.lengths(4), draw.pick(0, 0, 1, 2), draw.pick(4, 2)
    count, offsets = len(lengths), draw.offsets(lengths)
    call.sizes["N"] = count
    call.give("query_start_loc", draw.indices(offsets), "~")
    call.ties["N"] = call.ties["tokens"] = ("query_start_loc",)
    tokens = offsets[-1] + draw.pick(0, 2)
    call.sizes["tokens"] = offsets[-1]
    call.give("parent_token", torch.tensor(parents_of(draw, offsets, tokens), dtype=torch.int32), "tokens+")
    slots, size = slots_of(draw, call, count)
    call.give("state_indices", draw.indices(some_null(draw, call, slots)), "N+")
    rows = draw.pick(16, 4, 7)
    ring = ring_of(draw, max(layers, 1) * size, rows, draw.pick(8, 20))
    call.give("ring", ring.unflatten(0, (layers, size)) if layers else ring, "L ~ ~ ~" if layers else "~ ~ ~")
    if draw.maybe(0.7):
        outer = (layers,) if layers else ()
        windows = draw.floats(*outer, size, 8, width - 2 + draw.pick(8, 4), dtype=draw.any_float())
        call.give("conv_state", draw.pool(windows), "L ~ ~ ~" if layers else "~ ~ ~")
    else:
        call.arguments["conv_state"] = None
    nodes = [draw.random.randrange(length) if length else 0 for length in lengths]
    call.give("accepted_nodes", torch.tensor(nodes, dtype=torch.int32), "N+")
    call.give("num_computed_tokens", draw.indices([draw.random.randint(0, 50) for _ in lengths]), "N+")
    call.give("num_accepted_tokens", torch.ones(count, dtype=torch.int32), "N+")
    call.arguments["conv_width"] = width
    return call


def _changed_by_fold(call: Call) -> dict[str, torch.Tensor]:
    slots = written_slots(call, "state_indices", "final_state_indices")
    state, counts = call.get("ssm_state"), call.get("state_tokens")
    own = slots_mask(counts, slots)
    return {"ssm_state": own.view(*own.shape, 1, 1, 1).expand(state.shape), "state_tokens": own}


def _changed_by_accept(call: Call) -> dict[str, torch.Tensor]:
    slots = written_slots(call, "state_indices", None)
    masks = {}
    for name in ("ring", "conv_state"):
        if isinstance(pool := call.get(name), torch.Tensor):
            own = slots_mask(pool.flatten(0, pool.dim() - 4)[0] if pool.dim() == 4 else pool, slots)
            masks[name] = own.expand(pool.shape)
    accepted = torch.zeros(call.get("num_accepted_tokens").shape, dtype=torch.bool)
    accepted[live_sequences(call)] = True
    return masks | {"num_accepted_tokens": accepted}


# Counts that a call writes: int32, one for each slot or sequence.
_COUNTS: Kind = but(INT32, "one longer") | {
    "all rows in one place": VALUE, "overlaps another argument": VALUE, "adjacent to another argument": SAME,
}  # fmt: skip
_WITHOUT_OFFSETS: Kind = but(PER_SEQUENCE, "extra rows of anything")

CALLS = {
    "fold_states": Described(fold, (), {
        "ssm_state": but(STATE_POOL, "two dims more", "interleaved with another argument"),
        "state_indices": but(SLOTS, "one shorter", "extra rows of anything", "extra rows without offsets") | {
            "two live sequences, one slot": VALUE, "null slots twice": SAME,
        },
        "ring": sequences.RING_READ | sequences.SIZES_OF_RING,
        "state_tokens": but(_COUNTS, "all rows in one place") | but(
            sequences.STATE_TOKENS, "anything where no sequence is live"
        ),
        "num_computed_tokens": _WITHOUT_OFFSETS | sequences.COMMITTED | {"fewer tokens than its state": VALUE},
        "num_accepted_tokens": _WITHOUT_OFFSETS | sequences.ACCEPTED_OF_RING,
        "final_state_indices": but(SLOTS, "extra rows of anything") | sequences.FINAL_SLOTS,
        "fold_phase": COUNT | {"as long as a period": VALUE},
        "rounding_seed": sequences.SEED,
        "*": WHOLE,
    }, _changed_by_fold),
    "accept_draft_tree": Described(accept, (), {
        "ring": sequences.RING,
        "conv_state": but(WINDOWS, "one longer"),
        "state_indices": sequences.with_offsets(SLOTS) | sequences.SHARED_SLOTS,
        "parent_token": but(sequences.PARENTS, "the indices 1-D", "one longer"),
        "accepted_nodes": sequences.with_offsets(but(PER_SEQUENCE, "the other index dtype") | {"dtype int64": TYPE}),
        "num_computed_tokens": sequences.with_offsets(PER_SEQUENCE) | sequences.COMMITTED,
        "num_accepted_tokens": _COUNTS,
        "query_start_loc": OFFSETS,
        "*": WHOLE,
    }, _changed_by_accept),
}  # fmt: skip
