"""Spoilings of values: offsets, slots, counts, parents, pages; and of arguments that belong together."""

import random
from collections.abc import Callable

import torch

from tests.ops.spoiling.call import Call
from tests.ops.spoiling.live import (
    indices_of,
    lengths,
    live_sequences,
    null_slot,
    rows_of,
)  # fmt: skip
from tests.ops.spoiling.spoilings import SPOILINGS, Spoiled, spoiling

Tensor = torch.Tensor
FAR = 2**33  # int64 only; its low half is zero
POOLS = ("initial_state", "ssm_state", "conv_state", "conv_states")


def _copy(call: Call, path: str) -> Tensor | None:
    tensor = call.get(path)
    return tensor.clone(memory_format=torch.contiguous_format) if isinstance(tensor, Tensor) else None


def _wide(call: Call, path: str) -> Tensor | None:
    """A copy as int64."""
    tensor = _copy(call, path)
    return None if tensor is None else tensor.long()


def _with(call: Call, path: str, value: Tensor, *names: str, model: Tensor | None = None) -> Spoiled:
    return Spoiled(
        call.with_values({path: value}), names=set(names), model=None if model is None else call.with_values({path: model})
    )


def _set(name: str, value: Callable[[Call, str], int | None]) -> None:
    """Registers: one entry that counts gets another value. value: None where that cannot be."""

    def spoil(call: Call, path: str, rng: random.Random) -> Spoiled | None:
        tensor, places = _copy(call, path), _used(call, path)
        new = value(call, path) if tensor is not None and places else None
        if tensor is None or new is None or (tensor.dtype != torch.int64 and not -(2**31) <= new < 2**31):
            return None
        tensor[rng.choice(places)] = new
        return _with(call, path, tensor, *_pools(call))

    SPOILINGS[name] = spoil


def _pools(call: Call) -> set[str]:
    return {name for name in (*POOLS, "cache", "ring", "kv_cache") if name in call.arguments}


def _used(call: Call, path: str) -> list[tuple[int, ...]]:
    """Places of an index tensor that the call really looks at."""
    tensor = call.get(path)
    if not isinstance(tensor, Tensor) or not tensor.numel():
        return []
    if path in ("state_indices", "ssm_state_indices", "cache_indices", "conv_state_indices"):
        if tensor.dim() == 1:
            return [(n,) for n in live_sequences(call)]
        counts = lengths(call)
        if call.operator == "causal_conv1d_update" and not isinstance(call.get("parent_token"), Tensor):
            return [(n, 0) for n in live_sequences(call)]
        return [(n, c) for n in live_sequences(call) for c in range(min(tensor.shape[1], counts[n]))]
    if path == "final_state_indices":
        counts = lengths(call)
        if call.arguments.get("disable_state_update"):
            return []
        if tensor.dim() == 1:
            return [(n,) for n in live_sequences(call)]
        return [(n, c) for n in live_sequences(call) for c in range(min(tensor.shape[1], counts[n]))]
    if path == "checkpoint_slots":
        counts, offsets = lengths(call), call.index("checkpoint_offsets")
        return [(n, c) for n in live_sequences(call) for c, offset in enumerate(offsets[n]) if 0 < offset <= counts[n]]
    if path in ("checkpoint_offsets", "num_accepted_tokens"):
        live = live_sequences(call)
        return [(n,) if tensor.dim() == 1 else (n, 0) for n in live]
    if path == "positions" and call.operator == "compress_indexer_keys":
        return [(n,) for n, slot in enumerate(call.index("ring_slots")) if slot >= 0 and slot != null_slot(call)]
    if path == "slot_mapping" and call.operator == "compress_indexer_keys":
        ratio, slots = call.arguments.get("ratio", 4), call.index("ring_slots")
        return [
            (n,) for n, position in enumerate(call.index("positions"))
            if (position + 1) % ratio == 0 and slots[n] >= 0 and slots[n] != null_slot(call)
        ]  # fmt: skip
    return [tuple(place) for place in torch.ones(tensor.shape).nonzero().tolist()]


# ---------------------------------------------------------------------------------------------------------------- offsets


@spoiling("starts at 1")
def _starts_late(call: Call, path: str, _: random.Random) -> Spoiled | None:
    offsets = _copy(call, path)
    if offsets is None or offsets.numel() < 2 or offsets[1] < 1:
        return None
    offsets[0] = 1
    return _with(call, path, offsets)


@spoiling("starts at -1")
def _starts_early(call: Call, path: str, _: random.Random) -> Spoiled | None:
    offsets = _copy(call, path)
    if offsets is None or offsets.numel() < 2:
        return None
    offsets[0] = -1
    return _with(call, path, offsets)


@spoiling("decreases")
def _decreases(call: Call, path: str, _: random.Random) -> Spoiled | None:
    offsets = _copy(call, path)
    if offsets is None or offsets.numel() < 3:
        return None
    offsets[-2] = offsets[-1] + 1
    return _with(call, path, offsets)


@spoiling("ends beyond the tokens")
def _ends_late(call: Call, path: str, _: random.Random) -> Spoiled | None:
    offsets = _copy(call, path)
    if offsets is None or offsets.numel() < 2:
        return None
    first = call.get(next(name for name in ("q", "x", "mixed_qkv") if name in call.dims))
    tokens = first.shape[1] if first.dim() == 4 else first.shape[0]
    offsets[-1] = tokens + 1
    return _with(call, path, offsets, "seq_lens")


@spoiling("ends beyond 2**32")
def _ends_far(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """int64: the low half of the last offset is what it was."""
    offsets = _wide(call, path)
    if offsets is None or offsets.numel() < 2:
        return None
    offsets[-1] += FAR
    return _with(call, path, offsets, "seq_lens", "block_tables")


@spoiling("no offset")
def _no_offset(call: Call, path: str, _: random.Random) -> Spoiled | None:
    offsets = _copy(call, path)
    return None if offsets is None else _with(call, path, offsets[:0], "seq_lens", "block_tables")


# ------------------------------------------------------------------------------------------------------------------ slots


def _pool_size(call: Call, _: str) -> int | None:
    sizes = [call.get(name).shape[0] for name in POOLS if isinstance(call.get(name), Tensor)]
    return min(sizes) if sizes else None


_set("a slot beyond the pool", _pool_size)
_set("a slot of 2**33 + 1", lambda call, path: FAR + 1)


@spoiling("null as -2**33 + 1")
def _far_null(call: Call, path: str, rng: random.Random) -> Spoiled | None:
    """int64: padding, although its low half is a slot."""
    return _null_as(call, path, rng, -FAR + 1)


@spoiling("null as -7")
def _other_null(call: Call, path: str, rng: random.Random) -> Spoiled | None:
    return _null_as(call, path, rng, -7)


def _null_as(call: Call, path: str, rng: random.Random, value: int) -> Spoiled | None:
    tensor, places = _wide(call, path), _used(call, path)
    if tensor is None or not places:
        return None
    place = rng.choice(places)
    model = tensor.clone()
    tensor[place], model[place] = value, -1 if path in ("slot_mapping", "group_indices") else null_slot(call)
    return _with(call, path, tensor, model=model)


@spoiling("two live sequences, one slot")
def _shared_slot(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor, live = _copy(call, path), live_sequences(call)
    if tensor is None or len(live) < 2 or path != indices_of(call):
        return None
    if isinstance(call.get("final_state_indices"), Tensor) or call.arguments.get("disable_state_update"):
        return None  # reading one slot twice is held elsewhere
    tensor[live[1]] = tensor[live[0]]
    return _with(call, path, tensor)


@spoiling("two live sequences, one slot to write")
def _shared_target(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor, places = _copy(call, path), _used(call, path)
    if tensor is None:
        return None
    stored = [place for place in places if int(tensor[place]) > null_slot(call)]
    others = [place for place in stored if place[0] != stored[0][0]] if stored else []
    if not others:
        return None
    tensor[others[0]] = tensor[stored[0]]
    return _with(call, path, tensor)


@spoiling("the slot that another live sequence reads")
def _read_by_another(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor, live, reads = _copy(call, path), live_sequences(call), indices_of(call)
    if tensor is None or reads is None or len(live) < 2 or call.arguments.get("disable_state_update"):
        return None
    read = call.get("num_accepted_tokens").tolist()[live[0]] - 1 if isinstance(call.get("num_accepted_tokens"), Tensor) else 0
    tensor.view(tensor.shape[0], -1)[live[1], 0] = rows_of(call, reads)[live[0]][read]
    return _with(call, path, tensor, reads)


@spoiling("an empty sequence names a live slot")
def _empty_shares(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor, live, counts = _copy(call, path), live_sequences(call), lengths(call)
    empty = [n for n, count in enumerate(counts) if count == 0]
    if tensor is None or not live or not empty:
        return None
    tensor[empty[0]] = tensor[live[0]]
    return _with(call, path, tensor)


@spoiling("null slots twice")
def _two_nulls(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor = _copy(call, path)
    if tensor is None or len(lengths(call)) < 2:
        return None
    tensor[:2] = null_slot(call)
    return _with(call, path, tensor, model=tensor)


@spoiling("extra rows of anything")
def _extra_rows(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor = _copy(call, path)
    if tensor is None or call.dims[path][0] != "N+":
        return None
    extra = torch.ones_like(tensor[:1]) if tensor.dtype == torch.bool else torch.full_like(tensor[:1], 10**6)
    return _with(call, path, torch.cat([tensor, extra, extra]))


@spoiling("one row too many of checkpoint offsets")
def _extra_offsets(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """Extra rows in checkpoint_offsets and checkpoint_slots together."""
    if not isinstance(call.get("checkpoint_offsets"), Tensor):
        return None
    offsets, slots = call.get("checkpoint_offsets"), call.get("checkpoint_slots")
    extra = {
        "checkpoint_offsets": torch.cat([offsets, torch.full_like(offsets[:1], -3)]),
        "checkpoint_slots": torch.cat([slots, torch.full_like(slots[:1], 10**6)]),
    }
    return Spoiled(call.with_values(extra))


# ------------------------------------------------------------------------------------------------------------ checkpoints

_set("a negative offset", lambda call, path: -64)
_set("no multiple of 64", lambda call, path: 63)


@spoiling("an offset beyond the sequence")
def _late_checkpoint(call: Call, path: str, _: random.Random) -> Spoiled | None:
    return _unused_checkpoint(call, path, 64 * 100)


@spoiling("an offset of 2**33 + 64")
def _far_checkpoint(call: Call, path: str, _: random.Random) -> Spoiled | None:
    return _unused_checkpoint(call, path, FAR + 64)


def _unused_checkpoint(call: Call, path: str, value: int) -> Spoiled | None:
    tensor = _wide(call, path)
    if tensor is None:
        return None
    model = tensor.clone()
    tensor[0, 0], model[0, 0] = value, 0
    return _with(call, path, tensor, model=model)


@spoiling("a null slot to save to")
def _null_checkpoint(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor, places = _copy(call, path), _used(call, path)
    if tensor is None or not places:
        return None
    offsets = call.get("checkpoint_offsets").clone(memory_format=torch.contiguous_format)
    tensor[places[0]], offsets[places[0]] = null_slot(call), 0
    return Spoiled(call.with_values({path: tensor}), model=call.with_values({"checkpoint_offsets": offsets}))


# ------------------------------------------------------------------------------------------------- accepted counts, parents


def _padding(name: str, value: Callable[[int], int]) -> None:
    """Registers: an accepted count that makes its sequence padding. value: from the largest count in range."""

    def spoil(call: Call, path: str, rng: random.Random) -> Spoiled | None:
        tensor, indices, live = _wide(call, path), indices_of(call), live_sequences(call)
        if tensor is None or indices is None or not live:
            return None
        slots = call.get(indices)
        most = slots.shape[1] if slots.dim() == 2 else 0
        if slots.dim() == 1:  # the convolution's window may start anywhere in its slot
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
        tensor, live = _copy(call, path), live_sequences(call)
        if tensor is None or not live:
            return None
        counts = lengths(call)
        node = counts[live[0]] - 1
        tensor[sum(counts[: live[0]]) + node] = value(node)
        return _with(call, path, tensor)

    SPOILINGS[name] = spoil


_parent("its own parent", lambda node: node)
_parent("a parent after it", lambda node: node + 1)
_parent("a parent of -2", lambda node: -2)


# -------------------------------------------------------------------------------------------------- cache rows and pages

_set("a row beyond the cache", lambda call, path: call.get("cache").shape[0] * call.get("cache").shape[1])
_set("a row of 2**33 + 1", lambda call, path: FAR + 1)
_set("a ring beyond the ring buffer", lambda call, path: call.get("ring").shape[0])
_set("a position beyond cos_sin", lambda call, path: call.get("cos_sin").shape[0])
_set("a position of 2**33 + 1", lambda call, path: FAR + 1)
_set("a negative position", lambda call, path: -1)
_set("a negative count", lambda call, path: -1)
_set("more than k", lambda call, path: call.get("topk_indices").shape[1] + 1)


@spoiling("one row twice")
def _duplicate_row(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor, places = _copy(call, path), _used(call, path)
    if tensor is None or len(places) < 2:
        return None
    for place in places[:2]:
        tensor[place] = 1
    return _with(call, path, tensor)


@spoiling("anything at tokens that end no group")
def _unread_rows(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor = _copy(call, path)
    if tensor is None:
        return None
    ratio = call.arguments.get("ratio", 4)
    unread = (call.get("positions") + 1) % ratio != 0
    return _with(call, path, torch.where(unread, 10**6, tensor).to(tensor.dtype)) if bool(unread.any()) else None


@spoiling("anything at skipped tokens")
def _skipped_positions(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor = _copy(call, path)
    if tensor is None:
        return None
    skipped = call.get("ring_slots") == null_slot(call)
    return _with(call, path, torch.where(skipped, -5, tensor).to(tensor.dtype)) if bool(skipped.any()) else None


def _visible(call: Call) -> list[int]:
    """Rows (keys, positions) that each sequence of a paged call looks at."""
    if call.operator == "gather_indexer_cache":
        return lengths(call)
    if call.operator == "sparse_attention":
        return call.index("seq_lens")
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
        tables = _copy(call, path)
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
        return _with(call, path, tables)

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


@spoiling("longer than its block table")
def _longer_than_table(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor = _copy(call, path)
    if tensor is None:
        return None
    addressed = call.get("block_tables").shape[1] * _page_size(call)
    values = {path: tensor}
    if call.operator == "gather_indexer_cache":
        tensor[-1] = tensor[-2] + addressed + 1
        if "num_rows" in call.arguments:
            values["num_rows"] = int(tensor[-1]) + 1
    else:
        tensor[0] = addressed + 1
    if "max_context_len" in call.arguments:
        values["max_context_len"] = addressed + 5
        values |= {"out": None} if "out" in call.arguments else {}
    return Spoiled(call.with_values(values), names={"block_tables", "max_context_len"})


@spoiling("a length of 2**33 + 1")
def _far_length(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor = _wide(call, path)
    if tensor is None:
        return None
    tensor[0] = FAR + 1
    return Spoiled(call.with_values({path: tensor}), names={"block_tables", "max_context_len"})


@spoiling("empty as -2**33 + 1")
def _far_empty(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor = _wide(call, path)
    if tensor is None or not tensor.numel():
        return None
    model = tensor.clone()
    tensor[0], model[0] = -FAR + 1, 0
    return _with(call, path, tensor, model=model)


@spoiling("ends of 2**33 + 1")
def _far_end(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """int64: clamped to the keys, whatever its low half is."""
    tensor = _wide(call, path)
    if tensor is None or not tensor.numel() or call.arguments.get("max_seqlen_k"):
        return None
    keys = call.get(next(name for name in ("logits", "kv[0]", "k") if call.get(name) is not None))
    count = keys.shape[1] if path == "row_ends" else keys.shape[0]
    model = tensor.clone()
    tensor[0], model[0] = FAR + 1, count
    return _with(call, path, tensor, model=model)


_set("a negative start", lambda call, path: -1)


@spoiling("fewer than the new tokens")
def _too_few(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor, counts = _copy(call, path), lengths(call)
    n = max(range(len(counts)), key=counts.__getitem__)
    if tensor is None:
        return None
    tensor[n] = counts[n] - 1
    return _with(call, path, tensor, "query_start_loc")


@spoiling("a position beyond the sequence")
def _beyond_sequence(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor, counts = _copy(call, path), lengths(call)
    n = max(range(len(counts)), key=counts.__getitem__)
    token = sum(counts[:n])
    if tensor is None or not _is_read(call, token):
        return None
    tensor[token, 0] = call.index("seq_lens")[n]
    return _with(call, path, tensor, "seq_lens")


def _is_read(call: Call, token: int) -> bool:
    return not isinstance(call.get("topk_length"), Tensor) or call.index("topk_length")[token] > 0


@spoiling("a position after the query's own")
def _not_causal(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """In the sequence, but later: does not count."""
    tensor, counts = _copy(call, path), lengths(call)
    n = max(range(len(counts)), key=counts.__getitem__)
    if tensor is None or counts[n] < 2:
        return None
    token = sum(counts[:n])
    model = tensor.clone()
    tensor[token, 0], model[token, 0] = call.index("seq_lens")[n] - 1, -1
    return _with(call, path, tensor, model=model)


@spoiling("none as -9")
def _other_none(call: Call, path: str, _: random.Random) -> Spoiled | None:
    tensor = _copy(call, path)
    return None if tensor is None else _with(call, path, torch.where(tensor < 0, -9, tensor).to(tensor.dtype))


@spoiling("too small")
def _too_small(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """num_rows: one row less than there are."""
    rows = sum(lengths(call))
    return Spoiled(call.with_values({path: rows - 1}), names={"cu_seqlens"}) if rows else None


# ------------------------------------------------------------------------------------------- arguments that belong together


def _without(*names: str) -> None:
    """Registers "without a, b": the spoilt argument stays, those go."""

    def spoil(call: Call, path: str, _: random.Random) -> Spoiled | None:
        if call.get(path) is None or any(call.get(name) is None for name in names):
            return None
        return Spoiled(call.with_values(dict.fromkeys(names)), names={*names, "initial_state"})

    SPOILINGS[f"without {', '.join(names)}"] = spoil


_without("A_log")
_without("state_indices")
_without("checkpoint_slots")
_without("checkpoint_offsets")
_without("conv_states")


@spoiling("the indices 1-D")
def _one_dimension(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """What needs 2-D indices, with their first column only."""
    name = indices_of(call)
    if call.get(path) is None or name is None or call.get(name).dim() != 2:
        return None
    values = {name: call.get(name)[:, 0], "final_state_indices": None}
    if path == "num_accepted_tokens":
        values["parent_token"] = None
    if path == "parent_token":
        values["num_accepted_tokens"] = None
    values = {key: value for key, value in values.items() if key in call.arguments}
    return Spoiled(call.with_values(values), names={name})


@spoiling("left out where it must be")
def _absent(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """None, where another argument needs it: a pool with indices, z of a flat projection, one of k's four."""
    if not isinstance(call.get(path), Tensor):
        return None
    if path == "initial_state" and indices_of(call) is None and not call.get("inplace_final_state"):
        return None
    if path == "g" and not call.arguments.get("use_gate_in_kernel"):
        return None
    if path == "beta" and not call.arguments.get("use_beta_sigmoid_in_kernel"):
        return None
    return Spoiled(call.with_values({path: None}), names={"k", "k_norm", "cache", "slot_mapping"} if path in call.dims else set())


@spoiling("given with interleaved projections")
def _given_interleaved(call: Call, path: str, _: random.Random) -> Spoiled | None:
    if call.arguments.get("projection_layout") != "interleaved":
        return None
    return Spoiled(call.with_values({path: call.get("b").clone()}))


@spoiling("False with indices")
def _not_in_place(call: Call, path: str, _: random.Random) -> Spoiled | None:
    return None if indices_of(call) is None else Spoiled(call.with_values({path: False}))


@spoiling("against the cache")
def _against_cache(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """fp8: the opposite of what the cache's dtype says."""
    cache = call.get("cache")
    return None if cache is None else Spoiled(call.with_values({path: cache.dtype == torch.bfloat16}), names={"cache"})


@spoiling("no multiple of the heads")
def _odd_heads(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """One key head more than divides the query heads."""
    k = call.get(path)
    if not isinstance(k, Tensor) or k.dim() != 3:
        return None
    heads = call.get("q").shape[1]
    wider = torch.zeros(k.shape[0], heads + 1, k.shape[2]).to(k.dtype)
    return Spoiled(call.with_values({path: wider, "k_scale": None}), names={"q"})


@spoiling("float16, the keys too")
def _half_keys(call: Call, path: str, _: random.Random) -> Spoiled | None:
    return _wider_keys(call, path, torch.float16)


@spoiling("float32, the keys too")
def _single_keys(call: Call, path: str, _: random.Random) -> Spoiled | None:
    return _wider_keys(call, path, torch.float32)


def _wider_keys(call: Call, path: str, dtype: torch.dtype) -> Spoiled | None:
    """q in what prepare_indexer hands out for it, keys as the cache has them (bfloat16) or in the same dtype."""
    if call.get(path).dtype != torch.bfloat16:
        return None
    values = {path: call.get(path).half().to(dtype)}
    model = {path: call.get(path).half().bfloat16()}
    if isinstance(call.get("k"), Tensor):
        values["k"], model["k"] = call.get("k").half().to(dtype), call.get("k").half().bfloat16()
    return Spoiled(call.with_values(values), model=call.with_values(model), is_exact=False)


@spoiling("less than one row")
def _no_room(call: Call, path: str, _: random.Random) -> Spoiled | None:
    has_scores = all(call.get(name).numel() for name in ("q", "k", "cache") if name in call.arguments)
    return Spoiled(call.with_values({path: 3})) if has_scores else None


@spoiling("a single tensor")
def _single(call: Call, path: str, _: random.Random) -> Spoiled | None:
    pair = call.get(path)
    return Spoiled(call.with_values({path: pair[0]})) if isinstance(pair, tuple) else None


@spoiling("three entries")
def _three(call: Call, path: str, _: random.Random) -> Spoiled | None:
    pair = call.get(path)
    return Spoiled(call.with_values({path: (*pair, pair[0])})) if isinstance(pair, tuple) else None


@spoiling("the pair as a list")
def _pair_as_list(call: Call, path: str, _: random.Random) -> Spoiled | None:
    pair = call.get(path)
    return Spoiled(call.with_values({path: list(pair)})) if isinstance(pair, tuple) else None


@spoiling("size no multiple of ratio")
def _odd_ring(call: Call, path: str, _: random.Random) -> Spoiled | None:
    ring = call.get(path)
    wider = torch.cat([ring, ring[:, :1]], dim=1)
    return Spoiled(call.with_values({path: wider}), names={"ratio"})


@spoiling("a page size of 6")
def _odd_pages(call: Call, path: str, _: random.Random) -> Spoiled | None:
    cache = call.get(path)
    if not isinstance(cache, Tensor):
        return None
    return Spoiled(call.with_values({path: torch.zeros(cache.shape[0], 6, *cache.shape[2:]).to(cache.dtype)}))


@spoiling("too few columns")
def _few_columns(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """Of a pool of windows: fewer than the filter needs."""
    pool = call.get(path)
    width = call.get("weight" if "weight" in call.arguments else "conv_weight").shape[1]
    return Spoiled(call.with_values({path: pool[:, :, : width - 2]})) if isinstance(pool, Tensor) else None


@spoiling("one tap")
def _one_tap(call: Call, path: str, _: random.Random) -> Spoiled:
    return Spoiled(call.with_values({path: call.get(path)[:, :1]}))


@spoiling("[dim, tokens]")
def _dim_first(call: Call, path: str, _: random.Random) -> Spoiled | None:
    x = call.get(path)
    if x.dim() != 2 or x.shape[0] == x.shape[1]:
        return None
    return Spoiled(call.with_values({path: x.T.contiguous()}), names={"weight"})
