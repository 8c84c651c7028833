"""Cases of the operators. Every rank computes the whole call by itself, from the same seed, and compares its own part."""

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import gdn
import gdn.distributed
from gdn.distributed import composition
from gdn.distributed import group as groups
from gdn.distributed.composition import LEAST_SEGMENT
from gdn.distributed.group import Ranks
from gdn.runtime import env

SLOTS = 9
# Tokens of each sequence on each of four ranks; smaller groups take the first ones, and the last of these has the rest.
ONE = [[70, 64, 3, 130]]
RAGGED = [[64, 1, 0, 65], [0, 0, 40, 7], [0, 0, 0, 0], [130, 5, 2, 0], [0, 33, 0, 1], [1, 0, 0, 0]]


@dataclass
class Parts:
    """Layout of packed sequences on the ranks."""

    lengths: list[list[int]]  # [sequences][ranks]
    rank: int

    @classmethod
    def of(cls, lengths: list[list[int]], group: Any) -> "Parts":
        size = dist.get_world_size(group)
        return cls([[*row[: size - 1], sum(row[size - 1 :])] for row in lengths], dist.get_rank(group))

    @property
    def totals(self) -> list[int]:
        return [sum(row) for row in self.lengths]

    @property
    def own(self) -> list[int]:
        return [row[self.rank] for row in self.lengths]

    def rows(self) -> Tensor:
        """This rank's tokens among all."""
        found, start = [], 0
        for row in self.lengths:
            first = start + sum(row[: self.rank])
            found += range(first, first + row[self.rank])
            start += sum(row)
        return torch.tensor(found, dtype=torch.int64)


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def raises(kind: type[Exception], text: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    try:
        function(*arguments, **options)
    except kind as error:
        assert text in str(error), f"{text!r} is not in {str(error)!r}"
    else:
        raise AssertionError(f"no {kind.__name__} with {text!r}")


def tokens(total: int, heads: tuple[int, int, int] = (2, 2, 4), dims: tuple[int, int] = (16, 16)) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(total)
    (num_q, num_k, num_v), (K, V) = heads, dims
    states = max(num_q, num_v)

    def random(*shape: int) -> Tensor:
        return torch.randn(1, total, *shape, generator=generator)

    gates = {"g": -random(states).abs(), "beta": random(states)}
    return {"q": random(num_q, K), "k": random(num_k, K), "v": random(num_v, V), **gates}


def raw_gates(heads: int) -> dict[str, Any]:
    return {
        "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True,
        "A_log": torch.linspace(-3, 1, heads), "dt_bias": torch.linspace(-1, 0.5, heads),
    }  # fmt: skip


def cut(values: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    return {name: value[:, rows] for name, value in values.items()}


def stale(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def chunk(
    group: Any,
    lengths: list[list[int]],
    final_rank: int | None = -1,
    heads: tuple[int, int, int] = (2, 2, 4),
    dims: tuple[int, int] = (16, 16),
    state_v_first: bool = True,
    pool_dtype: torch.dtype = torch.float32,
    least_segment: int = LEAST_SEGMENT,
) -> None:
    """A pool with stale slots; sequences that continue a state, start anew, or are padding."""
    parts = Parts.of(lengths, group)
    size, count = dist.get_world_size(group), len(lengths)
    every = tokens(sum(parts.totals), heads, dims)
    options = {**raw_gates(max(heads)), "state_v_first": state_v_first, "output_final_state": True, "null_slot": 0}
    slots = torch.tensor([3, 5, 1, 8, 0, 2][:count], dtype=torch.int32)  # sequence 4 is padding
    continued = torch.tensor([True, False, True, True, True, False])[:count]
    K, V = dims
    pool = stale(SLOTS, max(heads), *((V, K) if state_v_first else (K, V))).to(pool_dtype)
    wanted_pool, own_pool = pool.clone(), pool.clone()
    if parts.rank:  # only the first rank's states are read
        own_pool[slots.long()] = torch.nan
        pool = own_pool.clone()
    wanted, _ = gdn.chunk_gated_delta_rule(
        **every, **options, initial_state=wanted_pool, state_indices=slots, has_initial_state=continued,
        cu_seqlens=offsets(parts.totals),
    )  # fmt: skip
    rows = parts.rows()
    with mock.patch.object(composition, "LEAST_SEGMENT", least_segment):
        found, state = gdn.distributed.chunk_gated_delta_rule(
            **cut(every, rows), **options, initial_state=own_pool, state_indices=slots, has_initial_state=continued,
            cu_seqlens=offsets(parts.own), group=group, final_rank=final_rank,
        )  # fmt: skip
    close(found, wanted[:, rows])
    written = [int(s) for s, total in zip(slots, parts.totals, strict=True) if s > 0 and total]
    if final_rank is None or parts.rank == final_rank % size:
        assert state is own_pool
        close(own_pool[written].float(), wanted_pool[written].float(), 1e-5 if pool_dtype == torch.float32 else 1e-2)
    else:
        assert state is None
        written = []
    others = [slot for slot in range(SLOTS) if slot not in written]
    assert torch.equal(own_pool[others].nan_to_num(7.0), pool[others].nan_to_num(7.0)), "a slot that is not to be written"


def by_passes(case: Callable[[Any], None], group: Any) -> None:
    """A call for which no kernel serves `chunk_summary`."""
    with mock.patch.object(composition, "serves", lambda *_: False), mock.patch.object(gdn, "chunk_summary", None):
        case(group)


def no_sequences(group: Any) -> None:
    """Rows of padding alone."""
    own = tokens(5)
    o, state = gdn.distributed.chunk_gated_delta_rule(
        **own, **raw_gates(4), cu_seqlens=torch.zeros(1, dtype=torch.int32), output_final_state=True, final_rank=None, group=group
    )
    assert not o.any() and state is not None and state.shape == (0, 4, 16, 16)


def chunk_without_pool(group: Any, state_v_first: bool) -> None:
    """A new final state; batch rows instead of offsets; plain gates; an `out` with gaps between rows; unequal parts."""
    parts, size = Parts.of(ONE, group), dist.get_world_size(group)
    total, K = parts.totals[0], 12
    every = tokens(total, dims=(K, K))
    every["g"], every["beta"] = -every["g"].abs(), every["beta"].sigmoid()
    every["q"], every["k"] = (torch.nn.functional.normalize(every[name], dim=-1) for name in "qk")
    start = stale(1, 4, K, K)
    options: dict[str, Any] = {"state_v_first": state_v_first, "output_final_state": True, "scale": 0.3}
    wanted, state = gdn.chunk_gated_delta_rule(**every, **options, initial_state=start)
    rows = parts.rows()
    own = cut(every, rows)
    out = torch.full((1, len(rows), 5, K), torch.nan)[:, :, :4]
    found, final = gdn.distributed.chunk_gated_delta_rule(
        **own, **options, initial_state=start if parts.rank == 0 else None, group=group, final_rank=0, out=out
    )
    assert found is out
    close(found, wanted[:, rows])
    assert (final is not None) == (parts.rank == 0)
    if final is not None and state is not None:
        close(final, state)
    # Two batch rows of as many tokens on every rank; no state to start from, none to return.
    pairs = {name: torch.stack([x[0, : 20 * size], x[0, -20 * size :]]) for name, x in every.items()}
    wanted, _ = gdn.chunk_gated_delta_rule(**pairs)
    here = slice(20 * parts.rank, 20 * (parts.rank + 1))
    found, final = gdn.distributed.chunk_gated_delta_rule(**{name: x[:, here] for name, x in pairs.items()}, group=group)
    close(found, wanted[:, here])
    assert final is None


def chunk_is_repeated_bit_for_bit(group: Any) -> None:
    for lengths in (ONE, RAGGED):
        parts = Parts.of(lengths, group)
        own = cut(tokens(sum(parts.totals)), parts.rows())
        call = partial(
            gdn.distributed.chunk_gated_delta_rule, **own, **raw_gates(4), cu_seqlens=offsets(parts.own),
            output_final_state=True, final_rank=None, group=group,
        )  # fmt: skip
        (first, state), (again, same) = call(), call()
        assert torch.equal(first, again) and torch.equal(state, same)
        gathered = [torch.empty_like(state) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, state, group=group)
        assert all(torch.equal(one, state) for one in gathered)


def chunk_of_bfloat16(group: Any) -> None:
    """The error is one process's: states are composed in float32."""
    parts = Parts.of(ONE, group)
    every = tokens(parts.totals[0])
    wanted, _ = gdn.chunk_gated_delta_rule(**every, **raw_gates(4))
    half = {name: x.bfloat16() for name, x in every.items()}
    alone, _ = gdn.chunk_gated_delta_rule(**half, **raw_gates(4))
    found, _ = gdn.distributed.chunk_gated_delta_rule(**cut(half, parts.rows()), **raw_gates(4), group=group)
    assert found.dtype == torch.bfloat16
    rows = parts.rows()
    error, of_one = ((x.float() - wanted[:, rows]).norm() for x in (found, alone[:, rows]))
    assert error < 1.1 * of_one, (error, of_one)


def chunk_refuses(group: Any) -> None:
    """Errors come before anything is sent: no rank waits for another."""
    size = dist.get_world_size(group)
    own = tokens(8)
    call = partial(gdn.distributed.chunk_gated_delta_rule, **own)
    raises(TypeError, "group: expected a torch.distributed.ProcessGroup, got NoneType", call, group=None)
    alone = dist.new_group([0])
    if dist.get_rank(group):
        raises(ValueError, "group: expected a group that this process belongs to", call, group=alone)
    for wrong in (size, -size - 1):
        raises(ValueError, f"final_rank: expected {-size} to {size - 1}", call, group=group, final_rank=wrong)
    raises(TypeError, "final_rank: expected an int or None, got float", call, group=group, final_rank=1.0)
    raises(TypeError, "k: expected dtype float32", partial(call, **{**own, "k": own["k"].double()}), group=group)
    raises(ValueError, "initial_state: expected", call, group=group, state_indices=torch.tensor([0]))
    raises(ValueError, "head_first", call, group=group, head_first=True)
    offered = torch.zeros(1, 1, dtype=torch.int32)
    raises(ValueError, "checkpoint_offsets: expected None", call, group=group, checkpoint_offsets=offered)
    heads = 4 if dist.get_rank(group) == 0 else 2
    raises(ValueError, "group: expected ranks whose calls have the same state heads", gdn.distributed.chunk_gated_delta_rule,
           *(torch.ones(1, 4, heads, 8),) * 3, group=group)  # fmt: skip
    state = torch.zeros(2, 4, 16, 16)
    offsets_of_two = torch.tensor([0, 8, 8])[: 3 - (dist.get_rank(group) == size - 1)]
    raises(ValueError, "same sequences", call, group=group, cu_seqlens=offsets_of_two)
    assert not state.any()


def refused_calls() -> list[tuple[type[Exception], str, partial[Any]]]:
    """Calls that every operator on a part would refuse, each with its error, whatever the rank."""
    own, chunk_call, conv_call = tokens(8), gdn.distributed.chunk_gated_delta_rule, gdn.distributed.causal_conv1d_fn
    x, weight, windows = torch.ones(8, 6), torch.ones(6, 4), torch.ones(1, 6, 3)
    cannot, overlaps = "backend: expected a backend that can run", "out: expected memory of its own, got elements that it shares"
    chunks: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, cannot, {"backend": "cute"}),
        (ValueError, "backend: expected 'tilelang'", {"backend": "x"}),
        (TypeError, "backend: expected a str", {"backend": 3}),
        (TypeError, "use_qk_l2norm_in_kernel: expected a bool", {"use_qk_l2norm_in_kernel": "yes"}),
        (TypeError, "use_beta_sigmoid_in_kernel: expected a bool", {"use_beta_sigmoid_in_kernel": 1}),
        (TypeError, "state_v_first: expected a bool", {"state_v_first": 1}),
        (TypeError, "output_final_state: expected a bool", {"output_final_state": None}),
        (TypeError, "scale: expected a number", {"scale": "x"}),
        (ValueError, "scale: expected a finite number", {"scale": float("nan")}),
        (TypeError, "null_slot: expected an int", {"null_slot": 0.5}),
        (TypeError, "initial_state: expected", {"initial_state": 3}),
        (ValueError, overlaps + " with v", {"out": own["v"]}),
        (TypeError, "A_log, dt_bias: expected None without use_gate_in_kernel=True", {"A_log": torch.ones(4)}),
        (ValueError, "A_log: expected", {"use_gate_in_kernel": True, "A_log": torch.ones(3)}),
        (ValueError, "heads whose states", {name: torch.ones(1, 4, 1, 3) for name in "qkv"} | {"g": None, "beta": None}),
    ]  # fmt: skip
    convs: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, cannot, {"backend": "cute"}),
        (TypeError, "null_slot: expected an int", {"null_slot": "0"}),
        (ValueError, "activation: expected", {"activation": "relu"}),
        (ValueError, overlaps + " with x", {"out": x[1:], "x": x[:-1]}),
        (ValueError, overlaps + " with x", {"x": (strided := torch.ones(6, 8).t()), "out": strided.mT.view(8, 6)}),
        (TypeError, "conv_states: expected", {"conv_states": [windows]}),
    ]  # fmt: skip
    return [(kind, text, partial(chunk_call, **{**own, **wrong})) for kind, text, wrong in chunks] + [
        (kind, text, partial(conv_call, **{"x": x, "weight": weight, **wrong})) for kind, text, wrong in convs
    ]


def refusals_are_alike(group: Any) -> None:
    """The error of a wrong call is its own on every rank, and as on a GPU none of them has begun an exchange."""
    for kind, text, call in refused_calls():
        raises(kind, text, call, group=group)
    with ExitStack() as stack:
        for module in (gdn.distributed.chunk, gdn.distributed.conv, groups):
            stack.enter_context(mock.patch.object(module, "reads_values", lambda _: False))
        stack.enter_context(mock.patch.object(groups, "_all_gather", None))
        for kind, text, call in refused_calls():
            raises(kind, text, call, group=group)


def one_rank_refuses(group: Any) -> None:
    """The others raise too: no rank waits for it."""
    rank = dist.get_rank(group)
    begin = time.monotonic()
    for kind, text, call in refused_calls():
        if rank == 1:
            raises(kind, text, call, group=group)
        else:
            good = {"x": torch.ones(8, 6), "weight": torch.ones(6, 4)} if "weight" in call.keywords else tokens(8)
            text = "group: expected ranks that all accept their arguments, got an error on rank 1"
            raises(ValueError, text, call.func, **good, group=group)
    assert time.monotonic() - begin < 20


def one_rank_leaves_float16(group: Any) -> None:
    """With GDN_VALIDATE=1: found before the exchange, so that no rank waits for the one that refuses."""
    k = torch.zeros(1, 2, 1, 16, dtype=torch.float16)  # 1 / |k| is 1000, by which kernels multiply v
    call = partial(gdn.distributed.chunk_gated_delta_rule, k, k, use_qk_l2norm_in_kernel=True, group=group)
    with mock.patch.dict(os.environ, GDN_VALIDATE="1"):
        env.reload()
        call(torch.ones_like(k))
        if dist.get_rank(group) == 1:
            raises(ValueError, "q, k, v: expected float16 values", call, torch.full_like(k, 100.0))
        else:
            refusal = "group: expected ranks that all accept their arguments, got an error on rank 1"
            raises(ValueError, refusal, call, torch.ones_like(k))
    env.reload()


def rows_of_all(group: Any) -> None:
    """Rows of unequal ranks one after the other; wrong numbers of them, and of columns."""
    rank, size, others = dist.get_rank(group), dist.get_world_size(group), "ranks that all accept their arguments, got an error"
    ranks, counts = Ranks(group), tuple(range(1, size + 1))
    rows = torch.full((rank + 1, 2), float(rank))
    found = ranks.gather_rows(rows, counts)
    assert found.tolist() == [[float(one)] * 2 for one in range(size) for _ in range(one + 1)]
    raises(ValueError, "x: expected" if rank == 1 else others, ranks.gather_rows, rows[: 1 if rank == 1 else None], counts, "x")
    raises(ValueError, "the same numbers in a row, got [1, 2", ranks.gather_rows, rows[:, : 1 if rank == 0 else 2], counts)
    raises(ValueError, "the same dtype", ranks.gather_rows, rows.double() if rank == 0 else rows, counts)
    raises(ValueError, "the same rows by rank", ranks.gather_rows, rows, (*counts, 1) if rank == 0 else counts)


def calls_differ(group: Any) -> None:
    """All ranks raise where they differ in what they exchange, or in what their parts' maps depend on."""
    first, own = dist.get_rank(group) == 0, tokens(8)
    call = partial(gdn.distributed.chunk_gated_delta_rule, group=group)
    for name, other in (
        ("use_qk_l2norm_in_kernel", {"use_qk_l2norm_in_kernel": True}),
        ("use_beta_sigmoid_in_kernel", {"use_beta_sigmoid_in_kernel": True}),
        ("use_gate_in_kernel", {"use_gate_in_kernel": True, "A_log": torch.ones(4)}),
        ("presence of g", {"g": None}),
        ("presence of beta", {"beta": None}),
        ("scale", {"scale": 0.5}),
        ("state_v_first", {"state_v_first": True}),
        ("dtype", {name: x.double() for name, x in own.items()}),
        ("dtype", {name: x.bfloat16() for name, x in own.items()}),
        ("q heads", {"k": own["k"].repeat(1, 1, 2, 1), "q": own["q"].repeat(1, 1, 2, 1)}),
    ):
        raises(
            ValueError, f"group: expected ranks whose calls have the same {name}, got [", call, **own | (other if first else {})
        )
    raises(ValueError, "final_rank, got [1, 0", call, **own, final_rank=1 if first else 0)
    x, weight, windows = torch.ones(4, 6), torch.ones(6, 4), torch.zeros(1, 6, 3)
    convolve = partial(gdn.distributed.causal_conv1d_fn, group=group)
    for name, one, other in (
        ("dtype, got [torch.float32, torch.bfloat16", {}, {"x": x.bfloat16()}),
        ("dtype", {"x": x.bfloat16(), "conv_states": windows}, {"x": x.bfloat16(), "conv_states": windows.bfloat16()}),
        ("presence of conv_states", {"conv_states": windows}, {}),
        ("presence of bias", {"bias": torch.ones(6)}, {}),
        ("activation", {"activation": None}, {}),
    ):
        text = f"group: expected ranks whose calls have the same {name}"
        raises(ValueError, text, convolve, **{"x": x, "weight": weight} | (one if first else other))
    if first:
        raises(ValueError, "group: expected ranks that make the same call", call, **own)
    else:
        raises(ValueError, "group: expected ranks that make the same call", convolve, x=x, weight=weight)
    # Padding on one rank alone.
    rank, pool = dist.get_rank(group), torch.zeros(3, 4, 16, 16)
    slots, offset = torch.tensor([1, -1 if rank == 1 else 2]), torch.tensor([0, 4, 8])
    text = ": expected a sequence to be padding on all ranks or on none, got sequence 1, which is padding on rank 1 alone"
    raises(ValueError, "state_indices" + text, call, **own, initial_state=pool, state_indices=slots, cu_seqlens=offset)
    windows = torch.zeros(3, 6, 3)
    raises(ValueError, "cache_indices" + text, convolve, x=torch.ones(8, 6), weight=weight, conv_states=windows,
           cache_indices=slots, query_start_loc=offset)  # fmt: skip
    assert not pool.any() and not windows.any()


def conv(
    group: Any, lengths: list[list[int]], final_rank: int | None = -1, width: int = 4, columns: int = 3, in_place: bool = False
) -> None:
    parts, dim, count = Parts.of(lengths, group), 6, len(lengths)
    size = dist.get_world_size(group)
    every = stale(sum(parts.totals), dim, seed=3)
    weight, bias = stale(dim, width, seed=4), stale(dim, seed=6)
    slots = torch.tensor([3, 5, 1, 8, 0, 2][:count], dtype=torch.int32)
    continued = torch.tensor([True, False, True, True, True, False])[:count]
    pool = stale(SLOTS, dim, columns)
    wanted_pool, own_pool = pool.clone(), pool.clone()
    if parts.rank:
        own_pool[slots.long(), :, : width - 1] = torch.nan
        pool = own_pool.clone()
    shared: dict[str, Any] = {"has_initial_state": continued, "cache_indices": slots, "null_slot": 0}
    wanted = gdn.causal_conv1d_fn(every, weight, bias, conv_states=wanted_pool, query_start_loc=offsets(parts.totals), **shared)
    rows = parts.rows()
    x = every[rows]
    found = gdn.distributed.causal_conv1d_fn(
        x, weight, bias, conv_states=own_pool, query_start_loc=offsets(parts.own), **shared, group=group, final_rank=final_rank,
        out=x if in_place else None,
    )  # fmt: skip
    assert not in_place or found is x
    close(found, wanted[rows])
    is_final = final_rank is None or parts.rank == final_rank % size
    written = [int(s) for s, total in zip(slots, parts.totals, strict=True) if s > 0 and total and is_final]
    assert torch.equal(own_pool[written], wanted_pool[written])
    others = [slot for slot in range(SLOTS) if slot not in written]
    assert torch.equal(own_pool[others].nan_to_num(7.0), pool[others].nan_to_num(7.0))


def conv_without_states(group: Any) -> None:
    parts = Parts.of(ONE, group)
    every, weight = stale(parts.totals[0], 6, seed=3), stale(6, 3, seed=4)
    wanted = gdn.causal_conv1d_fn(every, weight, activation=None)
    found = gdn.distributed.causal_conv1d_fn(every[parts.rows()], weight, activation=None, group=group)
    close(found, wanted[parts.rows()])
    half = every.bfloat16()
    windows = stale(1, 6, 2, seed=9)
    alone = windows.clone()
    wanted = gdn.causal_conv1d_fn(half, weight, conv_states=alone)
    found = gdn.distributed.causal_conv1d_fn(half[parts.rows()], weight, conv_states=windows, group=group)
    assert torch.equal(found, wanted[parts.rows()])
    assert torch.equal(windows, alone) == (parts.rank == dist.get_world_size(group) - 1)


def modes(group: Any) -> None:
    """Tensors of inference mode are written outside of it, gradients are not recorded, autocast changes nothing."""
    parts = Parts.of(ONE, group)
    own = cut(tokens(parts.totals[0]), parts.rows())
    pool, windows = stale(3, 4, 16, 16), stale(3, 6, 3)  # made in inference mode
    slots = torch.tensor([1])
    with torch.inference_mode(False):
        plain = {name: x.clone().requires_grad_(name != "g") for name, x in own.items()}
        call = partial(gdn.distributed.chunk_gated_delta_rule, **plain, **raw_gates(4), group=group, output_final_state=True)
        o, state = call()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            again, same = call()
        assert torch.equal(o, again) and torch.equal(o.isnan(), torch.zeros_like(o, dtype=torch.bool)) and not o.requires_grad
        assert state is None or torch.equal(state, same)
        call(initial_state=pool, state_indices=slots, final_rank=None)
        x = torch.ones(len(parts.rows()), 6)
        gdn.distributed.causal_conv1d_fn(
            x, torch.ones(6, 4), conv_states=windows, cache_indices=slots, group=group, final_rank=None
        )
    assert not torch.equal(pool, stale(3, 4, 16, 16)) and bool((windows[1] == 1).all())


def conv_refuses(group: Any) -> None:
    x, weight = torch.ones(4, 6), torch.ones(6, 4)
    call = partial(gdn.distributed.causal_conv1d_fn, x, weight)
    raises(TypeError, "group: expected", call, group=7)
    raises(ValueError, "final_rank: expected", call, group=group, final_rank=9)
    raises(ValueError, "x: expected", gdn.distributed.causal_conv1d_fn, x, weight[:5], group=group)
    raises(ValueError, "checkpoint_slots: expected None", call, group=group, checkpoint_slots=torch.zeros(1, 1))
    width = 4 if dist.get_rank(group) else 3
    raises(ValueError, "group: expected ranks whose calls have the same width", gdn.distributed.causal_conv1d_fn, x,
           weight[:, :width], group=group)  # fmt: skip


def a_rank_that_is_late(group: Any) -> None:
    """The others raise when the group's time is over."""
    short = dist.new_group(timeout=timedelta(seconds=1))
    if dist.get_rank(group) == 1:
        time.sleep(2.5)
        return
    begin = time.monotonic()
    own = tokens(4)
    raises(RuntimeError, "", gdn.distributed.chunk_gated_delta_rule, **own, group=short)
    assert 0.5 < time.monotonic() - begin < 2.5


def a_rank_that_dies(group: Any) -> None:
    """The last case: the group is broken then."""
    if dist.get_rank(group) == 1:
        raise SystemExit  # the runner ends the process
    begin = time.monotonic()
    raises(RuntimeError, "", gdn.distributed.causal_conv1d_fn, torch.ones(4, 6), torch.ones(6, 4), group=group)
    assert time.monotonic() - begin < 30


CASES: dict[str, Callable[[Any], None]] = {
    "chunk, refusals": chunk_refuses,
    "conv, refusals": conv_refuses,
    "refusals are alike on all ranks": refusals_are_alike,
    "one rank refuses": one_rank_refuses,
    "one rank leaves float16": one_rank_leaves_float16,
    "calls differ": calls_differ,
    "rows of all ranks": rows_of_all,
    "chunk, one sequence": partial(chunk, lengths=ONE),
    "chunk, one sequence, all ranks get the state": partial(chunk, lengths=ONE, final_rank=None),
    "chunk, one sequence, K first": partial(chunk, lengths=ONE, final_rank=0, state_v_first=False),
    "chunk, K and V differ": partial(chunk, lengths=ONE, dims=(16, 8)),
    "chunk, K and V differ, K first": partial(chunk, lengths=ONE, dims=(16, 24), state_v_first=False, final_rank=None),
    "chunk, more query heads": partial(chunk, lengths=ONE, heads=(4, 2, 2)),
    "chunk, ragged": partial(chunk, lengths=RAGGED),
    "chunk, ragged, K first, all ranks get the states": partial(chunk, lengths=RAGGED, final_rank=None, state_v_first=False),
    "chunk, ragged, the first rank gets the states": partial(chunk, lengths=RAGGED, final_rank=0),
    "chunk, ragged, bfloat16 pool": partial(chunk, lengths=RAGGED, pool_dtype=torch.bfloat16),
    "chunk, one sequence in segments": partial(chunk, lengths=ONE, least_segment=30),
    "chunk, one sequence in segments, K first, all ranks": partial(
        chunk, lengths=ONE, least_segment=16, state_v_first=False, final_rank=None
    ),
    "chunk, ragged, in segments": partial(chunk, lengths=RAGGED, least_segment=4),
    "chunk, ragged, in segments, the first rank gets the states": partial(chunk, lengths=RAGGED, least_segment=4, final_rank=0),
    "chunk, h and P by the chunk operator": partial(by_passes, partial(chunk, lengths=ONE, least_segment=30)),
    "chunk, ragged, h and P by the chunk operator": partial(by_passes, partial(chunk, lengths=RAGGED, state_v_first=False)),
    "chunk, more query heads, h and P by the chunk operator": partial(by_passes, partial(chunk, lengths=ONE, heads=(4, 2, 2))),
    "chunk, no sequences": no_sequences,
    "chunk, no tokens at all": partial(chunk, lengths=[[0, 0, 0, 0]] * 2),
    "chunk, without a pool": partial(chunk_without_pool, state_v_first=False),
    "chunk, without a pool, V first": partial(chunk_without_pool, state_v_first=True),
    "chunk, the same bits": chunk_is_repeated_bit_for_bit,
    "chunk, bfloat16": chunk_of_bfloat16,
    "inference mode, gradients, autocast": modes,
    "conv, one sequence": partial(conv, lengths=ONE),
    "conv, ragged": partial(conv, lengths=RAGGED),
    "conv, ragged, in place, all ranks": partial(conv, lengths=RAGGED, final_rank=None, in_place=True),
    "conv, ragged, spare columns": partial(conv, lengths=RAGGED, final_rank=1, columns=5),
    "conv, parts shorter than the window": partial(conv, lengths=[[1, 1, 1, 2], [2, 0, 1, 0], [0, 0, 0, 3]], width=6, columns=5),
    "conv, without states": conv_without_states,
    "a rank that is late": a_rank_that_is_late,
    "a rank that dies": a_rank_that_dies,
}
