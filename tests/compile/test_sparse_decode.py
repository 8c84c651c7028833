"""The decode kernel of sparse attention: its barriers, simulated with random times from their table, and its choice of tiles."""

import dataclasses
from typing import Any

import pytest

from gdn.device import H100
from tests.compile.barrier_simulation import Buffer, Role, Simulation, mbarriers
from tests.compile.variants.base import example

decode = pytest.importorskip("kernels_cute.attention.decode", reason="needs the CuTe DSL")
specs = pytest.importorskip("kernels_cute.attention.decode.spec", reason="needs the CuTe DSL")


def problem_of(sequences: int, heads: tuple[int, int] = (16, 2), **fields: Any) -> Any:
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "num_tokens": sequences, "num_sequences": sequences}
    return example("sparse_attention_decode", **sizes, **fields)


class Block:
    def __init__(self, simulation: Simulation, spec: Any, tiles: int) -> None:
        self.sim, self.spec, self.tiles = simulation, spec, tiles
        bars = mbarriers(spec.barriers)
        self.full, self.free = bars["full"], bars["free"]
        self.ring = [Buffer(f"stage {stage}") for stage in range(spec.stages)]

    def copy(self, number: int) -> Role:
        for tile in range(number, self.tiles, self.spec.copy_warps):
            stage, turn = tile % self.spec.stages, tile // self.spec.stages
            yield self.free[stage], "copy", turn % 2 ^ 1
            self.full[stage].arrive("copy", copies=1)
            self.sim.copy(self.full[stage], self.ring[stage], tile)
            yield self.sim.some_time(0.5)

    def math(self, reader: int) -> Role:
        for tile in range(reader, self.tiles, self.spec.readers):
            stage = tile % self.spec.stages
            yield self.full[stage], "math", tile // self.spec.stages % 2
            yield from self.sim.read(self.ring[stage], tile, 1.0)
            self.free[stage].arrive("math")


@pytest.mark.parametrize("tiles", [0, 1, 2, 7, 64])
@pytest.mark.parametrize("shape", [(2, 6, 2, 2), (1, 12, 4, 4), (2, 4, 2, 4), (2, 2, 2, 1), (1, 8, 8, 2), (1, 12, 3, 4)])
def test_roles_neither_stop_nor_overwrite(shape: tuple[int, int, int, int], tiles: int) -> None:
    spec = specs.Spec(problem_of(64, (24, 2)), decode.Config(2, *shape, 1))
    for seed in range(20):
        simulation = Simulation(seed)
        block = Block(simulation, spec, tiles)
        for number in range(spec.copy_warps):
            simulation.start(f"copy {number}", block.copy(number))
        for warp in range(spec.math_warps):
            simulation.start(f"math {warp}", block.math(warp // spec.sharers))
        simulation.run()


@pytest.mark.parametrize("heads", [(16, 2), (24, 2), (8, 1), (12, 1), (4, 1), (1, 1), (16, 1), (64, 4)])
@pytest.mark.parametrize("dim", [128, 256])
def test_the_default_uses_the_device(heads: tuple[int, int], dim: int) -> None:
    for sequences in (1, 2, 5, 16, 32, 64, 100, 128, 500):
        problem = problem_of(sequences, heads, head_dim=dim)
        assert decode.refusal(problem) is None
        config = decode.default_config(problem, H100)
        assert decode.fits(problem, config, H100)
        blocks = sequences * config.splits * problem.num_kv_heads // config.kv_heads
        assert blocks >= min(16, sequences * 16)  # one sequence has 16 blocks at least
        if 32 <= sequences <= 64:
            assert blocks >= 100
    assert len(decode.configs(problem_of(64, heads, head_dim=dim), H100)) >= 8


def test_the_split_does_not_depend_on_the_batch_where_it_must_not() -> None:
    """The runtime with GDN_BATCH_INVARIANT asks for the configuration of fixed sizes: a row's split follows from k alone."""
    spec = specs.Spec(problem_of(1), decode.Config(2, 2, 4, 2, 4, 1))
    assert {"num_tokens", "num_sequences"} & set(vars(spec)) == set()


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"head_dim": 64}, "head_dim 128 or 256, got 64"),
        ({"rows_aligned": False}, "multiples of 16 bytes"),
        ({"num_heads": 34}, "16 query heads a key head"),
        ({"dtype": "float32"}, "bfloat16 or float16, got float32"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], word: str) -> None:
    reason = decode.refusal(dataclasses.replace(problem_of(64), **fields))
    assert reason is not None and reason.startswith("requires") and word in reason
