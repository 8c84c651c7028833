"""The barriers of the streamed decode step: the warps that copy states and entries, those that prepare and those that multiply,
simulated with random times from the kernel's own table.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.compile.barrier_simulation import Buffer, Named, Role, Simulation, mbarriers, with_arrivals
from tests.compile.variants.base import example

specs = pytest.importorskip("kernels_cute.gdn_decode.streamed.spec", reason="needs the CuTe DSL")
gdn_decode = pytest.importorskip("kernels_cute.gdn_decode", reason="needs the CuTe DSL")
common = pytest.importorskip("kernels_cute.common.barriers", reason="needs the CuTe DSL")

Arrivals = common.Arrivals
STATES, ENTRIES, PREPARE, MATH = "states", "entries", "prepare", "math"
WARPS, PREPARE_WARPS, TILES_OF_HEAD = 8, 4, 4
END = "no item"


def spec_of(num_v_heads: int, stages: int, state_dtype: str = "float32") -> Any:
    ring = {"cu_seqlens_dtype": "int32", "has_accepted": True, "ring_rows": 22, "fold_every": 15}
    problem = example("gdn_decode", num_v_heads=num_v_heads, state_dtype=state_dtype, **ring)
    return specs.Spec(problem, gdn_decode.Config(256, 8, 4, 256, stages, 132))


class Block:
    """A block with `items` live items, one after the other."""

    def __init__(self, simulation: Simulation, spec: Any, items: int) -> None:
        self.sim, self.spec, self.items = simulation, spec, items
        bars = mbarriers(spec.barriers)
        self.full, self.free = bars["state_full"], bars["state_free"]
        self.entries_full, self.entries_free = bars["entries_full"], bars["entries_free"]
        self.tokens_full, self.weights_full, self.done = bars["tokens_full"], bars["weights_full"], bars["done"]
        self.stages = [Buffer(f"stage {stage}") for stage in range(spec.stages)]
        self.entries = [Buffer(f"entries {buffer}") for buffer in range(spec.buffers)]
        self.decays = [[Buffer(f"log decays {buffer} of lane {lane}") for lane in range(32)] for buffer in range(spec.buffers)]
        # What each warp that prepares writes of an item: after the convolution, and after the barrier behind it.
        self.tokens, self.weights = (
            [[Buffer(f"{name} {buffer} of warp {warp}") for warp in range(PREPARE_WARPS)] for buffer in range(2)]
            for name in ("tokens", "weights")
        )
        self.numbers = [Buffer(f"numbers {buffer}") for buffer in range(2)]
        self.squares = [[Buffer(f"squares {buffer} of warp {warp}") for warp in range(WARPS)] for buffer in range(2)]
        self.all = Named("all", PREPARE_WARPS, PREPARE)
        self.heads = [Named("head", TILES_OF_HEAD, MATH) for _ in range(2)]
        # The entries' warp only arrives there: once, when the first entries have been asked for.
        self.start, self.has_asked = Named("start", 1, STATES), False

    def run(self) -> None:
        self.sim.start("states", self.states_warp())
        self.sim.start("entries", self.entries_warp())
        for warp in range(PREPARE_WARPS):
            self.sim.start(f"prepare {warp}", self.prepare_warp(warp))
        for warp in range(WARPS):
            self.sim.start(f"math {warp}", self.math_warp(warp))
        self.sim.run()

    def states_warp(self) -> Role:
        spec = self.spec
        for item in range(self.items):
            if item == 0:
                yield self.start, STATES, 0
                assert self.has_asked
            for tile in range(spec.item_tiles):
                earlier = item * spec.item_tiles + tile - spec.in_flight
                if earlier >= 0:
                    of_item, before = divmod(earlier, spec.item_tiles)
                    stage, parity = specs.stage_of(spec, of_item, before % WARPS, before // WARPS)
                    yield self.full[stage], STATES, parity
                    assert self.stages[stage].content == (of_item, before)
                stage, parity = specs.stage_of(spec, item, tile % WARPS, tile // WARPS)
                yield self.free[stage], STATES, parity ^ 1
                self.full[stage].arrive(STATES, copies=1)
                self.sim.copy(self.full[stage], self.stages[stage], (item, tile))

    def entries_warp(self) -> Role:
        spec = self.spec
        for item in range(self.items):
            buffer = item % spec.buffers
            yield self.entries_free[buffer], ENTRIES, item // spec.buffers % 2 ^ 1
            self.sim.copy(self.entries_full[buffer], self.entries[buffer], item)
            yield self.sim.some_time(0.3)
            for lane, decays in enumerate(self.decays[buffer]):
                decays.write(item)
                self.entries_full[buffer].arrive(ENTRIES, copies=lane == 0)
            if item == 0:
                self.has_asked = True
                self.start.arrive()

    def prepare_warp(self, warp: int) -> Role:
        spec = self.spec
        for item in range(self.items):
            buffer, own = item % spec.buffers, item % 2
            yield self.done[own], PREPARE, item // 2 % 2 ^ 1
            self.tokens[own][warp].write(item)
            yield self.sim.some_time(0.3)
            yield self.entries_full[buffer], PREPARE, item // spec.buffers % 2
            if warp == 0:
                self.numbers[own].write(item)
            self.tokens_full[own].arrive(PREPARE)
            yield self.all.meet(PREPARE)
            for read in (*self.tokens[own], self.entries[buffer], *self.decays[buffer]):
                yield from self.sim.read(read, item, 0.02)
            self.weights[own][warp].write(item)
            self.weights_full[own].arrive(PREPARE)
        own = self.items % 2
        yield self.done[own], PREPARE, self.items // 2 % 2 ^ 1
        if warp == 0:
            self.numbers[own].write(END)
        self.tokens_full[own].arrive(PREPARE)

    def math_warp(self, warp: int) -> Role:
        spec, item = self.spec, 0
        while True:
            buffer, own = item % spec.buffers, item % 2
            yield self.tokens_full[own], MATH, item // 2 % 2
            if self.numbers[own].content == END:
                assert item == self.items
                return
            yield from self.sim.read(self.numbers[own], item, 0.02)
            yield self.entries_full[buffer], MATH, item // spec.buffers % 2
            for turn, tile in enumerate(range(warp, spec.item_tiles, WARPS)):
                yield from self.tile(warp, item, turn, tile)
            if warp >= spec.item_tiles:
                self.leave(item)
            item += 1

    def leave(self, item: int) -> None:
        self.entries_free[item % self.spec.buffers].arrive(MATH)
        self.done[item % 2].arrive(MATH)

    def tile(self, warp: int, item: int, turn: int, tile: int) -> Role:
        spec = self.spec
        stage, parity = specs.stage_of(spec, item, warp, turn)
        for read in self.tokens[item % 2]:
            yield from self.sim.read(read, item, 0.02)
        yield self.full[stage], MATH, parity
        yield from self.sim.read(self.stages[stage], (item, tile), 1.0)
        self.free[stage].arrive(MATH)
        own, buffer = item % 2, item % spec.buffers
        yield self.weights_full[own], MATH, item // 2 % 2
        for read in (*self.weights[own], self.entries[buffer], *self.decays[buffer], *self.tokens[own]):
            yield from self.sim.read(read, item, 0.05)
        if tile + WARPS >= spec.item_tiles:
            self.leave(item)
        squares = self.squares[specs.tile_number(spec, item, warp, turn) % 2]
        squares[warp].write((item, turn))
        yield self.heads[warp // TILES_OF_HEAD].meet(MATH)
        first = warp // TILES_OF_HEAD * TILES_OF_HEAD
        for read in squares[first : first + TILES_OF_HEAD]:
            yield from self.sim.read(read, (item, turn), 0.1)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stages", [8, 16])
@pytest.mark.parametrize("num_v_heads", [16, 32, 48, 64, 80, 96])
def test_warps_neither_stop_nor_overwrite(num_v_heads: int, stages: int, state_dtype: str) -> None:
    spec = spec_of(num_v_heads, stages, state_dtype)
    assert spec.in_flight == {"float32": 3, "bfloat16": 4}[state_dtype]
    for seed in range(4):
        Block(Simulation(seed), spec, 5).run()


@pytest.mark.parametrize(
    ("name", "stages", "arrivals", "message"),
    [
        ("state_free", 8, Arrivals(MATH, "warp"), "deadlock"),
        ("entries_full", 2, Arrivals(ENTRIES, "role"), "arrivals"),
        ("entries_free", 2, Arrivals(MATH, "role"), "arrivals|still read|holds"),
        ("tokens_full", 2, Arrivals(PREPARE, "thread"), "deadlock"),
        ("tokens_full", 2, Arrivals(PREPARE, "role"), "arrivals|holds|still read"),
        ("weights_full", 2, Arrivals(PREPARE, "thread"), "deadlock"),
        ("weights_full", 2, Arrivals(PREPARE, "role"), "arrivals|holds"),
        ("done", 2, Arrivals(MATH, "role"), "deadlock|still read|holds"),
    ],
)
def test_the_simulation_finds_a_wrong_table(name: str, stages: int, arrivals: Any, message: str) -> None:
    spec = spec_of(32, 8)
    spec.barriers = with_arrivals(spec.barriers, name, arrivals, stages=stages)
    with pytest.raises(AssertionError, match=message):
        for seed in range(8):
            Block(Simulation(seed), spec, 6).run()


@pytest.mark.parametrize("num_v_heads", [16, 48])
def test_the_simulation_finds_too_many_tiles_on_their_way(num_v_heads: int) -> None:
    spec = spec_of(num_v_heads, 8)
    spec.in_flight = 5
    with pytest.raises(AssertionError):
        for seed in range(8):
            Block(Simulation(seed), spec, 6).run()


def test_the_simulation_finds_a_missing_meeting() -> None:
    with pytest.raises(AssertionError, match="still read|holds"):
        for seed in range(8):
            block = Block(Simulation(seed), spec_of(32, 8), 4)
            block.all.is_over = lambda parity: True  # type: ignore[method-assign]
            block.all.arrive = lambda: 0  # type: ignore[method-assign]
            block.run()


def test_the_notes_show_the_table() -> None:
    text = (Path(gdn_decode.__file__).parent / "DESIGN.md").read_text(encoding="utf-8")
    assert str(spec_of(32, 8).barriers) in text
