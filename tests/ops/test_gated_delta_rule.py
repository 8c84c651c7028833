"""gdn.gated_delta_rule: which rows take which form, equal results whatever the order, and errors before anything is written."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import gdn
from gdn.ops.delta_rule.crossing import RECURRENT_TOKENS, recurrent_rows
from gdn.ops.delta_rule.oracle import oracle_delta_rule
from gdn.runtime import env
from tests.references import reference

Arguments = dict[str, Any]
H, HV, K, V, SLOTS = 2, 4, 16, 16, 40
LONG = RECURRENT_TOKENS + 1


def step(lengths: list[int], *, padding: int = 0, seed: int = 0) -> Arguments:
    """A call in float32 on a pool whose slots go down with the sequence."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tokens, count = sum(lengths) + padding, len(lengths)
    return {
        "q": randn(1, tokens, H, K), "k": randn(1, tokens, H, K), "v": randn(1, tokens, HV, V), "g": -randn(1, tokens, HV).abs(),
        "beta": randn(1, tokens, HV).sigmoid(), "use_qk_l2norm_in_kernel": True, "initial_state": randn(SLOTS, HV, K, V),
        "cu_seqlens": torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
        "state_indices": torch.arange(count, 0, -1, dtype=torch.int32), "output_final_state": True,
        "lengths_host": tuple(lengths),
    }  # fmt: skip


def parts_of(arguments: Arguments) -> list[tuple[str, int, int]]:
    """(operator, sequences, tokens) of each part that runs."""
    answer = gdn.explain("gated_delta_rule", **arguments)
    return [(part.op, part.problem.num_sequences, part.problem.num_tokens) for part in answer.parts]


@pytest.mark.parametrize(
    ("lengths", "told"),
    [
        ([LONG] * 3, LONG),
        ([10 * LONG, 10 * LONG + 2], 10 * LONG + 2),
        ([LONG, 2 * LONG], 0),
        ([10 * LONG, *[LONG] * 9], 10 * LONG),
        ([LONG], 0),
    ],
    ids=["equal", "about equal", "neither", "one long", "one"],
)
def test_the_longest_is_told_where_it_says_something(lengths: list[int], told: int) -> None:
    """Of lengths that are neither equal nor uneven every number would be a problem of its own."""
    (part,) = gdn.explain("gated_delta_rule", **step(lengths)).parts
    assert part.op == "chunk" and part.problem.longest == told


@pytest.mark.parametrize(
    ("lengths", "parts"),
    [
        ([1, 1, 1], [("recurrent", 3, 3)]),
        ([LONG, 1, 1], [("chunk", 3, LONG + 2)]),
        ([1, 2, LONG, 1], [("chunk", 2, LONG + 1), ("recurrent", 2, 3)]),
        ([0, RECURRENT_TOKENS, 0, LONG], [("chunk", 1, LONG), ("recurrent", 3, RECURRENT_TOKENS)]),
        ([0, 0, LONG], [("chunk", 3, LONG)]),
        ([0, 0], [("chunk", 2, 0)]),
    ],
)  # fmt: skip
def test_rows_are_dealt_by_length(lengths: list[int], parts: list[tuple[str, int, int]]) -> None:
    arguments = step(lengths)
    assert parts_of(arguments) == parts
    whole = ("chunk", len(lengths), sum(lengths))
    assert parts_of(arguments | {"lengths_host": None}) == [whole]
    assert recurrent_rows(lengths) == sum(sequences for op, sequences, _ in parts if op == "recurrent") or parts == [whole]


def test_batch_invariant_rows_all_take_the_chunk_form(switch: Callable[..., env.Switches]) -> None:
    switch(GDN_BATCH_INVARIANT="1")
    assert parts_of(step([1, 2, LONG])) == [("chunk", 3, LONG + 3)] and parts_of(step([1])) == [("chunk", 1, 1)]


def test_drafts_take_the_recurrent_form_whatever_their_lengths() -> None:
    arguments = step([2, LONG, 3])
    arguments["state_indices"] = torch.arange(1, 31, dtype=torch.int32).view(3, 10)
    arguments["num_accepted_tokens"] = torch.tensor([1, 3, 2])
    assert parts_of(arguments | {"lengths_host": None}) == [("recurrent", 3, LONG + 5)]
    mine, other = arguments, {key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in arguments.items()}
    o, pool = gdn.gated_delta_rule(**mine)
    other["ssm_state_indices"] = other.pop("state_indices")
    del other["lengths_host"]
    want, want_pool = gdn.fused_recurrent_gated_delta_rule(**other)
    assert torch.equal(o, want) and torch.equal(pool, want_pool)


ORDERS = ([1, 3, 100, 8], [100, 1, 70, 2], [1, 100, 1, 0, 65], [2, 2, 0, 2], [0, 130])
FORMS: dict[str, Callable[[int], Arguments]] = {
    "pool": lambda count: {},
    "no host lengths": lambda count: {"lengths_host": None},
    "fresh rows": lambda count: {"has_initial_state": torch.arange(count) % 2 == 1},
    "other slots": lambda count: {"final_state_indices": torch.arange(count) + 20, "state_indices": torch.arange(count) + 1},
    "padding": lambda count: {"state_indices": torch.tensor([-1, 5, 6, 7, 8])[:count]},
    "checkpoints": lambda count: {
        "checkpoint_offsets": torch.tensor([[64, 0]]).expand(count, 2),
        "checkpoint_slots": torch.arange(2 * count).view(-1, 2) + 9,
    },
    "V first": lambda count: {"state_v_first": True},
    "not updated": lambda count: {"disable_state_update": True},
    "states": lambda count: {"state_indices": None, "initial_state": torch.randn(count, HV, K, V)},
    "fresh states": lambda count: {
        "state_indices": None, "initial_state": torch.randn(count, HV, K, V), "has_initial_state": torch.arange(count) % 2 == 0,
    },
    "in place": lambda count: {"state_indices": None, "initial_state": torch.randn(count, HV, K, V), "inplace_final_state": True},
    "no states": lambda count: {"state_indices": None, "initial_state": None},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths", ORDERS, ids=str)
def test_equals_the_chunk_form_in_any_order(lengths: list[int], form: str) -> None:
    torch.manual_seed(0)
    mine = step(lengths, padding=2) | FORMS[form](len(lengths))
    fresh = mine | {"initial_state": None if mine["initial_state"] is None else mine["initial_state"].clone()}
    other = dict(fresh)
    for name in ("lengths_host", "disable_state_update", "inplace_final_state"):
        other.pop(name, None)
    want, want_state = gdn.chunk_gated_delta_rule(**other)
    before = None if fresh["initial_state"] is None else mine["initial_state"].clone()
    o, state = gdn.gated_delta_rule(**mine)
    assert torch.allclose(o, want, rtol=1e-4, atol=1e-5) and not o[0, -2:].any()
    if form == "not updated":
        assert state is mine["initial_state"] and torch.equal(state, before)
    else:
        assert torch.allclose(state, want_state, rtol=1e-4, atol=1e-5)
    if form not in ("states", "fresh states", "no states"):
        assert state is mine["initial_state"]


def test_against_the_recurrence_in_float64() -> None:
    arguments = step([1, 5, 70, 3])
    wanted = {name: value for name, value in arguments.items() if name not in ("lengths_host", "output_final_state")}
    want = oracle_delta_rule(**wanted | {"initial_state": arguments["initial_state"].clone()})
    o, after = gdn.gated_delta_rule(**arguments)
    assert torch.allclose(o.double(), want.o, rtol=1e-4, atol=1e-5)
    assert torch.allclose(after.double(), want.state, rtol=1e-4, atol=1e-5) and want.written_slots == {1, 2, 3, 4}


def test_stochastic_rounding_is_that_of_the_recurrent_rows() -> None:
    arguments = step([1, 2, 70])
    arguments["initial_state"] = arguments["initial_state"].bfloat16()
    arguments["rounding_seed"] = torch.tensor([7])
    pools = [arguments["initial_state"].clone() for _ in range(3)]
    gdn.gated_delta_rule(**arguments | {"initial_state": pools[0]})
    reference.gated_delta_rule(**arguments | {"initial_state": pools[1]})
    gdn.gated_delta_rule(**arguments | {"initial_state": pools[2], "rounding_seed": None})
    assert torch.equal(pools[0], pools[1])
    same = (pools[0] == pools[2]).flatten(1).all(1)
    assert same[1] and not same[2] and not same[3]  # slot 1: the prompt


BAD: list[tuple[Arguments, str]] = [
    ({"lengths_host": (1, 9)}, "lengths_host: expected 3 lengths, one per sequence"),
    ({"lengths_host": (1, 2, 71)}, "lengths_host: expected numbers >= 0 that sum to at most the 73 tokens"),
    ({"lengths_host": (2, 1, 70)}, r"lengths_host: expected the differences of cu_seqlens \[0, 1, 3, 73\]"),
    ({"ssm_state_indices": torch.arange(3)}, r"ssm_state_indices: expected None with state_indices \(two names"),
    ({"num_accepted_tokens": torch.ones(3, dtype=torch.int32)}, "num_accepted_tokens: expected None without 2-D"),
    ({"parent_token": torch.zeros(73, dtype=torch.int32)}, "parent_token: expected None without 2-D"),
    ({"state_indices": torch.ones(3, 2, dtype=torch.int32), "has_initial_state": torch.ones(3, dtype=torch.bool)},
     "has_initial_state: expected None with 2-D state_indices"),
    ({"state_indices": torch.tensor([3, 2, 99])}, "state_indices: expected slots below 40"),
    ({"state_indices": torch.tensor([3, 2, 2])}, "state_indices: "),
    ({"disable_state_update": True, "checkpoint_offsets": torch.zeros(3, 1), "checkpoint_slots": torch.zeros(3, 1)},
     "checkpoint_offsets: expected None with disable_state_update"),
    ({"inplace_final_state": False}, "inplace_final_state: expected None or True with state_indices, got False"),
    ({"backend": "cute"}, "cute"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_errors_come_before_anything_is_written(change: Arguments, message: str) -> None:
    arguments = step([1, 2, 70])
    out = arguments["out"] = torch.full_like(arguments["v"], 7.0)
    before = arguments["initial_state"].clone()
    with pytest.raises(ValueError, match=message):
        gdn.gated_delta_rule(**arguments | change)
    assert torch.equal(arguments["initial_state"], before) and bool((out == 7).all())
    with pytest.raises(TypeError, match="lengths_host: expected a tuple or list of int, got Tensor"):
        gdn.gated_delta_rule(**arguments | {"lengths_host": torch.tensor([1, 2, 70])})


def test_an_order_for_one_form_is_refused_before_the_other_writes(switch: Callable[..., env.Switches]) -> None:
    switch(GDN_BACKEND_RECURRENT="tilelang")
    arguments = step([1, 2, 70])
    before = arguments["initial_state"].clone()
    with pytest.raises(ValueError, match="expected a backend that can run recurrent, got 'tilelang'"):
        gdn.gated_delta_rule(**arguments)
    assert torch.equal(arguments["initial_state"], before)


def test_the_switch_of_the_whole_orders_both_forms(switch: Callable[..., env.Switches]) -> None:
    switch(GDN_BACKEND_GATED_DELTA_RULE="reference")
    answer = gdn.explain("gated_delta_rule", **step([1, 2, 70]))
    assert [part.decided_by for part in answer.parts] == ["GDN_BACKEND_GATED_DELTA_RULE=reference"] * 2


def test_no_value_is_read_on_a_device() -> None:
    """The operator itself asks for no value where values are not checked (a GPU without GDN_VALIDATE)."""
    arguments = step([1, 3, 70]) | {"has_initial_state": torch.tensor([True, False, True])}
    forbidden = mock.Mock(side_effect=AssertionError("a value was read"))
    import gdn.ops.delta_rule.gated_delta_rule as module

    forms = {name: mock.Mock(return_value=(torch.zeros(1, 4, HV, V), None)) for name in FORMS_OF}
    with (
        mock.patch.multiple(module, reads_values=lambda device: False, **forms),
        mock.patch.multiple(torch.Tensor, item=forbidden, tolist=forbidden, cpu=forbidden, __bool__=forbidden),
    ):
        gdn.gated_delta_rule(**arguments)
    assert all(form.called for form in forms.values())


FORMS_OF = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
