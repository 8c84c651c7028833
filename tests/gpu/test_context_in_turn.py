"""Context parallel on one GPU: what all ranks of a group compute, one after the other, next to the operator on all tokens.

It runs what ranks run but the exchange itself (`tests.distributed.in_turn`), so it finds what is wrong in summaries, in composed
states and in rows of layers. Whether ranks in processes of their own do as well: test_distributed.py, with a GPU each.
"""

import pytest
import torch

from gdn.testing.compare import same_bits
from tests.distributed.in_turn import in_turn
from tests.gpu import context_layers
from tests.gpu.context_inputs import O_ERROR, STATE_ERROR, Sequences, cases, state_error, token_error, wrong_transitions

pytestmark = pytest.mark.gpu

SIZES = [2, 4]


@pytest.fixture(autouse=True)
def inference(device: torch.device) -> None:
    torch.cuda.set_device(device)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", list(cases(2)))
def test_operators(name: str, size: int) -> None:
    """Composed parts are about as near to float64 as the operator on all tokens: P has been rounded too, for less than a half."""
    every = Sequences(cases(size)[name])
    (wanted, wanted_pool), (exact, exact_pool) = every.chunk(), every.exact()
    found, again = in_turn(every.chunk_on, size), in_turn(every.chunk_on, size)
    o = torch.empty_like(wanted)
    for rank, (part, pool) in enumerate(found):
        assert every.num_segments(rank) >= every.case.segments
        o[:, every.rows(rank)] = part
        assert same_bits(pool, found[0][1]), "every rank has the same states"
        assert same_bits(pool[[0, -1]], every.pool[[0, -1]]), "slots of no sequence"
        assert same_bits(part, again[rank][0]) and same_bits(pool, again[rank][1]), "the same bits"
    states, wanted_states, exact_states = (x[1:-1] for x in (found[0][1], wanted_pool, exact_pool))
    assert token_error(o, wanted) < O_ERROR and state_error(states, wanted_states) < STATE_ERROR
    floor = 2.0**-10
    assert token_error(o, exact) < 1.5 * token_error(wanted, exact) + floor
    assert state_error(states, exact_states) < 1.5 * state_error(wanted_states, exact_states) + floor
    y, windows = every.conv()
    for rank, (part, own) in enumerate(in_turn(every.conv_on, size)):
        assert same_bits(part, y[every.rows(rank)]) and same_bits(own, windows)


@pytest.mark.parametrize("name", [name for name, case in cases(2).items() if case.is_weak])
def test_weak_decays_tell_a_wrong_transition(name: str) -> None:
    """The inputs can fail: with every P transposed the limits are far exceeded."""
    every = Sequences(cases(2)[name])
    wanted, wanted_pool = every.chunk()
    with wrong_transitions():
        ranks = in_turn(every.chunk_on, 2)
    o, pool = ranks[1]
    assert token_error(o, wanted[:, every.rows(1)]) > 5 * O_ERROR
    assert state_error(pool[1:-1], wanted_pool[1:-1]) > 5 * STATE_ERROR


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_weak", [False, True])
def test_delta_net(is_weak: bool, size: int) -> None:
    with torch.inference_mode():
        wanted = context_layers.delta_net_steps(None, is_weak)
        ranks = in_turn(lambda group: context_layers.delta_net_steps(group, is_weak), size, context_layers.DELTA_NET_EXCHANGES)
    for rank, found in enumerate(ranks):
        for step, (one, other) in enumerate(zip(found, wanted, strict=True)):
            errors = context_layers.step_errors(one, other)
            assert errors[0] < 2 * O_ERROR and errors[1] < 2 * STATE_ERROR, f"rank {rank}, step {step}: {errors}"
            same = [same_bits(one.states[slot], ranks[0][step].states[slot]) for slot in (1, 2)]
            print(f"rank {rank}, step {step}: states have the bits of rank 0's, slots 1 and 2: {same}")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fields", context_layers.ATTENTION_FORMS, ids=["tokens", "compressed"])
def test_attention(fields: dict[str, int], size: int) -> None:
    with torch.inference_mode():
        wanted = context_layers.attention_step(None, fields)
        ranks = in_turn(lambda group: context_layers.attention_step(group, fields), size)
    assert all(same_bits(one, ranks[0]) for one in ranks)
    median, most = context_layers.row_errors(ranks[0], wanted)
    assert median < O_ERROR and most < 0.1, (median, most)
