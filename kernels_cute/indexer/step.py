"""Host side that the indexer's steps share: one kernel an operator, and configurations whose fields take a few values each."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

from gdn.device import DeviceSpec
from kernels_cute.common.build import library


@dataclass(frozen=True)
class Step:
    """The runtime's contract for one operator; its module exports these methods as functions."""

    name: str  # entry of the library
    kernel: Callable[[Any, Any], Any]  # class of the kernel for a problem and a configuration
    arguments: Callable[[Any], Any]  # Params of fake tensors and scalars to compile for
    config: Callable[..., Any]  # class of configurations
    choices: dict[str, tuple[int, ...]]  # values of each of its fields
    divides: Callable[[Any, Any], bool] = lambda problem, config: (
        True
    )  # whether the problem splits into the configuration's parts

    def fits(self, problem: Any, config: Any, device: DeviceSpec) -> bool:
        """Whether the configuration can be compiled and launched."""
        is_listed = all(getattr(config, name) in values for name, values in self.choices.items())
        return is_listed and self.divides(problem, config)

    def configs(self, problem: Any, device: DeviceSpec) -> list[Any]:
        """Every feasible configuration."""
        space = [self.config(*values) for values in product(*self.choices.values())]
        return [config for config in space if self.fits(problem, config, device)]

    def workspace_bytes(self, problem: Any, config: Any) -> int:
        return 0

    def compile(self, problem: Any, config: Any) -> dict[str, bytes]:
        """The one kernel, built for sm_90a."""
        return {self.name: library(self.name, self.kernel(problem, config), *self.arguments(problem))}

    def launch(self, compiled: Any, params: Any) -> None:
        compiled.functions[self.name](*params)
