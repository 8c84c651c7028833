"""Configuration of the fused decode step."""

from dataclasses import dataclass

from gdn.ops.delta_rule.tiles import Tiles


@dataclass(frozen=True)
class Config(Tiles):
    # Tiles of states in shared memory of a persistent block; 0: a state is in the registers of its own block.
    stages: int = 0
    num_blocks: int = 0  # with stages: blocks of a launch at most, the device's SMs
