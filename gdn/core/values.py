"""Checks of values in tensors: offsets, slots, counts, parents, lengths, pages and positions.

They run before anything is written: always where the tensors are on the CPU, on a GPU with GDN_VALIDATE=1 only, because each
of them waits for the device. A function reads the host once if all values are good, and again only to word its error: a
ValueError that names the argument, what was expected, and the first bad value with its place. Never call one while a CUDA
graph is captured, nor with meta or fake tensors.

Indices are widened to int64 and never narrowed. Shapes and dtypes have been checked before. Padding is not an error: rows
beyond the N sequences, a sequence without tokens or with a null slot to read and everything that belongs to it, a null slot to
write, tokens beyond the last sequence, entries of a block table after the last page, skipped tokens, empty ranges.

Two checks refuse values that have a defined result, and so are called with GDN_VALIDATE=1 only, on the CPU too:

    check_accepted   the sequence is padding
    check_ranges     ranges are clamped to the keys, and to max_seqlen_k
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gdn.core.check import bad_value


def _is_clean(*bad: Tensor) -> bool:
    """Whether no element of any mask is set: the one host read of a check."""
    masks = [mask.reshape(-1) for mask in bad]
    return not bool((masks[0] if len(masks) == 1 else torch.cat(masks)).any())


def _first(bad: Tensor) -> list[int]:
    """Index of the first set element of a mask that has one."""
    place: list[int] = bad.nonzero()[0].tolist()
    return place


def require(name: str, values: Tensor, *bad: tuple[Tensor, str]) -> None:
    """Raises for the first bad value, with its place. bad: masks of bad values, each with what is expected instead."""
    if _is_clean(*(mask for mask, _ in bad)):
        return
    for mask, expected in bad:
        if bool(mask.any()):
            place = _first(mask)
            bad_value(name, expected, f"{int(values[tuple(place)])} at {place}")


def _require_distinct(name: str, slots: Tensor, bad: tuple[Tensor, str], keys: Tensor, expected: str, earlier: str) -> None:
    """Raises for the first bad slot [n], as `require`, then for the first key [n] >= 0 that occurs twice.

    earlier: words for the first of two equal keys, before its place.
    """
    ordered, order = keys.sort(stable=True)
    is_repeated = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
    if _is_clean(bad[0], is_repeated):
        return
    require(name, slots, bad)
    (place,) = _first(is_repeated)
    first, second = int(order[place]), int(order[place + 1])
    bad_value(name, expected, f"{int(slots[second])} at [{second}], {earlier} [{first}]")


def check_offsets(name: str, offsets: Tensor, num_tokens: int | None = None) -> None:
    """Checks that offsets [N + 1] start at 0, never decrease, and end within num_tokens (None = no bound)."""
    values = offsets.long()
    bad = [values[:1] != 0, values[1:] < values[:-1]]
    if num_tokens is not None:
        bad.append(values[-1:] > num_tokens)
    if _is_clean(*bad):
        return
    listed = values.tolist()
    if listed[0] != 0:
        bad_value(name, "a first offset of 0", listed[0])
    for n, (start, end) in enumerate(zip(listed[:-1], listed[1:], strict=True)):
        if end < start:
            bad_value(name, "offsets that never decrease", f"{start} then {end} at index {n}")
    bad_value(name, f"a last offset of at most {num_tokens} tokens", listed[-1])


def token_bounds(name: str, offsets: Tensor | None, batch: int, length: int, device: torch.device) -> Tensor:
    """First token of each sequence and the end of the last, [N + 1] int64. offsets: checked here; None = `batch` rows."""
    if offsets is None:
        return torch.arange(batch + 1, device=device) * length
    check_offsets(name, offsets, batch * length)
    return offsets.long().contiguous()


def check_max_seqlen(max_seqlen: int | None, bounds: Tensor) -> None:
    """Checks that no sequence has more tokens."""
    if max_seqlen is None:
        return
    longest = int(bounds.diff().max()) if bounds.numel() > 1 else 0
    if longest > max_seqlen:
        bad_value("max_seqlen", f"at least the {longest} tokens of the longest sequence", max_seqlen)


def _sequence_of(bounds: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Sequence of each token (arbitrary for padding), and whether the token belongs to a sequence; N >= 1."""
    token = torch.arange(num_tokens, device=bounds.device)
    sequence = torch.searchsorted(bounds, token, right=True) - 1
    return sequence.clamp(0, bounds.numel() - 2), token < bounds[-1]


def check_log_decays(name: str, g: Tensor, bounds: Tensor, is_live: Tensor | None = None) -> None:
    """Checks that no logarithm of a decay [B, T, heads] is positive: a state would grow from token to token.

    is_live [N]: False = padding, with arbitrary values. NaN is no error here: it shows in the result.
    """
    if bounds.numel() < 2 or not g.numel():
        return
    rows = g.flatten(0, 1)
    sequence, is_checked = _sequence_of(bounds, rows.shape[0])
    if is_live is not None:
        is_checked = is_checked & is_live[sequence]
    bad = is_checked[:, None] & (rows > 0)
    if not _is_clean(bad):
        token, head = _first(bad)
        place = f"[{token // g.shape[1]}, {token % g.shape[1]}, {head}]"
        bad_value(name, "logarithms of decays, at most 0", f"{float(rows[token, head])} at {place}")


def check_parents(name: str, parent_token: Tensor, bounds: Tensor, is_live: Tensor | None = None) -> None:
    """Checks that each parent is -1 or a node before its child, counted within the sequence.

    parent_token: one entry per token, [tokens] or [B, T]. is_live [N]: False = padding, with arbitrary parents.
    """
    parents = parent_token.reshape(-1).long()
    if bounds.numel() < 2:
        return
    sequence, is_checked = _sequence_of(bounds, parents.numel())
    node = torch.arange(parents.numel(), device=bounds.device) - bounds[sequence]
    if is_live is not None:
        is_checked = is_checked & is_live[sequence]
    bad = is_checked & ((parents < -1) | (parents >= node))
    if not _is_clean(bad):
        (token,) = _first(bad)
        bad_value(name, f"-1 or a node before node {int(node[token])}", f"{int(parents[token])} at token {token}")


@dataclass(frozen=True, slots=True)
class SlotUse:
    """Slots of one argument that live sequences read or write."""

    name: str
    slots: Tensor  # [N, columns] int64
    is_used: Tensor  # [N, columns] bool: False = the entry may hold anything
    is_written: bool
    rank: int  # dimensions of the argument: 1 or 2

    def place(self, entry: int) -> str:
        """Index in the argument of an entry of the flattened slots."""
        row, column = divmod(entry, self.slots.shape[1])
        return f"[{row}]" if self.rank == 1 else f"[{row}, {column}]"


@dataclass(frozen=True, slots=True)
class TouchedSlots:
    """All slots of one pool that a call reads or writes."""

    is_live: Tensor  # [N] bool
    uses: tuple[SlotUse, ...]


def _as_columns(indices: Tensor, count: int) -> Tensor:
    """[>= N] or [>= N, columns] as [N, columns] int64."""
    used = indices[:count].long()
    return used[:, None] if used.dim() == 1 else used


def _use(name: str, indices: Tensor, slots: Tensor, is_used: Tensor, *, is_written: bool) -> SlotUse:
    return SlotUse(name, slots, is_used.expand(slots.shape), is_written, indices.dim())


def prefill_slots(
    name: str,
    bounds: Tensor,
    indices: Tensor | None,
    null_slot: int,
    *,
    has_initial_state: Tensor | None = None,
    final_indices: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
    checkpoint_multiple: int = 64,
) -> TouchedSlots:
    """Slots that `chunk_gated_delta_rule` or `causal_conv1d_fn` (checkpoint_multiple 1, no final_indices) touches.

    indices None = slot n for sequence n, never null. A checkpoint beyond its sequence, or after 0 tokens, does not count.
    """
    lengths, count = bounds.diff(), bounds.numel() - 1
    is_live = lengths > 0
    if indices is None:
        indices = torch.arange(count, device=bounds.device)
    else:
        is_live = is_live & (indices[:count].long() > null_slot)
    own = _as_columns(indices, count)
    if final_indices is None:
        uses = [_use(name, indices, own, is_live[:, None], is_written=True)]
    else:
        is_read = is_live if has_initial_state is None else is_live & has_initial_state[:count]
        final = _as_columns(final_indices, count)
        is_stored = is_live[:, None] & (final > null_slot)
        uses = [
            _use(name, indices, own, is_read[:, None], is_written=False),
            _use("final_state_indices", final_indices, final, is_stored, is_written=True),
        ]
    if checkpoint_offsets is not None and checkpoint_slots is not None:
        uses.append(_checkpoint_use(bounds, is_live, checkpoint_offsets, checkpoint_slots, null_slot, checkpoint_multiple))
    return TouchedSlots(is_live, tuple(uses))


def _checkpoint_use(
    bounds: Tensor, is_live: Tensor, checkpoint_offsets: Tensor, checkpoint_slots: Tensor, null_slot: int, multiple: int
) -> SlotUse:
    count = is_live.numel()
    offsets, slots = _as_columns(checkpoint_offsets, count), _as_columns(checkpoint_slots, count)
    is_reached = (offsets > 0) & (offsets <= bounds.diff()[:, None]) & (offsets % multiple == 0)
    is_stored = is_live[:, None] & is_reached & (slots > null_slot)
    return _use("checkpoint_slots", checkpoint_slots, slots, is_stored, is_written=True)


def own_rows(name: str, rows: Tensor, is_live: Tensor, null_slot: int) -> TouchedSlots:
    """One row for each sequence, [>= N], that it writes unless it is null."""
    own = _as_columns(rows, is_live.numel())
    return TouchedSlots(is_live, (_use(name, rows, own, is_live[:, None] & (own > null_slot), is_written=True),))


def decode_slots(
    name: str,
    bounds: Tensor,
    indices: Tensor,
    null_slot: int,
    *,
    num_accepted_tokens: Tensor | None = None,
    final_indices: Tensor | None = None,
    is_updated: bool = True,
    first_column_decides: bool = False,
) -> TouchedSlots:
    """Slots that the states of a decode step, or the windows of a draft tree, touch; indices [>= N] or [>= N, columns].

    With columns the state before the first token is read from column num_accepted_tokens - 1, and the state after token i is
    written to column i. is_updated False = nothing is written. first_column_decides: a null slot in column 0 is padding too
    (`fused_gdn_decode` keeps its windows there).
    """
    lengths, count = bounds.diff(), bounds.numel() - 1
    slots = _as_columns(indices, count)
    column = torch.arange(slots.shape[1], device=slots.device)
    read_column = torch.zeros_like(lengths) if num_accepted_tokens is None else num_accepted_tokens[:count].long() - 1
    is_read = (column == read_column[:, None]) & (slots > null_slot)
    is_live = (lengths > 0) & is_read.any(dim=1)
    if first_column_decides:
        is_live = is_live & (slots[:, 0] > null_slot)
    uses = [_use(name, indices, slots, is_read & is_live[:, None], is_written=False)]
    if is_updated:
        target_name, target = (name, indices) if final_indices is None else ("final_state_indices", final_indices)
        stored = _as_columns(target, count)
        is_stored = is_live[:, None] & (column < lengths[:, None]) & (stored > null_slot)
        uses.append(_use(target_name, target, stored, is_stored, is_written=True))
    return TouchedSlots(is_live, tuple(uses))


def window_slots(
    name: str,
    bounds: Tensor,
    indices: Tensor,
    null_slot: int,
    *,
    num_accepted_tokens: Tensor | None = None,
    num_windows: int = 1,
    is_live: Tensor | None = None,
    is_updated: bool = True,
) -> TouchedSlots:
    """Slots that the windows of a decode step touch: one per sequence, indices [>= N] or column 0 of [>= N, columns].

    num_windows: the largest num_accepted_tokens that is not padding. is_live: that of the states, in `fused_gdn_decode`.
    is_updated False = nothing is written.
    """
    lengths, count = bounds.diff(), bounds.numel() - 1
    slots = _as_columns(indices, count)[:, :1]
    alive = (lengths > 0) & (slots[:, 0] > null_slot)
    if num_accepted_tokens is not None:
        accepted = num_accepted_tokens[:count].long()
        alive = alive & (accepted >= 1) & (accepted <= num_windows)
    if is_live is not None:
        alive = alive & is_live
    return TouchedSlots(alive, (_use(name, indices, slots, alive[:, None], is_written=is_updated),))


def check_slots(touched: TouchedSlots, num_slots: int, null_slot: int) -> None:
    """Checks that every slot that is read or written is in the pool."""
    bad = [use.is_used & (use.slots >= num_slots) for use in touched.uses]
    if _is_clean(*bad):
        return
    for use, mask in zip(touched.uses, bad, strict=True):
        entries = mask.reshape(-1).nonzero()
        if entries.numel():
            entry = int(entries[0])
            got = f"{int(use.slots.reshape(-1)[entry])} at {use.place(entry)}"
            bad_value(use.name, f"slots below {num_slots} (or null, <= {null_slot})", got)


def check_unshared(touched: TouchedSlots, num_slots: int) -> None:
    """Checks that no slot written by one live sequence is read or written by another. Several may read one slot."""
    uses, count = touched.uses, touched.is_live.numel()
    slots = torch.cat([use.slots.reshape(-1) for use in uses])
    is_used = torch.cat([use.is_used.reshape(-1) for use in uses]) & (slots < num_slots)
    is_written = torch.cat([(use.is_used & use.is_written).reshape(-1) for use in uses])
    row = torch.arange(count, device=slots.device)[:, None]
    sequence = torch.cat([row.expand(use.slots.shape).reshape(-1) for use in uses])

    # Per slot: the first and the last sequence that uses it, and whether any writes it. Unused entries go to slot num_slots.
    place = torch.where(is_used, slots, num_slots)
    first = torch.full((num_slots + 1,), count, device=slots.device).scatter_reduce_(0, place, sequence, "amin")
    last = torch.full((num_slots + 1,), -1, device=slots.device).scatter_reduce_(0, place, sequence, "amax")
    written = torch.zeros(num_slots + 1, dtype=torch.int64, device=slots.device)
    written = written.scatter_reduce_(0, place, is_written.long(), "amax")
    bad = ((first < last) & (written > 0))[:num_slots]
    if _is_clean(bad):
        return
    (slot,) = _first(bad)
    described = [(use.name, use.place(entry)) for use in uses for entry in range(use.slots.numel())]
    entries = (place == slot).nonzero().reshape(-1).tolist()
    writer = next(entry for entry in reversed(entries) if bool(is_written[entry]))
    other = next(entry for entry in entries if int(sequence[entry]) != int(sequence[writer]))
    name, where = described[writer]
    got = f"slot {slot} at {where}, which is {''.join(described[other])} too"
    bad_value(name, "slots that no other live sequence reads or writes", got)


def check_touched(touched: TouchedSlots, pool: Tensor, null_slot: int) -> None:
    """Checks that slots are in the pool, and that none that a live sequence writes is read or written by another."""
    check_slots(touched, pool.shape[0], null_slot)
    check_unshared(touched, pool.shape[0])


def check_accepted(num_accepted_tokens: Tensor, columns: int, bounds: Tensor, indices: Tensor | None, null_slot: int) -> None:
    """Checks for counts of 1 to `columns` in every sequence with tokens and a slot.

    columns: those of 2-D indices; with 1-D indices 1, or the number of windows in a convolution's slot. indices: all indices
    that the call may read ([:, 0] where it reads only column 0); a sequence whose slots are all null is padding.
    """
    lengths, count = bounds.diff(), bounds.numel() - 1
    accepted = num_accepted_tokens[:count].long()
    bad = (lengths > 0) & ((accepted < 1) | (accepted > columns))
    if indices is not None:
        bad = bad & (_as_columns(indices, count) > null_slot).any(dim=1)
    require("num_accepted_tokens", accepted, (bad, f"1 to {columns} (the states or windows to start from)"))


def check_checkpoint_offsets(name: str, offsets: Tensor, is_live: Tensor, *, multiple: int) -> None:
    """Checks that offsets [>= N, C] are >= 0 and multiples of `multiple` tokens. is_live [N]: that of `prefill_slots`."""
    values = offsets[: is_live.numel()].long()
    is_negative, is_odd = (is_live[:, None] & bad for bad in (values < 0, values % multiple != 0))
    counts = "0 (none) or a number of tokens"
    require(name, values, (is_negative, counts), (is_odd, f"multiples of {multiple} tokens, or 0"))


def check_checkpoints(
    offsets: Tensor | None, slots: Tensor | None, kept: Sequence[Tensor | None], bounds: Tensor, is_live: Tensor, null_slot: int,
    *, multiple: int = 64,
) -> None:  # fmt: skip
    """Checks checkpoint_offsets, and checkpoint_slots as rows of the given ones of `kept`, the tensors that take checkpoints.

    bounds [N + 1]; is_live [N]: that of `prefill_slots`, which counts the slots of those that go to a pool.
    """
    if offsets is None or slots is None:
        return
    check_checkpoint_offsets("checkpoint_offsets", offsets, is_live, multiple=multiple)
    use = _checkpoint_use(bounds, is_live, offsets, slots, null_slot, multiple)
    for tensor in kept:
        if tensor is not None:
            check_touched(TouchedSlots(is_live, (use,)), tensor, null_slot)


def _longest(lengths: Tensor) -> Tensor:
    """Longest draft of each sequence, [N] int64, from lengths [N] or [N, drafts]."""
    return lengths.long() if lengths.dim() == 1 else lengths.long().amax(dim=1)


def check_table_lengths(name: str, lengths: Tensor, block_tables: Tensor, page_size: int) -> None:
    """Checks that no sequence is longer than its row of block_tables [N, columns].

    lengths [N] or [N, drafts]; name: their argument's.
    """
    longest = _longest(lengths)
    limit = block_tables.shape[1] * page_size
    expected = f"sequences of at most {limit} ({block_tables.shape[1]} columns of block_tables, {page_size} in a page)"
    require(name, longest, (longest > limit, expected))


def check_pages(
    name: str, block_tables: Tensor, lengths: Tensor, page_size: int, num_pages: int, max_length: int | None = None
) -> None:
    """Checks that pages of visible keys are in the cache. lengths [N] or [N, drafts]: visible keys, at most max_length."""
    longest = _longest(lengths)
    if max_length is not None:
        longest = longest.clamp(max=max_length)
    pages = block_tables[: longest.numel()].long()
    first_key = torch.arange(pages.shape[1], device=pages.device) * page_size
    bad = (first_key < longest[:, None]) & ((pages < 0) | (pages >= num_pages))
    if not _is_clean(bad):
        row, column = _first(bad)
        bad_value(f"{name}[{row}, {column}]", f"a page in [0, {num_pages})", int(pages[row, column]))


def check_slot_mapping(name: str, slot_mapping: Tensor, num_rows: int, is_read: Tensor | None = None) -> None:
    """Checks that cache rows [tokens] are in the cache and distinct. Negative = skipped; is_read [tokens] False = not read."""
    slots = slot_mapping.long()
    if is_read is not None:
        slots = torch.where(is_read, slots, -1)
    beyond = (slots >= num_rows, f"slots below {num_rows} (pages * page_size)")
    _require_distinct(name, slots, beyond, slots, "distinct slots (or negative: skipped)", "as at")


def ring_tokens(ring_slots: Tensor, positions: Tensor, null_slot: int) -> Tensor:
    """Tokens that `compress_indexer_keys` does not skip, [tokens] bool: those with a live slot and a position in int32."""
    slots, position = ring_slots.long(), positions.long()
    return (slots >= 0) & (slots != null_slot) & (position >= 0) & (position < 2**31)


def finished_groups(positions: Tensor, ring_slots: Tensor, ratio: int, null_slot: int) -> Tensor:
    """Tokens that complete a group, so that their slot_mapping is read, [tokens] bool."""
    return ring_tokens(ring_slots, positions, null_slot) & ((positions.long() + 1) % ratio == 0)


def check_ring_slots(name: str, ring_slots: Tensor, positions: Tensor, num_slots: int, null_slot: int) -> None:
    """Checks that slots [tokens] are in the ring and that each slot has one run of tokens with ascending positions.

    Skipped tokens do not count. Two runs in one slot are two sequences that share it, or one with tokens out of order.
    """
    slots, position = ring_slots.long(), positions.long()
    is_kept = ring_tokens(ring_slots, positions, null_slot)
    beyond = (is_kept & (slots >= num_slots), f"slots below {num_slots} (or negative or {null_slot}: skipped)")
    before = torch.where(is_kept, torch.arange(slots.numel(), device=slots.device), -1).cummax(0).values.roll(1)
    before[:1] = -1  # the last token before each one that is not skipped
    starts_run = is_kept & ((before < 0) | (slots != slots[before]) | (position <= position[before]))
    runs, expected = torch.where(starts_run, slots, -1), "one run of tokens with ascending positions for each slot"
    _require_distinct(name, slots, beyond, runs, expected, "whose first run starts at")


def check_rope_positions(
    name: str, positions: Tensor, num_positions: int, *, is_read: Tensor | None = None, before: int = 0
) -> None:
    """Checks that positions [tokens] are >= 0 and have a row in cos_sin [num_positions, ...]: row position - before.

    is_read [tokens]: False = skipped. before: ratio - 1 for compressed keys, which are rotated at their group's first position.
    """
    values = positions.long()
    is_negative, is_beyond = values < 0, values >= num_positions + before
    if is_read is not None:
        is_negative, is_beyond = is_negative & is_read, is_beyond & is_read
    expected = f"positions below {num_positions + before} (cos_sin has {num_positions} rows)"
    require(name, values, (is_negative, "positions >= 0"), (is_beyond, expected))


def check_ranges(starts: Tensor, ends: Tensor, num_keys: int, max_seqlen_k: int | None) -> None:
    """Checks that no range [starts, ends), each [M], starts below 0 or is longer than max_seqlen_k."""
    start, end = starts.long(), ends.long().clamp(0, num_keys)
    visible = (end - start.clamp(0, num_keys)).clamp(min=0)
    is_negative = (start < 0) & (visible > 0)
    limit = num_keys if max_seqlen_k is None else max_seqlen_k
    if _is_clean(is_negative, visible > limit):
        return
    require("cu_seqlen_ks", start, (is_negative, "starts >= 0"))
    bad_value("max_seqlen_k", f"at least {int(visible.max())}, the longest range", max_seqlen_k)


def check_new_tokens(name: str, seq_lens: Tensor, bounds: Tensor) -> None:
    """Checks that each sequence [N] is at least as long as its new tokens, which are its last ones."""
    lengths, new = seq_lens.long(), bounds.diff()
    bad = (new > 0) & (lengths < new)
    if not _is_clean(bad):
        (row,) = _first(bad)
        bad_value(name, f"at least the {int(new[row])} new tokens of sequence {row}", f"{int(lengths[row])} at [{row}]")


def check_selected_positions(
    name: str, topk_indices: Tensor, bounds: Tensor, seq_lens: Tensor, topk_length: Tensor | None = None
) -> None:
    """Checks that selected positions [tokens, k] are in the query's own sequence.

    Negative = none; only the first topk_length entries of a row count.
    """
    tokens, k = topk_indices.shape
    if bounds.numel() < 2:
        return
    sequence, is_real = _sequence_of(bounds, tokens)
    position = topk_indices.long()
    bad = is_real[:, None] & (position >= seq_lens.long()[sequence][:, None]) & (position >= 0)
    if topk_length is not None:
        bad = bad & (torch.arange(k, device=position.device) < topk_length.long()[:, None])
    if not _is_clean(bad):
        token, column = _first(bad)
        length = int(seq_lens[sequence[token]])
        got = f"{int(position[token, column])} at [{token}, {column}]"
        bad_value(name, f"positions below {length}, the length of sequence {int(sequence[token])}", got)


def check_topk_length(name: str, topk_length: Tensor, k: int, bounds: Tensor) -> None:
    """Checks for lengths of 0 to k at every token of a sequence."""
    if bounds.numel() < 2:
        return
    _, is_real = _sequence_of(bounds, topk_length.numel())
    lengths = topk_length.long()
    require(name, lengths, (is_real & ((lengths < 0) | (lengths > k)), f"0 to {k} (the columns of topk_indices)"))
