"""Spoilings of cache rows, pages, lengths and ranges."""

import random
from collections.abc import Callable

import torch

from tests.ops.spoiling.call import Call
from tests.ops.spoiling.indices import FAR, as_int64, copied, places_looked_at, register_entry, with_value
from tests.ops.spoiling.live import lengths, null_slot
from tests.ops.spoiling.spoiling import SPOILINGS, Spoiled, spoiling

Tensor = torch.Tensor


register_entry("a row beyond the cache", lambda call, path: call.get("cache").shape[0] * call.get("cache").shape[1])
register_entry("a row of 2**33 + 1", lambda call, path: FAR + 1)
register_entry("a ring beyond the ring buffer", lambda call, path: call.get("ring").shape[0])
register_entry("a position beyond cos_sin", lambda call, path: call.get("cos_sin").shape[0] + _rows_before(call))
register_entry("a position of 2**33 + 1", lambda call, path: FAR + 1)
register_entry("a negative position", lambda call, path: -1)
register_entry("a negative count", lambda call, path: -1)
register_entry("more than k", lambda call, path: call.get("topk_indices").shape[1] + 1)


def _rows_before(call: Call) -> int:
    """Rows of cos_sin between that of a key and its position: compressed keys are rotated to where their group begins."""
    return call.arguments.get("ratio", 4) - 1 if call.operator == "compress_indexer_keys" else 0


@spoiling("one row twice")
def _duplicate_row(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor, places = copied(call, path), places_looked_at(call, path)
    if tensor is None or len(places) < 2:
        return None
    for place in places[:2]:
        tensor[place] = 1
    return with_value(call, path, tensor)


@spoiling("anything at tokens that end no group")
def _unread_rows(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor = copied(call, path)
    if tensor is None:
        return None
    ratio = call.arguments.get("ratio", 4)
    unread = (call.get("positions") + 1) % ratio != 0
    return with_value(call, path, torch.where(unread, 10**6, tensor).to(tensor.dtype)) if bool(unread.any()) else None


@spoiling("anything at skipped tokens")
def _skipped_positions(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor = copied(call, path)
    if tensor is None:
        return None
    skipped = call.get("ring_slots") == null_slot(call)
    return with_value(call, path, torch.where(skipped, -5, tensor).to(tensor.dtype)) if bool(skipped.any()) else None


@spoiling("positions that skip their tokens")
def _skipping_positions(call: Call, path: str, rng: random.Random) -> Spoiled | None:
    """A negative position, or one beyond int32, of a live token: the call with a null slot at that token."""
    tensor, live = copied(call, path), (call.get("ring_slots") != null_slot(call)).nonzero()[:, 0].tolist()
    if tensor is None or not live:
        return None
    token = rng.choice(live)
    wide, slots = tensor.long(), call.get("ring_slots").clone()
    wide[token] = rng.choice([-1, -5, FAR + 1] if tensor.dtype == torch.int64 else [-1, -5])
    slots[token] = null_slot(call)
    return Spoiled(
        call.with_values({path: wide.to(tensor.dtype)}),
        model=call.with_values({path: wide.to(tensor.dtype), "ring_slots": slots}),
    )


def _visible(call: Call) -> list[int]:
    """Rows (keys, positions) that each sequence of a paged call looks at."""
    if call.operator == "gather_indexer_cache":
        return lengths(call)
    if call.operator in ("sparse_attention", "attention"):
        return [rows if new else 0 for rows, new in zip(call.index("seq_lens"), lengths(call), strict=True)]
    values = call.index("context_lens")
    rows = [max(row) if isinstance(row, list) else row for row in values]
    return [min(row, call.arguments.get("max_context_len", row)) for row in rows]


def _page_size(call: Call) -> int:
    cache = call.get("cache")
    if not isinstance(cache, Tensor):
        cache = call.get("kv_cache")
        return cache.shape[2] if isinstance(cache, Tensor) else cache[0].shape[1]
    return cache.shape[1]


def _page(name: str, value: Callable[[Call], int], *, visible: bool) -> None:
    """Registers: a page number of rows that are looked at, or of others."""

    def spoil(call: Call, path: str, rng: random.Random) -> Spoiled | None:
        tables = copied(call, path)
        if tables is None or not tables.numel():
            return None
        size = _page_size(call)
        used = [
            (n, column) for n, rows in enumerate(_visible(call)) for column in range(tables.shape[1])
            if (column * size < rows) == visible
        ]  # fmt: skip
        if not used:
            return None
        tables[rng.choice(used)] = value(call)
        return with_value(call, path, tables)

    SPOILINGS[name] = spoil


def _pages(call: Call) -> int:
    cache = call.get("cache")
    if isinstance(cache, Tensor):
        return cache.shape[0]
    cache = call.get("kv_cache")
    return cache.shape[1] if isinstance(cache, Tensor) else cache[0].shape[0]


_page("a page beyond the cache", _pages, visible=True)
_page("a negative page", lambda call: -1, visible=True)
_page("anything where no row is looked at", lambda call: 10**8, visible=False)


def _with_tokens(call: Call) -> int | None:
    """A sequence whose length is looked at."""
    if not isinstance(call.get("query_start_loc"), Tensor):
        return 0
    return next((n for n, count in enumerate(lengths(call)) if count > 0), None)


@spoiling("longer than its block table")
def _longer_than_table(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor = copied(call, path)
    if tensor is None:
        return None
    addressed = call.get("block_tables").shape[1] * _page_size(call)
    values = {path: tensor}
    if call.operator == "gather_indexer_cache":
        tensor[-1] = tensor[-2] + addressed + 1
        if "num_rows" in call.arguments:
            values["num_rows"] = int(tensor[-1]) + 1
    else:
        sequence = _with_tokens(call)
        if sequence is None:
            return None
        tensor[sequence] = addressed + 1
    if "max_context_len" in call.arguments:
        values["max_context_len"] = addressed + 5
        values |= {"out": None} if "out" in call.arguments else {}
    return Spoiled(call.with_values(values), names={"block_tables", "max_context_len"})


@spoiling("a length of 2**33 + 1")
def _far_length(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor, sequence = as_int64(call, path), _with_tokens(call)
    if tensor is None or sequence is None:
        return None
    tensor[sequence] = FAR + 1
    return Spoiled(call.with_values({path: tensor}), names={"block_tables", "max_context_len"})


@spoiling("empty as -2**33 + 1")
def _far_empty(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor = as_int64(call, path)
    if tensor is None or not tensor.numel():
        return None
    model = tensor.clone()
    tensor[0], model[0] = -FAR + 1, 0
    return with_value(call, path, tensor, model=model)


@spoiling("ends of 2**33 + 1")
def _far_end(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """int64: clamped to the keys, whatever its low half is."""
    tensor = as_int64(call, path)
    if tensor is None or not tensor.numel() or call.arguments.get("max_seqlen_k"):
        return None
    keys = call.get(next(name for name in ("logits", "kv[0]", "k") if call.get(name) is not None))
    count = keys.shape[1] if path == "row_ends" else keys.shape[0]
    model = tensor.clone()
    tensor[0], model[0] = FAR + 1, count
    return with_value(call, path, tensor, model=model)


@spoiling("a negative start")
def _negative_start(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """Clamped to the first key."""
    tensor = copied(call, path)
    if tensor is None or not tensor.numel() or call.arguments.get("max_seqlen_k"):
        return None
    model = tensor.clone()
    tensor[0], model[0] = -1, 0
    return with_value(call, path, tensor, model=model)


@spoiling("fewer than the new tokens")
def _too_few(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor, counts = copied(call, path), lengths(call)
    n = max(range(len(counts)), key=counts.__getitem__)
    if tensor is None:
        return None
    tensor[n] = counts[n] - 1
    return with_value(call, path, tensor, "query_start_loc")


@spoiling("a position beyond the sequence")
def _beyond_sequence(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor, counts = copied(call, path), lengths(call)
    n = max(range(len(counts)), key=counts.__getitem__)
    token = sum(counts[:n])
    if tensor is None or not _is_read(call, token):
        return None
    tensor[token, 0] = call.index("seq_lens")[n]
    return with_value(call, path, tensor, "seq_lens")


def _is_read(call: Call, token: int) -> bool:
    return not isinstance(call.get("topk_length"), Tensor) or call.index("topk_length")[token] > 0


@spoiling("a position after the query's own")
def _not_causal(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """A later position of the sequence does not count."""
    tensor, counts = copied(call, path), lengths(call)
    n = max(range(len(counts)), key=counts.__getitem__)
    if tensor is None or counts[n] < 2:
        return None
    token = sum(counts[:n])
    model = tensor.clone()
    tensor[token, 0], model[token, 0] = call.index("seq_lens")[n] - 1, -1
    return with_value(call, path, tensor, model=model)


@spoiling("none as -9")
def _other_none(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor = copied(call, path)
    return None if tensor is None else with_value(call, path, torch.where(tensor < 0, -9, tensor).to(tensor.dtype))


@spoiling("too small")
def _too_small(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """num_rows: one row less than there are."""
    rows = sum(lengths(call))
    return Spoiled(call.with_values({path: rows - 1}), names={"cu_seqlens"}) if rows else None
