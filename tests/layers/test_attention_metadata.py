"""Metadata of the attention layers: places of tokens in the paged caches, lengths, and padding for capture."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gdn.layers import AttentionMetadata, AttentionMetadataBuilder

BLOCK = 16


def builder(**changes: Any) -> AttentionMetadataBuilder:
    return AttentionMetadataBuilder(
        "cpu", **{"block_size": BLOCK, "max_seq_len": 80, "max_num_sequences": 6, "max_query_len": 3} | changes
    )


def flat(metadata: AttentionMetadata) -> dict[str, Any]:
    return {name: value.tolist() if torch.is_tensor(value) else value for name, value in vars(metadata).items()}


@pytest.mark.parametrize("ratio", [1, 4])
def test_a_mixed_batch(ratio: int) -> None:
    metadata = builder(index_ratio=ratio).build([2, 1, 0, 3], [18, 5, 7, 3], [[4, 2], [0], [9], [7, 6]], [3, 0, 1, 2])
    groups = {"visible_keys": [17, 18, 5, 1, 2, 3], "group_slots": None, "ring_slots": None}
    if ratio == 4:
        groups = {
            "visible_keys": [4, 4, 1, 0, 0, 0],
            "group_slots": [8, 8, 1, 28, 28, 28],
            "ring_slots": [3, 3, 0, 2, 2, 2],
        }
    assert flat(metadata) == groups | {
        "query_start_loc": [0, 2, 3, 3, 6],
        "seq_lens": [18, 5, 7, 3],
        "block_tables": [[4, 2], [0, 0], [9, 0], [7, 0]],  # the last row's second block holds no token yet
        "slot_mapping": [2 * 16, 2 * 16 + 1, 4, 112, 113, 114],
        "sequence_slots": [3, 0, 1, 2],
        "token_sequences": [0, 0, 1, 3, 3, 3],
        "max_query_len": 3,
        "max_seq_len": 18,
        "num_actual_tokens": 6,
        "seq_lens_host": (18, 5, 7, 3),
        "query_lens_host": (2, 1, 0, 3),
        "index_ratio": ratio,
        "dealt": None,
    }
    int64 = {"slot_mapping", "token_sequences", "group_slots"}
    for name, value in vars(metadata).items():
        if torch.is_tensor(value):
            assert value.dtype == (torch.int64 if name in int64 else torch.int32), name


def test_an_empty_batch() -> None:
    metadata = builder().build([], [], [], [])
    assert (metadata.query_start_loc.tolist(), metadata.max_query_len, metadata.num_actual_tokens) == ([0], 0, 0)
    assert metadata.block_tables.shape[0] == metadata.slot_mapping.shape[0] == 0


ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60)), min_size=1, max_size=5)


@given(rows=ROWS, pad=st.integers(0, 1), seed=st.integers(0, 9))
def test_padding_and_places(rows: list[tuple[int, int]], pad: int, seed: int) -> None:
    """Each token's row is that of its position in its sequence's blocks, counted one by one; padding follows."""
    generator = torch.Generator().manual_seed(seed)
    order = iter(torch.randperm(100, generator=generator).tolist())
    tables = [[next(order) for _ in range(-(-(new + before) // BLOCK))] for new, before in rows]
    queries, lengths = [new for new, _ in rows], [new + before for new, before in rows]
    places, owners = [], []
    for row, (new, before) in enumerate(rows):
        for position in range(before, before + new):
            places.append(tables[row][position // BLOCK] * BLOCK + position % BLOCK)
            owners.append(row)
    made = builder(index_ratio=4)
    eager = made.build(queries, lengths, tables, range(len(rows)))
    assert (eager.slot_mapping.tolist(), eager.token_sequences.tolist()) == (places, owners)
    active = [row for row, new in enumerate(queries) if new]  # the others are padding
    count = len(rows) + pad
    padded = made.build(queries, lengths, tables, range(len(rows)), pad_to=count)
    missing, unused = 3 * count - len(places), count - len(active)
    assert padded.slot_mapping.tolist() == places + [-1] * missing
    assert padded.token_sequences.tolist() == [active.index(row) for row in owners] + [count - 1] * missing
    starts = [sum(queries[:row]) for row in active]
    assert padded.query_start_loc.tolist() == starts + [len(places)] * (unused + 1)
    assert padded.seq_lens.tolist() == [lengths[row] for row in active] + [0] * unused
    assert padded.visible_keys.tolist() == eager.visible_keys.tolist() + [0] * missing
    assert padded.group_slots.tolist() == [place // 4 for place in places] + [-1] * missing
    assert padded.ring_slots.tolist() == owners + [-1] * missing
    assert padded.sequence_slots.tolist() == active + [-1] * unused
    listed = [tables[row] for row in active] + [[]] * unused
    assert padded.block_tables.tolist() == [table + [0] * (5 - len(table)) for table in listed]
    assert (padded.max_query_len, padded.max_seq_len, padded.num_actual_tokens) == (3, 80, len(places))
    assert padded.seq_lens_host is None and padded.query_lens_host is None


@pytest.mark.parametrize("convert", [np.asarray, torch.tensor], ids=["array", "tensor"])
def test_block_tables_in_one_array(convert: Any) -> None:
    """Blocks that a row needs may be followed by anything."""
    rows = [[4, 2, -1], [0, -1, 99]]
    metadata = builder().build([2, 1], [18, 5], convert(rows), [0, 1])
    assert metadata.block_tables.tolist() == [[4, 2], [0, 0]]
    assert metadata.slot_mapping.tolist() == [32, 33, 4]


def test_padded_batches_keep_their_addresses() -> None:
    made = builder()
    first = made.build([1, 1], [5, 6], [[0], [1]], [0, 1], pad_to=4, pad_query_len=1)
    second = made.build([1], [33], [[5, 6, 7]], [2], pad_to=4, pad_query_len=1)
    tensors = {name: value for name, value in vars(first).items() if torch.is_tensor(value)}
    for name, tensor in tensors.items():
        other = getattr(second, name)
        assert (other.data_ptr(), other.shape) == (tensor.data_ptr(), tensor.shape), name
    assert second.slot_mapping.tolist() == [7 * 16, -1, -1, -1]


ONE_BLOCK = "1 blocks, none of them negative or beyond int32"
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "too long": ({"seq_lens": [81, 2]}, r"seq_lens: expected at most 80 tokens \(max_seq_len\), got 81"),
    "few blocks": ({"block_tables": [[0], []]}, rf"block_tables\[1\]: expected {ONE_BLOCK}, got \[-1\]"),
    "few rows": ({"block_tables": [[0]]}, "block_tables: expected 2 rows, got shape"),
    "few columns": ({"seq_lens": [5, 17]}, r"block_tables\[1\]: expected at least 2 blocks, got 1 blocks"),
    "negative block": ({"block_tables": [[0], [-1]]}, rf"block_tables\[1\]: expected {ONE_BLOCK}, got \[-1\]"),
    "slots": ({"sequence_slots": [0]}, "sequence_slots: expected 2 rows"),
    "a slot that is 0 in 32 bits": ({"sequence_slots": [0, 2**40]}, "sequence_slots: expected numbers that fit int32, got 109"),
    "a block beyond 32 bits": ({"block_tables": [[0], [2**32]]}, rf"block_tables\[1\]: expected {ONE_BLOCK}, got \[{2**32}\]"),
    "a sum beyond 32 bits": (
        {"query_lens": [2**30, 2**30], "seq_lens": [2**30, 2**30]},
        f"query_lens: expected a sum that fits int32, got {2**31}",
    ),
    "padding": ({"pad_to": 7}, r"pad_to: expected 2 \(rows\) to 6"),
    "tokens per row": ({"pad_to": 2, "pad_query_len": 4}, r"pad_query_len: expected 1 \(longest row\) to 3"),
}


def test_one_token_per_row_is_the_token_of_its_row() -> None:
    """The layers take token i of a decode step for that of row i: rows without tokens do not come between."""
    made = builder().build([1, 0, 1], [5, 6, 7], [[4], [1], [2]], [0, 1, 2], pad_to=4, pad_query_len=1)
    assert (made.token_sequences.tolist(), made.sequence_slots.tolist()) == ([0, 1, 3, 3], [0, 2, -1, -1])
    assert (made.seq_lens.tolist(), made.slot_mapping.tolist()) == ([5, 7, 0, 0], [68, 38, -1, -1])


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str) -> None:
    changes, message = BAD[name]
    good: dict[str, Any] = {"query_lens": [1, 1], "seq_lens": [5, 5], "block_tables": [[0], [1]], "sequence_slots": [0, 1]}
    with pytest.raises(ValueError, match=message):
        builder().build(**{**good, **changes})
    builder().build(**good)


def test_rings_of_keys_are_one_sequences_alone() -> None:
    steps: dict[str, Any] = {"query_lens": [1, 3, 0], "seq_lens": [5, 5, 5], "block_tables": [[0], [1], [2]]}
    with pytest.raises(ValueError, match="^sequence_slots: expected a slot of its own .* got slot 2 in rows 0 and 1"):
        builder(index_ratio=4).build(**steps, sequence_slots=[2, 2, 1])
    for slots in ([2, 1, 2], [-1, 1, 1], [-1, -1, 0]):
        builder(index_ratio=4).build(**steps, sequence_slots=slots)
    builder().build(**steps, sequence_slots=[2, 2, 2])  # without a ring nothing is there
