"""Lower triangular tiles as panels of 16 columns: M, P and L. A product's k step takes one panel, with the columns of the result
that it reaches."""

from typing import Any

from kernels_cute.chunk.key_head.shape import PANEL, PANEL_ROW_BYTES
from kernels_cute.chunk.shape import CHUNK


def panel_offset(panel: Any) -> Any:
    """Return the bytes from a tile to row 0 of its panel, as if the panel had all rows; it leaves out the first 16 * panel."""
    return panel * (PANEL_ROW_BYTES * (CHUNK - PANEL // 2)) - panel * panel * (PANEL_ROW_BYTES * PANEL // 2)


def block_address(tile: Any, row: Any, panel: Any, unit: Any) -> Any:
    """Address of the 16 bytes `unit` (0 or 1) of a row of a panel; tile: its first byte, a multiple of 256."""
    return tile + panel_offset(panel) + row * PANEL_ROW_BYTES + ((unit ^ (row >> 2 & 1)) << 4)
