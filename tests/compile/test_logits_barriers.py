"""The barrier tables of the logits kernels: both sides of each ring agree, roles are held to the table, and a simulation of all
roles reads arrive counts from it.
"""

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from tests.compile.barrier_simulation import Buffer, Named, Role, Simulation, faults_found, mbarriers

barriers = pytest.importorskip("kernels_cute.mqa_logits.barriers", reason="needs the CuTe DSL")

NAMED = {"turn": barriers.TURN, "scores": barriers.SCORES, "costs": barriers.COSTS}
NO_ITEM = -1


class Block:
    """A block that takes items of so many tiles. named: those of the kernel's named barriers that the form uses."""

    def __init__(self, table: Any, named: Collection[str], seed: int, items: list[int] | None = None) -> None:
        self.simulation = Simulation(seed)
        random = self.simulation.random
        self.items = [random.choice((1, 1, 2, 3, 9)) for _ in range(random.randrange(8))] if items is None else items
        self.barriers = mbarriers(table)
        self.named = {
            name: [Named(name, NAMED[name].warps, "math", "copy", "publish") for _ in range(NAMED[name].count)] for name in named
        }
        self.queries, self.ranges = (
            [Buffer(f"{name} {stage}") for stage in range(len(self.barriers["queries_full"]))] for name in ("queries", "ranges")
        )
        self.keys = [Buffer(f"keys {stage}") for stage in range(len(self.barriers["keys_full"]))]
        self.costs = [Buffer(f"costs of fill warp {number}") for number in range(2)]
        self.scores = [[Buffer(f"scores of warp {warp} in half {half}") for warp in range(4)] for half in range(2)]
        self.warps = [(number // 4, number % 4) for number in range(table.warps["math"])]
        self.written: list[tuple[int, int, int, int]] = []

    def run(self) -> None:
        roles = {"copy": self.copy(), "publish": self.publish(), **{f"fill {number}": self.fill(number) for number in range(2)}}
        roles |= {f"math {half}.{warp}": self.math(half, warp) for half, warp in self.warps}
        for name, role in roles.items():
            self.simulation.start(name, role)
        self.simulation.run()
        wanted = [(*warp, item, tile) for warp in self.warps for item, tiles in enumerate(self.items) for tile in range(tiles)]
        assert sorted(self.written) == sorted(wanted)

    def place(self, ring: str, turn: int) -> tuple[int, int]:
        """Stage and parity of a fill."""
        stages = len(self.barriers[f"{ring}_full"])
        return turn % stages, turn // stages % 2

    def wait(self, name: str, stage: int, parity: int, role: str) -> Role:
        yield self.barriers[name][stage], role, parity

    def after_costs(self, role: str) -> Role:
        if "costs" in self.named:
            yield self.named["costs"][0].meet(role)
            for costs in self.costs:
                yield from self.simulation.read(costs, "added up", 0.1)

    def bring(self, ring: str, turn: int, buffers: list[Buffer], content: Any) -> Role:
        """One copy once the stage is free; without content, after the last item, the arrival alone."""
        stage, parity = self.place(ring, turn)
        yield from self.wait(f"{ring}_free", stage, parity ^ 1, "copy")
        full = self.barriers[f"{ring}_full"][stage]
        full.arrive("copy", copies=int(content is not None))
        if content is not None:
            self.simulation.copy(full, buffers[stage], content)

    def copy(self) -> Role:
        yield from self.after_costs("copy")
        turn = 0
        for item, tiles in enumerate(self.items):
            yield from self.bring("queries", item, self.queries, item)
            for tile in range(tiles):
                yield from self.bring("keys", turn, self.keys, (item, tile))
                turn += 1
        yield from self.bring("queries", len(self.items), self.queries, None)

    def publish(self) -> Role:
        yield from self.after_costs("publish")
        for item, tiles in enumerate([*self.items, NO_ITEM]):
            stage, parity = self.place("queries", item)
            yield from self.wait("queries_free", stage, parity ^ 1, "publish")
            self.ranges[stage].write(tiles)
            yield self.simulation.some_time(0.3)
            self.barriers["queries_full"][stage].arrive("publish", 32)

    def fill(self, number: int) -> Role:
        yield self.simulation.some_time(2.0)
        self.costs[number].write("added up")
        if "costs" in self.named:
            self.named["costs"][0].arrive()

    def math(self, half: int, warp: int) -> Role:
        """A math warp. Its warpgroup's turn and stores are warpgroup-wide through the named barriers."""
        takes_turns, turn = "turn" in self.named, 0
        if takes_turns and half == 1:
            self.named["turn"][0].arrive()
        for item, tiles in enumerate([*self.items, NO_ITEM]):
            stage, parity = self.place("queries", item)
            yield from self.wait("queries_full", stage, parity, "math")
            self.ranges[stage].begin(tiles)
            if tiles == NO_ITEM:
                break
            self.queries[stage].begin(item)
            for tile in range(tiles):
                yield from self.tile(half, turn, (item, tile))
                yield from self.sums(half, warp, (item, tile))
                self.written.append((half, warp, item, tile))
                turn += 1
            self.queries[stage].end()
            self.ranges[stage].end()
            self.barriers["queries_free"][stage].arrive("math")
        if takes_turns and half == 0:
            yield self.named["turn"][0].meet("math")

    def tile(self, half: int, turn: int, content: tuple[int, int]) -> Role:
        """Products with a tile of keys."""
        stage, parity = self.place("keys", turn)
        yield from self.wait("keys_full", stage, parity, "math")
        if "turn" in self.named:
            yield self.named["turn"][half].meet("math")
        self.keys[stage].begin(content)
        yield self.simulation.some_time(1.0)
        if "turn" in self.named:
            self.named["turn"][1 - half].arrive()
        yield self.simulation.some_time(0.2)
        self.keys[stage].end()
        self.barriers["keys_free"][stage].arrive("math")

    def sums(self, half: int, warp: int, content: tuple[int, int]) -> Role:
        """Sums over the heads, and where the scores go through shared memory the exchange of them."""
        if "scores" not in self.named:
            yield self.simulation.some_time(0.7)
            return
        yield self.named["scores"][half].meet("math")
        self.scores[half][warp].write(content)
        yield self.simulation.some_time(0.7)
        yield self.named["scores"][half].meet("math")
        for buffer in self.scores[half]:
            buffer.begin(content)
        yield self.simulation.some_time(0.4)
        for buffer in self.scores[half]:
            buffer.end()


# Stages of queries and of keys, math warps, and the named barriers in use.
FORMS: dict[str, tuple[tuple[int, int, int], tuple[str, ...]]] = {
    "ragged": ((2, 8, 8), ("turn",)),
    "ragged, one stage of queries": ((1, 3, 8), ("turn",)),
    "ragged, runs at the end, scores through shared memory": ((2, 5, 8), ("turn", "costs", "scores")),
    "paged, one math warpgroup": ((2, 3, 4), ()),
    "paged, two": ((2, 4, 8), ()),
    "paged, two in turns": ((2, 2, 8), ("turn",)),
}


@pytest.mark.parametrize("name", list(FORMS))
def test_roles_neither_wait_for_ever_nor_overwrite_what_is_read(name: str) -> None:
    sizes, named = FORMS[name]
    for seed in range(40):
        Block(barriers.barriers(*sizes), named, seed).run()


@pytest.mark.parametrize("name", ["queries_free", "keys_free"])
def test_the_simulation_finds_a_count_that_is_too_small(name: str) -> None:
    """One math warp fewer: a stage is free while the last warp reads it."""
    blocks = (Block(barriers.barriers(2, 8, 8), ("turn",), seed, [3, 1, 2, 9, 1, 1, 4]) for seed in range(40))
    assert faults_found(blocks, name, {"math": 7})


def test_both_sides_of_a_ring_agree() -> None:
    """The warps that fill a stage wait until it is free, and those that wait for it free it."""
    rows = barriers.barriers(2, 8, 8).barriers
    for ring in ("queries", "keys"):
        full, free = rows[f"{ring}_full"], rows[f"{ring}_free"]
        assert full.stages == free.stages
        assert {one.role for one in full.arrivals} == set(free.waits)
        assert {one.role for one in free.arrivals} == set(full.waits)


def test_named_barriers_are_apart() -> None:
    numbers = [one.first_id + which for one in NAMED.values() for which in range(one.count)]
    assert len(set(numbers)) == len(numbers) and min(numbers) > 0 and max(numbers) < 16


def test_roles_are_held_to_the_table() -> None:
    tiles = SimpleNamespace(barriers=barriers.barriers(2, 8, 8))
    with pytest.raises(ValueError, match="does not arrive"):
        barriers.arrive(tiles, None, "queries_full", 0, by="math")
    with pytest.raises(ValueError, match="does not wait"):
        barriers.wait(tiles, None, "queries_full", 0, 0, by="copy")
    with pytest.raises(ValueError, match="without bytes"):
        barriers.arrive_and_expect(tiles, None, "queries_full", 0, 16, by="publish")
