"""A timer that runs in the tuner's process of the device, without a GPU: some tiles take the process with them."""

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

from autotune.device import DeviceLost
from autotune.shapes import Shape
from autotune.tuning import Kernel
from gdn.device import DeviceSpec
from tests.autotune import fake_kernel
from tests.autotune.fake_gpu import by_tile


class FakeTimer:
    def __init__(self, spec: DeviceSpec) -> None:
        self._made_by = os.getpid()

    def measure(self, kernel: Kernel, shape: Shape, config: Any) -> tuple[float, float]:
        if config.tile == fake_kernel.CRASHES:
            os.kill(os.getpid(), signal.SIGKILL)
        if config.tile == fake_kernel.HANGS:
            time.sleep(600)
        if config.tile == fake_kernel.RAISES:
            raise DeviceLost("the launch broke the CUDA context: illegal address")
        if config.tile == fake_kernel.WRONG:
            raise ValueError("output error 3e-1")
        return float(self._made_by), by_tile(shape, config)

    def compare(self, kernel: Kernel, shape: Shape, configs: Sequence[Any], rounds: int) -> list[list[float]]:
        return [[by_tile(shape, config)] * rounds for config in configs]
