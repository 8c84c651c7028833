"""Times of tensor-parallel ranks: what is timed, and what is compared with what."""

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import cli, ranks, spread
from gdn.device import H100
from gdn.layers import StepMetadata
from gdn.layers.named import NAMED, first_layers

TINY = ranks.Job(first_layers(NAMED["tiny"], 4), batches=(3, 1), context=40, device_type="cpu", samples=2)


@pytest.mark.cover
def test_every_number_of_ranks_is_timed() -> None:
    for size in (1, 2):
        found = ranks.measure(size, TINY)
        assert list(found) == [3, 1] and min(found.values()) > 0


def test_ranks_are_compared_with_one() -> None:
    found = ranks.rows({1: {64: 3000.0, 1: 400.0}, 2: {64: 2400.0, 1: 500.0}, 4: {64: 2500.0, 1: 100.0}})
    assert [(row.ranks, row.batch, row.faster, row.must, row.passed) for row in found] == [
        (1, 64, 1.0, None, True), (1, 1, 1.0, None, True), (2, 64, 1.25, 1.2, True), (2, 1, 0.8, None, True),
        (4, 64, 1.2, 1.5, False), (4, 1, 4.0, None, True),
    ]  # fmt: skip


@pytest.mark.parametrize(("last_us", "status"), [(1400.0, 0), (2100.0, 1)])
def test_the_command(monkeypatch: pytest.MonkeyPatch, last_us: float, status: int) -> None:
    times = {1: {64: 3000.0, 1: 400.0}, 2: {64: 2000.0, 1: 300.0}, 4: {64: last_us, 1: 300.0}}
    asked: list[int] = []

    def measure(size: int, job: ranks.Job) -> dict[int, float]:
        asked.append(size)
        return times[size]

    monkeypatch.setattr(spread, "device_spec", lambda: H100)
    monkeypatch.setattr(ranks, "measure", measure)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    result = CliRunner().invoke(cli.app, ["ranks"])
    assert result.exit_code == status and asked == [1, 2, 4], result.output
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    result = CliRunner().invoke(cli.app, ["ranks"])
    assert result.exit_code == 0 and asked[3:] == [1, 2] and "a GPU: 2 here, larger groups are not timed" in result.output


def test_a_step_is_timed_on_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Median of the samples after the first ones, each of as many replays; positions are those of the last token."""
    clock, seen = [0.0], []

    class Fixed(ranks.FixedStep):
        def __call__(self, step: StepMetadata) -> None:
            seen.append((self.input_ids.clone(), self.positions.clone()))
            clock[0] += 1e-3 if len(seen) > ranks.WARM_UPS * ranks.CALLS else 1.0

    monkeypatch.setattr(ranks, "FixedStep", Fixed)
    monkeypatch.setattr(ranks.time, "perf_counter", lambda: clock[0])
    model = ranks.HybridModel(TINY.config, dtype=torch.float32)
    ranks.load(model, ranks.RandomTensors(TINY.config), TINY.config)
    assert ranks.step_us(model, 2, 40, samples=3) == pytest.approx(1000.0)
    assert len(seen) == (ranks.WARM_UPS + 3) * ranks.CALLS
    assert all(torch.equal(ids, seen[0][0]) and positions.tolist() == [39, 39] for ids, positions in seen)
