"""The barriers of the sparse prefill: a simulation of its roles, with arrive counts from the kernel's own table.

Every warp is a process. A copy warp has its own part of each tile; its asynchronous copies arrive at the barrier when they end.
What a part holds is checked wherever it is read, and nothing may be written while somebody reads it.
"""

from collections import Counter
from typing import Any

import pytest

from tests.compile.barrier_simulation import Buffer, Role, Simulation, faults_found, mbarriers

prefill_tiles = pytest.importorskip("kernels_cute.attention.prefill.tiles", reason="needs the CuTe DSL")

COPY, MATH = prefill_tiles.COPY_WARPS, prefill_tiles.MATH_WARPS


class Block:
    def __init__(self, stages: tuple[int, int], items: list[int], seed: int) -> None:
        """items: steps of each."""
        self.simulation, self.items = Simulation(seed), items
        self.stages = dict(zip(("keys", "values"), stages, strict=True))
        self.barriers = mbarriers(prefill_tiles.barriers(*stages))
        parts = [(name, stage, warp) for name, count in self.stages.items() for stage in range(count) for warp in range(COPY)]
        parts += [("queries", 0, warp) for warp in range(COPY)]
        self.parts = {part: Buffer(str(part)) for part in parts}
        self.records = [Buffer(f"record {number}") for number in range(2)]
        self.finished: Counter[tuple[int, int]] = Counter()

    def copy(self, name: str, stage: int, warp: int, content: Any) -> None:
        """A warp's copies into its part, which end some time later, each lane's with an arrival."""

        def end() -> None:
            if content is not None:
                self.parts[name, stage, warp].write(content)
            self.barriers[f"{name}_full"][stage].arrive("copy", 32)

        self.simulation.after(self.simulation.some_time(3.0), end)

    def stage_of(self, name: str, step: int) -> tuple[int, int]:
        return step % self.stages[name], step // self.stages[name] % 2

    def copy_warp(self, warp: int) -> Role:
        place = 0

        def publish(number: int, steps: int) -> None:
            if warp == 0:
                self.records[number % 2].write((number, steps))
                self.barriers["queries_full"][0].arrive("dealer")
            self.copy("queries", 0, warp, number if steps > 0 else None)

        for number, steps in enumerate([*self.items, -1]):
            if steps <= 0:
                yield self.barriers["queries_free"][0], "copy", number % 2 ^ 1
                publish(number, steps)
            for step in range(steps + 1 if steps > 0 else 0):
                if step < steps:
                    stage, parity = self.stage_of("keys", place + step)
                    yield self.barriers["keys_free"][stage], "copy", parity ^ 1
                    self.copy("keys", stage, warp, (number, step))
                    if step == 0:
                        yield self.barriers["queries_free"][0], "copy", number % 2 ^ 1
                        publish(number, steps)
                if step > 0:
                    stage, parity = self.stage_of("values", place + step - 1)
                    yield self.barriers["values_free"][stage], "copy", parity ^ 1
                    self.copy("values", stage, warp, (number, step - 1))
                yield self.simulation.some_time(0.5)
            place += max(steps, 0)

    def begin(self, name: str, stage: int, content: Any) -> None:
        for warp in range(COPY):
            self.parts[name, stage, warp].begin(content)

    def end(self, name: str, stage: int) -> None:
        for warp in range(COPY):
            self.parts[name, stage, warp].end()
        self.barriers[f"{name}_free"][stage].arrive("math")

    def math_warp(self, warp: int) -> Role:
        place = 0
        for number, steps in enumerate([*self.items, -1]):
            yield self.barriers["queries_full"][0], "math", number % 2
            record = self.records[number % 2]
            assert record.content == (number, steps)
            if steps > 0:
                self.begin("queries", 0, number)
                for step in range(steps + 1):
                    if step < steps:
                        stage, parity = self.stage_of("keys", place + step)
                        yield self.barriers["keys_full"][stage], "math", parity
                        self.begin("keys", stage, (number, step))
                    else:
                        self.end("queries", 0)
                    if step > 0:
                        before, parity = self.stage_of("values", place + step - 1)
                        yield self.barriers["values_full"][before], "math", parity
                        self.begin("values", before, (number, step - 1))
                    yield self.simulation.some_time(1.0)
                    if step < steps:
                        self.end("keys", stage)
                    yield self.simulation.some_time(1.0)
                    if step > 0:
                        self.end("values", before)
                place += steps
            else:
                self.barriers["queries_free"][0].arrive("math")
            if steps < 0:
                break
            yield from self.simulation.read(record, (number, steps), 2.0)  # the results are stored
            self.finished[warp, number] += 1

    def run(self) -> None:
        for warp in range(COPY):
            self.simulation.start(f"copy {warp}", self.copy_warp(warp))
        for warp in range(MATH):
            self.simulation.start(f"math {warp}", self.math_warp(warp))
        self.simulation.run()
        assert self.finished == Counter((warp, number) for warp in range(MATH) for number in range(len(self.items)))


@pytest.mark.parametrize("stages", [(2, 2), (3, 2), (2, 3), (5, 5)])
def test_roles_neither_wait_for_ever_nor_overwrite_what_is_read(stages: tuple[int, int]) -> None:
    for seed in range(30):
        items = [(seed * 7 + number * 5) % 6 for number in range(seed % 7)]
        Block(stages, items, seed).run()


@pytest.mark.parametrize("name", ["keys_free", "values_free", "queries_free"])
def test_the_simulation_finds_a_count_that_is_too_small(name: str) -> None:
    """One math warp fewer: a stage is free while the last warp reads it."""
    blocks = (Block((3, 2), [3, 1, 5, 2, 4, 1, 6], seed) for seed in range(20))
    assert faults_found(blocks, name, {"math": MATH - 1})
