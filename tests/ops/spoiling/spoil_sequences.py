"""Spoilings of offsets, slots, checkpoints, accepted counts and parents."""

import random
from collections.abc import Callable

import torch

from tests.ops.spoiling.call import Call
from tests.ops.spoiling.indices import FAR, POOLS, as_int64, copied, places_looked_at, register_entry, with_value
from tests.ops.spoiling.live import column_read, indices_of, kept_of, lengths, live_sequences, null_slot, reads_state, rows_of
from tests.ops.spoiling.spoiling import SPOILINGS, Spoiled, spoiling

Tensor = torch.Tensor


@spoiling("starts at 1")
def _starts_late(call: Call, path: str, _: random.Random) -> Spoiled | None:
    offsets = copied(call, path)
    if offsets is None or offsets.numel() < 2 or offsets[1] < 1:
        return None
    offsets[0] = 1
    return with_value(call, path, offsets)


@spoiling("starts at -1")
def _starts_early(call: Call, path: str, _: random.Random) -> Spoiled | None:
    offsets = copied(call, path)
    if offsets is None or offsets.numel() < 2:
        return None
    offsets[0] = -1
    return with_value(call, path, offsets)


@spoiling("decreases")
def _decreases(call: Call, path: str, _: random.Random) -> Spoiled | None:
    offsets = copied(call, path)
    if offsets is None or offsets.numel() < 3:
        return None
    offsets[-2] = offsets[-1] + 1
    return with_value(call, path, offsets)


@spoiling("ends beyond the tokens")
def _ends_late(call: Call, path: str, _: random.Random) -> Spoiled | None:
    offsets = copied(call, path)
    if offsets is None or offsets.numel() < 2:
        return None
    first = call.get(next(name for name in ("q", "x", "mixed_qkv", "parent_token") if name in call.dims))
    tokens = first.shape[1] if first.dim() == 4 else first.shape[0]
    offsets[-1] = tokens + 1
    return with_value(call, path, offsets, "seq_lens")


@spoiling("ends beyond 2**32")
def _ends_far(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """int64: the low half of the last offset is what it was."""
    offsets = as_int64(call, path)
    if offsets is None or offsets.numel() < 2:
        return None
    offsets[-1] += FAR
    return with_value(call, path, offsets, "seq_lens", "block_tables")


@spoiling("no offset")
def _no_offset(call: Call, path: str, _: random.Random) -> Spoiled | None:
    offsets = copied(call, path)
    return None if offsets is None else with_value(call, path, offsets[:0], "seq_lens", "block_tables")


def _lengths(name: str, change: Callable[[list[int]], list[int]]) -> None:
    """Registers: other lengths on the host than those of cu_seqlens."""

    def spoil(call: Call, path: str, _: random.Random) -> Spoiled | None:
        found = lengths(call) if path != "seq_lens_host" else call.index("seq_lens")
        return Spoiled(call.with_values({path: change(found)})) if found else None

    SPOILINGS[name] = spoil


_lengths("one length more", lambda found: [*found, 0])
_lengths("a length of -1", lambda found: [-1, *found[1:]])
_lengths("a longer first sequence", lambda found: [found[0] + 1, *found[1:]])


def _pool_size(call: Call, path: str) -> int | None:
    if path == "intermediate_indices":
        return call.get("intermediate_states").shape[0]
    if call.operator in ("fold_states", "accept_draft_tree"):
        return call.get("state_tokens").shape[0] if call.operator == "fold_states" else call.get("ring").shape[-3]
    if path == "checkpoint_slots" and kept_of(call):
        return min(call.get(name).shape[0] for name in kept_of(call))
    sizes = [call.get(name).shape[0] for name in POOLS if isinstance(call.get(name), Tensor)]
    return min(sizes) if sizes else None


register_entry("a slot beyond the pool", _pool_size)
register_entry("a slot of 2**33 + 1", lambda call, path: FAR + 1)


@spoiling("null as -2**33 + 1")
def _far_null(call: Call, path: str, rng: random.Random) -> Spoiled | None:
    """int64: padding, although its low half is a slot."""
    return _null_as(call, path, rng, -FAR + 1)


@spoiling("null as -7")
def _other_null(call: Call, path: str, rng: random.Random) -> Spoiled | None:
    return _null_as(call, path, rng, -7)


def _null_as(call: Call, path: str, rng: random.Random, value: int) -> Spoiled | None:
    tensor, places = as_int64(call, path), places_looked_at(call, path)
    if tensor is None or not places:
        return None
    place = rng.choice(places)
    model = tensor.clone()
    tensor[place], model[place] = value, -1 if path in ("slot_mapping", "group_indices") else null_slot(call)
    return with_value(call, path, tensor, model=model)


@spoiling("two live sequences, one slot")
def _shared_slot(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor, live = copied(call, path), live_sequences(call)
    if tensor is None or len(live) < 2 or path != indices_of(call):
        return None
    not_written = call.arguments.get("disable_state_update") or "intermediate_states" in call.arguments
    if isinstance(call.get("final_state_indices"), Tensor) or not_written:
        return None  # reading one slot twice is held elsewhere
    tensor[live[1]] = tensor[live[0]]
    return with_value(call, path, tensor)


@spoiling("two live sequences, one slot to write")
def _shared_target(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor, places = copied(call, path), places_looked_at(call, path)
    if tensor is None:
        return None
    stored = [place for place in places if int(tensor[place]) > null_slot(call)]
    others = [place for place in stored if place[0] != stored[0][0]] if stored else []
    if not others:
        return None
    tensor[others[0]] = tensor[stored[0]]
    return with_value(call, path, tensor)


@spoiling("the slot that another live sequence reads")
def _read_by_another(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor, live, reads = copied(call, path), live_sequences(call), indices_of(call)
    if tensor is None or reads is None or len(live) < 2 or call.arguments.get("disable_state_update"):
        return None
    if not reads_state(call, live[0]):
        return None
    read = column_read(call, live[0])
    tensor.view(tensor.shape[0], -1)[live[1], 0] = rows_of(call, reads)[live[0]][read]
    return with_value(call, path, tensor, reads)


@spoiling("an empty sequence names a live slot")
def _empty_shares(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor, live, counts = copied(call, path), live_sequences(call), lengths(call)
    empty = [n for n, count in enumerate(counts) if count == 0]
    if tensor is None or not live or not empty:
        return None
    tensor[empty[0]] = tensor[live[0]]
    return with_value(call, path, tensor)


@spoiling("null slots twice")
def _two_nulls(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor = copied(call, path)
    if tensor is None or len(lengths(call)) < 2:
        return None
    tensor[:2] = null_slot(call)
    return with_value(call, path, tensor, model=tensor)


@spoiling("extra rows of anything")
def _extra_rows(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor = copied(call, path)
    if tensor is None or call.dims[path][0] != "N+":
        return None
    extra = torch.ones_like(tensor[:1]) if tensor.dtype == torch.bool else torch.full_like(tensor[:1], 10**6)
    return with_value(call, path, torch.cat([tensor, extra, extra]))


@spoiling("extra rows without offsets")
def _rows_of_nothing(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """A row more than there are sequences, in both tensors where two belong together."""
    tensor = copied(call, path)
    if tensor is None or call.dims[path][0] != "N":
        return None
    pair = ("checkpoint_offsets", "checkpoint_slots") if path.startswith("checkpoint_") else (path,)
    rows = {name: call.get(name) for name in pair}
    return Spoiled(call.with_values({name: torch.cat([x, x[:1]]) for name, x in rows.items()}), names=set(pair))


@spoiling("one row too many of checkpoint offsets")
def _extra_offsets(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """Extra rows in checkpoint_offsets and checkpoint_slots together."""
    if not isinstance(call.get("checkpoint_offsets"), Tensor) or call.dims[path][0] != "N+":
        return None
    offsets, slots = call.get("checkpoint_offsets"), call.get("checkpoint_slots")
    extra = {
        "checkpoint_offsets": torch.cat([offsets, torch.full_like(offsets[:1], -3)]),
        "checkpoint_slots": torch.cat([slots, torch.full_like(slots[:1], 10**6)]),
    }
    return Spoiled(call.with_values(extra))


register_entry("a negative offset", lambda call, path: -64)
register_entry("no multiple of 64", lambda call, path: 63)


@spoiling("an offset beyond the sequence")
def _late_checkpoint(call: Call, path: str, _: random.Random) -> Spoiled | None:
    return _unused_checkpoint(call, path, 64 * 100)


@spoiling("an offset of 2**33 + 64")
def _far_checkpoint(call: Call, path: str, _: random.Random) -> Spoiled | None:
    return _unused_checkpoint(call, path, FAR + 64)


def _unused_checkpoint(call: Call, path: str, value: int) -> Spoiled | None:
    tensor = as_int64(call, path)
    if tensor is None:
        return None
    model = tensor.clone()
    tensor[0, 0], model[0, 0] = value, 0
    return with_value(call, path, tensor, model=model)


@spoiling("a null slot to save to")
def _null_checkpoint(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor, places = copied(call, path), places_looked_at(call, path)
    if tensor is None or not places:
        return None
    offsets = call.get("checkpoint_offsets").clone(memory_format=torch.contiguous_format)
    tensor[places[0]], offsets[places[0]] = null_slot(call), 0
    return Spoiled(call.with_values({path: tensor}), model=call.with_values({"checkpoint_offsets": offsets}))


def _padding(name: str, value: Callable[[int], int]) -> None:
    """Registers: an accepted count that makes its sequence padding. value: from the largest count in range."""

    def spoil(call: Call, path: str, rng: random.Random) -> Spoiled | None:
        tensor, indices, live = as_int64(call, path), indices_of(call), live_sequences(call)
        if tensor is None or indices is None or not live:
            return None
        slots = call.get(indices)
        most = slots.shape[1] if slots.dim() == 2 else 0
        if "accepted" in call.sizes:  # with a ring
            most = call.sizes["accepted"]
        elif slots.dim() == 1:  # the convolution's window may start anywhere in its slot
            most = call.get("conv_state").shape[2] - call.get("weight").shape[1] + 2
        n = rng.choice(live)
        tensor[n] = value(most)
        null = slots.clone(memory_format=torch.contiguous_format)
        null[n] = null_slot(call)
        model = call.with_values({indices: null})
        return Spoiled(call.with_values({path: tensor}), model=model)

    SPOILINGS[name] = spoil


_padding("0 accepted", lambda most: 0)
_padding("-3 accepted", lambda most: -3)
_padding("more than the columns", lambda most: most + 1)
_padding("2**33 + 1 accepted", lambda most: FAR + 1)
_padding("-2**33 + 1 accepted", lambda most: -FAR + 1)


def _parent(name: str, value: Callable[[int], int]) -> None:
    """Registers: the parent of a node. value: from the node's own place in its sequence."""

    def spoil(call: Call, path: str, _: random.Random) -> Spoiled | None:
        tensor, live = copied(call, path), live_sequences(call)
        if tensor is None or not live:
            return None
        counts = lengths(call)
        node = counts[live[0]] - 1
        tensor[sum(counts[: live[0]]) + node] = value(node)
        return with_value(call, path, tensor)

    SPOILINGS[name] = spoil


_parent("its own parent", lambda node: node)
_parent("a parent after it", lambda node: node + 1)
_parent("a parent of -2", lambda node: -2)
