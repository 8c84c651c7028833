"""The sequences of the GPU tests, over ranks in one process: they pass, and they tell a wrong transition."""

from dataclasses import replace

import pytest
import torch

from gdn.distributed import composition
from gdn.ops.delta_rule import checks
from tests.distributed.in_turn import in_turn
from tests.gpu.context_inputs import O_ERROR, STATE_ERROR, Sequences, cases, state_error, token_error, wrong_transitions

WEAK = [name for name, case in cases(2).items() if case.is_weak]


def few_heads(name: str, size: int, dim: int) -> Sequences:
    return Sequences(replace(cases(size)[name], heads=(1, 2)), "cpu", torch.float32, dim)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", list(cases(2)))
def test_ranks_compute_what_one_process_does(name: str, size: int) -> None:
    every = few_heads(name, size, 8)
    (wanted, wanted_pool), (y, windows) = every.chunk(), every.conv()
    for rank, (o, pool) in enumerate(in_turn(every.chunk_on, size)):
        torch.testing.assert_close(o, wanted[:, every.rows(rank)], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(pool, wanted_pool, rtol=1e-5, atol=1e-5)
    for rank, (part, own) in enumerate(in_turn(every.conv_on, size)):
        torch.testing.assert_close(part, y[every.rows(rank)])
        assert torch.equal(own, windows)


@pytest.mark.parametrize("size", [2, 4])
def test_some_parts_are_cut_into_segments(size: int) -> None:
    """The sizes are those of the GPU tests, also with the ordinary least segment: the path of long sequences is tested."""
    for name, case in cases(size).items():
        tokens = [sum(parts[rank] for parts in case.lengths) for rank in range(size)]
        heads, states = case.heads
        for count in tokens:
            sizes = checks.Sizes(1, count, len(case.lengths), heads, heads, states, 128, 128)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(composition, "LEAST_SEGMENT", case.least_segment)
                segments = composition.num_segments(sizes)
            assert segments >= case.segments and (segments == 1) == (case.segments == 1), name
    assert cases(size)["two segments"].least_segment == composition.LEAST_SEGMENT


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", WEAK)
def test_a_wrong_transition_exceeds_the_limits_of_the_gpu_tests(name: str, size: int) -> None:
    every = few_heads(name, size, 128)
    wanted, wanted_pool = every.chunk()
    with wrong_transitions():
        ranks = in_turn(every.chunk_on, size)
    for rank, (o, pool) in enumerate(ranks):
        if rank:
            assert token_error(o, wanted[:, every.rows(rank)]) > 5 * O_ERROR
        assert state_error(pool[1:-1], wanted_pool[1:-1]) > 5 * STATE_ERROR


def test_a_small_head_of_a_slot_counts_as_much_as_a_large_one() -> None:
    wanted = torch.ones(3, 2, 4, 4) * torch.tensor([1e3, 1.0])[:, None, None]
    found = wanted.clone()
    found[1, 1] *= 1.5
    assert state_error(found, wanted) == pytest.approx(0.5)
