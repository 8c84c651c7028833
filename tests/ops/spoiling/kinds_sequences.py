"""Kinds of arguments of operators on sequences with states: slots, checkpoints, drafts and rings."""

from tests.ops.spoiling.kinds import COUNT, INT32, OPTIONAL_COUNT, PER_SEQUENCE, SLOTS, STATE_POOL, WINDOWS, Kind, but
from tests.ops.spoiling.verdict import ERROR, SAME, TYPE, VALUE


def with_offsets(kind: Kind) -> Kind:
    """The kind of an operator that always has offsets."""
    return but(kind, "extra rows without offsets")


SHARED_SLOTS: Kind = {
    "two live sequences, one slot": VALUE,
    "an empty sequence names a live slot": SAME,
    "null slots twice": SAME,
}
FINAL_SLOTS: Kind = {
    "two live sequences, one slot to write": VALUE,
    "the slot that another live sequence reads": VALUE,
}
ACCEPTED: Kind = PER_SEQUENCE | {
    "0 accepted": SAME,
    "-3 accepted": SAME,
    "more than the columns": SAME,
    "2**33 + 1 accepted": SAME,
    "-2**33 + 1 accepted": SAME,
}
PARENTS: Kind = INT32 | {
    "its own parent": VALUE,
    "a parent after it": VALUE,
    "a parent of -2": VALUE,
    "the indices 1-D": VALUE,
}
SEED: Kind = but(INT32, "dtype int64", "last dim not contiguous") | {"dtype int32": TYPE}
CHECKPOINT_OFFSETS: Kind = but(PER_SEQUENCE, "extra rows of anything") | {
    "a negative offset": VALUE,
    "an offset beyond the sequence": SAME,
    "an offset of 2**33 + 64": SAME,
    "one row too many of checkpoint offsets": SAME,
    "without checkpoint_slots": VALUE,
}
CHECKPOINT_SLOTS: Kind = but(PER_SEQUENCE, "extra rows of anything") | {
    "a slot beyond the pool": VALUE,
    "a slot of 2**33 + 1": VALUE,
    "a null slot to save to": SAME,
    "null as -2**33 + 1": SAME,
    "without checkpoint_offsets": VALUE,
}
KEPT: Kind = but(STATE_POOL, "one longer", "interleaved with another argument") | {
    "without checkpoint_offsets, checkpoint_slots": VALUE,
}
KEPT_WINDOWS: Kind = but(WINDOWS, "one longer") | {"without checkpoint_offsets, checkpoint_slots": VALUE}
INTERMEDIATE: dict[str, Kind] = {
    "intermediate_states": but(STATE_POOL, "one longer", "interleaved with another argument") | {
        "the indices 2-D": VALUE, "without intermediate_indices": VALUE,
    },
    "intermediate_indices": SLOTS | {"two live sequences, one slot to write": VALUE, "without intermediate_states": VALUE},
}  # fmt: skip
COMMITTED: Kind = {
    "a count of -1": VALUE, "2**31 committed tokens": VALUE, "2**33 + 1 committed tokens": VALUE,
    "anything where no sequence is live": SAME,
}  # fmt: skip
ACCEPTED_OF_RING: Kind = dict.fromkeys(
    ("0 accepted", "-3 accepted", "more than the columns", "2**33 + 1 accepted", "-2**33 + 1 accepted"), VALUE
)
STATE_TOKENS: Kind = {
    "a count of -1": VALUE, "more tokens than are committed": VALUE, "anything where no sequence is live": SAME,
}  # fmt: skip
RING: Kind = but(STATE_POOL, "dtype float64", "one longer", "one shorter", "interleaved with another argument")
RING_READ: Kind = but(RING, "all rows in one place", "overlapping rows", "overlaps another argument") | {"dtype float64": TYPE}
SIZES_OF_RING: Kind = {"too few rows": VALUE, "rows too short for an entry": VALUE}
REPLAYED: dict[str, Kind] = {
    "ring": but(STATE_POOL, "one longer", "one shorter") | {"the indices 2-D": VALUE} | SIZES_OF_RING,
    "state_tokens": but(INT32, "one longer") | {"left out where it must be": ERROR} | STATE_TOKENS,
    "num_computed_tokens": PER_SEQUENCE | COMMITTED | {
        "left out where it must be": ERROR, "fewer tokens than its state": VALUE,
    },
    "num_accepted_tokens with a ring": PER_SEQUENCE | ACCEPTED_OF_RING | {"anything where no sequence is live": SAME},
    "fold_every": OPTIONAL_COUNT | {"0": VALUE},
    "fold_phase": COUNT | {"as long as a period": VALUE},
}  # fmt: skip
