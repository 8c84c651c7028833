"""The barriers of dense prefill: a simulation of its roles, with arrive counts from the kernel's own table.

Every warp is a process. What a stage holds is checked wherever it is read, and nothing may be written while somebody reads it.
Each math warpgroup writes zeros over the end of the first values. At the end all math warps meet, since a block of a split tile
stores its part where keys and values were. The blocks of a split tile meet twice: parts are stored before any is read, and read
before a block leaves.
"""

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from tests.compile.barrier_simulation import Buffer, Named, Role, Simulation, faults_found, mbarriers

dense_tiles = pytest.importorskip("kernels_cute.attention.dense.tiles", reason="needs the CuTe DSL")

MATH = dense_tiles.MATH_WARPS


class Block:
    def __init__(self, stages: tuple[int, int], steps: int, seed: int, *, cluster: "Cluster | None" = None) -> None:
        self.cluster, self.steps = cluster, steps
        self.simulation = Simulation(seed) if cluster is None else cluster.simulation
        self.stages = dict(zip(("keys", "values"), stages, strict=True))
        self.barriers = mbarriers(dense_tiles.barriers(*stages))
        self.parts = {(name, stage): Buffer(f"{name} {stage}") for name, count in self.stages.items() for stage in range(count)}
        self.parts["queries", 0] = Buffer("queries")
        self.zeroed, self.stored = (
            [Named(f"zeroed {n}", MATH // 2, "math") for n in range(2)],
            Named("parts stored", MATH, "math"),
        )
        self.rows = [Buffer(f"rows of warp {warp}") for warp in range(MATH)]  # of the block's part of a split tile
        self.finished: Counter[int] = Counter()

    def place(self, name: str, step: int) -> tuple[int, int]:
        return step % self.stages[name], step // self.stages[name] % 2

    def copy(self, name: str, stage: int, content: Any) -> None:
        full = self.barriers[f"{name}_full"][stage]
        full.arrive("copy", copies=1)
        self.simulation.copy(full, self.parts[name, stage], content)

    def copy_warp(self) -> Role:
        self.copy("queries", 0, "queries")
        for step in range(self.steps + 1):
            for name, own in (("keys", step), ("values", step - 1)):
                if 0 <= own < self.steps:
                    stage, parity = self.place(name, own)
                    yield self.barriers[f"{name}_free"][stage], "copy", parity ^ 1
                    self.copy(name, stage, own)
            yield self.simulation.some_time(0.5)

    def begin(self, name: str, step: int) -> Role:
        stage, parity = self.place(name, step)
        yield self.barriers[f"{name}_full"][stage], "math", parity
        self.parts[name, stage].begin(step)

    def end(self, name: str, step: int) -> None:
        stage, _ = self.place(name, step)
        self.parts[name, stage].end()
        self.barriers[f"{name}_free"][stage].arrive("math")

    def math_warp(self, warp: int) -> Role:
        if self.steps > 0:
            yield self.barriers["queries_full"][0], "math", 0
            yield from self.begin("keys", 0)
            yield self.simulation.some_time(1.0)
            self.end("keys", 0)
            yield self.barriers["values_full"][0], "math", 0  # zeros after the last position
            yield self.zeroed[warp // 4].meet("math")
            for step in range(1, self.steps):
                yield from self.begin("keys", step)
                yield from self.begin("values", step - 1)
                yield self.simulation.some_time(1.0)
                self.end("keys", step)
                yield self.simulation.some_time(1.0)
                self.end("values", step - 1)
            yield from self.begin("values", self.steps - 1)
            yield self.simulation.some_time(1.0)
            self.parts["values", self.place("values", self.steps - 1)[0]].end()
        yield self.stored.meet("math")
        for part in self.parts.values():  # where a split tile's parts are stored
            assert part.readers == 0 or part.name == "queries", part.name
        if self.cluster is not None:
            yield from self.cluster.merge(self.rows[warp])
        self.finished[warp] += 1

    def start(self) -> None:
        if self.steps > 0:
            self.simulation.start("copy", self.copy_warp())
        for warp in range(MATH):
            self.simulation.start(f"math {warp}", self.math_warp(warp))

    def has_ended(self) -> bool:
        return self.finished == Counter(range(MATH))

    def run(self) -> None:
        self.start()
        self.simulation.run()
        assert self.has_ended()


class Cluster:
    """The blocks of a split tile. meetings: of the two, those that are held."""

    def __init__(self, splits: int, stages: tuple[int, int], steps: int, seed: int, meetings: tuple[int, ...] = (0, 1)) -> None:
        self.simulation, self.meetings = Simulation(seed), meetings
        ends = [rank * steps // splits for rank in range(splits + 1)]
        self.blocks = [Block(stages, end - start, seed, cluster=self) for start, end in pairwise(ends)]
        self.met = Named("cluster", MATH * splits, "math")

    def meet(self, number: int) -> Role:
        if number in self.meetings:
            yield self.met.meet("math")

    def merge(self, rows: Buffer) -> Role:
        """A warp stores its rows, and reads some of every block."""
        yield self.simulation.some_time(0.3)
        rows.write("stored")
        yield from self.meet(0)
        for block in self.blocks:
            for part in block.rows:
                yield from self.simulation.read(part, "stored", 0.1)
                assert not block.has_ended(), "a block has left while its part is read"
        yield from self.meet(1)

    def run(self) -> None:
        for block in self.blocks:
            block.start()
        self.simulation.run()
        assert all(block.has_ended() for block in self.blocks)


@pytest.mark.parametrize("stages", [(2, 2), (3, 2), (3, 3)])
def test_roles_neither_wait_for_ever_nor_overwrite_what_is_read(stages: tuple[int, int]) -> None:
    for seed in range(30):
        Block(stages, seed % 9, seed).run()


@pytest.mark.parametrize("splits", [2, 4, 8])
def test_the_blocks_of_a_split_tile_neither_wait_for_ever_nor_read_what_is_not_there(splits: int) -> None:
    """Fewer steps than blocks, and more."""
    for seed, steps in enumerate((1, 3, 8, 13, 30)):
        Cluster(splits, (2, 2), steps, seed).run()


@pytest.mark.parametrize(("held", "message"), [((1,), "holds None"), ((0,), "has left")])
def test_the_simulation_finds_a_missing_meeting_of_the_blocks(held: tuple[int, ...], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        for seed in range(20):
            Cluster(4, (2, 2), 30, seed, held).run()


@pytest.mark.parametrize("name", ["keys_free", "values_free"])
def test_the_simulation_finds_a_count_that_is_too_small(name: str) -> None:
    """One math warp fewer: a stage is free while the last warp reads it."""
    blocks = (Block((2, 2), 8, seed) for seed in range(20))
    assert faults_found(blocks, name, {"math": MATH - 1})
