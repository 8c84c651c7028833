"""Rings of good calls, and what a decode call writes into them."""

from collections.abc import Sequence
from typing import Any

import torch

from gdn.ops.delta_rule.problem import entry_width, most_tokens, state_position
from tests.ops.spoiling.call import Call, Draw

Tensor = torch.Tensor


def ring_of(draw: Draw, slots: int, rows: int, width: int) -> Tensor:
    """[slots, rows, >= width], decays among it below 0."""
    ring = -torch.rand(slots, rows, -(-width // 4) * 4, generator=draw.generator)
    return draw.pool(ring)


def give_ring(
    draw: Draw, call: Call, width: int, slots: tuple[Sequence[int], int], lengths: Sequence[int], dims: str,
    windows: int | None = None,
) -> None:  # fmt: skip
    """A ring for the sequences of a decode call, counts of their tokens, and accepted ones where a call has several.

    width: elements of an entry. slots: of each sequence, and those of the pool, whose dimension is "slots". dims: of what has a
    row a sequence. windows: the most tokens that the windows of the convolution allow.
    """
    (reads, size), longest = slots, max(1, *lengths)
    fold_every, has_accepted = draw.pick(1, 2, 5), longest > 1 or draw.maybe()
    most = longest + draw.pick(0, 1) if has_accepted else 1
    rows = max(fold_every + 1, fold_every - 1 + 2 * most + draw.pick(0, 3))
    call.give("ring", ring_of(draw, draw.pick(size, max(1, max(reads) + 1)), rows, width), "~ ~ ~")
    call.ties["slots"] = ("ring",)
    written = [draw.random.randint(0, 40) for _ in range(size)]
    call.give("state_tokens", torch.tensor(written, dtype=torch.int32), "slots")
    call.give("num_computed_tokens", draw.indices([written[slot] + draw.pick(0, 1, 3, 20) for slot in reads]), dims)
    if has_accepted:
        allowed = most_tokens(rows, fold_every) if windows is None else min(windows, most_tokens(rows, fold_every))
        call.give("num_accepted_tokens", draw.indices([draw.random.randint(1, allowed) for _ in reads]), dims)
        call.sizes["accepted"] = allowed
    call.arguments["fold_every"] = fold_every
    if draw.maybe():
        call.arguments["fold_phase"] = draw.random.randrange(fold_every)


def has_ring(call: Call) -> bool:
    """Whether this is a decode call by replay."""
    return isinstance(call.get("ring"), Tensor) and "fold_every" in call.arguments and call.operator != "fold_states"


def replayed_elements(call: Call, pool: str, slots: Sequence[tuple[int, int, int]], inner: tuple[int, int, int, int]) -> Any:
    """Masks of a pool of states and of the ring: what a decode call may change.

    slots: (sequence, slot, tokens) of the live ones. inner: key heads, state heads, K, V.
    """
    states, ring, every = call.get(pool), call.get("ring"), call.arguments["fold_every"]
    masks = {pool: torch.zeros(states.shape, dtype=torch.bool), "ring": torch.zeros(ring.shape, dtype=torch.bool)}
    phase, accepted = call.arguments.get("fold_phase", 0), call.get("num_accepted_tokens")
    for n, slot, tokens in slots:
        p, p0 = call.index("num_computed_tokens")[n], call.index("state_tokens")[slot]
        a = 1 if accepted is None else call.index("num_accepted_tokens")[n]
        masks[pool][slot] = state_position(p0, p, every, phase) > state_position(p0, p - a, every, phase)
        for i in range(tokens):
            masks["ring"][slot, (p + i) % ring.shape[1], : entry_width(*inner)] = True
    return masks
