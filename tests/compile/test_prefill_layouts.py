"""Places to which the copy warps of the sparse prefill write rows are those that the products read: queries and keys as operands
whose contraction runs along the head dim, values as one whose contraction runs along rows. Each row has one copying lane, and
registers hold what the code takes them for.
"""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from tests.compile.inspection import traced

products: Any = pytest.importorskip("kernels_cute.attention.products", reason="needs the CuTe DSL")


def swizzled(byte: int) -> int:
    """Address of a byte in rows of 128 bytes: the 16-byte unit changes with the row in its eight."""
    return byte ^ ((byte >> 7 & 7) << 4)


@pytest.mark.parametrize("dim", [256, 128])
def test_written_where_read(dim: int) -> None:
    copy = importlib.import_module("kernels_cute.attention.prefill.copy")

    def check(cute: Any, cutlass: Any) -> None:
        tiles = SimpleNamespace(dtype=cutlass.BFloat16, dim=dim, step=64, stage_bytes=64 * 2 * dim)
        rows, columns = products.by_rows(tiles, 64, 2), products.by_columns(tiles, 2)
        assert "3,4,3" in str(rows.inner) and str(rows.inner) == str(columns.inner)
        for stage in range(2):
            for row in range(64):
                for unit in range(dim // 8):
                    # The terms of `gather`: tile + piece + row + swizzled unit.
                    written = stage * tiles.stage_bytes + unit // 8 * (64 * copy.PIECE_BYTES) + row * copy.PIECE_BYTES
                    written += (unit % 8 ^ row & 7) << 4
                    for x in (8 * unit, 8 * unit + 7):
                        byte = 2 * cute.crd2idx((row, x, stage), rows.outer)
                        assert 2 * cute.crd2idx((x, row, stage), columns.outer) == byte
                        assert swizzled(byte) == written + x % 8 * 2, (stage, row, unit)

    traced(check)


@pytest.mark.parametrize("dim", [256, 128])
def test_each_unit_of_a_row_has_one_lane(dim: int) -> None:
    copy = importlib.import_module("kernels_cute.attention.prefill.copy")
    units, lane_rows, seen = dim // 8, 32 // (dim // 8), set()
    for warp in range(copy.COPY_WARPS):
        for lane in range(32):
            for i in range(copy.WARP_ROWS // lane_rows):
                row = i * lane_rows + lane // units
                assert row < copy.WARP_ROWS  # the lane that holds its offset
                seen.add((warp * copy.WARP_ROWS + row, lane % units))
    assert len(seen) == 64 * units


@pytest.mark.parametrize(("dim", "step"), [(256, 64), (256, 80), pytest.param(128, 128, marks=pytest.mark.cover)])
def test_registers_of_scores_outputs_and_shares(dim: int, step: int) -> None:
    """Value 4 n + 2 side + e of a lane's scores and outputs: row lane / 4 + 8 side of its warp, column 8 n + 2 (lane % 4) + e. In
    an operand the same order: scores are packed as they lie."""

    def check(cute: Any, cutlass: Any) -> None:
        tiles = SimpleNamespace(dtype=cutlass.BFloat16, dim=dim, step=step)
        scores, outputs = products.score_mma(tiles), products.output_mma(tiles)
        for thread in range(128):
            row, column = thread // 32 * 16 + thread % 32 // 4, 2 * (thread % 4)
            for mma, columns in ((scores, step), (outputs, dim)):
                for value in range(columns // 2):
                    n, side, e = value // 4, value // 2 % 2, value % 2
                    at = cute.crd2idx((thread, value), mma.tv_layout_C_tiled)  # down the columns of 64 rows
                    assert (at % 64, at // 64) == (row + 8 * side, column + 8 * n + e), (thread, value)
            for value in range(8):  # of a product over 16 columns
                n, side, e = value // 4, value // 2 % 2, value % 2
                at = cute.crd2idx((thread, value), outputs.tv_layout_A_tiled)
                assert (at % 64, at // 64) == (row + 8 * side, column + 8 * n + e), (thread, value)

    traced(check)


@pytest.mark.parametrize(("dim", "step", "block_size"), [(256, 80, 16), (256, 64, 1344), (128, 128, 272), (128, 96, 48)])
def test_boxes_of_the_dense_kernel_are_written_where_read(dim: int, step: int, block_size: int) -> None:
    """A piece of a step as the copy engine writes it: keys as an operand of rows, values as one of columns."""
    dense = importlib.import_module("kernels_cute.attention.dense.tiles")

    def check(cute: Any, cutlass: Any) -> None:
        problem = SimpleNamespace(
            num_heads=4, num_kv_heads=2, head_dim=dim, dtype="bfloat16", has_gate=False, block_size=block_size
        )
        tiles = dense.DenseTiles(problem, SimpleNamespace(step=step, key_stages=2, value_stages=2, splits=1))
        written, rows, columns = tiles.cache_smem(2), products.by_rows(tiles, step, 2), products.by_columns(tiles, 2)
        assert str(written.inner) == str(rows.inner) and step % tiles.piece == block_size % tiles.piece == 0
        box = tiles.cache_smem(0)
        for stage in range(2):
            for row in range(step):
                piece, in_piece = divmod(row, tiles.piece)
                for x in range(0, dim, 21):
                    place = cute.crd2idx((in_piece, x, 0, 0, piece, stage), written.outer)
                    assert place == cute.crd2idx((row, x, stage), rows.outer) == cute.crd2idx((x, row, stage), columns.outer)
                    if piece == stage == 0:
                        assert place == cute.crd2idx((in_piece, x, 0, 0), box.outer)

    traced(check)


@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 2), (12, 1), (5, 5), (128, 1)])
def test_queries_of_the_dense_kernel_are_written_where_read(heads: int, kv_heads: int) -> None:
    """Row = query * group + head."""
    dense = importlib.import_module("kernels_cute.attention.dense.tiles")

    def check(cute: Any, cutlass: Any) -> None:
        problem = SimpleNamespace(
            num_heads=heads, num_kv_heads=kv_heads, head_dim=256, dtype="bfloat16", has_gate=False, block_size=16
        )
        tiles = dense.DenseTiles(problem, SimpleNamespace(step=80, key_stages=2, value_stages=2, splits=1))
        written, read = tiles.query_smem(), products.by_rows(tiles, 128, 1)
        assert str(written.inner) == str(read.inner)
        for query in range(tiles.queries):
            for head in range(tiles.group):
                for x in range(0, 256, 21):
                    place = cute.crd2idx((head, query, x, 0), written.outer)
                    assert place == cute.crd2idx((query * tiles.group + head, x, 0), read.outer)

    traced(check)
