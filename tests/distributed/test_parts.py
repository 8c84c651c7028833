"""Division of a sequence and of query rows into parts, and how metadata says so; no process group."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gdn.distributed import split_tokens, zigzag
from gdn.distributed.composition import Ends, Part
from gdn.layers import AttentionMetadataBuilder, GDNMetadataBuilder
from gdn.ops.context.problem import ContextTotalProblem
from gdn.ops.context.reference import parts_of
from gdn.ops.delta_rule import checks


@given(st.integers(0, 100_000), st.integers(1, 9))
def test_parts_are_all_tokens_in_equal_chunks(tokens: int, ranks: int) -> None:
    parts = split_tokens(tokens, ranks)
    assert len(parts) == ranks and sum(parts) == tokens and min(parts) >= 0
    chunks = [-(-part // 64) for part in parts]
    assert max(chunks) - min(chunks) <= 1 and all(part % 64 == 0 for part in parts[:-1])


def test_wrong_sizes_are_named() -> None:
    for wrong, message in (((-1, 2), "num_tokens: expected at least 0"), ((5, 0), "num_ranks: expected at least 1")):
        with pytest.raises(ValueError, match=message):
            split_tokens(*wrong)
    with pytest.raises(ValueError, match="num_ranks: expected at least 1"):
        zigzag(5, 0)
    for wrong_rank in ({"cp_rank": 2, "cp_size": 2}, {"cp_rank": -1}, {"cp_size": 0}):
        with pytest.raises(ValueError, match="cp_(rank|size): expected"):
            GDNMetadataBuilder("cpu", **wrong_rank)
        with pytest.raises(ValueError, match="cp_(rank|size): expected"):
            AttentionMetadataBuilder("cpu", block_size=16, max_seq_len=16, **wrong_rank)


@given(st.integers(0, 300), st.integers(1, 6))
def test_zigzag_rows_cost_each_rank_as_much(rows: int, ranks: int) -> None:
    shares = [list(chain.from_iterable(share)) for share in zigzag(rows, ranks)]
    assert sorted(chain.from_iterable(shares)) == list(range(rows))
    costs = [sum(row + 1 for row in share) for share in shares]  # a row sees as many keys as there are up to it
    assert max(costs) - min(costs) <= 2 * rows + 2


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_received_summaries_are_aligned(count: int, v_first: bool) -> None:
    """Rows of matrices start at multiples of 16 bytes on every rank, for loads of that size."""
    sizes = checks.Sizes(1, 64, count, 1, 1, 2, 4, 4)
    q = torch.zeros(1, 64, 1, 4)
    given = checks.Tokens(q, q, q, None, None, torch.zeros(count + 1, dtype=torch.int32), False, None, None, False)
    states = checks.States(None, None, None, None, None, None, v_first, -1)
    part = Part(sizes, given, states, {"use_qk_l2norm_in_kernel": False, "backend": None}, Ends(1, 3, None, True))
    part.prepare(given, states)
    problem = ContextTotalProblem(2, 4, 4, "float32", v_first, False, True, None, None, False, count, 1)
    h, P, flags = parts_of(problem, torch.empty(3, part.numbers))
    assert h.shape == P.shape == (3, count, 2, 4, 4) and flags.shape == (3, count)
    assert flags[0].storage_offset() == part.flags_at
    for matrices in (h, P):
        assert all(rank.is_contiguous() and rank.storage_offset() * 4 % 16 == 0 for rank in matrices)


def test_a_step_is_cut_where_the_ranks_meet() -> None:
    """A decode row, which all three ranks have, and three prompts: one lies on two ranks, one rank has no token of some."""
    built = [
        GDNMetadataBuilder("cpu", cp_rank=rank, cp_size=3).build([1, 300, 0, 339], [9, 300, 3, 339], [4, 1, 2, 7])
        for rank in range(3)
    ]
    stops = built[0].parts.stops
    assert [one.parts.rank for one in built] == [0, 1, 2]
    assert (
        stops[-1] == 640 and all(replace(one.parts, rank=0) == built[0].parts for one in built) and 0 < stops[0] < stops[1] < 640
    )
    lengths = torch.stack([one.non_spec_query_start_loc.diff() for one in built])
    assert lengths.sum(0).tolist() == [3, 300, 0, 339]
    assert lengths.sum(1).tolist() == [stops[0], stops[1] - stops[0] + 1, 640 - stops[1] + 1]
    assert lengths[:, 0].tolist() == [1, 1, 1] and lengths[2, 1] == 0 and lengths[0, 3] == 0
    places = [one.parts.take(torch.arange(642), rank).tolist() for rank, one in enumerate(built)]
    assert places == [[*range(stops[0])], [0, *range(stops[0], stops[1])], [0, *range(stops[1], 642)]]  # the last has padding
    for one in built:
        assert one.has_initial_state.tolist() == [True, False, True, False]
        assert one.non_spec_state_indices_tensor.tolist() == [4, 1, 2, 7] and one.num_prefills == 2


def test_dealt_rows_are_sequences_of_their_own() -> None:
    """A sequence over the threshold and one below it, over two ranks: blocks 0 and 3, and 1 and 2, of the first."""
    builders = [
        AttentionMetadataBuilder("cpu", block_size=16, max_seq_len=64, cp_rank=rank, cp_size=2, deal_longer_than=40)
        for rank in (0, 1)
    ]
    first, second = (builder.build([40, 9], [48, 20], [[5, 6, 7], [1, 2]], [3, 4]).dealt for builder in builders)
    assert (first.rank, second.rank) == (0, 1)
    assert first.counts == second.counts == (29, 20)  # the short sequence is the first rank's: both have as few
    assert first.rows.tolist() == [*range(10), *range(30, 40), *range(40, 49)] and second.rows.tolist() == [*range(10, 30)]
    assert torch.cat([first.rows, second.rows])[first.order].tolist() == list(range(49))
    assert first.metadata.query_lens_host == (10, 10, 9) and first.metadata.seq_lens_host == (18, 48, 20)
    assert first.metadata.block_tables.tolist() == [[5, 6, 7], [5, 6, 7], [1, 2, 0]]
    assert second.metadata.seq_lens_host == (28, 38) and second.metadata.sequence_slots.tolist() == [3, 3]
