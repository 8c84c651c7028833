"""Metadata of the Gated DeltaNet layers: every kind of batch, padding for capture, and the rules as a property."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gdn.layers import GDNMetadata, GDNMetadataBuilder
from tests.layers.metadata_rules import Row, expected

NUM_SPEC = 2


def arguments(rows: list[Row]) -> dict[str, Any]:
    return {
        "query_lens": [row.new for row in rows],
        "seq_lens": [row.before + row.new for row in rows],
        "slots": [row.slots for row in rows],
        "num_draft_tokens": [row.drafts for row in rows],
        "num_accepted_tokens": [row.accepted for row in rows],
        "is_prefilling": [row.on_prompt for row in rows],
    }


def build(rows: list[Row], *, num_spec: int = NUM_SPEC, **options: Any) -> GDNMetadata:
    return GDNMetadataBuilder("cpu", num_spec=num_spec, max_num_sequences=8).build(**arguments(rows), **options)


def as_lists(metadata: GDNMetadata) -> dict[str, Any]:
    """Fields that are present, tensors as lists."""
    found = {}
    for field in dataclasses.fields(metadata):
        value = getattr(metadata, field.name)
        if value is not None:
            found[field.name] = value.tolist() if torch.is_tensor(value) else value
    return found


def slots(row: int) -> tuple[int, ...]:
    return tuple(10 * row + column for column in range(1 + NUM_SPEC))


PREFILL = Row(5, 0, slots(1))
DECODE, OTHER_DECODE = Row(1, 9, slots(4), on_prompt=False), Row(1, 70, slots(5), on_prompt=False)
SPEC, NO_DRAFTS = Row(3, 20, slots(6), 2, 3, False), Row(1, 30, slots(7), 0, 2, False)

# Everything written out by hand, so that the rules of the property test are held too; fields that are absent are None.
BATCHES: dict[str, tuple[list[Row], dict[str, Any]]] = {
    "mixed": (
        [DECODE, PREFILL, OTHER_DECODE],  # a row of one token after the first prefill is prefill
        {
            "num_prefills": 2, "num_prefill_tokens": 6, "num_decodes": 1, "num_decode_tokens": 1, "num_actual_tokens": 7,
            "non_spec_query_start_loc": [0, 1, 6, 7], "non_spec_state_indices_tensor": [40, 10, 50],
            "non_spec_lengths_host": (1, 5, 1), "has_initial_state": [True, False, True],
        },
    ),
    "spec with zero drafts": (
        [NO_DRAFTS, SPEC],
        {
            "num_spec_decodes": 2, "num_spec_decode_tokens": 4, "num_actual_tokens": 4, "spec_query_start_loc": [0, 1, 4],
            "spec_state_indices_tensor": [[70, 71, 72], [60, 61, 62]], "spec_sequence_masks": [True, True],
            "spec_token_indx": [0, 1, 2, 3], "non_spec_token_indx": [], "num_accepted_tokens": [2, 3],
        },
    ),
    "spec with prefill": (
        [SPEC, PREFILL, NO_DRAFTS],
        {
            "num_prefills": 1, "num_prefill_tokens": 5, "num_spec_decodes": 2, "num_spec_decode_tokens": 4,
            "num_actual_tokens": 9, "spec_query_start_loc": [0, 3, 4],
            "spec_state_indices_tensor": [[60, 61, 62], [70, 71, 72]], "spec_sequence_masks": [True, False, True],
            "spec_token_indx": [0, 1, 2, 8], "non_spec_token_indx": [3, 4, 5, 6, 7], "num_accepted_tokens": [3, 2],
            "non_spec_query_start_loc": [0, 5], "non_spec_state_indices_tensor": [10], "non_spec_lengths_host": (5,),
            "has_initial_state": [False],
        },
    ),
    "rows without tokens in a mixed batch": (
        [SPEC, Row(0, 8, slots(8)), PREFILL, Row(0, 7, slots(9), 1, 1)],
        {
            "num_prefills": 1, "num_prefill_tokens": 5, "num_spec_decodes": 1, "num_spec_decode_tokens": 3,
            "num_actual_tokens": 8, "spec_query_start_loc": [0, 3, 3],
            "spec_state_indices_tensor": [[60, 61, 62], [90, 91, 92]], "spec_sequence_masks": [True, False, False, True],
            "spec_token_indx": [0, 1, 2], "non_spec_token_indx": [3, 4, 5, 6, 7], "num_accepted_tokens": [3, 1],
            "non_spec_query_start_loc": [0, 0, 5], "non_spec_state_indices_tensor": [80, 10], "non_spec_lengths_host": (0, 5),
            "has_initial_state": [True, False],
        },
    ),
    "empty": (
        [],
        {"non_spec_query_start_loc": [0], "non_spec_state_indices_tensor": [], "non_spec_lengths_host": ()},
    ),
}  # fmt: skip
ZERO = {
    f"num_{name}": 0
    for name in (
        "prefills", "prefill_tokens", "decodes", "decode_tokens", "spec_decodes", "spec_decode_tokens", "actual_tokens",
    )
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHES)
def test_batches(name: str) -> None:
    rows, wanted = BATCHES[name]
    assert as_lists(build(rows)) == ZERO | wanted
    assert as_lists(build(rows)) == ZERO | expected(rows), "the plain statement of the rules, which the property test uses"


def test_dtypes_are_those_of_the_operators() -> None:
    metadata = build(BATCHES["spec with prefill"][0], parent_token=[-1, 0, 0] + [-1] * 6)
    for field in dataclasses.fields(metadata):
        value = getattr(metadata, field.name)
        if torch.is_tensor(value):
            is_flag = field.name in ("has_initial_state", "spec_sequence_masks")
            assert value.dtype == (torch.bool if is_flag else torch.int32), field.name


def with_slots(rows: list[Row], order: list[int]) -> list[Row]:
    """The rows with slots of their own, in any order."""
    return [dataclasses.replace(row, slots=tuple(order[3 * n : 3 * n + 3])) for n, row in enumerate(rows)]


ROWS = st.lists(
    st.builds(
        Row,
        new=st.sampled_from([0, 1, 1, 2, 3, 7]),
        before=st.sampled_from([0, 1, 64, 200]),
        slots=st.just(()),
        drafts=st.integers(-1, NUM_SPEC),
        accepted=st.integers(1, 1 + NUM_SPEC),
        on_prompt=st.booleans(),
    ).map(lambda row: dataclasses.replace(row, new=min(row.new, row.drafts + 1)) if row.drafts >= 0 else row),
    max_size=7,
).flatmap(lambda rows: st.permutations(range(40)).map(functools.partial(with_slots, rows)))


@given(rows=ROWS, with_spec=st.booleans())
@settings(max_examples=300)
def test_rules(rows: list[Row], with_spec: bool) -> None:
    if not with_spec:
        rows = [dataclasses.replace(row, drafts=-1) for row in rows]
    metadata = build(rows)
    assert as_lists(metadata) == ZERO | expected(rows)
    assert metadata.num_decodes == 0 or metadata.num_spec_decodes == 0


@given(rows=ROWS, pad=st.integers(0, 4))
@settings(max_examples=100)
def test_padding_changes_only_the_padding(rows: list[Row], pad: int) -> None:
    """A batch of speculative rows alone: what the eager batch has, then null slots, False, empty ranges and 1."""
    rows = [dataclasses.replace(row, drafts=max(0, row.drafts), new=min(row.new, max(0, row.drafts) + 1)) for row in rows][:4]
    if not any(row.new for row in rows):
        return
    plain, padded = build(rows), build(rows, pad_to=len(rows) + pad)
    wanted = as_lists(plain)
    wanted["spec_query_start_loc"] += wanted["spec_query_start_loc"][-1:] * pad
    wanted["spec_state_indices_tensor"] += [[-1] * (1 + NUM_SPEC)] * pad
    wanted["spec_sequence_masks"] += [False] * pad
    wanted["num_accepted_tokens"] += [1] * pad
    wanted["spec_token_indx"] = list(range((len(rows) + pad) * (1 + NUM_SPEC)))
    assert as_lists(padded) == wanted


def test_decode_batches_are_padded_with_null_slots() -> None:
    builder = GDNMetadataBuilder("cpu", max_num_sequences=8, null_slot=0)
    metadata = builder.build([1, 0, 1], [10, 7, 20], [3, 4, 5], pad_to=4)
    counts = {"num_decodes": 2, "num_decode_tokens": 2, "num_actual_tokens": 2}
    padded = {"non_spec_query_start_loc": [0, 1, 2, 2, 2], "non_spec_state_indices_tensor": [3, 5, 0, 0]}
    assert as_lists(metadata) == ZERO | counts | padded


def test_a_batch_made_up_for_capture_is_decode() -> None:
    """Rows of one token of one: a first chunk, unless the batch is made for a capture or the row is not prefilling."""
    builder = GDNMetadataBuilder("cpu", max_num_sequences=8)
    made_up = {"query_lens": [1, 1], "seq_lens": [1, 1], "slots": [0, 1]}
    assert builder.build(**made_up).num_prefills == 2
    assert builder.build(**made_up, pad_to=2).num_decodes == 2
    assert builder.build(**made_up, is_prefilling=[False, False]).num_decodes == 2
    with pytest.raises(ValueError, match="pad_to: expected None for a batch with prefills, got 2"):
        builder.build(**made_up, is_prefilling=[True, False], pad_to=2)


def test_padded_batches_keep_their_addresses() -> None:
    builder = GDNMetadataBuilder("cpu", num_spec=NUM_SPEC, max_num_sequences=8)
    plain = [Row(1, 9, slots(1)), Row(1, 8, slots(2))]
    for rows, others in ((plain, [plain[1]]), ([SPEC, NO_DRAFTS], [NO_DRAFTS])):
        first = builder.build(**arguments(rows), pad_to=4)
        tensors = {name: value for name, value in vars(first).items() if torch.is_tensor(value)}
        assert len(tensors) >= 2
        second = builder.build(**arguments(others), pad_to=4)
        for name, tensor in tensors.items():
            assert getattr(second, name).data_ptr() == tensor.data_ptr(), name
            assert getattr(second, name).shape == tensor.shape
        eager = builder.build(**arguments(rows))
        assert all(getattr(eager, name).data_ptr() != tensor.data_ptr() for name, tensor in tensors.items() if tensor.numel())


def test_parents_and_checkpoints_follow_their_rows() -> None:
    rows = [SPEC, PREFILL, NO_DRAFTS]
    offsets, kept = [[0, 0], [64, 128], [0, 0]], [[-1, -1], [7, 8], [-1, -1]]
    metadata = build(rows, parent_token=[-1, 0, 0, 9, 9, 9, 9, 9, -1], checkpoint_offsets=offsets, checkpoint_slots=kept)
    assert metadata.retrieve_parent_token.tolist() == [-1, 0, 0, -1]
    assert (metadata.checkpoint_offsets.tolist(), metadata.checkpoint_slots.tolist()) == ([[64, 128]], [[7, 8]])
    none = build(rows, checkpoint_offsets=[[0]] * 3, checkpoint_slots=[[-1]] * 3)
    assert none.checkpoint_offsets is None and none.checkpoint_slots is None
    padded = build([SPEC], parent_token=[-1, 0, 0], pad_to=2)
    assert padded.retrieve_parent_token.tolist() == [-1, 0, 0, -1, -1, -1]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "negative length": ({"query_lens": [-1, 1]}, "query_lens: expected no negative length"),
    "shorter than the new tokens": ({"seq_lens": [0, 5]}, "seq_lens: expected no sequence shorter than its new tokens"),
    "rows": ({"seq_lens": [5]}, "seq_lens: expected 2 rows"),
    "columns": ({"slots": [[1, 2], [3, 4]]}, "slots: expected at least 3 columns"),
    "drafts": ({"num_draft_tokens": [3, -1]}, r"num_draft_tokens: expected -1 to 2 \(num_spec\)"),
    "more tokens than drafts": ({"query_lens": [3, 1], "num_draft_tokens": [1, -1]}, "query_lens: expected at most 1 \\+"),
    "accepted": ({"num_draft_tokens": [0, 0], "num_accepted_tokens": [0, 1]}, "num_accepted_tokens: expected 1 to 3"),
    "parents": ({"parent_token": [0]}, "parent_token: expected 2 rows"),
    "a parent that is the token itself": (
        {"query_lens": [2, 1], "num_draft_tokens": [1, 0], "parent_token": [-1, 1, -1]},
        r"parent_token: expected -1 to 0, a token before its own in the row, got 1 at \[1\]",
    ),
    "a parent before the start": (
        {"query_lens": [2, 1], "num_draft_tokens": [1, 0], "parent_token": [-1, 0, -2]},
        r"parent_token: expected -1 to -1, a token before its own in the row, got -2 at \[2\]",
    ),
    "a slot that is 0 in 32 bits": ({"slots": [[0, 1, 2], [2**40, 4, 5]]}, f"slots: expected numbers that fit .*, got {2**40}"),
    "a length beyond 32 bits": ({"seq_lens": [5, 2**33 + 5]}, "seq_lens: expected numbers that fit int32"),
    "a sum beyond 32 bits": (
        {"query_lens": [2**30, 2**30], "seq_lens": [2**30, 2**30]},
        f"query_lens: expected a sum that fits int32, got {2**31}",
    ),
    "a slot beyond 63 bits": ({"slots": np.full((2, 3), 2**63, np.uint64)}, f"slots: expected .* int64, got {2**63}"),
    "a checkpoint's slot": (
        {"checkpoint_offsets": [[64], [0]], "checkpoint_slots": [[2**32], [-1]]}, "checkpoint_slots: expected numbers that fit"
    ),
    "a checkpoint within a chunk": (
        {"checkpoint_offsets": [[65], [0]], "checkpoint_slots": [[1], [-1]]}, "checkpoint_offsets: expected multiples of 64"
    ),
    "one checkpoint argument": ({"checkpoint_offsets": [[64], [0]]}, "checkpoint_offsets, checkpoint_slots: expected both"),
    "checkpoint shapes": (
        {"checkpoint_offsets": [[64], [0]], "checkpoint_slots": [[1, 2], [3, 4]]}, "checkpoint_slots: expected shape"
    ),
    "accepted tokens without drafts": (
        {"num_accepted_tokens": [2, 1]}, "num_draft_tokens: expected the drafts .* next to num_accepted_tokens.* got None"
    ),
    "a tree without drafts": (
        {"parent_token": [-1, -1]}, "num_draft_tokens: expected the drafts of each row next to parent_token.* got None"
    ),
    "a slot of two decode rows": ({"slots": [[4, 1, 2], [4, 5, 6]]}, "slots: expected a slot .* slot 4 in rows 0 and 1"),
    "a slot of two prompts": (
        {"query_lens": [5, 3], "slots": [[4, 1, 2], [4, 5, 6]]}, "slots: expected a slot of its own .* slot 4 in rows 0 and 1"
    ),
    "a column of another speculative row": (
        {"num_draft_tokens": [1, 0], "slots": [[0, 1, 2], [3, 4, 1]]}, "slots: expected .* got slot 1 in rows 0 and 1"
    ),
    "a column of a prompt": (
        {"query_lens": [1, 3], "num_draft_tokens": [1, -1], "slots": [[0, 1, 2], [2, 4, 5]]},
        "slots: expected .* got slot 2 in rows 0 and 1",
    ),
    "two columns of a row": ({"num_draft_tokens": [1, 0], "slots": [[0, 1, 1], [3, 4, 5]]}, "slots: .* slot 1 in rows 0 and 0"),
    "a checkpoint in a slot of another row": (
        {"query_lens": [64, 1], "seq_lens": [64, 5], "checkpoint_offsets": [[64], [0]], "checkpoint_slots": [[3], [-1]]},
        "checkpoint_slots: expected .* got slot 3 in rows 1 and 0",
    ),
    "two checkpoints in a slot": (
        {"query_lens": [130, 1], "seq_lens": [130, 5], "checkpoint_offsets": [[64, 128], [0, 0]],
         "checkpoint_slots": [[9, 9], [-1, -1]]},
        "checkpoint_slots: expected .* got slot 9 in rows 0 and 0",
    ),
    "padding": ({"pad_to": 1}, "pad_to: expected 2 .rows. to 8"),
    "padding beyond the buffers": ({"pad_to": 9}, "pad_to: expected 2 .rows. to 8"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str) -> None:
    changes, message = BAD[name]
    good: dict[str, Any] = {"query_lens": [1, 1], "seq_lens": [5, 5], "slots": [[0, 1, 2], [3, 4, 5]]}
    builder = GDNMetadataBuilder("cpu", num_spec=2, max_num_sequences=8)
    with pytest.raises(ValueError, match=message):
        builder.build(**{**good, **changes})
    builder.build(**good)


def test_slots_that_no_live_row_uses_may_be_equal() -> None:
    """Those of rows without tokens, null slots, further columns of rows that are not speculative, unreached checkpoints."""
    builder = GDNMetadataBuilder("cpu", num_spec=2, max_num_sequences=8, null_slot=0)
    builder.build([1, 0, 1, 1], [5, 5, 5, 5], [[3, 7, 7], [3, 3, 3], [0, 7, 7], [0, 3, 3]])
    builder.build([2, 0, 5], [5, 5, 5], [[3, 4, 5], [4, 4, 4], [6, 4, 4]], num_draft_tokens=[1, 0, -1])
    builder.build([1] * 4, [1] * 4, [[0] * 3] * 4, num_draft_tokens=[0] * 4, pad_to=4)
    offsets, kept = [[64, 128, 0], [0, 0, 0]], [[8, 4, 4], [3, 8, 4]]
    builder.build([70, 1], [70, 9], [[3, 3, 3], [4, 4, 4]], checkpoint_offsets=offsets, checkpoint_slots=kept)
    builder.build([], [], [])


def test_floats_are_refused_and_tensors_taken() -> None:
    builder = GDNMetadataBuilder("cpu")
    with pytest.raises(TypeError, match="query_lens: expected integers, got float64"):
        builder.build([1.0], [2], [0])
    with pytest.raises(TypeError, match="pad_to: expected an int, got str"):
        builder.build([1], [2], [0], pad_to="2")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="num_spec: expected an int, got float"):
        GDNMetadataBuilder("cpu", num_spec=2.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="seq_lens: expected values on the host, got a tensor on meta"):
        builder.build([1], torch.empty(1, device="meta", dtype=torch.int32), [0])
    metadata = builder.build(torch.tensor([1]), torch.tensor([2], dtype=torch.int32), torch.tensor([[4]]))
    assert metadata.non_spec_state_indices_tensor.tolist() == [4]
