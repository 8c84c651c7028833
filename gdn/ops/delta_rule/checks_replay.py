"""Checks of a ring and of the integers that say which of its entries are live (see gdn.ops.delta_rule.problem).

Ring and counts are written in place or read where they lie, so nothing of the ring may be copied: its strides must be those that
kernels take.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gdn.core import check, values
from gdn.core.check import INDEX_DTYPES, bad_value, is_less
from gdn.core.modes import address
from gdn.core.tensors import ALIGNMENT
from gdn.ops.delta_rule.problem import entry_width, most_tokens

MOST_COMMITTED = 2**31 - 1  # tokens of a sequence: kernels count in int32


class Replay(NamedTuple):
    """Arguments of a call about its ring, under their public names."""

    ring: Tensor | None
    state_tokens: Tensor | None
    num_computed_tokens: Tensor | None
    fold_every: int | None
    fold_phase: int


class Sequences(NamedTuple):
    """What a call says of its sequences."""

    num_sequences: int
    slots: tuple[str, Tensor | None]  # name and value of the indices
    accepted: Tensor | None
    length: int | None  # tokens of each sequence, where the host knows them
    has_offsets: bool


def check_replay(
    replay: Replay, sequences: Sequences, pool: tuple[str, Tensor | None], heads: tuple[int, int, int, int],
    unused: dict[str, Tensor | None],
) -> bool:  # fmt: skip
    """Checks the arguments about a ring; returns whether there is one.

    pool: name and value of the states. heads: key heads, state heads, K, V. unused: arguments that must be left out with a ring.
    """
    ring, tokens, computed, fold_every, fold_phase = replay
    needed = {"state_tokens": tokens, "num_computed_tokens": computed, "fold_every": fold_every}
    if ring is None:
        for name, value in needed.items():
            if value is not None:
                bad_value(name, "None without ring", "a tensor" if isinstance(value, Tensor) else value)
        if fold_phase != 0:
            bad_value("fold_phase", "0 without ring", fold_phase)
        return False
    for name, value in needed.items():
        if value is None:
            bad_value(name, "a tensor with ring" if name != "fold_every" else "an int >= 1 with ring", "None")
    assert tokens is not None and computed is not None and fold_every is not None
    slots_name, slots = sequences.slots
    if slots is None or slots.dim() != 1:
        got = "None" if slots is None else f"shape {list(slots.shape)}"
        bad_value(slots_name, "1-D slots with ring", got)
    check.absent(unused, "with ring")
    pool_name, states = pool
    if states is None:
        bad_value(pool_name, "the state pool that the indices refer to", "None")
    device = states.device
    check_ring(ring, states, heads, fold_every, fold_phase)
    num_slots = states.shape[0]
    check.tensor("state_tokens", tokens, shape=(num_slots,), dtypes=(torch.int32,), device=device)
    count, has_offsets = sequences.num_sequences, sequences.has_offsets
    check.tensor("num_computed_tokens", computed, device=device)
    check.per_sequence("num_computed_tokens", computed, count, device, INDEX_DTYPES, has_offsets=has_offsets)
    most = most_tokens(ring.shape[1], fold_every)
    if sequences.length is not None and is_less(most, sequences.length):
        expected = f"at least {sequences.length * 2 - 1 + fold_every} rows for {sequences.length} tokens a sequence"
        bad_value("ring", f"{expected} with fold_every = {fold_every}", f"{ring.shape[1]} rows")
    if sequences.accepted is None and sequences.length is not None and is_less(1, sequences.length):
        bad_value("num_accepted_tokens", f"a tensor with ring and {sequences.length} tokens a sequence", "None")
    return True


def check_ring(
    ring: Tensor, states: Tensor, heads: tuple[int, int, int, int], fold_every: int, fold_phase: int, *, layers: bool = False
) -> None:
    """Checks a ring [slots, R, W], with layers [layers, slots, R, W], and the integers of its folds."""
    check.at_least("fold_every", fold_every, 1)
    if not 0 <= fold_phase < fold_every:
        bad_value("fold_phase", f"an int from 0 to {fold_every - 1} (fold_every - 1)", fold_phase)
    dtypes = (torch.float32, torch.float64) if states.dtype == torch.float64 else (torch.float32,)
    outer = (states.shape[0],) if layers else ()
    check.tensor("ring", ring, shape=(*outer, "slots", "R", "W"), dtypes=dtypes, device=states.device)
    check_ring_layout(ring)
    width, least = ring.shape[-1], entry_width(*heads)
    if is_less(width, least):
        bad_value("ring", f"rows of at least {least} elements ({heads[0]} keys, {heads[1]} corrections and decays)", width)
    if is_less(ring.shape[-2], fold_every + 1):
        bad_value("ring", f"at least {fold_every + 1} rows (fold_every + 1)", f"{ring.shape[-2]} rows")
    if is_less(states.shape[len(outer)], ring.shape[-3]):
        bad_value("ring", f"at most {states.shape[len(outer)]} slots, those of the pool", f"{ring.shape[-3]} slots")


def check_ring_layout(ring: Tensor) -> None:
    """Checks that rows are contiguous, and start at multiples of 16 bytes."""
    if ring.stride(-1) != 1 and not (isinstance(ring.shape[-1], int) and ring.shape[-1] <= 1):
        bad_value("ring", "a contiguous last dimension (stride 1)", f"strides {ring.stride()}")
    size = ring.element_size()
    strides = [
        ring.stride(dim) for dim in range(ring.dim() - 1) if not (isinstance(ring.shape[dim], int) and ring.shape[dim] <= 1)
    ]
    if any(stride * size % ALIGNMENT for stride in strides) or address(ring) % ALIGNMENT:
        expected = f"strides of its rows, and an address, that are multiples of {ALIGNMENT} bytes"
        bad_value("ring", expected, f"strides {ring.stride()} at address {address(ring):#x}")


def check_replay_values(
    replay: Replay, touched: values.TouchedSlots, slots: tuple[str, Tensor], bounds: Tensor, accepted: Tensor | None,
    most: int | None = None,
) -> None:  # fmt: skip
    """Checks that live sequences have a ring, and lengths and counts that it holds. most: tokens that the windows allow."""
    ring, tokens, computed, fold_every, _ = replay
    if ring is None:
        return
    assert tokens is not None and computed is not None and fold_every is not None
    allowed = most_tokens(ring.shape[1], fold_every) if accepted is not None else 1
    allowed = allowed if most is None else min(allowed, most)
    name, indices = slots
    count, is_live = bounds.numel() - 1, touched.is_live
    own = indices[:count].long()
    values.require(name, own, (is_live & (own >= ring.shape[0]), f"slots with a ring, below {ring.shape[0]}"))
    lengths = bounds.diff()
    if accepted is not None:
        a = accepted[:count].long()
        values.require("num_accepted_tokens", a, (is_live & ((a < 1) | (a > allowed)), f"1 to {allowed}"))
    values.require("ring", lengths, (is_live & (lengths > allowed), f"at most {allowed} tokens a sequence"))
    check_computed(tokens, computed[:count], own, is_live)


def check_computed(tokens: Tensor, computed: Tensor, slots: Tensor, is_live: Tensor, *, num_rings: int | None = None) -> None:
    """Checks that no live sequence has fewer tokens than its state, nor more where it has no ring, and counts in int32.

    num_rings: slots with a ring, where others may be named.
    """
    p = computed.long()
    p0 = tokens.long()[torch.where(is_live, slots, 0)] if tokens.numel() else torch.zeros_like(p)
    values.require("state_tokens", p0, (is_live & (p0 < 0), "counts >= 0"))
    bad = [(is_live & (p < p0), "at least state_tokens of the slot"), (is_live & (p > MOST_COMMITTED), "at most 2**31 - 1")]
    if num_rings is not None:
        bad.append((is_live & (slots >= num_rings) & (p > p0), "state_tokens of a slot without a ring"))
    values.require("num_computed_tokens", p, *bad)
