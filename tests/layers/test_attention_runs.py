"""Assignment of a step's sequences to the forms of attention, against a plain statement of the rule."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gdn.layers.attention_runs import MOST_DECODE_TOKENS, deal, token_sequences, visible_keys


def metadata(queries: list[int], contexts: list[int], *, on_host: bool = True) -> Any:
    lengths = [old + new for old, new in zip(contexts, queries, strict=True)]
    return SimpleNamespace(
        query_start_loc=torch.tensor([0, *queries]).cumsum(0).int(),
        block_tables=torch.zeros(len(queries), 4, dtype=torch.int32),
        max_query_len=max(queries, default=0),
        max_seq_len=max(lengths, default=0),
        seq_lens_host=tuple(lengths) if on_host else None,
        query_lens_host=tuple(queries) if on_host else None,
    )


def form(query: int, length: int, dense_below: int) -> str:
    if query <= MOST_DECODE_TOKENS:
        return "paged"
    return "dense" if length < dense_below else "ragged"


SEQUENCES = st.lists(st.tuples(st.sampled_from([0, 1, 2, 8, 9, 30, 100]), st.sampled_from([0, 1, 50, 90])), max_size=8)


@given(sequences=SEQUENCES, dense_below=st.sampled_from([0, 31, 100]))
def test_runs_cover_every_token_once_in_its_form(sequences: list[tuple[int, int]], dense_below: int) -> None:
    queries, contexts = [one[0] for one in sequences], [one[1] for one in sequences]
    step = metadata(queries, contexts)
    total = sum(queries)
    runs = deal(step, total, dense_below)
    if max(queries, default=0) <= MOST_DECODE_TOKENS:
        assert [run.form for run in runs] == ["paged"] and runs[0].tokens == slice(0, total)
        assert runs[0].sequences == slice(0, len(queries))
        return
    forms = [form(query, query + old, dense_below) for query, old in sequences]
    owner = [i for i, query in enumerate(queries) for _ in range(query)]
    covered = []
    for run in runs:
        part = range(len(queries))[run.sequences]
        assert {forms[i] for i in part} == {run.form}
        assert [owner[t] for t in range(run.tokens.start, run.tokens.stop)] == [i for i in part for _ in range(queries[i])]
        assert run.seq_lens == tuple(queries[i] + contexts[i] for i in part)
        assert run.max_query_len == max(queries[i] for i in part) and run.max_seq_len == max(run.seq_lens)
        covered += range(run.tokens.start, run.tokens.stop)
    assert covered == list(range(total))
    neighbours = zip(runs, runs[1:], strict=False)
    assert all(one.form != other.form or one.sequences.stop < other.sequences.start for one, other in neighbours)


@pytest.mark.parametrize("queries", [[1, 1], [300, 2]])
def test_without_host_lengths_all_rows_are_one_paged_run(queries: list[int]) -> None:
    step = metadata(queries, [5, 7], on_host=False)
    (run,) = deal(step, sum(queries) + 3, 2048)
    assert (run.form, run.tokens, run.sequences) == ("paged", slice(0, sum(queries) + 3), slice(0, 2))
    assert (run.max_query_len, run.max_seq_len, run.drafts) == (max(queries), step.max_seq_len, None)


@pytest.mark.parametrize(("queries", "drafts"), [([1, 1, 1], 1), ([3, 3], 3), ([3, 2], None), ([1, 1, 0], None), ([0, 0], None)])
def test_drafts_are_known_where_all_have_as_many(queries: list[int], drafts: int | None) -> None:
    (run,) = deal(metadata(queries, [4] * len(queries)), sum(queries), 0)
    assert run.drafts == drafts


def test_rows_of_a_step() -> None:
    step = metadata([2, 3, 0, 1], [4, 0, 9, 7])
    assert token_sequences(step, 8).tolist() == [0, 0, 1, 1, 1, 3, 3, 3]  # two rows of padding have the last sequence
    step.token_sequences = torch.arange(8)
    assert token_sequences(step, 8) is step.token_sequences
    step.slot_mapping = torch.tensor([3, 4, 90, 91, 92, 7, -1, -1])
    positions = torch.tensor([4, 5, 0, 1, 2, 7, 0, 0])
    assert visible_keys(step, positions, 1).tolist() == [5, 6, 1, 2, 3, 8, 0, 0]
    assert visible_keys(step, positions, 4).tolist() == [1, 1, 0, 0, 0, 2, 0, 0]
