"""Floors and rotation on any machine; clocks on a GPU."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from autotune import cli
from benchmarks import cli as benchmarks_cli
from gdn.testing import timing
from gdn.testing.timing import Limits
from tests.autotune.fake_device import FakeDevice

LIMITS = Limits(copy_gbps=3000.0, bf16_tflops=700.0, fp8_tflops=1250.0)


def test_floor_is_the_slower_of_bytes_and_arithmetic() -> None:
    assert LIMITS.floor_us(flops=0, num_bytes=3_000_000, dtype="bfloat16") == pytest.approx(1.0)
    assert LIMITS.floor_us(flops=1_400_000_000, num_bytes=3_000_000, dtype="bfloat16") == pytest.approx(2.0)
    assert LIMITS.floor_us(flops=2_500_000_000, num_bytes=0, dtype="float8_e4m3fn") == pytest.approx(2.0)


def test_inputs_rotate_beyond_the_cache() -> None:
    l2 = 50 << 20
    assert timing.copies_beyond_l2(1 << 30, l2) == 1
    assert timing.copies_beyond_l2(50 << 20, l2) == 3
    assert timing.copies_beyond_l2(1, l2) == 48


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return FakeDevice(monkeypatch)


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("alone_us", [2.0, 150.0, 1000.0, 30_000.0])
def test_a_time_is_what_the_device_sustains(fake: FakeDevice, alone_us: float, captured: bool) -> None:
    """The fake device is half as fast after 20 ms without a pause; the samples of a comparison have pauses."""
    fake.capturable = captured
    call = fake.call(alone_us)
    assert timing.time_us(call) == pytest.approx(2 * alone_us)
    if alone_us < 20_000:
        assert timing.interleaved_us([[call]]) == [pytest.approx(alone_us)]


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("alone_us", [2.0, 150.0, 1000.0])
def test_a_burst_is_over_before_the_device_slows_down(
    fake: FakeDevice, alone_us: float, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.capturable = captured
    rests: list[float] = []
    timed = timing.Timed([fake.call(alone_us), fake.call(3 * alone_us)])
    monkeypatch.setattr("time.sleep", rests.append)
    assert timed.sustained_us() == pytest.approx(2 * 2 * alone_us)
    before = fake.now_us
    assert timed.burst_us() == pytest.approx(2 * alone_us)
    assert fake.now_us - before <= 11 * max(2500.0, 6 * 2 * alone_us)
    assert len(rests) == 1


@pytest.mark.parametrize("alone_us", [2.0, 150.0, 1000.0, 30_000.0])
def test_a_time_costs_between_a_tenth_and_two_fifths_of_a_second(fake: FakeDevice, alone_us: float) -> None:
    timing.time_us(fake.call(alone_us / 2))
    assert 100e3 < fake.now_us < 400e3


def test_inputs_of_one_time_are_taken_in_turn(fake: FakeDevice) -> None:
    assert timing.time_us(fake.call(100.0), fake.call(300.0)) == pytest.approx(2 * 200.0)


def test_a_comparison_takes_its_candidates_in_turn(fake: FakeDevice) -> None:
    seen: list[str] = []
    first, second = ([fake.call(5000.0, lambda name=name: seen.append(name))] for name in "ab")  # type: ignore[misc]
    assert timing.interleaved_us([first, second], samples=4) == [pytest.approx(5000.0)] * 2
    assert seen[-8:] == ["a", "b"] * 4  # one call of so long a time is a sample


@pytest.mark.gpu
def test_limits_of_a_hopper_gpu() -> None:
    limits = timing.measure_limits()
    assert 1500 < limits.copy_gbps < 6000
    assert 300 < limits.bf16_tflops < 1000
    assert 1.3 * limits.bf16_tflops < limits.fp8_tflops < 2000


@pytest.mark.gpu
def test_time_grows_with_the_work_and_does_not_count_the_host() -> None:
    source = torch.zeros(1 << 28, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    half = source.numel() // 2
    small, large = timing.interleaved_us([[lambda: target[:half].copy_(source[:half])], [lambda: target.copy_(source)]])
    assert 1.8 < large / small < 2.2
    tiny = torch.zeros(16, device="cuda")
    assert timing.time_us(lambda: tiny.add_(1)) < 4.0  # an eager launch costs more


@pytest.mark.gpu
def test_a_call_that_synchronises_is_timed_without_a_graph() -> None:
    x = torch.ones(1 << 20, device="cuda")
    timed = timing.Timed([lambda: x.sum().item()])
    assert not timed.captured
    assert timed.sample_us() > 0
    assert timing.Timed([lambda: x.add_(1)]).captured  # capturing still works afterwards


@pytest.mark.gpu
def test_tune_and_bench_run(tmp_path: Path) -> None:
    runner = CliRunner()
    options = ["--shapes", "4/8 batch 128", "--backend", "cute", "--out", str(tmp_path), "--journals", str(tmp_path)]
    tuned = runner.invoke(cli.app, ["tune", "recurrent", *options, "--budget", "4m"])
    assert tuned.exit_code == 0, tuned.output
    (table,) = tmp_path.glob("*/recurrent.cute.json")
    shown = runner.invoke(cli.app, ["show", "--folder", str(tmp_path)])
    assert shown.exit_code == 0 and table.parent.name in shown.output
    figures = tmp_path / "bench.json"
    measured = runner.invoke(benchmarks_cli.app, ["ops", "recurrent", "--shapes", "4/8 batch 128", "--json", str(figures)])
    assert measured.exit_code == 0, measured.output
    assert '"share_of_floor"' in figures.read_text()
