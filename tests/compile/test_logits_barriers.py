"""The barrier tables of the logits kernels: both sides of each ring agree, roles are held to the table, and a simulation of all
roles reads arrive counts from it.

Every warp is a process that waits, works for a random time and arrives. The simulation ends in an error where a warp would write
a stage that another still reads, where one reads what is not there, and where all wait.
"""

import heapq
import random
from collections.abc import Callable, Collection, Generator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

barriers = pytest.importorskip("kernels_cute.mqa_logits.barriers", reason="needs the CuTe DSL")

NAMED = {"turn": barriers.TURN, "scores": barriers.SCORES, "costs": barriers.COSTS}

Process = Generator[Callable[[], bool] | float, None, None]


class Phases:
    """One mbarrier, or one named barrier: completed phases, and arrivals of the current one."""

    def __init__(self, count: int) -> None:
        self.count, self.arrived, self.completed = count, 0, 0

    def arrive(self, arrivals: int = 1) -> None:
        self.arrived += arrivals
        assert self.arrived <= self.count, "more arrivals than a phase takes"
        if self.arrived == self.count:
            self.arrived, self.completed = 0, self.completed + 1

    def passed(self, parity: int) -> bool:
        """Whether a wait for the phase of this parity passes; fresh barriers let waits for parity 1 pass."""
        return self.completed % 2 != parity


class Block:
    """The mbarriers, named barriers and stages of one block."""

    def __init__(self, table: Any, named: Collection[str], seed: int) -> None:
        """named: those of the kernel's named barriers that the form uses."""
        self.random, self.rows = random.Random(seed), table.barriers
        self.phases = {name: [Phases(table.count(name)) for _ in range(row.stages)] for name, row in self.rows.items()}
        self.named = {name: [Phases(32 * NAMED[name].warps) for _ in range(NAMED[name].count)] for name in named}
        self.holds: dict[tuple[str, int], Any] = {}  # a ring's stage -> what was written there
        self.readers: dict[tuple[str, int], int] = {}
        self.written: list[Any] = []

    def arrive(self, name: str, stage: int, by: str) -> None:
        """One warp's arrivals; bytes of the copy engine arrive before the phase completes, so they are part of the arrival."""
        (arrival,) = [one for one in self.rows[name].arrivals if one.role == by]
        self.phases[name][stage].arrive(arrival.count(warps=1))

    def wait(self, name: str, stage: int, parity: int, by: str) -> Callable[[], bool]:
        assert by in self.rows[name].waits
        return lambda: self.phases[name][stage].passed(parity)

    def meet(self, name: str, which: int) -> Callable[[], bool]:
        """A warp's arrival at a named barrier, and the wait for its phase."""
        barrier = self.named[name][which]
        phase = barrier.completed
        barrier.arrive(32)
        return lambda: barrier.completed > phase

    def write(self, ring: str, stage: int, value: Any) -> None:
        assert not self.readers.get((ring, stage)), f"{ring}[{stage}] is overwritten while it is read"
        self.holds[ring, stage] = value

    def read(self, ring: str, stage: int, value: Any) -> None:
        assert self.holds.get((ring, stage)) == value, f"{ring}[{stage}] holds {self.holds.get((ring, stage))}, not {value}"
        self.readers[ring, stage] = self.readers.get((ring, stage), 0) + 1

    def release(self, ring: str, stage: int) -> None:
        self.readers[ring, stage] -= 1

    def run(self, processes: dict[str, Process]) -> None:
        events = [(0.0, place, name) for place, name in enumerate(processes)]
        waiting: dict[str, Callable[[], bool]] = {}
        place = len(events)
        now = 0.0
        while events or waiting:
            ready = [name for name, condition in waiting.items() if condition()]
            for name in ready:
                del waiting[name]
                heapq.heappush(events, (now + self.random.random(), place := place + 1, name))
            assert events, f"deadlock: {', '.join(waiting)} wait"
            now, _, name = heapq.heappop(events)
            step = next(processes[name], None)
            if callable(step):
                waiting[name] = step
            elif step is not None:
                heapq.heappush(events, (now + step * self.random.random() ** 3, place := place + 1, name))


def places(stages: int) -> Iterator[tuple[int, int]]:
    """(stage, parity) of a ring, without end."""
    turn = 0
    while True:
        yield turn % stages, turn // stages & 1
        turn += 1


def copy(block: Block, items: list[int]) -> Process:
    queries, keys = places(block.rows["queries_full"].stages), places(block.rows["keys_full"].stages)
    for item, tiles in enumerate([*items, 0]):
        stage, parity = next(queries)
        yield block.wait("queries_free", stage, parity ^ 1, "copy")
        if item < len(items):
            block.write("queries", stage, item)
        yield 1.0  # on their way
        block.arrive("queries_full", stage, "copy")
        for tile in range(tiles):
            key_stage, key_parity = next(keys)
            yield block.wait("keys_free", key_stage, key_parity ^ 1, "copy")
            block.write("keys", key_stage, (item, tile))
            yield 1.0
            block.arrive("keys_full", key_stage, "copy")


def publish(block: Block, items: list[int]) -> Process:
    if "costs" in block.named:
        yield block.meet("costs", 0)
    for (stage, parity), tiles in zip(places(block.rows["queries_full"].stages), [*items, -1], strict=False):
        yield block.wait("queries_free", stage, parity ^ 1, "publish")
        block.write("ranges", stage, tiles)
        yield 0.3
        block.arrive("queries_full", stage, "publish")


def copy_after_costs(block: Block, items: list[int]) -> Process:
    if "costs" in block.named:
        yield block.meet("costs", 0)
    yield from copy(block, items)


def fill(block: Block) -> Process:
    yield 2.0
    if "costs" in block.named:
        block.named["costs"][0].arrive(32)


def math(block: Block, items: list[int], half: int, warp: int) -> Process:
    """A math warp. Its warpgroup's turn and stores are warpgroup-wide through the named barriers."""
    keys = places(block.rows["keys_full"].stages)
    takes_turns, shares_scores = "turn" in block.named, "scores" in block.named
    if takes_turns and half == 1:
        block.named["turn"][0].arrive(32)
    for item, (stage, parity) in enumerate(places(block.rows["queries_full"].stages)):
        yield block.wait("queries_full", stage, parity, "math")
        if item == len(items):
            assert block.holds["ranges", stage] == -1
            break
        block.read("queries", stage, item)
        block.read("ranges", stage, items[item])
        for tile in range(items[item]):
            key_stage, key_parity = next(keys)
            yield block.wait("keys_full", key_stage, key_parity, "math")
            if takes_turns:
                yield block.meet("turn", half)
            block.read("keys", key_stage, (item, tile))
            yield 1.0  # products
            if takes_turns:
                block.named["turn"][1 - half].arrive(32)
            yield 0.2
            block.release("keys", key_stage)
            block.arrive("keys_free", key_stage, "math")
            if shares_scores:
                yield block.meet("scores", half)
                block.write(f"scores {half}", warp, (item, tile))
            yield 0.7  # sums
            if shares_scores:
                yield block.meet("scores", half)
                for other in range(4):
                    block.read(f"scores {half}", other, (item, tile))
                yield 0.4
                for other in range(4):
                    block.release(f"scores {half}", other)
            block.written.append((half, warp, item, tile))
        block.release("queries", stage)
        block.release("ranges", stage)
        block.arrive("queries_free", stage, "math")
    if takes_turns and half == 0:
        yield block.meet("turn", 0)


def simulate(table: Any, named: Collection[str], seed: int) -> None:
    block = Block(table, named, seed)
    items = [block.random.choice((1, 1, 2, 3, 9)) for _ in range(block.random.randrange(8))]
    warps = [(number // 4, number % 4) for number in range(table.warps["math"])]
    processes = {
        "copy": copy_after_costs(block, items),
        "publish": publish(block, items),
        "fill 0": fill(block),
        "fill 1": fill(block),
        **{f"math {half}.{warp}": math(block, items, half, warp) for half, warp in warps},
    }
    block.run(processes)
    wanted = [(*warp, item, tile) for warp in warps for item, tiles in enumerate(items) for tile in range(tiles)]
    assert sorted(block.written) == sorted(wanted)


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
        simulate(barriers.barriers(*sizes), named, seed)


@pytest.mark.parametrize("name", ["queries_free", "keys_free"])
def test_the_simulation_finds_a_count_that_is_too_small(name: str) -> None:
    """One math warp fewer: a stage is free while the last warp reads it."""
    table = barriers.barriers(2, 8, 8)
    found = []
    for seed in range(40):
        block = Block(table, ("turn",), seed)
        block.phases[name] = [Phases(table.count(name) - 1) for _ in block.phases[name]]
        items = [3, 1, 2, 9, 1, 1, 4]
        processes = {"copy": copy(block, items), "publish": publish(block, items)}
        processes |= {f"math {number}": math(block, items, number // 4, number % 4) for number in range(8)}
        try:
            block.run(processes)
        except AssertionError as error:
            found.append(str(error))
    assert found


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


def test_arrive_counts() -> None:
    """The numbers that the kernels' notes state."""
    for math_warps in (4, 8):
        table = barriers.barriers(2, 3, math_warps)
        counts = {name: table.count(name) for name in table.barriers}
        assert counts == {"queries_full": 33, "queries_free": math_warps, "keys_full": 1, "keys_free": math_warps}
    assert {name: 32 * one.warps for name, one in NAMED.items()} == {"turn": 256, "scores": 128, "costs": 128}
