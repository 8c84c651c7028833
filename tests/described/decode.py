"""The fused steps between a layer's projections, decode and prefill: calls, what their arguments may be, their results."""

import torch

from gdn.ops.delta_rule.problem import entry_width
from tests.described import Described
from tests.described.delta_rule import checkpoint_states, give_some_seed, intermediate, replayed, slots_of, some_null, state_of
from tests.ops.spoiling import kinds
from tests.ops.spoiling import kinds_sequences as sequences
from tests.ops.spoiling.call import Call, Draw
from tests.ops.spoiling.live import live_sequences, rows_of, slots_mask, written_slots
from tests.ops.spoiling.rings import give_ring, has_ring
from tests.ops.spoiling.verdict import ERROR, SAME, VALUE

_HEADS = 2  # key heads
_TIES = {
    "T": ("mixed_qkv",),
    "C": ("num_k_heads", "head_k_dim", "head_v_dim", "A_log"),
    "width": ("num_k_heads", "head_k_dim", "head_v_dim", "A_log"),
    "H": ("num_k_heads", "A_log", "mixed_qkv"),
    "V": ("head_v_dim",),
    "K": ("head_k_dim",),
    "gates": ("A_log",),
}


def decode(draw: Draw) -> Call:
    """fused_gdn_decode, projections in any layout."""
    call = Call("fused_gdn_decode")
    inner = _inner(draw)
    is_packed = draw.maybe(0.6)
    lengths = draw.lengths(3) if is_packed else [1] * draw.pick(1, 2, 3)
    offsets = draw.offsets(lengths)
    tokens, count = offsets[-1] + (draw.pick(0, 1) if is_packed else 0), len(lengths)
    if is_packed:
        call.give("query_start_loc", draw.indices(offsets), "~")
    dtype = draw.any_float()
    call.sizes["N"] = count
    call.ties |= _TIES | {"N": ("query_start_loc", "mixed_qkv")}
    _projections(draw, call, tokens, inner, dtype, ("interleaved", "merged", "concatenated"))
    kind = draw.pick("1-D", "2-D", "2-D accepted", "kept", "ring", "ring")
    columns = 1 if kind in ("1-D", "kept", "ring") else 3
    num_spec, width = max(lengths) - 1 if kind == "ring" else columns - 1, draw.pick(4, 2)
    slots, size = slots_of(draw, call, count, columns=columns)
    null_slot = call.arguments.get("null_slot", -1)
    state = _parameters(draw, call, "conv_state", inner, size, width, num_spec)
    reads = [slots[n * columns :][:columns] for n in range(count)]
    reads = [[null_slot] * columns if draw.maybe(0.15) else row for row in reads]
    indices = reads + [reads[0]] * (draw.pick(0, 1) if is_packed else 0)
    dims = ("N+" if is_packed else "N") + ("" if columns == 1 else " columns")
    call.give("state_indices", draw.indices([row[0] for row in indices] if columns == 1 else indices), dims)
    if kind == "ring":
        windows = call.get("conv_state").shape[2] - width + 2
        slots_of_pool = ([row[0] for row in reads], size)
        give_ring(draw, call, entry_width(_HEADS, *inner), slots_of_pool, lengths, "N+" if is_packed else "N", windows)
        call.dims["ssm_state"] = ("slots", *call.dims["ssm_state"][1:])
    if kind == "kept":
        intermediate(draw, call, inner, count, 3, "N+" if is_packed else "N")
    if kind == "2-D accepted":
        accepted = [draw.random.randint(1, columns) for _ in range(count)]
        call.give("num_accepted_tokens", draw.indices(accepted), "N+" if is_packed else "N")
    if kind != "kept":
        give_some_seed(draw, call, state)
    _options(draw, call, tokens, inner, dtype)
    return call


def prefill(draw: Draw) -> Call:
    """fused_gdn_prefill, projections in any layout, with and without checkpoints."""
    call = Call("fused_gdn_prefill")
    inner, has_checkpoints = _inner(draw), draw.maybe(0.3)
    lengths = draw.lengths(5)
    if has_checkpoints:
        lengths[0] = draw.pick(64, 65, 130)
    offsets = draw.offsets(lengths)
    tokens, count = offsets[-1] + draw.pick(0, 2), len(lengths)
    call.give("query_start_loc", draw.indices(offsets), "~")
    dtype = draw.any_float()
    call.sizes["N"] = count
    call.ties |= _TIES | {"N": ("query_start_loc",)}
    _projections(draw, call, tokens, inner, dtype, ("interleaved", "merged"))
    slots, size = slots_of(draw, call, count, columns=3)
    _parameters(draw, call, "conv_states", inner, size, draw.pick(4, 2), 0)
    reads = some_null(draw, call, slots[:count])
    call.give("state_indices", draw.indices(reads + [1] * draw.pick(0, 1)), "N+")
    if has_checkpoints:
        wanted = [[draw.pick(0, 64, 128), 0] for _ in range(count)]
        wanted[0][0] = 64
        call.give("checkpoint_offsets", draw.indices(wanted), "N+ columns")
        call.give("checkpoint_slots", draw.indices([list(slots[count + 2 * n :][:2]) for n in range(count)]), "N+ columns")
        kept = draw.pick("in the pools", "states", "windows", "both")
        if kept in ("states", "both"):
            checkpoint_states(draw, call, inner, size)
        if kept in ("windows", "both"):
            windows = draw.floats(size, _channels(inner), call.get("conv_weight").shape[1] - 1, dtype=draw.any_float())
            call.give("checkpoint_windows", draw.pool(windows), "~ C ~")
    if draw.maybe():
        call.give("has_initial_state", torch.tensor([draw.maybe(0.7) for _ in range(count)]), "N+")
    _options(draw, call, tokens, inner, dtype)
    return call


def _inner(draw: Draw) -> tuple[int, int, int]:
    """Value heads, K and V."""
    ratio = draw.pick(2, 1)
    return _HEADS * ratio, draw.size(8, 4, served=64), draw.size(4, 8, served=64)


def _channels(inner: tuple[int, int, int]) -> int:
    value_heads, k_dim, v_dim = inner
    return 2 * _HEADS * k_dim + value_heads * v_dim


def _projections(
    draw: Draw, call: Call, tokens: int, inner: tuple[int, int, int], dtype: torch.dtype, layouts: tuple[str, ...]
) -> None:
    value_heads, _, v_dim = inner
    layout = draw.pick("flat", *layouts)
    if draw.maybe(0.2):
        call.arguments["norm_weight"] = None  # neither norm nor z

    def rows(*shape: int) -> torch.Tensor:
        return draw.rows(draw.floats(tokens, *shape, dtype=dtype), lead=1)

    if layout == "flat":
        call.give("mixed_qkv", rows(_channels(inner)), "T width")
        if call.arguments.get("norm_weight", True) is not None:
            call.give("z", rows(value_heads, v_dim), "T H V")
        else:
            call.arguments["z"] = None
        call.give("b", rows(value_heads), "T H")
        call.give("a", rows(value_heads), "T H")
        if draw.maybe(0.3):
            call.arguments["projection_layout"] = layout
    elif layout == "concatenated":
        call.arguments |= {"projection_layout": layout, "z": None, "b": None, "a": None}
        call.give("mixed_qkv", rows(_channels(inner) + value_heads * (v_dim + 2)), "~ width+")
    else:
        call.arguments |= {"projection_layout": layout, "z": None, "a": None}
        call.give("mixed_qkv", rows(_channels(inner) + value_heads * v_dim), "T width")
        call.give("b", rows(2 * value_heads), "T gates")


def _parameters(
    draw: Draw, call: Call, windows: str, inner: tuple[int, int, int], size: int, width: int, num_spec: int
) -> torch.Tensor:
    """Adds both pools and the parameters; returns the states. windows: name of the convolution's pool."""
    value_heads, _, v_dim = inner
    channels = _channels(inner)
    conv = draw.floats(size, channels, width - 1 + num_spec + draw.pick(0, 1), dtype=draw.any_float())
    call.give(windows, draw.pool(conv) if draw.maybe() else conv.mT.contiguous().mT, "~ C ~")
    call.sizes["columns+"] = width - 1 + num_spec
    call.give("conv_weight", draw.floats(channels, width, dtype=draw.any_float()), "C ~")
    if draw.maybe():
        call.give("conv_bias", draw.floats(channels, dtype=draw.any_float()), "C")
    call.give("A_log", draw.floats(value_heads, dtype=draw.any_float()), "H")
    call.give("dt_bias", draw.floats(value_heads, dtype=draw.any_float()), "H")
    if call.arguments.get("norm_weight", True) is not None:
        call.give("norm_weight", draw.floats(v_dim, dtype=draw.any_float()), "V")
    return state_of(draw, call, "ssm_state", size, inner, is_pool=True)


def _changed_by_decode(call: Call) -> dict[str, torch.Tensor]:
    if "intermediate_states" in call.arguments:
        return {}
    slots = written_slots(call, "state_indices", None)
    windows = {rows_of(call, "state_indices")[n][0] for n in live_sequences(call)}
    conv, state = call.get("conv_state"), call.get("ssm_state")
    if has_ring(call):
        inner = (call.get("num_k_heads"), state.shape[1], call.get("head_k_dim"), call.get("head_v_dim"))
        return {"conv_state": slots_mask(conv, windows), **replayed(call, "ssm_state", "state_indices", inner)}
    return {"conv_state": slots_mask(conv, windows), "ssm_state": slots_mask(state, slots)}


def _changed_by_prefill(call: Call) -> dict[str, torch.Tensor]:
    slots = written_slots(call, "state_indices", None)
    windows, state = call.get("conv_states"), call.get("ssm_state")
    mask = slots_mask(windows, slots)
    mask[:, :, call.get("conv_weight").shape[1] - 1 :] = False
    return {"conv_states": mask, "ssm_state": slots_mask(state, slots)}


def _options(draw: Draw, call: Call, tokens: int, inner: tuple[int, int, int], dtype: torch.dtype) -> None:
    value_heads, k_dim, v_dim = inner
    call.arguments |= {"num_k_heads": _HEADS, "head_k_dim": k_dim, "head_v_dim": v_dim}
    if draw.maybe(0.3):
        call.arguments |= {"gate_activation": draw.pick("silu", "sigmoid", "swish"), "activation": draw.pick(None, "swish")}
    if draw.maybe(0.4):
        call.give("out", draw.rows(draw.floats(tokens, value_heads * v_dim, dtype=dtype), lead=1), "T HV")
        call.ties["HV"] = ("out",)


_BOTH: dict[str, kinds.Kind] = {
    "mixed_qkv": kinds.ROWS | kinds.MATRIX,
    "z": kinds.ROWS | {
        "left out where it must be": ERROR, "given with projections in pairs": VALUE, "given without the norm": VALUE,
    },
    "a": kinds.INPUT | kinds.MATRIX | {"left out where it must be": ERROR, "given with projections in pairs": VALUE},
    "ssm_state": kinds.STATE_POOL | {"one page buffer for both pools": SAME},
    "conv_weight": kinds.FILTER,
    "conv_bias": kinds.PARAMETER,
    "A_log, dt_bias": kinds.PARAMETER,
    "norm_weight": kinds.PARAMETER,
    "query_start_loc": kinds.OFFSETS,
    "out": kinds.FLOAT_OUT,
}  # fmt: skip
_WINDOWS: kinds.Kind = kinds.WINDOWS | {"one page buffer for both pools": SAME}

CALLS = {
    "fused_gdn_decode": Described(decode, (("T ~", 0.0),), _BOTH | sequences.INTERMEDIATE | sequences.REPLAYED | {
        "b": kinds.INPUT | kinds.MATRIX | {"left out where it must be": ERROR, "given with concatenated projections": VALUE},
        "conv_state": _WINDOWS,
        "state_indices": kinds.SLOTS | sequences.SHARED_SLOTS | {"a slot without a ring": VALUE},
        "num_accepted_tokens of columns": sequences.ACCEPTED | {"the indices 1-D": VALUE},
        "rounding_seed": sequences.SEED | {"given with intermediate states": VALUE},
    }, _changed_by_decode),
    "fused_gdn_prefill": Described(prefill, (("T ~", 0.0),), _BOTH | {
        "b": kinds.INPUT | kinds.MATRIX,
        "conv_states": _WINDOWS,
        "state_indices": sequences.with_offsets(kinds.SLOTS) | sequences.SHARED_SLOTS,
        "has_initial_state": sequences.with_offsets(kinds.MASK),
        "checkpoint_offsets": sequences.with_offsets(sequences.CHECKPOINT_OFFSETS) | {"no multiple of 64": VALUE},
        "checkpoint_slots": sequences.with_offsets(sequences.CHECKPOINT_SLOTS),
        "checkpoint_states": sequences.KEPT,
        "checkpoint_windows": sequences.KEPT_WINDOWS,
    }, _changed_by_prefill),
}  # fmt: skip
