"""The measurement of where the two forms of the delta rule cross, without a device."""

import pytest
import torch

from benchmarks import crossing


@pytest.mark.parametrize(
    ("times", "last"),
    [
        ({1: (3.8, 8.3), 4: (6.0, 8.4), 8: (9.0, 8.5)}, 4),
        ({1: (9.0, 8.0), 2: (1.0, 8.0)}, 0),
        ({2: (1.0, 2.0), 1: (1.0, 2.0)}, 2),
        ({1: (1.0, 2.0), 2: (3.0, 2.0), 3: (1.0, 2.0)}, 1),  # a gain after a loss is noise
    ],
)
def test_the_last_length_before_the_chunk_form_wins(times: dict[int, tuple[float, float]], last: int) -> None:
    assert crossing.crossing(times) == last


def test_both_calls_are_the_same_step() -> None:
    recurrent, chunk = crossing.calls(2, 3, torch.device("cpu"), tp=8)
    (o, pool), (other, other_pool) = recurrent(), chunk()  # type: ignore[misc]
    assert o.shape == other.shape == (1, 6, 4, 128) and pool is not None and pool.shape == other_pool.shape
