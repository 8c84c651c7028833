"""The convolution against torch's, and every rule of its slots."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gdn.testing.compare import error, same_bits
from tests.reference import calls
from tests.references import reference

DIM = 6
randn = partial(calls.randn, dtype=torch.float64)


def torch_conv(line: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> torch.Tensor:
    """line [dim, w - 1 + T] -> [T, dim] through torch's own convolution."""
    y = torch.nn.functional.conv1d(line[None], weight[:, None], bias, groups=line.shape[0])[0].t()
    return y if activation is None else y * y.sigmoid()


@given(st.integers(2, 5), st.lists(st.integers(0, 9), min_size=1, max_size=4), st.booleans(), st.sampled_from([None, "silu"]))
def test_prefill(width: int, lengths: list[int], has_bias: bool, activation: str | None) -> None:
    count, live = len(lengths), sum(lengths)
    x, weight = randn(live + 2, DIM), randn(DIM, width, seed=1)
    x[live:] = torch.nan
    bias = randn(DIM, seed=2) if has_bias else None
    states = randn(2 * count, DIM, width + 1, seed=3)
    before = states.clone()
    slots = torch.arange(count) * 2
    mask = torch.arange(count) % 2 == 0
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    y = reference.causal_conv1d_fn(
        x, weight, bias, conv_states=states, query_start_loc=torch.tensor(starts), cache_indices=slots,
        has_initial_state=mask, activation=activation,
    )  # fmt: skip
    assert bool((y[live:] == 0).all())
    untouched = torch.ones(2 * count, dtype=torch.bool)
    for n, length in enumerate(lengths):
        if length == 0:
            continue
        untouched[2 * n] = False
        history = before[2 * n, :, : width - 1] * mask[n]
        line = torch.cat([history, x[starts[n] : starts[n + 1]].t()], dim=1)
        assert error(y[starts[n] : starts[n + 1]], torch_conv(line, weight, bias, activation), groups=1).within(1e-12)
        assert torch.equal(states[2 * n, :, : width - 1], line[:, -(width - 1) :])
        assert torch.equal(states[2 * n, :, width - 1 :], before[2 * n, :, width - 1 :])
    assert same_bits(states[untouched], before[untouched])


def test_prefill_without_slots_and_with_all_defaults() -> None:
    x, weight = randn(7, DIM), randn(DIM, 4, seed=1)
    line = torch.cat([torch.zeros(DIM, 3, dtype=torch.float64), x.t()], dim=1)
    assert error(reference.causal_conv1d_fn(x, weight), torch_conv(line, weight, None, "silu"), groups=1).within(1e-12)


def test_prefill_padding_slot() -> None:
    x, weight, states = randn(6, DIM), randn(DIM, 4, seed=1), randn(3, DIM, 3, seed=2)
    before = states.clone()
    y = reference.causal_conv1d_fn(
        x, weight, conv_states=states, query_start_loc=torch.tensor([0, 2, 6]), cache_indices=torch.tensor([0, 2]), null_slot=0
    )
    assert bool((y[:2] == 0).all()) and bool((y[2:] != 0).all())
    assert same_bits(states[:2], before[:2]) and not torch.equal(states[2], before[2])


def test_checkpoint_is_the_window_of_a_shorter_call() -> None:
    x, weight, states = randn(130, DIM), randn(DIM, 4, seed=1), randn(4, DIM, 3, seed=2)
    shorter = states.clone()
    common: dict[str, Any] = {"cache_indices": torch.tensor([0])}
    reference.causal_conv1d_fn(
        x, weight, conv_states=states, checkpoint_offsets=torch.tensor([[64, 0, 192]]),
        checkpoint_slots=torch.tensor([[2, 1, 3]]), **common,
    )  # fmt: skip
    before = shorter.clone()
    reference.causal_conv1d_fn(x[:64], weight, conv_states=shorter, **common)
    assert torch.equal(states[2], shorter[0])
    assert same_bits(states[[1, 3]], before[[1, 3]])


@pytest.mark.parametrize("form", ["packed", "batch", "batch_time"])
@pytest.mark.parametrize("transposed", [False, True])
def test_update_continues_prefill(form: str, transposed: bool) -> None:
    """Decode after prefill gives what one long prefill gives; both memory orders of a slot."""
    length, count, width = 11, 3, 4
    x, weight, bias = randn(count, length, DIM), randn(DIM, width, seed=1), randn(DIM, seed=2)
    expected = torch.stack([reference.causal_conv1d_fn(x[n], weight, bias) for n in range(count)])
    states = randn(count + 1, width, DIM, seed=3).mT if transposed else randn(count + 1, DIM, width, seed=3)
    slots = torch.tensor([3, 0, 2], dtype=torch.int32)
    last_column = states[:, :, width - 1].clone()
    reference.causal_conv1d_fn(
        x[:, :5].reshape(-1, DIM), weight, bias, conv_states=states, query_start_loc=torch.arange(4) * 5, cache_indices=slots,
        has_initial_state=torch.zeros(count, dtype=torch.bool),
    )  # fmt: skip
    got, step = [], 2 if form != "batch" else 1
    for t in range(5, length, step):
        now = x[:, t : t + step]
        if form == "packed":
            offsets = torch.arange(count + 1) * step
            y = reference.causal_conv1d_update(
                now.reshape(-1, DIM), states, weight, bias, conv_state_indices=slots, query_start_loc=offsets
            ).view(count, step, DIM)
        elif form == "batch":
            y = reference.causal_conv1d_update(now[:, 0], states, weight, bias, conv_state_indices=slots)[:, None]
        else:
            y = reference.causal_conv1d_update(now.mT, states, weight, bias, conv_state_indices=slots).mT
        got.append(y)
    assert error(torch.cat(got, dim=1), expected[:, 5:], groups=2).within(1e-12)
    assert torch.equal(states[:, :, width - 1], last_column)


def test_update_touches_nothing_else() -> None:
    x, weight, states = randn(5, DIM), randn(DIM, 4, seed=1), randn(6, DIM, 3, seed=2)
    before = states.clone()
    y = reference.causal_conv1d_update(
        x, states, weight, conv_state_indices=torch.tensor([4, -1, 2, 1]), query_start_loc=torch.tensor([0, 2, 3, 3])
    )
    assert bool((y[2:] == 0).all()) and bool((y[:2] != 0).all())
    assert same_bits(states[[0, 1, 2, 3, 5]], before[[0, 1, 2, 3, 5]])


def test_speculative_window() -> None:
    """The next step after [window | 3 inputs] with 2 accepted starts as if only those two had been decoded."""
    width, num_spec = 4, 2
    x, weight = randn(5, DIM), randn(DIM, width, seed=1)
    states = randn(5, DIM, width - 1 + num_spec, seed=2)
    slots = torch.tensor([[3, 1, 0]])
    history = states[3, :, 1:4].clone()  # two tokens of the step before were accepted
    before = states.clone()
    y = reference.causal_conv1d_update(
        x[:3],
        states,
        weight,
        conv_state_indices=slots,
        num_accepted_tokens=torch.tensor([2]),
        query_start_loc=torch.tensor([0, 3]),
    )
    line = torch.cat([history, x[:3].t()], dim=1)
    assert error(y, torch_conv(line, weight, None, "silu"), groups=1).within(1e-12)
    assert torch.equal(states[3], line[:, 1:])
    assert same_bits(states[[0, 1, 2, 4]], before[[0, 1, 2, 4]])
    y = reference.causal_conv1d_update(
        x[3:],
        states,
        weight,
        conv_state_indices=slots,
        num_accepted_tokens=torch.tensor([2]),
        query_start_loc=torch.tensor([0, 2]),
    )
    line = torch.cat([history, x[:2].t(), x[3:].t()], dim=1)
    assert error(y, torch_conv(line, weight, None, "silu")[2:], groups=1).within(1e-12)


@pytest.mark.parametrize("accepted", [0, 4])
def test_accepted_out_of_range_is_padding(accepted: int) -> None:
    x, weight, states = randn(2, DIM), randn(DIM, 4, seed=1), randn(5, DIM, 5, seed=2)
    before = states.clone()
    y = reference.causal_conv1d_update(
        x, states, weight, conv_state_indices=torch.tensor([[3, 1, 0]]), num_accepted_tokens=torch.tensor([accepted]),
        query_start_loc=torch.tensor([0, 2]),
    )  # fmt: skip
    assert bool((y == 0).all()) and same_bits(states, before)


def test_draft_tree_equals_its_paths() -> None:
    """0 and 1 hang from the start, 2 from 0, 3 from 2; the start is the window of the accepted node's slot."""
    x, weight, states = randn(4, DIM), randn(DIM, 4, seed=1), randn(6, DIM, 3, seed=2)
    start = states[4].clone()
    slots, parents = torch.tensor([[5, 4, 1, -1]]), torch.tensor([-1, -1, 0, 2], dtype=torch.int32)
    y = reference.causal_conv1d_update(
        x, states, weight, conv_state_indices=slots, num_accepted_tokens=torch.tensor([2]),
        query_start_loc=torch.tensor([0, 4]), parent_token=parents,
    )  # fmt: skip
    for node, path in {0: [0], 1: [1], 2: [0, 2], 3: [0, 2, 3]}.items():
        line = torch.cat([start, x[path].t()], dim=1)
        assert error(y[node], torch_conv(line, weight, None, "silu")[-1], groups=0).within(1e-12)
        slot = int(slots[0, node])
        if slot >= 0:
            assert torch.equal(states[slot], line[:, -3:])
