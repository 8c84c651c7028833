"""A kernel module that compiles nothing; some of its configurations misbehave while they compile."""

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

from gdn.device import DeviceSpec
from gdn.ops.delta_rule.problem import ChunkProblem

CRASHES, HANGS, RAISES, WRONG, FAST, FASTEST, DEFAULT = 3, 4, 5, 6, 7, 8, 1


@dataclass(frozen=True)
class Config:
    tile: int  # rows
    split: bool  # halves the work


def refusal(problem: ChunkProblem) -> str | None:
    return None if problem.num_v_heads != 64 else "requires fewer than 64 value heads, got 64"


def fits(problem: ChunkProblem, config: Config, device: DeviceSpec) -> bool:
    return 0 < config.tile < 9


def default_config(problem: ChunkProblem, device: DeviceSpec) -> Config:
    return Config(DEFAULT, False)


def configs(problem: ChunkProblem, device: DeviceSpec) -> list[Config]:
    found = [Config(tile, False) for tile in (CRASHES, HANGS, RAISES, WRONG, FAST, FASTEST, DEFAULT)]
    return [config for config in found if fits(problem, config, device)]


def compile(problem: ChunkProblem, config: Config) -> dict[str, bytes]:
    if config.tile == CRASHES:
        os.kill(os.getpid(), signal.SIGSEGV)
    if config.tile == HANGS:
        time.sleep(600)
    if config.tile == RAISES:
        raise ValueError("tile does not divide")
    return {"fake": f"code of {config}".encode()}


def workspace_bytes(problem: ChunkProblem, config: Config) -> int:
    return 0


def launch(compiled: Any, *tensors: Any) -> None:
    raise AssertionError("nothing is launched without a GPU")
