"""A CUDA device as timing sees it: it slows down where it works for long without a pause, and nobody waits for real."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gdn.testing import timing

_BURST_US = 20e3  # at full speed, after a pause
_SLOWER = 2.0


class FakeDevice:
    """Replaces what gdn.testing.timing asks of torch.cuda. `now_us`: time of the device, all of it work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_us = 0.0
        self.capturable = True
        self._busy_us = 0.0  # since the last pause
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = device.now_us

            def synchronize(self) -> None:
                device.pause()

            def elapsed_time(self, end: "Event") -> float:
                return (end.at - self.at) / 1e3

        monkeypatch.setattr("torch.cuda.Event", Event)
        monkeypatch.setattr("torch.cuda.synchronize", self.pause)
        monkeypatch.setattr(timing.Timed, "_capture", lambda timed, rounds: self._graph(timed._calls, rounds))

    def pause(self) -> None:
        """The host waits: the device has nothing to do for a moment."""
        self._busy_us = 0.0

    def call(self, alone_us: float, also: Callable[[], object] = lambda: None) -> Callable[[], None]:
        def call() -> None:
            also()
            taken = alone_us * (_SLOWER if self._busy_us >= _BURST_US else 1.0)
            self.now_us += taken
            self._busy_us += taken

        return call

    def _graph(self, calls: Sequence[Callable[[], object]], rounds: int) -> Any:
        class Graph:
            def replay(self) -> None:
                for _ in range(rounds):
                    for call in calls:
                        call()

        return Graph() if self.capturable else None
