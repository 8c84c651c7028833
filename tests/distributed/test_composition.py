"""Work of a rank between its passes, on the reference: against sums written out head by head in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gdn.ops.context import reference
from gdn.ops.context.problem import message_numbers
from tests.context_calls import NULL_SLOT, Call, parts_call, start_call, total_call

FEW: dict[str, Any] = {"heads": 2, "dims": (6, 4)}
LAYOUTS = pytest.mark.parametrize("v_first", [False, True])


def run(call: Call) -> Any:
    """Params after the call, on tensors of their own."""
    made = call.copied()
    getattr(reference, call.problem.op)(made.problem, made.params)
    return made.params


def k_first(x: Tensor, v_first: bool) -> Tensor:
    return (x.mT if v_first else x).double()


def chain(state: Tensor, links: list[tuple[Tensor, Tensor]]) -> Tensor:
    """[heads, K, V] in float64 after links (h, P)."""
    for h, P in links:
        state = torch.einsum("hij,hjc->hic", P, state) + h
    return state


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", [[1000, 0, 64, 5], [0], [8192], [63, 65, 129]])
@pytest.mark.parametrize("segments", [1, 2, 5, 8])
def test_segments_are_whole_chunks_in_order(segments: int, lengths: list[int]) -> None:
    call = parts_call(lengths, segments, torch.int64)
    found = run(call)
    start, wanted = 0, []
    for length in lengths:
        piece = 64 * -(-length // (64 * segments))
        wanted += [start + min(piece * segment, length) for segment in range(segments)]
        start += length
    if segments > 1:
        assert found.offsets.tolist() == [*wanted, start]
    live = [slot > NULL_SLOT for slot in found.state_indices[: len(lengths)].tolist()]
    assert found.rows.tolist() == [n if live[n // segments] else -1 for n in range(len(lengths) * segments)]
    flags = found.message[found.flags_at :][: len(lengths)]
    assert flags.tolist() == [float(length > 0) for length in lengths]
    assert int(found.message.isnan().sum()) == len(found.message) - len(lengths)


def test_sequences_of_one_length() -> None:
    found = run(parts_call([1000], 3, None, length=1000, index_dtype=None))
    assert found.offsets.tolist() == [0, 384, 768, 1000] and found.rows.tolist() == [0, 1, 2]


@LAYOUTS
@pytest.mark.parametrize("segments", [1, 2, 4])
def test_message_of_a_later_rank(segments: int, v_first: bool) -> None:
    call = total_call(1, 3, segments, v_first, **FEW)
    found = run(call)
    h, P, flags = (x[0] for x in reference.parts_of(call.problem, found.message[None]))
    each = [(k_first(x, v_first), k_first(y, v_first)) for x, y in zip(found.h, found.P, strict=True)]
    for n in range(3):
        links = each[n * segments : (n + 1) * segments]
        close(k_first(h[n], v_first), chain(torch.zeros(2, 6, 4).double(), links))
        close(k_first(P[n], v_first), chain(torch.eye(6).double().expand(2, 6, 6), [(torch.zeros(()), y) for _, y in links]))
    assert bool(flags.isnan().all()), "another operator writes them"


@LAYOUTS
@pytest.mark.parametrize("index_dtype", [torch.int64, None])
@pytest.mark.parametrize("segments", [1, 3])
def test_message_and_states_of_the_first_rank(segments: int, index_dtype: Any, v_first: bool) -> None:
    call = total_call(0, 4, segments, v_first, index_dtype=index_dtype, **FEW)
    found = run(call)
    h, P, _ = (x[0] for x in reference.parts_of(call.problem, found.message[None]))
    each = [(k_first(x, v_first), k_first(y, v_first)) for x, y in zip(found.h, found.P, strict=True)]
    for n in range(4):
        slot = n if index_dtype is None else int(found.state_indices[n])
        is_live = index_dtype is None or slot > NULL_SLOT
        start = torch.zeros(2, 6, 4).double()
        if is_live and found.has_initial_state[n]:
            start = k_first(found.initial_state[slot], v_first)
        links = each[n * segments : (n + 1) * segments]
        for segment in range(segments):
            close(k_first(found.states[n * segments + segment], v_first), chain(start, links[:segment]))
        close(k_first(h[n], v_first), chain(start, links))
    assert bool(P.isnan().all()), "nobody reads it"


@LAYOUTS
@pytest.mark.parametrize("final", ["rows", "pool", None])
@pytest.mark.parametrize(("rank", "ranks", "segments"), [(0, 1, 1), (0, 3, 1), (1, 2, 2), (1, 4, 1), (2, 4, 3), (3, 4, 2)])
def test_states_before_segments_and_after_all(rank: int, ranks: int, segments: int, final: str | None, v_first: bool) -> None:
    if final is None and rank == 0:
        final = "rows"  # the first rank composes nothing else
    call = start_call(rank, ranks, 4, segments, v_first, final, final_index_dtype=torch.int64, **FEW)
    found = run(call)
    h, P, flags = reference.parts_of(call.problem, found.messages)
    pool = None if found.final_state is None else call.params.final_state.clone()
    for n in range(4):
        links = [(k_first(h[r, n], v_first), k_first(P[r, n], v_first)) for r in range(ranks)]
        first = links[0][0]
        before = chain(first, links[1:rank])
        for segment in range(segments if rank else 0):
            own = [
                (k_first(found.h[i], v_first), k_first(found.P[i], v_first)) for i in range(n * segments, n * segments + segment)
            ]
            close(k_first(found.states[n * segments + segment], v_first), chain(before, own))
        if final == "rows":
            close(k_first(found.final_state[n], v_first), chain(first, links[1:]))
        elif pool is not None:
            live = int(found.state_indices[n]) > NULL_SLOT and bool(flags[:, n].any())
            slot = int(found.final_state_indices[n])
            if live and slot > NULL_SLOT:
                wanted = chain(first, links[1:])
                pool[slot] = (wanted.mT if v_first else wanted).float()
    if final == "pool":
        torch.testing.assert_close(found.final_state, pool, rtol=1e-5, atol=1e-5)


def test_states_that_the_last_pass_has_left_are_stored() -> None:
    call = start_call(1, 2, 4, 2, True, "ends here", **FEW)
    found = run(call)
    wanted = call.params.final_state.clone()
    flags = found.messages[:, message_numbers(call.problem)[1] :][:, :4].any(0)
    for n, slot in enumerate(found.state_indices[:4].tolist()):
        if slot > NULL_SLOT and flags[n]:
            wanted[slot] = found.states[2 * n + 1]
    assert torch.equal(found.final_state, wanted) and not torch.equal(wanted, call.params.final_state)
