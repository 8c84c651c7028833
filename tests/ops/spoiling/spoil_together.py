"""Spoilings of arguments that belong together."""

import random

import torch

from tests.ops.spoiling.call import Call
from tests.ops.spoiling.live import indices_of, kept_of, lengths, live_sequences
from tests.ops.spoiling.spoiling import SPOILINGS, Spoiled, spoiling

Tensor = torch.Tensor


def _without(*names: str) -> None:
    """Registers "without a, b": the spoilt argument stays, those go."""

    def spoil(call: Call, path: str, _: random.Random) -> Spoiled | None:
        if call.get(path) is None or any(call.get(name) is None for name in names):
            return None
        if names == ("conv_states",) and call.get("checkpoint_windows") is not None:
            return None  # which take checkpoints without a pool
        return Spoiled(call.with_values(dict.fromkeys(names)), names={*names, *kept_of(call), "initial_state"})

    SPOILINGS[f"without {', '.join(names)}"] = spoil


_without("A_log")
_without("state_indices")
_without("checkpoint_slots")
_without("checkpoint_offsets")
_without("conv_states")
_without("checkpoint_offsets", "checkpoint_slots")
_without("intermediate_states")
_without("intermediate_indices")


@spoiling("the indices 1-D")
def _one_dimension(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """Arguments that need 2-D indices, with their first column only."""
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


@spoiling("the indices 2-D")
def _two_dimensions(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """Arguments that need 1-D indices, with a column."""
    name = indices_of(call)
    if call.get(path) is None or name is None:
        return None
    return Spoiled(call.with_values({name: call.get(name)[:, None]}), names={name})


@spoiling("given with intermediate states")
def _given_kept(call: Call, path: str, _: random.Random) -> Spoiled | None:
    if "intermediate_states" not in call.arguments:
        return None
    name = indices_of(call)
    value = torch.zeros(1, dtype=torch.int64) if path == "rounding_seed" or name is None else call.get(name)
    return Spoiled(call.with_values({path: value}))


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
    return Spoiled(
        call.with_values({path: None}),
        names={"k", "k_norm", "cache", "slot_mapping", "v", "v_cache"} if path in call.dims else set(),
    )


@spoiling("given without the gate")
def _without_gate(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """A parameter of the raw gate, where g is the log decay or left out."""
    if call.arguments.get("use_gate_in_kernel"):
        return None
    heads = max(call.get("q").shape[2], call.get("v").shape[2])
    return Spoiled(call.with_values({path: torch.zeros(heads)}), names={"A_log", "dt_bias"})


def _log_decays(name: str, *, of_padding: bool) -> None:
    """Registers: positive log decays, of a live token, or of all tokens that belong to no live sequence."""

    def spoil(call: Call, path: str, rng: random.Random) -> Spoiled | None:
        g, counts = call.get(path), lengths(call)
        if not isinstance(g, Tensor) or call.arguments.get("use_gate_in_kernel"):
            return None
        starts = [sum(counts[:n]) for n in range(len(counts))]
        live = [token for n in live_sequences(call) for token in range(starts[n], starts[n] + counts[n])]
        rows = g.clone(memory_format=torch.contiguous_format).flatten(0, 1)
        chosen = [token for token in range(rows.shape[0]) if token not in live] if of_padding else live and [rng.choice(live)]
        if not chosen:
            return None
        rows[chosen, rng.randrange(rows.shape[1])] = 0.25
        return Spoiled(call.with_values({path: rows.view(g.shape)}), is_exact=False)

    SPOILINGS[name] = spoil


_log_decays("a positive log decay", of_padding=False)
_log_decays("positive log decays of padding", of_padding=True)


@spoiling("given with projections in pairs")
def _given_in_pairs(call: Call, path: str, _: random.Random) -> Spoiled | None:
    if call.arguments.get("projection_layout") not in ("interleaved", "merged"):
        return None
    return Spoiled(call.with_values({path: call.get("b").clone()}))


@spoiling("given without the norm")
def _given_without_norm(call: Call, path: str, _: random.Random) -> Spoiled | None:
    if call.arguments.get("norm_weight") is not None:
        return None
    shape = (call.get("out") if call.get("out") is not None else call.get("mixed_qkv")).shape[0], call.get("A_log").shape[0]
    return Spoiled(call.with_values({path: torch.zeros(*shape, call.get("head_v_dim"))}))


@spoiling("given with concatenated projections")
def _given_concatenated(call: Call, path: str, _: random.Random) -> Spoiled | None:
    if call.arguments.get("projection_layout") != "concatenated":
        return None
    return Spoiled(call.with_values({path: call.get("mixed_qkv")[:, :2].clone()}))


@spoiling("False with indices")
def _not_in_place(call: Call, path: str, _: random.Random) -> Spoiled | None:
    return None if indices_of(call) is None else Spoiled(call.with_values({path: False}))


@spoiling("against the cache")
def _against_cache(call: Call, path: str, _: random.Random) -> Spoiled | None:
    """fp8: the opposite of what the cache's dtype says."""
    cache = call.get("cache")
    if cache is None:
        return None
    fp8 = cache.dtype in (torch.uint8, torch.float8_e4m3fn)
    return Spoiled(call.with_values({path: not fp8}), names={"cache"})


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
    """Pool with fewer columns than the filter needs."""
    pool = call.get(path)
    width = call.get("conv_width")
    if width is None:
        width = call.get("weight" if "weight" in call.arguments else "conv_weight").shape[1]
    return Spoiled(call.with_values({path: pool[..., : width - 2]})) if isinstance(pool, Tensor) else None


@spoiling("one tap")
def _one_tap(call: Call, path: str, _: random.Random) -> Spoiled:
    return Spoiled(call.with_values({path: call.get(path)[:, :1]}))


@spoiling("[dim, tokens]")
def _dim_first(call: Call, path: str, _: random.Random) -> Spoiled | None:
    x = call.get(path)
    if x.dim() != 2 or x.shape[0] == x.shape[1]:
        return None
    return Spoiled(call.with_values({path: x.T.contiguous()}), names={"weight"})
