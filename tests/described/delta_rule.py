"""The recurrence, as chunks, token by token, and a step dealt to both: calls, what their arguments may be, their results."""

from typing import Any

import torch

from gdn.ops.delta_rule.problem import entry_width
from tests.described import Described
from tests.ops.spoiling import kinds
from tests.ops.spoiling import kinds_sequences as sequences
from tests.ops.spoiling.call import Call, Draw
from tests.ops.spoiling.live import indices_of, lengths, live_sequences, slots_mask, written_slots
from tests.ops.spoiling.rings import give_ring, has_ring, replayed_elements
from tests.ops.spoiling.verdict import ERROR, SAME, TYPE, VALUE

HEADS = ((2, 2, 4), (2, 2, 2), (2, 2, 6), (4, 2, 2), (6, 2, 2))  # of q, k, v


def _tokens(draw: Draw, call: Call, batch: int, length: int) -> tuple[int, int, int]:
    """q, k, v, gates and flags; heads and dims of the states."""
    query_heads, key_heads, value_heads = draw.pick(*HEADS)
    heads = max(query_heads, value_heads)
    k_dim = draw.size(12, 4, 8, served=64)
    v_dim = k_dim if draw.maybe(0.8) else draw.pick(4, 8)
    dtype = draw.any_float()

    def rows(*shape: int, of: torch.dtype) -> torch.Tensor:
        return draw.rows(draw.floats(batch, length, *shape, dtype=of), lead=2)

    call.give("q", rows(query_heads, k_dim, of=dtype), "B T H K")
    call.give("k", rows(key_heads, k_dim, of=dtype), "B T H K")
    call.give("v", rows(value_heads, v_dim, of=dtype), "B T H V")
    call.arguments["use_qk_l2norm_in_kernel"] = True  # keeps the states small
    if call.operator != "chunk_summary" and draw.maybe(0.3):
        call.arguments["scale"] = draw.pick(0.5, 1, 0.25)
    gate = draw.pick("log", "log", "raw", "raw", "none")
    if gate == "log":
        g = -torch.rand(batch, length, heads, generator=draw.generator).to(draw.any_float())
        call.give("g", draw.rows(g, lead=2), "B T H")
    elif gate == "raw":
        call.arguments["use_gate_in_kernel"] = True
        call.give("g", rows(heads, of=draw.any_float()), "B T H")
        call.give("A_log", draw.floats(heads, dtype=draw.any_float()), "H")
        if draw.maybe(0.7):
            call.give("dt_bias", draw.floats(heads, dtype=draw.any_float()), "H")
    if draw.maybe(0.8):
        raw = draw.maybe()
        beta = rows(heads, of=draw.any_float())
        call.give("beta", beta if raw else beta.sigmoid(), "B T H")
        if raw:
            call.arguments["use_beta_sigmoid_in_kernel"] = True
    if call.operator != "chunk_summary" and draw.maybe(0.4):
        call.give("out", draw.rows(draw.floats(batch, length, heads, v_dim, dtype=dtype), lead=2), "B T H V")
    return heads, k_dim, v_dim


def _shape(draw: Draw, call: Call, lengths: list[int], most_padding: int = 2) -> tuple[int, int, int]:
    """Batch rows, tokens of a row, sequences: packed (cu_seqlens) or as [B, T]."""
    if draw.maybe(0.7):
        offsets = draw.offsets(lengths)
        call.give("cu_seqlens", draw.indices(offsets), "~")
        call.ties["N"] = call.ties["T"] = ("cu_seqlens",)
        call.sizes["N"] = len(lengths)
        return 1, offsets[-1] + draw.pick(*range(most_padding + 1)), len(lengths)
    batch = draw.pick(1, 2, 3)
    call.sizes["N"] = batch
    call.ties["N"] = ("q", "k", "v")
    return batch, max(lengths), batch


def rows_name(call: Call) -> str:
    """Dimension of what has a row a sequence: more than N with offsets alone."""
    return "N+" if "cu_seqlens" in call.arguments else "N"


def state_of(draw: Draw, call: Call, name: str, slots: int, inner: tuple[int, ...], *, is_pool: bool) -> torch.Tensor:
    heads, k_dim, v_dim = inner
    v_first = call.arguments.setdefault("state_v_first", draw.maybe())
    shape = (heads, v_dim, k_dim) if v_first else (heads, k_dim, v_dim)
    state = draw.floats(slots, *shape, dtype=draw.pick(torch.float32, torch.bfloat16))
    dims = "H V K" if v_first else "H K V"
    call.give(name, draw.pool(state) if is_pool else draw.rows(state, 1), f"{'~' if is_pool else 'N'} {dims}")
    return state


def checkpoint_states(draw: Draw, call: Call, inner: tuple[int, ...], rows: int) -> None:
    """A tensor of its own for checkpoints."""
    state_of(draw, call, "checkpoint_states", rows, inner, is_pool=True)


def intermediate(draw: Draw, call: Call, inner: tuple[int, ...], count: int, most: int, dims: str) -> None:
    """Rows that take the state after every token, some null, of up to `most` tokens. dims: of the rows' indices."""
    null_slot, rows = call.arguments.get("null_slot", -1), count + 3
    heads, k_dim, v_dim = inner
    v_first = call.arguments["state_v_first"]
    shape = (rows, draw.pick(1, most), heads, *((v_dim, k_dim) if v_first else (k_dim, v_dim)))
    states = draw.floats(*shape, dtype=draw.pick(torch.float32, torch.bfloat16))
    call.give("intermediate_states", draw.pool(states), "~ ~ H V K" if v_first else "~ ~ H K V")
    chosen = some_null(draw, call, draw.distinct(count, rows, start=null_slot + 1))
    call.give("intermediate_indices", draw.indices(chosen), dims)


def slots_of(draw: Draw, call: Call, count: int, columns: int = 1) -> tuple[list[int], int]:
    """Distinct live slots, some sequences null, and the size of a pool with some to spare. Sets null_slot."""
    null_slot = draw.pick(-1, 0)
    if null_slot == 0 or draw.maybe(0.3):
        call.arguments["null_slot"] = null_slot
    size = 4 * count * columns + 3
    slots = draw.distinct(count * columns, size, start=null_slot + 1)
    return slots, size


def some_null(draw: Draw, call: Call, slots: list[int], probability: float = 0.15) -> list[int]:
    """The slots, but null ones for some sequences."""
    null_slot = call.arguments.get("null_slot", -1)
    return [null_slot if draw.maybe(probability) else slot for slot in slots]


def give_seed(draw: Draw, call: Call) -> None:
    call.give("rounding_seed", torch.tensor([draw.random.randint(0, 2**40)]), "one")
    call.ties["one"] = ("rounding_seed",)


def give_some_seed(draw: Draw, call: Call, state: torch.Tensor) -> None:
    """Half of the states that are rounded, with noise."""
    if state.dtype == torch.bfloat16 and draw.maybe():
        give_seed(draw, call)


def chunk(draw: Draw) -> Call:
    call = Call("chunk_gated_delta_rule")
    has_checkpoints = draw.maybe(0.3)
    lengths = draw.lengths(66 if has_checkpoints else 5, sequences=3 if has_checkpoints else 4)
    if has_checkpoints:
        lengths[0] = draw.pick(64, 65, 130)
    batch, length, count = _shape(draw, call, lengths)
    inner = _tokens(draw, call, batch, length)
    if draw.maybe():
        call.arguments["output_final_state"] = True
    kind = draw.pick("pool", "pool", "none", "states") if has_checkpoints else draw.pick("pool", "pool", "none", "states")
    if kind == "states":
        state_of(draw, call, "initial_state", count, inner, is_pool=False)
    if kind == "pool":
        _prefill_pool(draw, call, inner, count, has_checkpoints)
    if has_checkpoints and (kind != "pool" or draw.maybe()):
        null_slot, rows = call.arguments.get("null_slot", -1), 2 * count + 3
        checkpoint_states(draw, call, inner, rows)
        saved = draw.distinct(2 * count, rows, start=null_slot + 1)
        _checkpoints(draw, call, count, [saved[2 * n :][:2] for n in range(count)])
    if kind != "none" and draw.maybe(0.4):
        call.give("has_initial_state", torch.tensor([draw.maybe(0.7) for _ in range(count)]), rows_name(call))
    return call


def summary(draw: Draw) -> Call:
    call = Call("chunk_summary")
    batch, length, _ = _shape(draw, call, draw.lengths(5))
    _tokens(draw, call, batch, length)
    if draw.maybe():
        call.arguments["state_v_first"] = True
    return call


def recurrent(draw: Draw) -> Call:
    call = Call("fused_recurrent_gated_delta_rule")
    lengths = draw.lengths(4)
    batch, length, count = _shape(draw, call, lengths)
    inner = _tokens(draw, call, batch, length)
    if draw.maybe(0.3):
        call.arguments["output_final_state"] = draw.maybe()
    kind = draw.pick("1-D", "none", "states", "in place", "2-D", "2-D", "tree", "kept", "kept tree", "ring", "ring", "ring tree")
    if kind == "states":
        state_of(draw, call, "initial_state", count, inner, is_pool=False)
        if draw.maybe(0.3):
            call.arguments["inplace_final_state"] = False
    if kind == "in place":
        state = state_of(draw, call, "initial_state", count, inner, is_pool=True)
        call.dims["initial_state"] = ("N", *call.dims["initial_state"][1:])
        call.arguments["inplace_final_state"] = True
        give_some_seed(draw, call, state)
    if kind in ("1-D", "2-D", "tree"):
        _pooled(draw, call, kind, inner, batch * length, count, length)
    if kind.startswith("kept"):
        _kept(draw, call, inner, count)
    if kind.startswith("ring"):
        _ringed(draw, call, inner, lengths if "cu_seqlens" in call.arguments else [length] * batch)
    if kind in ("kept tree", "ring tree"):
        _give_parents(draw, call, batch * length, length)
    if draw.maybe(0.15):
        call.arguments["disable_state_update"] = True
    return call


def step(draw: Draw) -> Call:
    """gated_delta_rule: short rows before, between and after long ones, of the chunk form, or drafts."""
    call = Call("gated_delta_rule")
    kind = draw.pick("pool", "pool", "pool", "none", "states", "in place", "2-D", "tree")
    has_checkpoints = kind == "pool" and draw.maybe(0.4)
    lengths = draw.lengths(4)
    if kind not in ("2-D", "tree"):
        lengths += [draw.pick(8, 65, 130)] * draw.pick(0, 1) + draw.lengths(4, sequences=1) * draw.pick(0, 1)
    if has_checkpoints:
        lengths[-1] = 65
    offsets = draw.offsets(lengths)
    call.give("cu_seqlens", draw.indices(offsets), "~")
    call.ties["N"] = call.ties["T"] = ("cu_seqlens", "lengths_host")
    count = call.sizes["N"] = len(lengths)
    length = offsets[-1] + draw.pick(0, 2)
    inner = _tokens(draw, call, 1, length)
    if draw.maybe(0.45):
        call.arguments["lengths_host"] = draw.pick(list, tuple)(lengths)
    if draw.maybe():
        call.arguments["output_final_state"] = True
    if kind == "states":
        state_of(draw, call, "initial_state", count, inner, is_pool=False)
    if kind == "in place":
        state_of(draw, call, "initial_state", count, inner, is_pool=True)
        call.dims["initial_state"] = ("N", *call.dims["initial_state"][1:])
        call.arguments["inplace_final_state"] = True
    if kind in ("2-D", "tree"):
        _pooled(draw, call, kind, inner, length, count, length)
    if kind == "pool":
        _prefill_pool(draw, call, inner, count, has_checkpoints, draw.pick("state_indices", "ssm_state_indices"))
    if kind in ("states", "in place", "pool") and draw.maybe(0.4):
        call.give("has_initial_state", torch.tensor([draw.maybe(0.7) for _ in range(count)]), rows_name(call))
    if kind in ("in place", "pool") and draw.maybe(0.3):
        give_seed(draw, call)
    if not has_checkpoints and draw.maybe(0.15):
        call.arguments["disable_state_update"] = True
    return call


def _prefill_pool(
    draw: Draw, call: Call, inner: tuple[int, ...], count: int, has_checkpoints: bool, name: str = "state_indices"
) -> None:
    """A pool with the slots of prefill."""
    slots, size = slots_of(draw, call, count, columns=4)
    state_of(draw, call, "initial_state", size, inner, is_pool=True)
    rows = rows_name(call)
    extra = draw.pick(0, 2) if rows == "N+" else 0
    dtype = draw.pick(torch.int32, torch.int64)
    reads = some_null(draw, call, slots[:count])
    call.give(name, draw.indices(reads + [1] * extra, dtype), rows)
    if draw.maybe(0.3):
        call.give("final_state_indices", draw.indices(some_null(draw, call, slots[count : 2 * count], 0.2)), rows)
    if has_checkpoints:
        _checkpoints(draw, call, count, [list(slots[2 * count + 2 * n :][:2]) for n in range(count)])


def _checkpoints(draw: Draw, call: Call, count: int, saved: list[list[int]]) -> None:
    offsets = [[draw.pick(0, 64, 128), 0] for _ in range(count)]
    offsets[0][0] = 64
    call.give("checkpoint_offsets", draw.indices(offsets), f"{rows_name(call)} C")
    call.give("checkpoint_slots", draw.indices(saved), f"{rows_name(call)} C")


def _pooled(draw: Draw, call: Call, kind: str, inner: tuple[int, ...], num_tokens: int, count: int, length: int) -> None:
    """State indices of a recurrent call, with drafts where they are 2-D."""
    columns = 1 if kind == "1-D" else 4
    slots, size = slots_of(draw, call, count, columns=2 * columns)
    null_slot = call.arguments.get("null_slot", -1)
    state = state_of(draw, call, "initial_state", size, inner, is_pool=True)
    dtype = draw.pick(torch.int32, torch.int64)

    def table(first: int) -> list[Any]:
        rows = [slots[first + n * columns :][:columns] for n in range(count)]
        rows = [[null_slot] * columns if draw.maybe(0.15) else row for row in rows]
        return [row[0] for row in rows] if kind == "1-D" else rows

    dims = rows_name(call) + ("" if kind == "1-D" else " columns")
    reads = table(0)
    extra = [reads[0]] * draw.pick(0, 1) if rows_name(call) == "N+" else []
    call.give("ssm_state_indices", draw.indices(reads + extra, dtype), dims)
    if draw.maybe(0.3):
        call.give("final_state_indices", draw.indices(table(count * columns), dtype), dims)
    if kind != "1-D" and draw.maybe(0.6):
        accepted = [draw.random.randint(1, columns) for _ in range(count)]
        call.give("num_accepted_tokens", draw.indices(accepted), rows_name(call))
    if kind == "tree":
        _give_parents(draw, call, num_tokens, length)
    give_some_seed(draw, call, state)


def _kept(draw: Draw, call: Call, inner: tuple[int, ...], count: int) -> None:
    """1-D slots to start from, and tensors that take the state after every token."""
    slots, size = slots_of(draw, call, count)
    state_of(draw, call, "initial_state", size, inner, is_pool=True)
    call.give("ssm_state_indices", draw.indices(some_null(draw, call, slots)), rows_name(call))
    intermediate(draw, call, inner, count, 4, rows_name(call))


def _ringed(draw: Draw, call: Call, inner: tuple[int, int, int], lengths: list[int]) -> None:
    """1-D slots, each with a ring."""
    slots, size = slots_of(draw, call, len(lengths))
    dims = rows_name(call)
    state = state_of(draw, call, "initial_state", size, inner, is_pool=True)
    call.dims["initial_state"] = ("slots", *call.dims["initial_state"][1:])
    reads = some_null(draw, call, slots)
    extra = [reads[0]] * draw.pick(0, 1) if dims == "N+" else []
    call.give("ssm_state_indices", draw.indices(reads + extra), dims)
    give_ring(draw, call, entry_width(call.get("k").shape[2], *inner), (reads, size), lengths, dims)
    give_some_seed(draw, call, state)


def _give_parents(draw: Draw, call: Call, num_tokens: int, length: int) -> None:
    dim = "tokens" if call.get("cu_seqlens") is None else "T"  # of all rows, where each sequence has one of its own
    call.give("parent_token", torch.tensor(_parents(draw, call, num_tokens, length), dtype=torch.int32), dim)
    call.ties.setdefault(dim, ())


def _parents(draw: Draw, call: Call, num_tokens: int, length: int) -> list[int]:
    """A parent of every token: -1 or an earlier token of its sequence."""
    if "cu_seqlens" in call.arguments:
        bounds = call.index("cu_seqlens")
    else:
        bounds = list(range(0, num_tokens + 1, max(1, length)))
    return parents_of(draw, bounds, num_tokens)


def parents_of(draw: Draw, bounds: list[int], num_tokens: int) -> list[int]:
    """A parent of every token of sequences with these offsets: -1 or an earlier token of its sequence."""
    parents = [-1] * num_tokens
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        for node in range(end - start):
            parents[start + node] = draw.random.randint(-1, node - 1)
    return parents


def replayed(call: Call, pool: str, indices: str, inner: tuple[int, int, int, int]) -> dict[str, torch.Tensor]:
    """inner: key heads, state heads, K, V."""
    counts, slots = lengths(call), call.index(indices)
    return replayed_elements(call, pool, [(n, slots[n], counts[n]) for n in live_sequences(call)], inner)


def _changed(call: Call) -> dict[str, torch.Tensor]:
    pool, name = call.get("initial_state"), indices_of(call)
    if has_ring(call) and name is not None and not call.arguments.get("disable_state_update"):
        q, k, v = (call.get(path).shape for path in ("q", "k", "v"))
        return replayed(call, "initial_state", name, (k[2], max(q[2], v[2]), k[3], v[3]))
    is_kept = call.arguments.get("disable_state_update") or "intermediate_states" in call.arguments
    if not isinstance(pool, torch.Tensor) or is_kept:
        return {}
    if name is None:
        return {"initial_state": torch.ones(pool.shape, dtype=torch.bool)} if call.get("inplace_final_state") else {}
    return {"initial_state": slots_mask(pool, written_slots(call, name, "final_state_indices"))}


_DELTA_RULE: dict[str, kinds.Kind] = {
    "q, k": kinds.ROWS | {"another 16-bit dtype": TYPE} | kinds.SHARED_INPUTS,
    "v": kinds.ROWS | {"another 16-bit dtype": TYPE, "overlaps a read-only argument": SAME},
    "g": kinds.INPUT
    | {
        "left out where it must be": ERROR,
        "without A_log": ERROR,
        "a positive log decay": VALUE,
        "positive log decays of padding": SAME,
    },
    "beta": kinds.INPUT | {"left out where it must be": ERROR},
    "A_log": kinds.PARAMETER | {"given without the gate": TYPE},
    "dt_bias": kinds.PARAMETER | {"given without the gate": TYPE},
    "initial_state as a pool": kinds.STATE_POOL | {"left out where it must be": ERROR},
    "initial_state to read": kinds.STATES,
    "cu_seqlens": kinds.OFFSETS,
    "out": kinds.FLOAT_OUT | {"is another argument": VALUE},
}
_RESULTS = (("B T ~ ~", 0.0), ("N ~ ~ ~", "the states"))

CALLS = {
    "chunk_gated_delta_rule": Described(chunk, _RESULTS, _DELTA_RULE | {
        "state_indices": kinds.SLOTS | sequences.SHARED_SLOTS,
        "final_state_indices": kinds.SLOTS | sequences.FINAL_SLOTS | {"without state_indices": VALUE},
        "has_initial_state": kinds.MASK,
        "checkpoint_offsets": sequences.CHECKPOINT_OFFSETS | {"no multiple of 64": VALUE},
        "checkpoint_slots": sequences.CHECKPOINT_SLOTS,
        "checkpoint_states": sequences.KEPT,
        "head_first": kinds.FLAG | {"True": VALUE},
        "initial_state as a pool": kinds.but(_DELTA_RULE["initial_state as a pool"], "interleaved with another argument"),
    }, _changed),
    "chunk_summary": Described(summary, (("N ~ ~ ~", 0.0), ("N ~ ~ ~", "identity")), {
        **{names: _DELTA_RULE[names] for names in ("q, k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens")},
    }),
    "fused_recurrent_gated_delta_rule": Described(recurrent, _RESULTS, {
        **_DELTA_RULE, **sequences.INTERMEDIATE, **sequences.REPLAYED,
        "ssm_state_indices": kinds.SLOTS | sequences.SHARED_SLOTS | {"a slot without a ring": VALUE},
        "final_state_indices": kinds.SLOTS | sequences.FINAL_SLOTS | {"given with intermediate states": VALUE},
        "num_accepted_tokens of columns": sequences.ACCEPTED | {"the indices 1-D": VALUE},
        "parent_token": sequences.PARENTS,
        "rounding_seed": sequences.SEED | {"given with intermediate states": VALUE},
        "inplace_final_state": kinds.OPTIONAL_FLAG | {"False with indices": VALUE},
    }, _changed),
    "gated_delta_rule": Described(step, _RESULTS, _DELTA_RULE | {
        # B is always 1.
        **{names: kinds.but(_DELTA_RULE[names], "rows of one element each") for names in ("q, k", "v", "g", "beta")},
        "cu_seqlens": kinds.OFFSETS,
        "state_indices": sequences.with_offsets(kinds.SLOTS) | sequences.SHARED_SLOTS,
        "ssm_state_indices": sequences.with_offsets(kinds.SLOTS) | sequences.SHARED_SLOTS,
        "final_state_indices": sequences.with_offsets(kinds.SLOTS) | sequences.FINAL_SLOTS,
        "has_initial_state": sequences.with_offsets(kinds.MASK),
        "checkpoint_offsets": sequences.with_offsets(sequences.CHECKPOINT_OFFSETS) | {"no multiple of 64": VALUE},
        "checkpoint_slots": sequences.with_offsets(sequences.CHECKPOINT_SLOTS),
        "num_accepted_tokens": sequences.with_offsets(sequences.ACCEPTED) | {"the indices 1-D": VALUE},
        "parent_token": sequences.PARENTS,
        "rounding_seed": sequences.SEED,
        "inplace_final_state": kinds.OPTIONAL_FLAG | {"False with indices": VALUE},
        "initial_state as a pool": kinds.but(_DELTA_RULE["initial_state as a pool"], "interleaved with another argument"),
    }, _changed),
}  # fmt: skip
