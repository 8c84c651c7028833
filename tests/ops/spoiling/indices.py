"""Index tensors: copies with other entries, and the places that a call looks at."""

import random
from collections.abc import Callable

import torch

from tests.ops.spoiling.call import Call
from tests.ops.spoiling.live import lengths, live_sequences, null_slot, reads_state
from tests.ops.spoiling.spoiling import SPOILINGS, Spoiled

Tensor = torch.Tensor
FAR = 2**33  # int64 only; its low half is zero
POOLS = ("initial_state", "ssm_state", "conv_state", "conv_states")


def copied(call: Call, path: str) -> Tensor | None:
    tensor = call.get(path)
    return tensor.clone(memory_format=torch.contiguous_format) if isinstance(tensor, Tensor) else None


def as_int64(call: Call, path: str) -> Tensor | None:
    """A copy as int64."""
    tensor = copied(call, path)
    return None if tensor is None else tensor.long()


def with_value(call: Call, path: str, value: Tensor, *names: str, model: Tensor | None = None) -> Spoiled:
    return Spoiled(
        call.with_values({path: value}), names=set(names), model=None if model is None else call.with_values({path: model})
    )


def register_entry(name: str, value: Callable[[Call, str], int | None]) -> None:
    """Registers: one entry that counts gets another value. value: None where that cannot be."""

    def spoil(call: Call, path: str, rng: random.Random) -> Spoiled | None:
        tensor, places = copied(call, path), places_looked_at(call, path)
        new = value(call, path) if tensor is not None and places else None
        if tensor is None or new is None or (tensor.dtype != torch.int64 and not -(2**31) <= new < 2**31):
            return None
        tensor[rng.choice(places)] = new
        return with_value(call, path, tensor, *pools_of(call))

    SPOILINGS[name] = spoil


def pools_of(call: Call) -> set[str]:
    return {name for name in (*POOLS, "cache", "v_cache", "ring", "kv_cache") if name in call.arguments}


def places_looked_at(call: Call, path: str) -> list[tuple[int, ...]]:
    """Places of an index tensor that the call really looks at."""
    tensor = call.get(path)
    if not isinstance(tensor, Tensor) or not tensor.numel():
        return []
    if path in ("state_indices", "ssm_state_indices", "cache_indices", "conv_state_indices"):
        if tensor.dim() == 1:
            is_written = not isinstance(call.get("final_state_indices"), Tensor) and not call.arguments.get(
                "disable_state_update"
            )
            return [(n,) for n in live_sequences(call) if is_written or reads_state(call, n)]
        counts = lengths(call)
        if call.operator == "causal_conv1d_update" and not isinstance(call.get("parent_token"), Tensor):
            return [(n, 0) for n in live_sequences(call)]
        if isinstance(call.get("final_state_indices"), Tensor) or call.arguments.get("disable_state_update"):
            accepted = call.index("num_accepted_tokens") if isinstance(call.get("num_accepted_tokens"), Tensor) else None
            return [(n, 0 if accepted is None else accepted[n] - 1) for n in live_sequences(call)]  # read, not written
        return [(n, c) for n in live_sequences(call) for c in range(min(tensor.shape[1], counts[n]))]
    if path == "final_state_indices":
        counts = lengths(call)
        if call.arguments.get("disable_state_update"):
            return []
        if tensor.dim() == 1:
            return [(n,) for n in live_sequences(call)]
        return [(n, c) for n in live_sequences(call) for c in range(min(tensor.shape[1], counts[n]))]
    if path == "intermediate_indices":
        return [(n,) for n in live_sequences(call)]
    if path == "checkpoint_slots":
        counts, offsets = lengths(call), call.index("checkpoint_offsets")
        return [(n, c) for n in live_sequences(call) for c, offset in enumerate(offsets[n]) if 0 < offset <= counts[n]]
    if path == "state_tokens":
        slots = call.index("ssm_state_indices" if "ssm_state_indices" in call.arguments else "state_indices")
        return [(slots[n],) for n in live_sequences(call)]
    if path in ("checkpoint_offsets", "num_accepted_tokens", "num_computed_tokens"):
        live = live_sequences(call)
        return [(n,) if tensor.dim() == 1 else (n, 0) for n in live]
    if path == "topk_length":
        return [(n,) for n in range(call.index("query_start_loc")[-1])]  # tokens after the last sequence are padding
    if path == "positions" and call.operator == "compress_indexer_keys":
        return [(n,) for n, slot in enumerate(call.index("ring_slots")) if slot >= 0 and slot != null_slot(call)]
    if path == "slot_mapping" and call.operator == "compress_indexer_keys":
        ratio, slots = call.arguments.get("ratio", 4), call.index("ring_slots")
        return [
            (n,) for n, position in enumerate(call.index("positions"))
            if (position + 1) % ratio == 0 and slots[n] >= 0 and slots[n] != null_slot(call)
        ]  # fmt: skip
    return [tuple(place) for place in torch.ones(tensor.shape).nonzero().tolist()]
