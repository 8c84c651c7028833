"""Parts that a call works on: tokens of each sequence, live sequences, and the elements of written tensors that may change."""

import torch

from gdn.ops.indexer.reference import page_views
from tests.ops.spoiling.call import Call
from tests.ops.spoiling.rings import has_ring, replayed_elements

Tensor = torch.Tensor
OFFSETS = ("cu_seqlens", "query_start_loc")
INDICES = ("state_indices", "ssm_state_indices", "cache_indices", "conv_state_indices")


def offsets_of(call: Call) -> str | None:
    return next((name for name in OFFSETS if isinstance(call.arguments.get(name), Tensor)), None)


def indices_of(call: Call) -> str | None:
    """The argument that chooses the slots to read."""
    return next((name for name in INDICES if isinstance(call.arguments.get(name), Tensor)), None)


def use_of(call: Call, argument: str) -> str:
    """Role of initial_state (the pool that indices refer to or that is replaced, or one state per sequence), and of accepted
    counts: of columns, or of a ring."""
    if argument == "num_accepted_tokens":
        return "with a ring" if has_ring(call) else "of columns"
    is_pool = indices_of(call) is not None or bool(call.arguments.get("inplace_final_state"))
    return "as a pool" if is_pool else "to read" if call.get(argument) is not None else ""


def lengths(call: Call) -> list[int]:
    """Tokens of each sequence."""
    name = offsets_of(call)
    if name is not None:
        bounds = call.index(name)
        return [end - start for start, end in zip(bounds[:-1], bounds[1:], strict=True)]
    if call.operator == "fold_states":
        return [1] * call.get("state_indices").shape[0]
    if "q" in call.arguments:
        return [call.arguments["q"].shape[1]] * call.arguments["q"].shape[0]
    if call.operator == "causal_conv1d_fn":
        return [call.arguments["x"].shape[0]]
    x = call.arguments["x"] if "x" in call.arguments else call.arguments["mixed_qkv"]
    return [x.shape[2] if x.dim() == 3 else 1] * x.shape[0]


def null_slot(call: Call) -> int:
    return call.arguments.get("null_slot", -1)


def rows_of(call: Call, name: str) -> list[list[int]]:
    """An index tensor as [sequence][column], extra rows left out."""
    rows = call.index(name)[: len(lengths(call))]
    return rows if call.get(name).dim() == 2 else [[row] for row in rows]


def column_read(call: Call, sequence: int) -> int:
    """Column of the slot that is read, counted from 0; may lie outside."""
    accepted = call.get("num_accepted_tokens")
    indices = indices_of(call)
    if not isinstance(accepted, Tensor) or indices is None or call.get(indices).dim() != 2:
        return 0
    return accepted.tolist()[sequence] - 1


def live_sequences(call: Call) -> list[int]:
    """Sequences with tokens, a slot to read and an accepted count in range."""
    counts, name = lengths(call), indices_of(call)
    if name is None:
        return [n for n, count in enumerate(counts) if count > 0]
    rows, live = rows_of(call, name), []
    for n, count in enumerate(counts):
        column = column_read(call, n)
        is_inside = 0 <= column < len(rows[n])
        is_null = not is_inside or rows[n][column] <= null_slot(call) or (_keeps_window(call) and rows[n][0] <= null_slot(call))
        if count > 0 and not is_null:
            live.append(n)
    return live


def reads_state(call: Call, sequence: int) -> bool:
    """Whether a live sequence reads its slot: one that starts from zeros does not."""
    mask = call.get("has_initial_state")
    return not isinstance(mask, Tensor) or bool(mask[sequence])


def _keeps_window(call: Call) -> bool:
    return call.operator == "fused_gdn_decode"


def _slots_mask(pool: Tensor, slots: set[int]) -> Tensor:
    mask = torch.zeros(pool.shape, dtype=torch.bool)
    for slot in slots:
        if 0 <= slot < pool.shape[0]:
            mask[slot] = True
    return mask


def _written_slots(call: Call, name: str, final: str | None) -> set[int]:
    slots: set[int] = set()
    target = final if final is not None and isinstance(call.get(final), Tensor) else name
    for n in live_sequences(call):
        slots |= {slot for slot in rows_of(call, target)[n] if slot > null_slot(call)}
    return slots | (set() if kept_of(call) else _checkpoint_slots(call))


def kept_of(call: Call) -> list[str]:
    """The tensors that take checkpoints instead of the pools."""
    return [name for name in ("checkpoint_states", "checkpoint_windows") if isinstance(call.get(name), Tensor)]


def _checkpoint_slots(call: Call) -> set[int]:
    if not isinstance(call.get("checkpoint_slots"), Tensor):
        return set()
    rows = rows_of(call, "checkpoint_slots")
    return {slot for n in live_sequences(call) for slot in rows[n] if slot > null_slot(call)}


def _kept_masks(call: Call) -> dict[str, Tensor]:
    """Of tensors that take checkpoints, or the state after every token."""
    masks = {name: _slots_mask(call.get(name), _checkpoint_slots(call)) for name in kept_of(call)}
    if "checkpoint_windows" in masks:
        weight = call.get("weight") if "weight" in call.arguments else call.get("conv_weight")
        masks["checkpoint_windows"][:, :, weight.shape[1] - 1 :] = False
    if isinstance(states := call.get("intermediate_states"), Tensor):
        masks["intermediate_states"] = torch.zeros(states.shape, dtype=torch.bool)
        rows, counts = rows_of(call, "intermediate_indices"), lengths(call)
        for n in live_sequences(call):
            if null_slot(call) < rows[n][0] < states.shape[0]:
                masks["intermediate_states"][rows[n][0], : counts[n]] = True
    return masks


def changed_elements(call: Call) -> dict[str, Tensor]:
    """Path -> mask of the elements that a call may change, for every tensor that it may write."""
    masks: dict[str, Tensor] = {}
    out = call.get("out")
    if isinstance(out, Tensor):
        masks["out"] = torch.ones(out.shape, dtype=torch.bool)
    function = _POOLS.get(call.operator)
    return masks | _kept_masks(call) | (function(call) if function is not None else {})


def _replayed(call: Call, pool: str, indices: str, inner: tuple[int, int, int, int]) -> dict[str, Tensor]:
    """inner: key heads, state heads, K, V."""
    counts, slots = lengths(call), call.index(indices)
    found: dict[str, Tensor] = replayed_elements(call, pool, [(n, slots[n], counts[n]) for n in live_sequences(call)], inner)
    return found


def _delta_rule(call: Call) -> dict[str, Tensor]:
    pool, name = call.get("initial_state"), indices_of(call)
    if has_ring(call) and name is not None and not call.arguments.get("disable_state_update"):
        q, k, v = (call.get(path).shape for path in ("q", "k", "v"))
        return _replayed(call, "initial_state", name, (k[2], max(q[2], v[2]), k[3], v[3]))
    if not isinstance(pool, Tensor) or call.arguments.get("disable_state_update") or "intermediate_states" in call.arguments:
        return {}
    if name is None:
        return {"initial_state": torch.ones(pool.shape, dtype=torch.bool)} if call.get("inplace_final_state") else {}
    return {"initial_state": _slots_mask(pool, _written_slots(call, name, "final_state_indices"))}


def _decode(call: Call) -> dict[str, Tensor]:
    if "intermediate_states" in call.arguments:
        return {}
    slots = _written_slots(call, "state_indices", None)
    windows = {rows_of(call, "state_indices")[n][0] for n in live_sequences(call)}
    conv, state = call.get("conv_state"), call.get("ssm_state")
    if has_ring(call):
        inner = (call.get("num_k_heads"), state.shape[1], call.get("head_k_dim"), call.get("head_v_dim"))
        return {"conv_state": _slots_mask(conv, windows), **_replayed(call, "ssm_state", "state_indices", inner)}
    return {"conv_state": _slots_mask(conv, windows), "ssm_state": _slots_mask(state, slots)}


def _fold(call: Call) -> dict[str, Tensor]:
    slots = _written_slots(call, "state_indices", "final_state_indices")
    state, counts = call.get("ssm_state"), call.get("state_tokens")
    own = _slots_mask(counts, slots)
    return {"ssm_state": own.view(*own.shape, 1, 1, 1).expand(state.shape), "state_tokens": own}


def _accept(call: Call) -> dict[str, Tensor]:
    slots = _written_slots(call, "state_indices", None)
    masks = {}
    for name in ("ring", "conv_state"):
        if isinstance(pool := call.get(name), Tensor):
            own = _slots_mask(pool.flatten(0, pool.dim() - 4)[0] if pool.dim() == 4 else pool, slots)
            masks[name] = own.expand(pool.shape)
    accepted = torch.zeros(call.get("num_accepted_tokens").shape, dtype=torch.bool)
    accepted[live_sequences(call)] = True
    return masks | {"num_accepted_tokens": accepted}


def _prefill(call: Call) -> dict[str, Tensor]:
    slots = _written_slots(call, "state_indices", None)
    windows, state = call.get("conv_states"), call.get("ssm_state")
    mask = _slots_mask(windows, slots)
    mask[:, :, call.get("conv_weight").shape[1] - 1 :] = False
    return {"conv_states": mask, "ssm_state": _slots_mask(state, slots)}


def _conv_fn(call: Call) -> dict[str, Tensor]:
    pool = call.get("conv_states")
    if not isinstance(pool, Tensor):
        return {}
    slots = _written_slots(call, "cache_indices", None) if "cache_indices" in call.arguments else set(live_sequences(call))
    mask = _slots_mask(pool, slots)
    mask[:, :, call.get("weight").shape[1] - 1 :] = False
    return {"conv_states": mask}


def _conv_update(call: Call) -> dict[str, Tensor]:
    pool, name = call.get("conv_state"), "conv_state_indices"
    live = live_sequences(call)
    if name not in call.arguments:
        return {"conv_state": _slots_mask(pool, set(live))}
    rows = rows_of(call, name)
    is_tree = isinstance(call.get("parent_token"), Tensor)
    return {"conv_state": _slots_mask(pool, {slot for n in live for slot in (rows[n] if is_tree else rows[n][:1])})}


def _cache_rows(cache: Tensor, slots: list[int]) -> Tensor:
    """Elements of cache rows, whatever the form of the pages."""
    marks = torch.zeros(cache.shape, dtype=torch.uint8)
    kinds = page_views(marks) if cache.dtype == torch.uint8 else (marks.unsqueeze(2) if marks.dim() == 3 else marks, None)
    page_size = cache.shape[1]
    for view in kinds:
        if view is not None:
            flat = view.view(torch.uint8)
            for slot in slots:
                if 0 <= slot < cache.shape[0] * page_size:
                    flat[slot // page_size, slot % page_size] = 1
    return marks.bool()


def _write(call: Call) -> dict[str, Tensor]:
    caches = {name: call.arguments.get(name) for name in ("cache", "v_cache")}
    rows = call.index("slot_mapping") if isinstance(caches["cache"], Tensor) else []
    return {name: _cache_rows(cache, rows) for name, cache in caches.items() if isinstance(cache, Tensor)}


def _compress(call: Call) -> dict[str, Tensor]:
    ring, ratio, null = call.get("ring"), call.arguments.get("ratio", 4), null_slot(call)
    mask = torch.zeros(ring.shape, dtype=torch.bool)
    slots = []
    for slot, position, row in zip(call.index("ring_slots"), call.index("positions"), call.index("slot_mapping"), strict=True):
        if slot < 0 or slot == null or position < 0:
            continue
        mask[slot, position % ring.shape[1]] = True
        if (position + 1) % ratio == 0:
            slots.append(row)
    return {"ring": mask, "cache": _cache_rows(call.get("cache"), slots)}


_POOLS = {
    "chunk_gated_delta_rule": _delta_rule,
    "fused_recurrent_gated_delta_rule": _delta_rule,
    "gated_delta_rule": _delta_rule,
    "fused_gdn_decode": _decode,
    "fold_states": _fold,
    "accept_draft_tree": _accept,
    "fused_gdn_prefill": _prefill,
    "causal_conv1d_fn": _conv_fn,
    "causal_conv1d_update": _conv_update,
    "write_indexer_cache": _write,
    "prepare_indexer": _write,
    "compress_indexer_keys": _compress,
}
