"""All spoilings: importing this registers them."""

from tests.ops.spoiling import (  # noqa: F401
    spoil_context,
    spoil_layout,
    spoil_pages,
    spoil_rings,
    spoil_sequences,
    spoil_sharing,
    spoil_together,
    spoil_values,
)
from tests.ops.spoiling.spoiling import SPOILINGS, Spoiled

__all__ = ["SPOILINGS", "Spoiled"]
