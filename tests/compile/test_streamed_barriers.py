"""The barriers of the streamed decode step: the copy warp and the warps that compute, simulated with random times from the
kernel's own table.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gdn.models import QWEN3_NEXT_80B
from gdn.runtime import registry
from tests.compile.barrier_simulation import Buffer, Mbarrier, Role, Simulation

specs = pytest.importorskip("kernels_cute.gdn_decode.streamed.spec", reason="needs the CuTe DSL")
gdn_decode = pytest.importorskip("kernels_cute.gdn_decode", reason="needs the CuTe DSL")
common = pytest.importorskip("kernels_cute.common.barriers", reason="needs the CuTe DSL")

Arrivals, Barrier, BarrierTable = common.Arrivals, common.Barrier, common.BarrierTable
COPY, MATH = "copy", "math"
WARPS, TILES_OF_HEAD = 8, 4


def spec_of(num_v_heads: int, stages: int) -> Any:
    example = registry.operator("gdn_decode").example(QWEN3_NEXT_80B, fp8=False)
    ring = {"cu_seqlens_dtype": "int32", "has_accepted": True, "ring_rows": 22, "fold_every": 15}
    problem = replace(example, num_v_heads=num_v_heads, **ring)  # type: ignore[type-var]
    return specs.Spec(problem, gdn_decode.Config(256, 8, 4, 256, stages, 132))


def meeting(warps: int) -> Mbarrier:
    """A named barrier of these warps."""
    return Mbarrier(BarrierTable({MATH: warps}, [Barrier("meeting", 1, (Arrivals(MATH, "warp"),), (MATH,))]), "meeting")


class Block:
    """A block with `items` live items, one after the other."""

    def __init__(self, simulation: Simulation, spec: Any, items: int) -> None:
        self.sim, self.spec, self.items = simulation, spec, items
        self.full, self.free = (
            [Mbarrier(spec.barriers, f"state_{name}") for _ in range(spec.stages)] for name in ("full", "free")
        )
        self.entries_full, self.entries_free = (
            [Mbarrier(spec.barriers, f"entries_{name}") for _ in range(spec.buffers)] for name in ("full", "free")
        )
        self.stages = [Buffer(f"stage {stage}") for stage in range(spec.stages)]
        self.entries = [Buffer(f"entries {buffer}") for buffer in range(spec.buffers)]
        self.decays = [[Buffer(f"log decays {buffer} of lane {lane}") for lane in range(32)] for buffer in range(spec.buffers)]
        self.tokens = [[Buffer(f"tokens {buffer} of warp {warp}") for warp in range(WARPS)] for buffer in range(2)]
        self.weights = [Buffer(f"weights of warp {warp}") for warp in range(WARPS)]
        self.squares = [[Buffer(f"squares {turn} of warp {warp}") for warp in range(WARPS)] for turn in range(2)]
        self.all, self.heads = meeting(WARPS), [meeting(TILES_OF_HEAD) for _ in range(2)]
        self.meetings = {name: [0] * WARPS for name in ("all", "head")}

    def run(self) -> None:
        self.sim.start("copy", self.copy_warp())
        for warp in range(WARPS):
            self.sim.start(f"warp {warp}", self.math_warp(warp))
        self.sim.run()

    def copy_warp(self) -> Role:
        spec = self.spec
        for item in range(self.items):
            buffer = item % spec.buffers
            yield self.entries_free[buffer], COPY, item // spec.buffers % 2 ^ 1
            self.sim.copy(self.entries_full[buffer], self.entries[buffer], item)
            yield self.sim.some_time(0.3)
            for lane, decays in enumerate(self.decays[buffer]):
                decays.write(item)
                self.entries_full[buffer].arrive(COPY, copies=lane == 0)
            for tile in range(spec.item_tiles):
                stage, parity = specs.stage_of(spec, item, tile % WARPS, tile // WARPS)
                yield self.free[stage], COPY, parity ^ 1
                self.full[stage].arrive(COPY, copies=1)
                self.sim.copy(self.full[stage], self.stages[stage], (item, tile))

    def math_warp(self, warp: int) -> Role:
        spec = self.spec
        for item in range(self.items):
            buffer, tokens = item % spec.buffers, self.tokens[item % 2]
            tokens[warp].write(item)
            yield self.sim.some_time(0.3)
            yield from self.meet("all", warp)
            yield self.entries_full[buffer], MATH, item // spec.buffers % 2
            for read in (*tokens, self.entries[buffer], *self.decays[buffer]):
                yield from self.sim.read(read, item, 0.02)
            self.weights[warp].write(item)
            yield from self.meet("all", warp)
            for turn, tile in enumerate(range(warp, spec.item_tiles, WARPS)):
                yield from self.tile(warp, item, turn, tile)
            self.entries_free[buffer].arrive(MATH)

    def tile(self, warp: int, item: int, turn: int, tile: int) -> Role:
        spec = self.spec
        stage, parity = specs.stage_of(spec, item, warp, turn)
        yield self.full[stage], MATH, parity
        yield from self.sim.read(self.stages[stage], (item, tile), 1.0)
        self.free[stage].arrive(MATH)
        for read in (*self.weights, self.entries[item % spec.buffers], *self.tokens[item % 2]):
            yield from self.sim.read(read, item, 0.05)
        squares = self.squares[turn % 2]
        squares[warp].write((item, turn))
        yield from self.meet("head", warp)
        first = warp // TILES_OF_HEAD * TILES_OF_HEAD
        for read in squares[first : first + TILES_OF_HEAD]:
            yield from self.sim.read(read, (item, turn), 0.1)

    def meet(self, name: str, warp: int) -> Role:
        barrier = self.all if name == "all" else self.heads[warp // TILES_OF_HEAD]
        barrier.arrive(MATH)
        self.meetings[name][warp] += 1
        yield barrier, MATH, (self.meetings[name][warp] - 1) % 2


@pytest.mark.parametrize("stages", [8, 16])
@pytest.mark.parametrize("num_v_heads", [16, 32, 48, 64])
def test_warps_neither_stop_nor_overwrite(num_v_heads: int, stages: int) -> None:
    for seed in range(4):
        Block(Simulation(seed), spec_of(num_v_heads, stages), 5).run()


@pytest.mark.parametrize(
    ("name", "stages", "arrivals", "message"),
    [
        ("state_free", 8, Arrivals(MATH, "warp"), "deadlock"),
        ("entries_full", 2, Arrivals(COPY, "role"), "arrivals"),
        ("entries_free", 2, Arrivals(MATH, "role"), "arrivals|still read|holds"),
    ],
)
def test_the_simulation_finds_a_wrong_table(name: str, stages: int, arrivals: Any, message: str) -> None:
    spec = spec_of(32, 8)
    table = spec.barriers.barriers | {name: Barrier(name, stages, (arrivals,), spec.barriers.barriers[name].waits)}
    spec.barriers = BarrierTable(spec.barriers.warps, list(table.values()))
    with pytest.raises(AssertionError, match=message):
        for seed in range(8):
            Block(Simulation(seed), spec, 6).run()


def test_the_simulation_finds_a_missing_meeting() -> None:
    with pytest.raises(AssertionError, match="still read|holds"):
        for seed in range(8):
            block = Block(Simulation(seed), spec_of(32, 8), 4)
            block.all.is_over = lambda parity: True  # type: ignore[method-assign]
            block.all.arrive = lambda *_, **__: None  # type: ignore[method-assign]
            block.run()


def test_the_notes_show_the_table() -> None:
    text = (Path(gdn_decode.__file__).parent / "DESIGN.md").read_text(encoding="utf-8")
    assert str(spec_of(32, 8).barriers) in text
