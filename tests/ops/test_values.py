"""Checks of what tensors hold: good values and padding pass with one host read, every bad value names its argument.

Here are the words and places of refusals, and what the operators' own spoilings (tests/ops/spoiling) do not make.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import gdn
from gdn.core import values as _values

Check = Callable[[], None]
HUGE, FAR_BELOW = 2**33 + 1, -(2**33) + 1  # slot 1 in 32 bits, both
DEVICE = torch.device("cpu")


class HostReads(TorchDispatchMode):
    """Counts what makes a GPU's host wait: item, bool, int, tolist, nonzero, boolean indices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.count = 0
        tolist = torch.Tensor.tolist

        def counted(tensor: torch.Tensor) -> Any:  # on the CPU it is no operator that a mode would see
            self.count += 1
            return tolist(tensor)

        monkeypatch.setattr(torch.Tensor, "tolist", counted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        is_masked = any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in indices)
        if is_masked or name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_consecutive"):
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_the_counter_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.tensor([1, 0, 2])
    reads: list[Callable[[], Any]] = [
        lambda: bool(x.any()), lambda: int(x[0]), lambda: x[1].item(), lambda: x.tolist(), lambda: x.nonzero(),
        lambda: x[x > 0], lambda: torch.equal(x, x),
    ]  # fmt: skip
    for number, read in enumerate(reads, 1):
        with HostReads(monkeypatch) as reads_of_one:
            read()
        assert reads_of_one.count == 1, number
    with HostReads(monkeypatch) as nothing:
        x[torch.tensor([2])].sort().values.cumsum(0)
    assert nothing.count == 0


def long(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def int32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def bounds(*lengths: int) -> torch.Tensor:
    return long(0, *lengths).cumsum(0)


@dataclass
class Case:
    """One check of one situation: calls that pass, and calls that raise a message that matches."""

    passes: dict[str, Check]
    raises: dict[str, tuple[Check, str]] = field(default_factory=dict)


def offsets_case() -> Case:
    check = functools.partial(_values.check_offsets, "cu_seqlens")
    return Case(
        {
            "whole": lambda: check(int32(0, 3, 6), 6),
            "empty sequences and padded tokens": lambda: check(long(0, 0, 3, 3), 9),
            "no sequence": lambda: check(long(0), 0),
            "no bound": lambda: check(long(0, HUGE)),
            "strided": lambda: check(long(0, 9, 3, 9, 6)[::2], 6),
        },
        {
            "decreasing": (
                lambda: check(int32(0, 4, 3, 6), 6),
                r"^cu_seqlens: expected offsets that never decrease, got 4 then 3 at index 1$",
            ),
        },
    )


def max_seqlen_case() -> Case:
    check = _values.check_max_seqlen
    return Case(
        {
            "none": lambda: check(None, bounds(3, 70)),
            "the longest": lambda: check(70, bounds(3, 70)),
            "more": lambda: check(HUGE, bounds(3, 70)),
            "no sequence": lambda: check(0, long(0)),
            "no token": lambda: check(0, bounds(0, 0)),
        },
        {
            "less": (
                lambda: check(69, bounds(3, 70)),
                r"^max_seqlen: expected at least the 70 tokens of the longest sequence, got 69$",
            ),
        },
    )


def parents_case() -> Case:
    check = functools.partial(_values.check_parents, "parent_token")
    even = _values.token_bounds("cu_seqlens", None, 2, 3, DEVICE)
    live = torch.tensor([True, False])
    return Case(
        {
            "packed": lambda: check(int32(-1, 0, 0, -1, 0, 1), bounds(3, 3)),
            "empty sequence": lambda: check(int32(-1, 0, -1), bounds(2, 0, 1)),
            "batch": lambda: check(int32([-1, 0, 1], [-1, -1, 0]), even),
            "batch flat": lambda: check(int32(-1, 0, 1, -1, -1, 0), even),
            "padded tokens": lambda: check(int32(-1, 0, 99, -7), bounds(2)),
            "padding sequence": lambda: check(int32(-1, 5, -9), bounds(1, 2), live),
            "no sequence": lambda: check(int32(5, 5), long(0)),
            "no token": lambda: check(int32(), bounds(0)),
        },
        {
            "self": (
                lambda: check(int32(-1, 1), bounds(2)),
                r"^parent_token: expected -1 or a node before node 1, got 1 at token 1$",
            ),
            "forward": (lambda: check(int32(-1, 0, 3, 1), bounds(4)), r"before node 2, got 3 at token 2$"),
            "root of itself": (lambda: check(int32(-1, 0, 0), bounds(2, 1)), r"before node 0, got 0 at token 2$"),
            "of the sequence before": (lambda: check(int32(-1, 0, -1, 2), bounds(2, 2)), r"before node 1, got 2 at token 3$"),
            "below -1": (lambda: check(int32(-1, -2), bounds(2)), r"^parent_token: .*node 1, got -2 at token 1$"),
            "batch": (lambda: check(int32([-1, 0, 1], [-1, 1, 0]), even), r"before node 1, got 1 at token 4$"),
            "int64": (lambda: check(long(-1, FAR_BELOW), bounds(2)), rf"^parent_token: .*got {FAR_BELOW} at token 1$"),
        },
    )


def log_decays_case() -> Case:
    """[B, T, heads]; bounds of the packed cases: sequences of 2 and 1 tokens, then padding."""
    check = functools.partial(_values.check_log_decays, "g")
    even = _values.token_bounds("cu_seqlens", None, 2, 3, DEVICE)
    live = torch.tensor([True, False])

    def g(*places: tuple[int, int, int], batch: int = 1, length: int = 4) -> torch.Tensor:
        values = torch.full((batch, length, 2), -0.5)
        for place in places:
            values[place] = 0.25
        return values

    return Case(
        {
            "none": lambda: check(g() * 0, bounds(2, 1)),
            "total decay and NaN": lambda: check(g() * torch.inf + torch.nan, bounds(2, 1)),
            "padded tokens": lambda: check(g((0, 3, 1)), bounds(2, 1)),
            "padding sequence": lambda: check(g((0, 2, 0)), bounds(2, 1), live),
            "no sequence": lambda: check(g((0, 0, 0)), long(0)),
            "no token": lambda: check(g(length=0), bounds(0)),
            "strided": lambda: check(g((0, 1, 0), (0, 3, 1), length=8)[:, ::2], bounds(2, 1)),
        },
        {
            "packed": (
                lambda: check(g((0, 1, 1)), bounds(2, 1)),
                r"^g: expected logarithms of decays, at most 0, got 0.25 at \[0, 1, 1\]$",
            ),
            "batch": (lambda: check(g((1, 2, 0), batch=2, length=3), even), r"^g: .* got 0.25 at \[1, 2, 0\]$"),
            "live": (lambda: check(g((0, 1, 0)), bounds(2, 1), live), r"^g: .* got 0.25 at \[0, 1, 0\]$"),
            "bfloat16": (lambda: check(g((0, 0, 0)).bfloat16(), bounds(2, 1)), r"^g: .* got 0.25 at \[0, 0, 0\]$"),
        },
    )


def slots_case() -> Case:
    """What is touched is restated below in plain Python; here are the words of a refusal, and the place in each argument."""

    def prefill(slots: torch.Tensor, **others: Any) -> _values.TouchedSlots:
        return _values.prefill_slots("state_indices", bounds(70, 64, 5), slots, -1, **others)

    def decode(slots: torch.Tensor, **others: Any) -> _values.TouchedSlots:
        return _values.decode_slots("ssm_state_indices", bounds(2, 0, 3), slots, -1, **others)

    def windows(slots: torch.Tensor) -> _values.TouchedSlots:
        return _values.window_slots("conv_state_indices", bounds(2, 0, 3), slots, -1)

    def inside(touched: _values.TouchedSlots) -> None:
        _values.check_slots(touched, 8, -1)

    def apart(touched: _values.TouchedSlots) -> None:
        _values.check_unshared(touched, 8)

    def kept(*slots: int) -> dict[str, torch.Tensor]:
        return {"checkpoint_offsets": int32([64], [64], [64]), "checkpoint_slots": long(*([slot] for slot in slots))}

    return Case(
        {
            "no indices": lambda: inside(_values.prefill_slots("state_indices", bounds(1, 1), None, -1)),
            "no sequence": lambda: apart(_values.prefill_slots("state_indices", bounds(), int32(), -1)),
            "rows beyond N": lambda: inside(prefill(int32(0, 1, 2, 99))),
            "one slot in a row": lambda: apart(decode(int32([0, 0, 0], [1, 1, 1], [2, 2, 2]))),
            "column 0 alone": lambda: inside(windows(long([0, 99], [99, 99], [7, HUGE]))),
        },
        {
            "slot": (
                lambda: inside(prefill(int32(0, 1, 8))),
                r"^state_indices: expected slots below 8 \(or null, <= -1\), got 8 at \[2\]$",
            ),
            "final slot": (
                lambda: inside(prefill(int32(0, 1, 2), final_indices=long(0, 1, HUGE))),
                rf"^final_state_indices: expected slots below 8 .*got {HUGE} at \[2\]$",
            ),
            "checkpoint": (
                lambda: inside(prefill(int32(0, 1, 2), **kept(50, 3, 4))),
                r"^checkpoint_slots: expected slots below 8 .*got 50 at \[0, 0\]$",
            ),
            "final column": (
                lambda: inside(
                    decode(int32([0, 1, 9], [0, 0, 0], [3, 4, 5]), final_indices=long([0, 8, 2], [0, 0, 0], [3, 4, 5]))
                ),
                r"^final_state_indices: .*got 8 at \[0, 1\]$",
            ),
            "window": (lambda: inside(windows(int32([8, 0], [0, 0], [1, 0]))), r"^conv_state_indices: .*got 8 at \[0, 0\]$"),
            "shared slot": (
                lambda: apart(prefill(int32(3, 1, 3))),
                r"^state_indices: expected slots that no other live sequence reads or writes, got slot 3 at \[2\], which is "
                r"state_indices\[0\] too$",
            ),
            "written and read by another": (
                lambda: apart(prefill(int32(0, 1, 2), final_indices=long(1, 5, 4))),
                r"^final_state_indices: .*got slot 1 at \[0\], which is state_indices\[1\] too$",
            ),
            "two checkpoints": (
                lambda: apart(prefill(int32(0, 1, 2), **kept(4, 4, 5))),
                r"^checkpoint_slots: .*got slot 4 at \[1, 0\], which is checkpoint_slots\[0, 0\] too$",
            ),
            "two columns": (
                lambda: apart(decode(int32([0, 5, 2], [0, 1, 2], [3, 4, 5]))),
                r"^ssm_state_indices: .*got slot 5 at \[2, 2\], which is ssm_state_indices\[0, 1\] too$",
            ),
        },
    )


def accepted_case() -> Case:
    def check(accepted: torch.Tensor, indices: torch.Tensor | None = None, columns: int = 3) -> None:
        _values.check_accepted(accepted, columns, bounds(2, 0, 3), indices, -1)

    return Case(
        {
            "in range": lambda: check(int32(1, 2, 3)),
            "empty sequence": lambda: check(int32(1, 99, 3)),
            "rows beyond N": lambda: check(int32(1, 1, 1, 99)),
            "null slots": lambda: check(int32(1, 1, 99), int32([0, 1], [0, 1], [-1, -1])),
            "null slot": lambda: check(long(FAR_BELOW, 1, 1), int32(-1, 0, 1)),
        },
        {
            "above": (
                lambda: check(int32(1, 5, 4)),
                r"^num_accepted_tokens: expected 1 to 3 \(the states or windows to start from\), got 4 at \[2\]$",
            ),
            "zero": (lambda: check(int32(0, 1, 1)), r"^num_accepted_tokens: .*got 0 at \[0\]$"),
            "beyond 32 bits": (lambda: check(long(2**32 + 1, 1, 1)), r"^num_accepted_tokens: .*got 4294967297 at \[0\]$"),
            "1-D indices": (
                lambda: check(int32(1, 1, 2), int32(0, 1, 2), columns=1),
                r"^num_accepted_tokens: expected 1 to 1 .*got 2 at \[2\]$",
            ),
            "one slot of the row": (
                lambda: check(int32(1, 1, 4), int32([0, 1], [0, 1], [-1, 2])),
                r"^num_accepted_tokens: .*got 4 at \[2\]$",
            ),
        },
    )


def checkpoint_offsets_case() -> Case:
    def check(offsets: torch.Tensor, multiple: int = 64) -> None:
        live = torch.tensor([True, False])
        _values.check_checkpoint_offsets("checkpoint_offsets", offsets, live, multiple=multiple)

    return Case(
        {
            "multiples": lambda: check(int32([0, 64], [65, -1])),
            "beyond the sequence": lambda: check(long([2**40, 0], [0, 0], [1, 1])),
            "any count": lambda: check(int32([1, 65], [-1, -1]), multiple=1),
        },
        {
            "65": (
                lambda: check(int32([0, 65], [0, 0])),
                r"^checkpoint_offsets: expected multiples of 64 tokens, or 0, got 65 at \[0, 1\]$",
            ),
            "negative": (
                lambda: check(int32([65, -64], [0, 0])),
                r"^checkpoint_offsets: expected 0 \(none\) or a number of tokens, got -64 at \[0, 1\]$",
            ),
            "negative in a convolution": (
                lambda: check(long([FAR_BELOW], [0]), multiple=1),
                rf"^checkpoint_offsets: .*got {FAR_BELOW} at \[0, 0\]$",
            ),
        },
    )


def table_lengths_case() -> Case:
    tables = torch.zeros(3, 2, dtype=torch.int32)
    check = functools.partial(_values.check_table_lengths, "context_lens", block_tables=tables, page_size=16)
    return Case(
        {
            "fit": lambda: check(int32(32, 0, 1)),
            "negative": lambda: check(long(-(2**40), -1, 32)),
            "drafts": lambda: check(int32([31, 32], [0, -5], [1, 1])),
        },
        {
            "long": (
                lambda: check(int32(32, 33, 1)),
                r"^context_lens: expected sequences of at most 32 \(2 columns of block_tables, 16 in a page\), got 33 at \[1\]$",
            ),
            "drafts": (lambda: check(int32([31, 34], [0, 1], [1, 1])), r"^context_lens: .*got 34 at \[0\]$"),
        },
    )


def pages_case() -> Case:
    tables = int32([3, 99, 99], [-7, 99, 99], [0, 1, 2])
    check = functools.partial(_values.check_pages, "block_tables", tables, page_size=16, num_pages=4)
    return Case(
        {
            "visible": lambda: check(int32(16, 0, 48)),
            "drafts": lambda: check(int32([15, 16], [0, -3], [47, 48])),
            "limit": lambda: check(long(2**40, -(2**40), 16), max_length=16),
        },
        {
            "beyond": (lambda: check(int32(17, 0, 1)), r"^block_tables\[0, 1\]: expected a page in \[0, 4\), got 99$"),
            "longest draft": (lambda: check(int32([16, 17], [0, 0], [1, 1])), r"^block_tables\[0, 1\]: .*got 99$"),
        },
    )


def slot_mapping_case() -> Case:
    check = functools.partial(_values.check_slot_mapping, "slot_mapping", num_rows=32)
    return Case(
        {
            "distinct": lambda: check(long(31, 0, 7)),
            "skipped": lambda: check(long(-1, 3, -1, FAR_BELOW, FAR_BELOW)),
            "not read": lambda: check(int32(5, 5, 99, 5), is_read=torch.tensor([False, False, False, True])),
            "no token": lambda: check(long()),
        },
        {
            "beyond": (
                lambda: check(int32(0, 32)),
                r"^slot_mapping: expected slots below 32 \(pages \* page_size\), got 32 at \[1\]$",
            ),
            "twice": (
                lambda: check(long(4, 9, -1, 4)),
                r"^slot_mapping: expected distinct slots \(or negative: skipped\), got 4 at \[3\], as at \[0\]$",
            ),
        },
    )


def ring_slots_case() -> Case:
    def check(slots: torch.Tensor, positions: torch.Tensor | None = None, null_slot: int = -1) -> None:
        positions = torch.arange(slots.numel()) if positions is None else positions
        _values.check_ring_slots("ring_slots", slots, positions, 3, null_slot)

    return Case(
        {
            "runs": lambda: check(int32(1, 1, 0, 2, 2), long(4, 5, 0, 7, 8)),
            "skipped": lambda: check(long(-1, 1, FAR_BELOW, -1)),
            "null slot": lambda: check(int32(0, 1, 0, 0), null_slot=0),
            "null slot beyond the ring": lambda: check(int32(99, 1, 99), null_slot=99),
            "positions that skip their tokens": lambda: check(long(99, 1, 99, 1), long(-1, 4, 2**31, 5)),
            "no token": lambda: check(int32()),
        },
        {
            "beyond": (
                lambda: check(int32(1, 3)),
                r"^ring_slots: expected slots below 3 \(or negative or -1: skipped\), got 3 at \[1\]$",
            ),
            "two runs": (
                lambda: check(int32(1, 0, 1), long(4, 9, 5)),
                r"^ring_slots: expected one run of tokens with ascending positions for each slot, got 1 at \[2\], whose "
                r"first run starts at \[0\]$",
            ),
            "two sequences side by side": (
                lambda: check(int32(1, 1, 1), long(4, 5, 5)),
                r"^ring_slots: .*got 1 at \[2\], whose first run starts at \[0\]$",
            ),
        },
    )


def rope_case() -> Case:
    check = functools.partial(_values.check_rope_positions, "positions", num_positions=8)
    return Case(
        {
            "in range": lambda: check(long(0, 7)),
            "skipped": lambda: check(int32(-1, 99, 3), is_read=torch.tensor([False, False, True])),
            "group's first": lambda: check(int32(10, 0), before=3),
            "no token": lambda: check(long()),
        },
        {
            "beyond": (
                lambda: check(int32(0, 8)),
                r"^positions: expected positions below 8 \(cos_sin has 8 rows\), got 8 at \[1\]$",
            ),
        },
    )


def ranges_case() -> Case:
    check = _values.check_ranges
    return Case(
        {
            "in range": lambda: check(int32(0, 5), int32(20, 9), 20, None),
            "empty": lambda: check(int32(-3, 9, 30), int32(-1, 4, 40), 20, None),
            "clamped": lambda: check(int32(12), int32(99), 20, 8),
            "far": lambda: check(long(2**40), long(2**40 + 99), 20, 1),
            "no row": lambda: check(int32(), int32(), 20, 3),
        },
        {
            "negative": (
                lambda: check(int32(0, -1), int32(5, 5), 20, None),
                r"^cu_seqlen_ks: expected starts >= 0, got -1 at \[1\]$",
            ),
            "below 32 bits": (
                lambda: check(long(FAR_BELOW), long(5), 20, None),
                rf"^cu_seqlen_ks: expected starts >= 0, got {FAR_BELOW} at \[0\]$",
            ),
            "long": (
                lambda: check(int32(0, 3), int32(5, 99), 20, 9),
                r"^max_seqlen_k: expected at least 17, the longest range, got 9$",
            ),
        },
    )


def new_tokens_case() -> Case:
    check = functools.partial(_values.check_new_tokens, "seq_lens")
    return Case(
        {"enough": lambda: check(int32(2, 9), bounds(2, 3)), "nothing new": lambda: check(long(-5, 9), bounds(0, 3))},
        {
            "short": (
                lambda: check(int32(2, 2), bounds(2, 3)),
                r"^seq_lens: expected at least the 3 new tokens of sequence 1, got 2 at \[1\]$",
            )
        },
    )


def touched_case() -> Case:
    def check(*indices: int) -> None:
        touched = _values.decode_slots("state_indices", bounds(1, 1), int32(*indices), -1)
        _values.check_touched(touched, torch.empty(8, 1), -1)

    return Case(
        {},  # two checks, and two host reads
        {
            "beyond the pool": (lambda: check(0, 8), r"^state_indices: expected slots below 8 .*got 8 at \[1\]$"),
            "shared": (lambda: check(3, 3), r"^state_indices: .*got slot 3 at \[1\], which is state_indices\[0\] too$"),
            "both": (lambda: check(9, 9), r"^state_indices: expected slots below 8 .*got 9 at \[0\]$"),
        },
    )


def own_rows_case() -> Case:
    def check(*rows: int) -> None:
        touched = _values.own_rows("intermediate_indices", int32(*rows), torch.tensor([True, True, False]), -1)
        _values.check_touched(touched, torch.empty(8, 1), -1)

    return Case(
        {"of a live sequence": lambda: _values.own_rows("rows", int32(0, 9), torch.tensor([True, False]), -1)},
        {
            "beyond the rows": (lambda: check(0, 8, 9), r"^intermediate_indices: expected slots below 8 .*got 8 at \[1\]$"),
            "shared": (lambda: check(3, 3, 0), r"^intermediate_indices: .*got slot 3 at \[1\], which is .*\[0\] too$"),
        },
    )


def kept_checkpoints_case() -> Case:
    def check(offsets: torch.Tensor | None, rows: torch.Tensor | None) -> None:
        kept = (torch.empty(4, 1), None)
        live = torch.tensor([True, True])
        _values.check_checkpoints(offsets, rows, kept, bounds(100, 200), live, -1)

    return Case(
        {"not given": lambda: check(None, None)},  # else several checks, and as many host reads
        {
            "65": (lambda: check(int32([65], [0]), int32([0], [1])), r"^checkpoint_offsets: expected multiples of 64 tokens"),
            "beyond the rows": (
                lambda: check(int32([64], [128]), int32([0], [4])),
                r"^checkpoint_slots: expected slots below 4 .*got 4 at \[1, 0\]$",
            ),
            "shared": (lambda: check(int32([64], [128]), int32([2], [2])), r"^checkpoint_slots: .*got slot 2 at \[1, 0\]"),
        },
    )


def selected_case() -> Case:
    def check(indices: torch.Tensor, topk_length: torch.Tensor | None = None) -> None:
        _values.check_selected_positions("topk_indices", indices, bounds(1, 2), int32(4, 9), topk_length)

    return Case(
        {
            "in range": lambda: check(int32([3, 0], [8, 0], [-1, 8])),
            "padded tokens": lambda: check(int32([3, 0], [8, 0], [8, 8], [99, 99])),
            "negative": lambda: check(long([FAR_BELOW, -1], [0, 1], [0, 1])),
            "beyond topk_length": lambda: check(int32([3, 99], [99, 0], [8, 8]), int32(1, 0, 2)),
            "no sequence": lambda: _values.check_selected_positions("topk_indices", int32([5]), long(0), int32()),
        },
        {
            "beyond": (
                lambda: check(int32([3, 4], [8, 0], [0, 0])),
                r"^topk_indices: expected positions below 4, the length of sequence 0, got 4 at \[0, 1\]$",
            ),
            "beyond in the second": (lambda: check(int32([3, 3], [8, 0], [9, 0])), r"sequence 1, got 9 at \[2, 0\]$"),
            "beyond 32 bits": (lambda: check(long([3, HUGE], [8, 0], [0, 0])), rf"^topk_indices: .*got {HUGE} at \[0, 1\]$"),
        },
    )


def topk_length_case() -> Case:
    def check(*lengths: int) -> None:
        _values.check_topk_length("topk_length", long(*lengths), 4, bounds(1, 2))

    return Case(
        {
            "in range": lambda: check(0, 4, 2),
            "padded tokens": lambda: check(0, 4, 2, -3, 99),
            "no sequence": lambda: _values.check_topk_length("topk_length", int32(99), 4, long(0)),
        },
        {
            "above": (
                lambda: check(0, 5, 2),
                r"^topk_length: expected 0 to 4 \(the columns of topk_indices\), got 5 at \[1\]$",
            ),
            "negative": (lambda: check(0, 4, -1), r"^topk_length: .*got -1 at \[2\]$"),
            "beyond 32 bits": (lambda: check(2**32 + 1, 4, 1), r"^topk_length: .*got 4294967297 at \[0\]$"),
        },
    )


MAKERS = {name.removesuffix("_case").replace("_", " "): make for name, make in globals().items() if name.endswith("_case")}
CASES = {name: make() for name, make in MAKERS.items()}
PASSES = {f"{name}: {what}": check for name, case in CASES.items() for what, check in case.passes.items()}
RAISES = {f"{name}: {what}": bad for name, case in CASES.items() for what, bad in case.raises.items()}


@pytest.mark.parametrize("check", PASSES.values(), ids=PASSES)
def test_good_values_and_padding_pass_with_one_host_read(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    with HostReads(monkeypatch) as reads:
        check()
    assert reads.count <= 1


@pytest.mark.parametrize(("check", "message"), RAISES.values(), ids=RAISES)
def test_bad_values_are_named(check: Check, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check()


@pytest.mark.parametrize("slots", [(0, 7), (-1, -1), (7, -1)])
def test_touched_slots_in_the_pool_and_distinct_pass(slots: tuple[int, int]) -> None:
    touched = _values.decode_slots("state_indices", bounds(1, 1), int32(*slots), -1)
    _values.check_touched(touched, torch.empty(8, 1), -1)


def test_every_check_is_covered() -> None:
    """Each public function of the module is called by the cases above."""
    called: set[str] = set()
    names = [name for name, value in vars(_values).items() if not name.startswith("_") and callable(value)]
    functions = {name for name in names if getattr(_values, name).__module__ == _values.__name__}
    with pytest.MonkeyPatch.context() as patch:
        for name in functions:
            original = getattr(_values, name)

            def recorded(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
                called.add(_name)
                return _original(*args, **kwargs)

            patch.setattr(_values, name, recorded)
        for make in MAKERS.values():
            for check in make().passes.values():
                check()
    assert functions - called == {"finished_groups", "check_touched"}  # these have tests of their own


def test_accepted_counts_are_padding_unless_validated(switch: Callable[..., object]) -> None:
    x, pool = torch.ones(1, 2, 1, 8), torch.zeros(4, 1, 8, 8)
    slots = {"initial_state": pool, "cu_seqlens": int32(0, 1, 2), "ssm_state_indices": int32([0, 1], [2, 3])}
    counts: dict[str, Any] = {**slots, "num_accepted_tokens": long(99, -(2**40))}
    o, _ = gdn.fused_recurrent_gated_delta_rule(x, x, x, **counts)
    assert not o.any() and not pool.any()
    switch(GDN_VALIDATE="1")
    with pytest.raises(ValueError, match=r"^num_accepted_tokens: expected 1 to 2 .*got 99 at \[0\]"):
        gdn.fused_recurrent_gated_delta_rule(x, x, x, **counts)


def test_lengths_of_sequences_without_queries_do_not_count() -> None:
    q, kv_cache, tables = torch.ones(1, 1, 8), torch.ones(2, 4, 16, 1, 8), int32([0], [1])
    lse = gdn.sparse_attention(q, kv_cache, int32([0]), tables, int32(0, 1, 1), int32(1, 999), return_lse=True)[1]
    assert lse.isfinite().all()
    with pytest.raises(ValueError, match=r"^seq_lens: expected sequences of at most 16 .*got 999 at \[1\]"):
        gdn.sparse_attention(q, kv_cache, int32([0]), tables, int32(0, 0, 1), int32(1, 999))


def test_too_few_rows_of_a_result() -> None:
    cache, tables = torch.zeros(4, 16, 32, dtype=torch.bfloat16), int32([0], [1])
    for num_rows in (6, 9):
        k, _ = gdn.gather_indexer_cache(cache, tables, int32(0, 4, 6), num_rows=num_rows)
        assert k.shape == (num_rows, 32)
    with pytest.raises(ValueError, match=r"^num_rows: expected at least 6, the last of cu_seqlens, got 5$"):
        gdn.gather_indexer_cache(cache, tables, long(0, 4, 6), num_rows=5)


def test_finished_groups() -> None:
    positions, slots = int32(3, 4, 7, 11, -1, 15), long(0, 0, 0, -1, 0, 2)
    assert _values.finished_groups(positions, slots, 4, null_slot=2).tolist() == [True, False, True, False, False, False]


def test_bounds() -> None:
    assert _values.token_bounds("cu_seqlens", None, 3, 5, DEVICE).tolist() == [0, 5, 10, 15]
    strided = int32(0, 9, 4, 9, 6)[::2]
    made = _values.token_bounds("cu_seqlens", strided, 1, 6, DEVICE)
    assert made.tolist() == [0, 4, 6] and made.dtype == torch.int64 and made.is_contiguous()


Sets = list[set[int]]  # of each sequence
SLOT = st.sampled_from([*range(-2, 8), HUGE, FAR_BELOW])
NULL_SLOT, OPTIONS = st.integers(-1, 0), st.lists(st.booleans(), min_size=4, max_size=4)


def stated(live: list[bool], slots: list[Any]) -> Sets:
    """Slots of live sequences; each one's are a set, or one of them."""
    return [(own if isinstance(own, set) else {own}) if is_live else set() for is_live, own in zip(live, slots, strict=True)]


def check_against(touched: _values.TouchedSlots, live: list[bool], reads: Sets, writes: Sets, null_slot: int) -> None:
    """A pool of 6: slots beyond it, and clashes of two sequences, restated with sets; no more host reads than one."""
    assert touched.is_live.tolist() == live
    used = [read | write for read, write in zip(reads, writes, strict=True)]
    pairs = [(a, b) for a in range(len(live)) for b in range(len(live)) if a != b]
    clash = any(slot < 6 for a, b in pairs for slot in writes[a] & used[b])
    for check, is_bad in (
        (lambda: _values.check_slots(touched, 6, null_slot), any(slot >= 6 for slots in used for slot in slots)),
        (lambda: _values.check_unshared(touched, 6), clash),
    ):
        with pytest.MonkeyPatch.context() as patch, HostReads(patch) as host_reads:
            try:
                check()
            except ValueError as error:
                assert is_bad, error
            else:
                assert not is_bad and host_reads.count == 1


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 5, 64, 70]), SLOT, SLOT, st.sampled_from([0, 1, 64, 128]), SLOT, st.booleans()), max_size=4
    ),
    NULL_SLOT,
    OPTIONS,
)
@settings(max_examples=300)
def test_prefill_slots_against_a_plain_statement(rows: list[Any], null_slot: int, options: list[bool]) -> None:
    has_indices, has_final, has_mask, has_checkpoints = options
    lengths, slots, final, offsets, kept, mask = map(list, zip(*rows, strict=True)) if rows else ([] for _ in range(6))
    multiple = 1 if null_slot == 0 else 64
    own = slots if has_indices else list(range(len(rows)))
    live = [length > 0 and (slot > null_slot or not has_indices) for length, slot in zip(lengths, own, strict=True)]
    reads = stated([one and (not has_final or not has_mask or is_read) for one, is_read in zip(live, mask, strict=True)], own)
    writes = stated(live, [{slot for slot in [last] if slot > null_slot} for last in final] if has_final else own)
    for n, (offset, slot) in enumerate(zip(offsets, kept, strict=True)):
        if has_checkpoints and live[n] and 0 < offset <= lengths[n] and offset % multiple == 0 and slot > null_slot:
            writes[n] = writes[n] | {slot}

    def columns(values: list[int]) -> torch.Tensor:
        return long(*values).reshape(len(rows), 1)

    touched = _values.prefill_slots(
        "state_indices", bounds(*lengths), long(*slots) if has_indices else None, null_slot,
        has_initial_state=torch.tensor(mask, dtype=torch.bool) if has_mask else None,
        final_indices=long(*final) if has_final else None,
        checkpoint_offsets=columns(offsets) if has_checkpoints else None,
        checkpoint_slots=columns(kept) if has_checkpoints else None, checkpoint_multiple=multiple,
    )  # fmt: skip
    check_against(touched, live, reads, writes, null_slot)


THREE = st.lists(SLOT, min_size=3, max_size=3)


@given(
    st.lists(st.tuples(st.integers(0, 3), THREE, THREE, st.sampled_from([*range(5), 2**32 + 1])), max_size=4), NULL_SLOT, OPTIONS
)
@settings(max_examples=300)
def test_decode_slots_against_a_plain_statement(rows: list[Any], null_slot: int, options: list[bool]) -> None:
    has_accepted, has_final, is_updated, first_column_decides = options
    lengths, slots, final, accepted = map(list, zip(*rows, strict=True)) if rows else ([] for _ in range(4))
    counts = accepted if has_accepted else [1] * len(rows)
    read = [row[count - 1] if 1 <= count <= 3 else null_slot for row, count in zip(slots, counts, strict=True)]
    live = [
        length > 0 and slot > null_slot and (row[0] > null_slot or not first_column_decides)
        for length, slot, row in zip(lengths, read, slots, strict=True)
    ]
    stored = [
        {slot for slot in row[:length] if slot > null_slot}
        for row, length in zip(final if has_final else slots, lengths, strict=True)
    ]
    writes = stated([one and is_updated for one in live], stored)
    touched = _values.decode_slots(
        "ssm_state_indices", bounds(*lengths), long(*slots).reshape(len(rows), 3), null_slot,
        num_accepted_tokens=long(*accepted) if has_accepted else None,
        final_indices=long(*final).reshape(len(rows), 3) if has_final else None, is_updated=is_updated,
        first_column_decides=first_column_decides,
    )  # fmt: skip
    check_against(touched, live, stated(live, read), writes, null_slot)


@given(
    st.lists(st.tuples(st.integers(0, 3), SLOT, st.sampled_from([*range(5), 2**32 + 1]), st.booleans()), max_size=4),
    NULL_SLOT,
    OPTIONS,
)
@settings(max_examples=300)
def test_window_slots_against_a_plain_statement(rows: list[Any], null_slot: int, options: list[bool]) -> None:
    has_accepted, has_live, is_updated, has_columns = options
    lengths, slots, accepted, states = map(list, zip(*rows, strict=True)) if rows else ([] for _ in range(4))
    live = [
        length > 0 and slot > null_slot and (1 <= count <= 3 or not has_accepted) and (state or not has_live)
        for length, slot, count, state in rows
    ]
    indices = torch.stack([long(*slots), torch.full((len(rows),), 99)], dim=1) if has_columns else long(*slots)
    touched = _values.window_slots(
        "conv_state_indices", bounds(*lengths), indices, null_slot, num_accepted_tokens=long(*accepted) if has_accepted else None,
        num_windows=3, is_live=torch.tensor(states, dtype=torch.bool) if has_live else None, is_updated=is_updated,
    )  # fmt: skip
    check_against(touched, live, stated(live, slots), stated([one and is_updated for one in live], slots), null_slot)
