"""Bad calls of the chunk and the recurrent operator raise, name the argument, and leave everything as it was."""

from collections.abc import Callable

import pytest
import torch

import gdn
from gdn.ops.delta_rule.inputs import chunk_inputs, chunk_problem
from gdn.testing.compare import same_bits
from tests.ops.bad_calls import CHUNK, RECURRENT, Arguments, Bad, check, good_chunk, good_recurrent


@pytest.mark.parametrize("bad", CHUNK, ids=lambda bad: bad.name)
def test_chunk(bad: Bad) -> None:
    check("chunk_gated_delta_rule", good_chunk(), bad)


@pytest.mark.parametrize("bad", RECURRENT, ids=lambda bad: bad.name)
def test_recurrent(bad: Bad) -> None:
    check("fused_recurrent_gated_delta_rule", good_recurrent(), bad)


def test_the_good_calls_are_good() -> None:
    for function, arguments in (
        (gdn.chunk_gated_delta_rule, good_chunk()),
        (gdn.fused_recurrent_gated_delta_rule, good_recurrent()),
    ):
        o, pool = function(**arguments)
        assert o is arguments["out"] and bool(o.any()) and pool is arguments["initial_state"]


# Offsets and slots are spoilt in tests/ops/spoiling.
CHECKPOINT = Bad(
    "checkpoint_offset",
    lambda a: {"checkpoint_offsets": torch.full((3, 1), 65), "checkpoint_slots": torch.full((3, 1), -1)},
    ValueError,
    r"^checkpoint_offsets: expected multiples of 64 tokens, or 0, got 65",
)


def _columns(a: Arguments) -> Arguments:
    return {"ssm_state_indices": a["ssm_state_indices"][:, None]}


VALIDATED_RECURRENT = [
    Bad(
        "accepted",
        lambda a: {**_columns(a), "num_accepted_tokens": torch.tensor([1, 5, 2], dtype=torch.int32)},
        ValueError,
        r"^num_accepted_tokens: expected 1 to 1 .*got 2",  # the 5 belongs to a sequence without tokens
    ),
    Bad(
        "parent",
        lambda a: {**_columns(a), "parent_token": torch.tensor([-1, 0, 2, -1, 0, 1], dtype=torch.int32)},
        ValueError,
        r"^parent_token: expected -1 or a node before node 2, got 2 at token 2",
    ),
]


def test_validate_chunk(switch: Callable[..., object]) -> None:
    switch(GDN_VALIDATE="1")
    check("chunk_gated_delta_rule", good_chunk(), CHECKPOINT)


@pytest.mark.parametrize("bad", VALIDATED_RECURRENT, ids=lambda bad: bad.name)
def test_validate_recurrent(bad: Bad, switch: Callable[..., object]) -> None:
    switch(GDN_VALIDATE="1")
    check("fused_recurrent_gated_delta_rule", good_recurrent(), bad)


def test_validate_passes_good_calls_and_null_slots(switch: Callable[..., object]) -> None:
    switch(GDN_VALIDATE="1")
    arguments = good_chunk()
    arguments["state_indices"][2] = -1
    gdn.chunk_gated_delta_rule(**arguments)
    gdn.fused_recurrent_gated_delta_rule(**good_recurrent())


def test_a_checkpoint_slot_counts_where_its_offset_is_reached() -> None:
    arguments = chunk_inputs(chunk_problem(index_dtype="int64", has_checkpoints=True), lengths=[70, 70])
    before = arguments["initial_state"].clone()
    far = torch.full((2, 1), 50)
    for offset, is_reached in ((0, False), (64, True), (128, False)):
        found = arguments | {"checkpoint_offsets": torch.full((2, 1), offset), "checkpoint_slots": far}
        if is_reached:
            with pytest.raises(ValueError, match=r"^checkpoint_slots: expected slots below .*got 50 at \[0, 0\]"):
                gdn.chunk_gated_delta_rule(**found)
            assert same_bits(arguments["initial_state"], before)
        else:
            gdn.chunk_gated_delta_rule(**found | {"initial_state": before.clone()})
