"""Candidates on the GPU: what a process of its own survives, and what is timed in it."""

from typing import Any

import pytest
import torch

from autotune import cases, compiling, device, engine, shapes, tuning
from autotune.compiling import Compiler
from autotune.device import Device, GpuTimer
from autotune.journal import DROPPED, Journal
from gdn import runtime
from gdn.device import H100
from tests.autotune import fake_kernel
from tests.autotune.fake_device import FakeDevice
from tests.autotune.fake_gpu import KERNEL, OTHER, SHAPE, compile_at_once
from tests.autotune.fake_kernel import Config
from tests.autotune.fake_timer import FakeTimer


@pytest.mark.cover
def test_a_crash_and_a_hang_cost_one_candidate_each(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the four bad ones is named; the other three are timed, in processes that came after."""
    made = tuning.plan(KERNEL, [SHAPE], H100)
    (job,) = engine.jobs([(made, Journal(tmp_path / "journal.jsonl", "s"))])
    work, gpu = engine.visits([job]), Device(H100, FakeTimer, hang_s=12)
    monkeypatch.setattr(compiling.workers, "run", compile_at_once)
    try:
        with Compiler(engine.wanted(work), 1, 60) as compiler:
            engine.run(work, compiler, gpu, deadline=float("inf"))
    finally:
        gpu.close()
    records = {config.tile: job.record(config) for config in job.configs}
    whys = {tile: record.why for tile, record in records.items() if record is not None and record.state == DROPPED}
    assert whys.pop(fake_kernel.WRONG).startswith("ValueError: output error 3e-1")
    assert whys.pop(fake_kernel.RAISES).startswith("DeviceLost: the launch broke the CUDA context: illegal address")
    assert whys == {fake_kernel.CRASHES: "worker process died (SIGKILL)", fake_kernel.HANGS: "took longer than 12 s"}
    winner = job.winner()
    assert (
        winner is not None and winner.config == Config(fake_kernel.FASTEST, False) and winner.gain == pytest.approx(1 - 49 / 90)
    )


def test_a_process_that_does_not_come_up_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.workers.START_S", 0.0)
    with pytest.raises(OSError, match="The process that times candidates did not come up: its process did not start within 0 s"):
        Device(H100, FakeTimer).measure(KERNEL, SHAPE, Config(fake_kernel.FAST, False))


class _Case:
    """Launches take 100 us a row of the tile."""

    made: list[str] = []

    def __init__(self, shape: shapes.Shape, fake: FakeDevice) -> None:
        self.made.append(shape.name)
        self._fake = fake

    def check(self, prepared: Any) -> float:
        if prepared == fake_kernel.WRONG:
            raise cases.WrongResult("output error 3e-1")
        return 0.004

    def launches(self, prepared: Any) -> list[Any]:
        return [self._fake.call(100.0 * prepared)]


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> GpuTimer:
    fake = FakeDevice(monkeypatch)
    _Case.made.clear()
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr(cases, "make", lambda shape, where, spec: _Case(shape, fake))
    monkeypatch.setattr(runtime, "prepare", lambda problem, where, backend, config: config.tile)
    return GpuTimer(H100)


def test_inputs_are_made_once_a_shape(timer: GpuTimer) -> None:
    for tile in (1, 2):
        assert timer.measure(KERNEL, SHAPE, Config(tile, False)) == (0.004, pytest.approx(100.0 * tile))
    times = timer.compare(KERNEL, SHAPE, [Config(2, False), Config(1, False)], 5)
    assert times == [[pytest.approx(200.0)] * 5, [pytest.approx(100.0)] * 5]
    assert _Case.made == [SHAPE.name]
    timer.measure(KERNEL, OTHER, Config(1, False))
    assert _Case.made == [SHAPE.name, OTHER.name]


def test_a_wrong_result_is_never_timed(timer: GpuTimer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gdn.testing.timing.Timed", lambda calls: pytest.fail("timed"))
    with pytest.raises(cases.WrongResult):
        timer.measure(KERNEL, SHAPE, Config(fake_kernel.WRONG, False))


def test_a_broken_context_is_told_from_a_wrong_result(timer: GpuTimer, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(device.DeviceLost, match="^the launch broke the CUDA context: CUDA error: an illegal memory"):
        timer.measure(KERNEL, SHAPE, Config(fake_kernel.WRONG, False))
