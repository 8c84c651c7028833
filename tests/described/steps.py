"""Convolution, gates, split and norms: calls, what their arguments may be, their results."""

import torch

from tests.described import Described
from tests.ops.spoiling import kinds
from tests.ops.spoiling.call import Call, Draw
from tests.ops.spoiling.kinds_sequences import ACCEPTED, CHECKPOINT_OFFSETS, CHECKPOINT_SLOTS, KEPT_WINDOWS, PARENTS, SHARED_SLOTS
from tests.ops.spoiling.live import live_sequences, rows_of, slots_mask, written_slots
from tests.ops.spoiling.verdict import SAME, TYPE, VALUE


def _filter(draw: Draw, call: Call, dim: int, width: int) -> None:
    call.give("weight", draw.floats(dim, width, dtype=draw.any_float()), "C ~")
    if draw.maybe():
        call.give("bias", draw.floats(dim, dtype=draw.any_float()), "C")
    if draw.maybe(0.4):
        call.arguments["activation"] = draw.pick(None, "silu", "swish")


def _windows(draw: Draw, slots: int, dim: int, columns: int) -> torch.Tensor:
    """A pool of windows, channels or columns next to each other in memory."""
    windows = draw.floats(slots, dim, columns, dtype=draw.any_float())
    return draw.pool(windows) if draw.maybe() else windows.mT.contiguous().mT


def _null_slot(draw: Draw, call: Call) -> int:
    null_slot = draw.pick(-1, 0)
    if null_slot == 0:
        call.arguments["null_slot"] = 0
    return null_slot


def conv_fn(draw: Draw) -> Call:
    call = Call("causal_conv1d_fn")
    dim, width = draw.size(12, 8, 4, served=64), draw.pick(4, 2, 3)
    is_packed = draw.maybe(0.8)
    lengths = draw.lengths(5) if is_packed else [draw.pick(1, 2, 5)]
    offsets = draw.offsets(lengths)
    tokens, count = offsets[-1] + (draw.pick(0, 2) if is_packed else 0), len(lengths)
    tokens += tokens == dim  # [dim, tokens] could not be distinguished from it
    dtype = draw.any_float()
    call.give("x", draw.rows(draw.floats(tokens, dim, dtype=dtype), lead=1), "T C")
    call.sizes["N"] = count
    call.ties |= {"N": ("query_start_loc",)}
    _filter(draw, call, dim, width)
    if is_packed:
        call.give("query_start_loc", draw.indices(offsets), "~")
    if draw.maybe(0.8):
        has_slots = draw.maybe(0.7)
        size = 4 * count + 2
        call.give("conv_states", _windows(draw, size if has_slots else count + 1, dim, width - 1 + draw.pick(0, 2)), "~ C ~")
        sequences = "N+" if is_packed else "N"
        if has_slots:
            null_slot = _null_slot(draw, call)
            slots = draw.distinct(3 * count, size, start=null_slot + 1)
            reads = [null_slot if draw.maybe(0.15) else slot for slot in slots[:count]]
            extra = [1] * (draw.pick(0, 1) if is_packed else 0)
            call.give("cache_indices", draw.indices(reads + extra), sequences)
            if draw.maybe(0.4):
                saved = [list(slots[count + 2 * n :][:2]) for n in range(count)]
                dtype_of = draw.pick(torch.int32, torch.int64)
                lasts = [[draw.random.randint(0, length), 0] for length in lengths]
                call.give("checkpoint_offsets", draw.indices(lasts, dtype_of), f"{sequences} columns")
                call.give("checkpoint_slots", draw.indices(saved), f"{sequences} columns")
                if draw.maybe():
                    kept = _windows(draw, size, dim, width - 1 + draw.pick(0, 2))
                    call.give("checkpoint_windows", kept, "~ C ~")
        if draw.maybe(0.5):
            call.give("has_initial_state", torch.tensor([draw.maybe() for _ in range(count)]), sequences)
    if draw.maybe(0.4):
        call.give("out", draw.rows(draw.floats(tokens, dim, dtype=dtype), lead=1), "T C")
    return call


def conv_update(draw: Draw) -> Call:
    call = Call("causal_conv1d_update")
    dim, width = draw.size(12, 8, 4, served=64), draw.pick(4, 2, 3)
    form = draw.pick("packed", "packed", "[B, dim]", "[B, dim, T]")
    dtype = draw.any_float()
    lengths = draw.lengths(3) if form == "packed" else [1 if form == "[B, dim]" else draw.pick(1, 2, 3)] * draw.pick(1, 2, 3)
    offsets, count = draw.offsets(lengths), len(lengths)
    tokens = offsets[-1] + (draw.pick(0, 1) if form == "packed" else 0)
    call.sizes["N"] = count
    if form == "packed":
        call.give("x", draw.rows(draw.floats(tokens, dim, dtype=dtype), lead=1), "T C")
        call.give("query_start_loc", draw.indices(offsets), "~")
        call.ties["N"] = ("query_start_loc",)
    elif form == "[B, dim]":
        call.give("x", draw.rows(draw.floats(count, dim, dtype=dtype), lead=1), "B C")
    else:
        x = draw.floats(count, dim, lengths[0], dtype=dtype)
        call.give("x", x if draw.maybe() else x.mT.contiguous().mT, "B C T")
    call.ties.setdefault("N", ("x",))
    _filter(draw, call, dim, width)
    kind = draw.pick("1-D", "none", "1-D accepted", "2-D", "2-D accepted", "tree")
    columns = 1 if kind in ("none", "1-D", "1-D accepted") else 4
    num_spec = 2 if kind == "1-D accepted" else 0 if kind == "tree" else columns - 1
    size = 3 * count * columns + 2
    spare = draw.pick(0, 1) if kind == "none" else 0
    windows = _windows(draw, count + 1 if kind == "none" else size, dim, width - 1 + num_spec + spare)
    call.give("conv_state", windows, "~ C ~")
    if kind != "none":
        null_slot = _null_slot(draw, call)
        slots = draw.distinct(count * columns, size, start=null_slot + 1)
        rows = [slots[n * columns :][:columns] for n in range(count)]
        rows = [[null_slot] * columns if draw.maybe(0.15) else row for row in rows]
        has_offsets = form == "packed"
        rows += [rows[0]] * (draw.pick(0, 1) if has_offsets else 0)
        flat = columns == 1
        dims = ("N+" if has_offsets else "N") + ("" if flat else " columns")
        call.give("conv_state_indices", draw.indices([row[0] for row in rows] if flat else rows), dims)
        if kind.endswith("accepted") or kind == "tree" and draw.maybe():
            most = 1 + num_spec if kind != "tree" else columns
            accepted = [draw.random.randint(1, most) for _ in range(count)]
            call.give("num_accepted_tokens", draw.indices(accepted), "N+" if has_offsets else "N")
    if kind == "tree":
        total = tokens if form == "packed" else sum(lengths)
        parents = [-1] * total
        for start, end in zip(offsets[:-1], offsets[1:], strict=True):
            for node in range(end - start):
                parents[start + node] = draw.random.randint(-1, node - 1)
        call.give("parent_token", torch.tensor(parents, dtype=torch.int32), "tokens")
        call.ties["tokens"] = ("x",)
    if draw.maybe(0.4):
        x = call.arguments["x"]
        call.give("out", draw.rows(draw.floats(*x.shape, dtype=dtype), lead=1), " ".join(call.dims["x"]))
    return call


def gating(draw: Draw) -> Call:
    call = Call("fused_gdn_gating")
    shape, heads = draw.pick((draw.tokens(3, 5, 0),), (2, 3), (1, 4)), draw.pick(4, 2)
    dims = " ".join([f"D{i}" for i in range(len(shape))] + ["H"])
    for name in ("a", "b"):
        call.give(name, draw.rows(draw.floats(*shape, heads, dtype=draw.any_float()), lead=1), dims)
    call.give("A_log", draw.floats(heads, dtype=draw.any_float()), "H")
    call.give("dt_bias", draw.floats(heads, dtype=draw.any_float()), "H")
    if draw.maybe(0.3):
        call.arguments |= {"beta": draw.pick(1, 0.5, 2.0), "threshold": draw.pick(20, 10.0)}
    return call


def split(draw: Draw) -> Call:
    call = Call("fused_qkvzba_split_reshape_cat")
    heads, k_dim = draw.pick(2, 1, 3), draw.size(4, 8, served=64)
    v_dim, tokens = draw.size(4, 8, served=64), draw.tokens(0, 1, 3, 5)
    value_heads = heads * draw.pick(2, 1)
    dtype = draw.any_float()
    wide = draw.floats(tokens, 2 * heads * k_dim + 2 * value_heads * v_dim, dtype=dtype)
    call.give("mixed_qkvz", draw.rows(wide, lead=1), "T width")
    call.give("mixed_ba", draw.rows(draw.floats(tokens, 2 * value_heads, dtype=draw.any_float()), lead=1), "T gates")
    call.ties |= {"width": ("num_heads_qk", "num_heads_v", "head_qk", "head_v"), "gates": ("num_heads_v",)}
    call.arguments |= {"num_heads_qk": heads, "num_heads_v": value_heads, "head_qk": k_dim, "head_v": v_dim}
    return call


def add_norm(draw: Draw) -> Call:
    call = Call("add_rms_norm")
    shape, dim, dtype = draw.pick((draw.tokens(3, 5),), (2, 3), (0, 2)), draw.size(12, 4, 8, served=64), draw.any_float()
    dims = " ".join([f"D{i}" for i in range(len(shape))] + ["D"])
    call.give("x", draw.rows(draw.floats(*shape, dim, dtype=dtype), lead=len(shape)), dims)
    if draw.maybe(0.8):
        call.give("residual", draw.rows(draw.floats(*shape, dim, dtype=dtype), lead=len(shape)), dims)
        if draw.maybe():
            call.give("layer_scale", draw.floats(dim, dtype=draw.any_float()), "D")
    else:
        call.arguments["residual"] = None
        call.alone = frozenset({"x"})
    call.give("weight", draw.floats(dim, dtype=draw.any_float()), "D")
    if draw.maybe(0.3):
        call.arguments |= {"eps": draw.pick(0, 1e-5, 1), "zero_centred": draw.pick(True, False)}
    return call


def norm(draw: Draw) -> Call:
    call = Call("rms_norm_gated")
    shape, dim = draw.pick((draw.tokens(2, 4), 3), (3,), (4, 2), (5,), (0, 2)), draw.size(12, 4, 8, served=64)
    dims = " ".join([f"D{i}" for i in range(len(shape))] + ["V"])
    call.give("x", draw.rows(draw.floats(*shape, dim, dtype=draw.any_float()), lead=len(shape)), dims)
    call.give("z", draw.rows(draw.floats(*shape, dim, dtype=draw.any_float()), lead=len(shape)), dims)
    call.give("weight", draw.floats(dim, dtype=draw.any_float()), "V")
    if draw.maybe(0.3):
        call.arguments |= {"eps": draw.pick(0, 1e-5, 1), "activation": draw.pick("silu", "swish", "sigmoid")}
    return call


def _changed_by_conv_fn(call: Call) -> dict[str, torch.Tensor]:
    pool = call.get("conv_states")
    if not isinstance(pool, torch.Tensor):
        return {}
    slots = written_slots(call, "cache_indices", None) if "cache_indices" in call.arguments else set(live_sequences(call))
    mask = slots_mask(pool, slots)
    mask[:, :, call.get("weight").shape[1] - 1 :] = False
    return {"conv_states": mask}


def _changed_by_update(call: Call) -> dict[str, torch.Tensor]:
    pool, name = call.get("conv_state"), "conv_state_indices"
    live = live_sequences(call)
    if name not in call.arguments:
        return {"conv_state": slots_mask(pool, set(live))}
    rows = rows_of(call, name)
    is_tree = isinstance(call.get("parent_token"), torch.Tensor)
    return {"conv_state": slots_mask(pool, {slot for n in live for slot in (rows[n] if is_tree else rows[n][:1])})}


_FILTERED: dict[str, kinds.Kind] = {
    "weight": kinds.FILTER,
    "bias": kinds.PARAMETER,
    "out": kinds.FLOAT_OUT
    | {
        "in place on x": SAME,
        "in place on an equal view of x": SAME,
        "in place on an x whose last dim is not contiguous": VALUE,
        "one row further than x": VALUE,
    },
}

CALLS = {
    "fused_gdn_gating": Described(gating, (("a", None), ("a", None)), {
        "A_log, dt_bias": kinds.PARAMETER,
        "a, b": kinds.INPUT | {"one tensor for two read-only arguments": SAME},
        "beta": kinds.POSITIVE,
    }),
    "fused_qkvzba_split_reshape_cat": Described(split, (("T ~", None), ("T ~ ~", None), ("T ~", None), ("T ~", None)), {
        "mixed_qkvz": kinds.ROWS | kinds.MATRIX,
        "mixed_ba": kinds.INPUT | kinds.MATRIX,
    }),
    "causal_conv1d_fn": Described(conv_fn, (("x", 0.0),), _FILTERED | {
        "x": kinds.ROWS | kinds.MATRIX | {"[dim, tokens]": VALUE},
        "conv_states": kinds.WINDOWS,
        "query_start_loc": kinds.OFFSETS,
        "cache_indices": kinds.SLOTS | SHARED_SLOTS,
        "has_initial_state": kinds.MASK,
        "checkpoint_offsets": CHECKPOINT_OFFSETS | {"without conv_states": VALUE},
        "checkpoint_slots": CHECKPOINT_SLOTS,
        "checkpoint_windows": KEPT_WINDOWS,
    }, _changed_by_conv_fn),
    "causal_conv1d_update": Described(conv_update, (("x", 0.0),), _FILTERED | {
        "x": kinds.ROWS | kinds.MATRIX,
        "conv_state": kinds.WINDOWS,
        "query_start_loc": kinds.OFFSETS,
        "conv_state_indices": kinds.SLOTS | SHARED_SLOTS,
        "num_accepted_tokens": ACCEPTED,
        "parent_token": kinds.but(PARENTS, "the indices 1-D"),
        "out": _FILTERED["out"] | {"x in the other memory order": VALUE},
    }, _changed_by_update),
    "add_rms_norm": Described(add_norm, (("x", None), ("x", None)), {
        "x": kinds.ROWS | {"another 16-bit dtype": TYPE, "one tensor for two read-only arguments": SAME},
        "residual": kinds.ROWS | {"another 16-bit dtype": TYPE, "one tensor for two read-only arguments": SAME},
        "weight": kinds.PARAMETER,
        "layer_scale": kinds.PARAMETER,
    }),
    "rms_norm_gated": Described(norm, (("x", None),), {
        "x, z": kinds.ROWS | {"one tensor for two read-only arguments": SAME},
        "weight": kinds.PARAMETER,
    }),
}  # fmt: skip
