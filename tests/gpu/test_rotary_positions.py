"""Positions without a row in the rotary table, on a GPU: what the kernels do, as their docstrings say, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gdn

pytestmark = pytest.mark.gpu

ROWS, TOKENS, DIM = 16, 8, 128


def call(device: torch.device, positions: list[int], ratio: int | None) -> dict[str, Any]:
    """`compress_indexer_keys` of one sequence with a ratio, else `prepare_indexer`; caches are new."""
    generator = torch.Generator(device).manual_seed(0)

    def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    slots = torch.arange(TOKENS, device=device)
    given: dict[str, Any] = {
        "positions": torch.tensor(positions, device=device), "cos_sin": rows(ROWS, DIM // 2, dtype=torch.float32),
        "k_norm": rows(DIM), "cache": torch.zeros(2, 64, 1, DIM, dtype=torch.bfloat16, device=device), "slot_mapping": slots,
        "rotary_dim": DIM // 2, "backend": "cute",
    }  # fmt: skip
    if ratio is None:
        return given | {"q": rows(TOKENS, 4, DIM), "k": rows(TOKENS, 1, DIM), "weights": None, "q_norm": rows(DIM)}
    ring = torch.zeros(1, 2 * ratio, 1, DIM, dtype=torch.bfloat16, device=device)
    return given | {"raw_k": rows(TOKENS, 1, DIM), "ring": ring, "ring_slots": torch.zeros_like(slots), "ratio": ratio}


def test_the_nearest_row_of_the_table_is_taken(device: torch.device) -> None:
    far, near = ([-3, 0, 1, ROWS - 1, ROWS, ROWS + 1, 2**20, 2**33], [0, 0, 1, *[ROWS - 1] * 5])
    calls = [call(device, positions, None) for positions in (far, near)]
    found = [gdn.prepare_indexer(**arguments)[0] for arguments in calls]
    assert torch.equal(*found) and torch.equal(calls[0]["cache"], calls[1]["cache"])


def test_the_last_row_is_taken_for_a_group_after_the_table(device: torch.device) -> None:
    """The raw keys are the same: those of positions at the end of the table, and of as many groups later."""
    ratio = 4
    positions = [list(range(first, first + TOKENS)) for first in (ROWS + ratio, ROWS + 5 * ratio)]
    calls = [call(device, one, ratio) for one in positions]
    for arguments in calls:
        gdn.compress_indexer_keys(**arguments)
    assert torch.equal(calls[0]["cache"], calls[1]["cache"]) and bool(calls[0]["cache"].any())


@pytest.mark.parametrize("ratio", [None, 4])
def test_they_are_refused_where_values_are_checked(
    device: torch.device, ratio: int | None, switch: Callable[..., object]
) -> None:
    switch(GDN_VALIDATE="1")
    first = ROWS - TOKENS + 1 + (0 if ratio is None else ratio - 1)  # the last position is the first without a row
    arguments = call(device, list(range(first, first + TOKENS)), ratio)
    operator = gdn.prepare_indexer if ratio is None else gdn.compress_indexer_keys
    with pytest.raises(ValueError, match=rf"positions: expected positions below {first + TOKENS - 1} .cos_sin has {ROWS} rows"):
        operator(**arguments)
    assert not arguments["cache"].any()
