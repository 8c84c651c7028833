"""Parts that a call works on: tokens of each sequence, live sequences, and the elements of written tensors that may change."""

import torch

from tests import described
from tests.ops.spoiling.call import Call
from tests.ops.spoiling.rings import has_ring

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


def slots_mask(pool: Tensor, slots: set[int]) -> Tensor:
    mask = torch.zeros(pool.shape, dtype=torch.bool)
    for slot in slots:
        if 0 <= slot < pool.shape[0]:
            mask[slot] = True
    return mask


def written_slots(call: Call, name: str, final: str | None) -> set[int]:
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
    masks = {name: slots_mask(call.get(name), _checkpoint_slots(call)) for name in kept_of(call)}
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
    changes = described.every()[call.operator].changes
    return masks | _kept_masks(call) | ({} if changes is None else changes(call))
