"""Calls of public operators with nothing along one dimension, made from good calls.

What depends on the dimension is emptied with it: offsets end at 0 where there are no tokens, indices are null where a pool has
no slot, and lengths are 0 where there is no page to read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.ops.spoiling.call import Call

Tensor = torch.Tensor

OFFSETS = ("cu_seqlens", "query_start_loc")
HOST_LENGTHS = ("lengths_host", "query_lens_host", "seq_lens_host")
TOKENS = ("T", "tokens", "M", "D0")
PAGES = ("cache", "v_cache", "kv_cache", "kv_cache[0]", "kv_cache[1]")
POOLS = ("initial_state", "conv_state", "conv_states", "ssm_state", "ring", "state_tokens")
SLOTS = (
    "state_indices", "ssm_state_indices", "final_state_indices", "cache_indices", "conv_state_indices", "checkpoint_slots",
    "ring_slots",
)  # fmt: skip


@dataclass
class Emptied:
    call: Call
    names: frozenset[str]  # dimensions of which nothing is left


Form = Callable[[Call], Emptied | None]  # None: the call has no such dimension


def _cut(call: Call, *names: str) -> Emptied:
    """Nothing along some dimensions; offsets are left alone."""
    values: dict[str, Any] = {}
    for path, dims in call.dims.items():
        value = call.get(path)
        if not isinstance(value, Tensor) or path in OFFSETS:
            continue
        for place, name in enumerate(dims[: value.dim()]):
            if name.rstrip("+") in names:
                value = value.narrow(place, 0, 0)
        values[path] = value
    return Emptied(call.with_values(values), frozenset(names))


def _has(call: Call, name: str) -> bool:
    return any(name in (own.rstrip("+") for own in dims) for path, dims in call.dims.items() if path not in OFFSETS)


def _set(call: Call, changes: dict[str, Callable[[Any], Any]]) -> Call:
    """The call with the given of some arguments changed."""
    given = {name: call.get(name) for name in changes}
    return call.with_values({name: changes[name](value) for name, value in given.items() if value is not None})


def _zeros(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, Tensor) else type(value)([0] * len(value))


def _nobody(value: Any) -> Any:
    return value[:0]


def without_tokens(call: Call) -> Emptied | None:
    """Sequences, rows or positions without any token."""
    if call.operator == "quantize_fp8":
        call = call.with_values({})
        call.dims = {"x": ("D0", *call.dims["x"][1:])}
    if call.operator == "fused_gdn_decode":
        call = _with_token_rows(call)
        if call.get("query_start_loc") is None:
            return None  # a token is a sequence
    if call.operator == "causal_conv1d_update" and "B" in call.dims["x"] and "T" not in call.dims["x"]:
        return None
    names = [name for name in TOKENS if _has(call, name)]
    if not names and call.operator != "gather_indexer_cache":
        return None
    found = _cut(call, *names)
    changes = dict.fromkeys((*OFFSETS, "lengths_host", "query_lens_host"), _zeros)
    return Emptied(_set(found.call, changes), found.names)


def _with_token_rows(call: Call) -> Call:
    """The call, the first dimension of its projections named."""
    call = call.with_values({})
    call.dims = call.dims | {"mixed_qkv": ("T", *call.dims["mixed_qkv"][1:])}
    return call


def without_sequences(call: Call) -> Emptied | None:
    """Tokens that belong to no sequence; where a sequence is a row of a batch, no row."""
    offsets = next((name for name in OFFSETS if call.get(name) is not None), None)
    if offsets is not None:
        found = _cut(call, "N")
        return Emptied(_set(found.call, {offsets: lambda x: x[:1], **dict.fromkeys(HOST_LENGTHS, _nobody)}), found.names)
    if call.operator == "fold_states":
        return _cut(call, "N")
    if _has(call, "B"):
        return _cut(call, "B", "N", "rows", "tokens")
    return _cut(_with_token_rows(call), "T", "N") if call.operator == "fused_gdn_decode" else None


def without_both(call: Call) -> Emptied | None:
    """Neither tokens nor sequences."""
    tokens = without_tokens(call)
    found = None if tokens is None else without_sequences(tokens.call)
    return None if tokens is None or found is None else Emptied(found.call, found.names | tokens.names)


def without_keys(call: Call) -> Emptied | None:
    """No key to score."""
    if not _has(call, "Nk"):
        return None
    found = _cut(call, "Nk", "columns")
    return Emptied(_set(found.call, {"max_seqlen_k": lambda _: 0}), found.names)


def _unread(call: Call) -> Call:
    """The call with no key to read or to write: every length is 0, and what tokens there are belong to no sequence."""
    changes: dict[str, Callable[[Any], Any]] = dict.fromkeys((*OFFSETS, "seq_lens", "context_lens", *HOST_LENGTHS), _zeros)
    return _set(call, changes | dict.fromkeys(("slot_mapping", "ring_slots"), lambda x: torch.full_like(x, -1)))


def without_pages(call: Call) -> Emptied | None:
    """Caches without a page, where nothing is read or written."""
    paths = [path for path in PAGES if isinstance(call.get(path), Tensor)]
    if not paths:
        return None
    cut = {path: (lambda x: x[:, :0]) if path == "kv_cache" else (lambda x: x[:0]) for path in paths}  # after K and V
    return Emptied(_set(_unread(call), cut), frozenset())


def without_blocks(call: Call) -> Emptied | None:
    """Block tables without a column."""
    if call.get("block_tables") is None:
        return None
    return Emptied(_set(_unread(call), {"block_tables": lambda x: x[:, :0]}), frozenset())


def without_slots(call: Call) -> Emptied | None:
    """Pools without a slot, where every sequence is padding."""
    pools = [name for name in POOLS if call.get(name) is not None]
    slots = [name for name in SLOTS if call.get(name) is not None]
    if not pools or not slots:
        return None
    null = call.arguments.get("null_slot", -1)
    changes: dict[str, Callable[[Any], Any]] = {name: lambda x: torch.full_like(x, null) for name in slots}
    changes["slot_mapping"] = lambda x: torch.full_like(x, -1)
    has_layers = "L" in call.dims.get("ring", ())  # whose slots come second
    cut: Callable[[Any], Any] = lambda x: x[:, :0] if has_layers and x.dim() > 1 else x[:0]  # noqa: E731
    return Emptied(_set(call, changes | dict.fromkeys(pools, cut)), frozenset())


def without_choice(call: Call) -> Emptied | None:
    """Nothing to select, or nothing selected."""
    if call.operator == "expand_topk_groups":
        ratio = call.arguments["ratio"]
        changes = {"group_indices": lambda x: x[:, :0], "out": lambda x: x[:, : ratio - 1]}
        return Emptied(_set(call, changes), frozenset())
    count = next((name for name in ("k", "topk") if isinstance(call.arguments.get(name), int)), None)
    if count is None and call.get("topk_indices") is None:
        return None
    found = _cut(call, "k")
    return Emptied(_set(found.call, {"topk_length": _zeros, **({count: lambda _: 0} if count else {})}), found.names)


def without_columns(call: Call) -> Emptied | None:
    """Scores without a column."""
    if call.operator == "topk_indices":
        changes = dict.fromkeys(("row_starts", "row_ends"), _zeros)
        return Emptied(_set(call, {"logits": lambda x: x[:, :0], **changes}), frozenset())
    if call.arguments.get("max_context_len") is None:
        return None
    found = _cut(_unread(call), "columns")
    return Emptied(found.call.changed(max_context_len=0), frozenset({"columns"}))


def without_drafts(call: Call) -> Emptied | None:
    """Sequences without a query."""
    return _cut(call, "next", "rows") if _has(call, "next") else None


FORMS: dict[str, Form] = {
    "no tokens": without_tokens,
    "no sequences": without_sequences,
    "neither": without_both,
    "no keys": without_keys,
    "no pages": without_pages,
    "no blocks": without_blocks,
    "no slots": without_slots,
    "no choice": without_choice,
    "no columns": without_columns,
    "no drafts": without_drafts,
}
