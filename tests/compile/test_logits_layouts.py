"""The places to which the copy engine writes queries and keys are those that the matmul reads, for every element."""

import importlib
from typing import Any

import pytest

from tests.compile.inspection import traced

# head count, head_dim, FP8, lanes of a quad a query takes, groups of queries
QUERIES = [(64, 128, True, 1, 1), (64, 128, True, 4, 3), (16, 64, True, 2, 2), (6, 128, False, 1, 2), (40, 64, False, 4, 1)]
# keys of a tile, keys of a piece, head_dim, FP8
KEYS = [(64, 64, 128, True), (128, 16, 128, True), (64, 4, 128, True), (128, 32, 128, False), (64, 64, 64, False)]
STAGES = 2


@pytest.mark.parametrize(("heads", "dim", "fp8", "lanes", "groups"), QUERIES)
def test_queries(heads: int, dim: int, fp8: bool, lanes: int, groups: int) -> None:
    def check(cute: Any, cutlass: Any) -> None:
        layouts = importlib.import_module("kernels_cute.mqa_logits.layouts")
        dtype = cutlass.Float8E4M3FN if fp8 else cutlass.BFloat16
        drafts, run = 4 // lanes, 2 * lanes
        columns = groups * drafts * heads
        written = layouts.query_layout(dtype, heads, dim, groups, STAGES, lanes)
        read = layouts.operand_layout(dtype, columns, dim, STAGES)
        assert str(written.inner) == str(read.inner)
        seen = set()
        for stage in range(STAGES):
            for group in range(groups):
                for draft in range(drafts):
                    for head in range(heads):
                        # Lane t of a quad holds columns 8j + 2t and 8j + 2t + 1: of one draft, and heads of one residue.
                        column = group * drafts * heads + 8 * (head // run) + 2 * (lanes * draft + head % run // 2) + head % 2
                        seen.add((stage, column))
                        for x in range(0, dim, 21):
                            place = cute.crd2idx((head % run, draft, head // run, x, group, stage), written.outer)
                            assert place == cute.crd2idx((column, x, stage), read.outer), (head, draft, x)
        assert len(seen) == STAGES * columns

    traced(check)


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_every_head_has_one_slot(lanes: int) -> None:
    """All head counts: boxes stay within a row (a single head's reaches beyond an extent instead), slots hold what the sum
    takes them for."""
    importlib.import_module("kernels_cute.common.build")
    orders = importlib.import_module("kernels_cute.mqa_logits.orders")
    for heads in range(1, 65):
        for kv_heads in (count for count in range(1, heads + 1) if heads % count == 0):
            order = orders.HeadOrder(heads, kv_heads, lanes)
            if lanes > 1 and order.slots > order.group:
                continue  # an odd count, or one that lanes do not divide, keeps to one lane
            (in_run, positions), (run_stride, position_stride) = order.view(1)
            assert (in_run - 1) * run_stride + (positions - 1) * position_stride == heads - 1
            assert order.slots == order.run * order.pairs and order.slots - order.group in (0, 1)
            for kv_head in range(kv_heads):
                seen = []
                for place in range(order.run):
                    for pair in range(order.pairs):
                        position = order.position(kv_head) + pair
                        head = order.head(kv_head, place, pair) if lanes == 1 else None
                        if place >= in_run:
                            assert heads == kv_heads and head is None  # zeros
                            continue
                        assert position < positions
                        read = place * run_stride + position * position_stride
                        if lanes > 1:
                            assert read == kv_head * order.group + pair * order.run + place
                        elif head is not None:
                            assert read == head
                        else:
                            assert order.shared
                            continue
                        seen.append(read)
                assert sorted(seen) == list(range(kv_head * order.group, (kv_head + 1) * order.group))


@pytest.mark.parametrize(("rows", "piece", "dim", "fp8"), KEYS)
def test_keys(rows: int, piece: int, dim: int, fp8: bool) -> None:
    def check(cute: Any, cutlass: Any) -> None:
        layouts = importlib.import_module("kernels_cute.mqa_logits.layouts")
        dtype = cutlass.Float8E4M3FN if fp8 else cutlass.BFloat16
        written = layouts.piece_layout(dtype, rows, piece, dim, STAGES)
        read = layouts.operand_layout(dtype, rows, dim, STAGES)
        assert str(written.inner) == str(read.inner)
        for stage in range(STAGES):
            for row in range(rows):
                for x in range(0, dim, 21):
                    place = cute.crd2idx((row % piece, x, 0, row // piece, stage), written.outer)
                    assert place == cute.crd2idx((row, x, stage), read.outer), (row, x)

    traced(check)
