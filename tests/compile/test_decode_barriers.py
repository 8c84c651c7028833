"""The barriers of the fused decode step: all warps of a cluster, simulated with random times from the kernel's own table."""

from pathlib import Path
from typing import Any

import pytest

from gdn.ops.delta_rule.tiles import Tiles
from tests.compile.barrier_simulation import Buffer, Named, Role, Simulation, mbarriers, with_arrivals
from tests.compile.variants.base import example

specs = pytest.importorskip("kernels_cute.gdn_decode.spec", reason="needs the CuTe DSL")
common = pytest.importorskip("kernels_cute.common.barriers", reason="needs the CuTe DSL")

Arrivals = common.Arrivals
ROLE = "token"


def spec_of(tiles: tuple[int, int, int], num_v_heads: int = 32, v_first: bool = True, has_drafts: bool = True) -> Any:
    """A cluster of num_v_heads / 16 value heads of 128 columns."""
    drafts = {"cu_seqlens_dtype": "int32", "has_columns": True, "has_accepted": True} if has_drafts else {}
    problem = example("gdn_decode", num_v_heads=num_v_heads, state_v_first=v_first, **drafts)
    return specs.Spec(problem, Tiles(*tiles, 256))


def hardware(warps: int) -> Named:
    """A barrier at which these warps meet."""
    return Named("meeting", warps, ROLE)


class Cluster:
    """The blocks of a sequence and key head."""

    def __init__(self, simulation: Simulation, spec: Any, tokens: int) -> None:
        self.sim, self.spec, self.tokens = simulation, spec, tokens
        self.meeting = hardware(spec.warps * spec.cluster)
        self.windows = [Buffer(f"window of q and k, part {rank}") for rank in range(spec.cluster)]  # each block writes one
        self.blocks = [Block(self, rank) for rank in range(spec.cluster)]

    def run(self) -> None:
        for window in self.windows:
            window.write("before")
        for block in self.blocks:
            for warp in range(self.spec.warps):
                self.sim.start(f"warp {warp} of block {block.rank}", block.warp(warp))
        self.sim.run()
        assert all(window.content == "after" for window in self.windows)


class Block:
    def __init__(self, cluster: Cluster, rank: int) -> None:
        self.cluster, self.sim, self.spec, self.rank = cluster, cluster.sim, cluster.spec, rank
        spec = self.spec
        self.sums_full = mbarriers(spec.barriers)["sums_full"]
        self.is_set_up, self.running = False, spec.warps
        self.all = hardware(spec.warps)
        self.columns = [hardware(spec.tile.k_warps) for _ in range(spec.warps // spec.tile.k_warps)]
        self.inputs = [Buffer(f"inputs of warp {warp}") for warp in range(spec.warps)]
        self.sums = [
            [Buffer(f"sum {part} of stage {stage}") for part in range(spec.parts)] for stage in range(len(self.sums_full))
        ]
        self.parts = [[Buffer(f"sums over K {warp}") for warp in range(spec.warps)] for _ in range(1 + spec.has_several_tokens)]

    def warp(self, warp: int) -> Role:
        spec, cluster = self.spec, self.cluster
        for window in cluster.windows:
            yield from self.sim.read(window, "before", 0.3)
        if spec.splits > 1 and warp == 0:
            yield self.sim.some_time(0.3)
            self.is_set_up = True
            for barrier in self.sums_full:
                barrier.arrive(ROLE, copies=spec.parts)
        for step in range(cluster.tokens):
            yield self.sim.some_time(0.3)
            self.inputs[warp].write(step)
            yield self.all.meet(ROLE)
            if step == 0 and spec.cluster > 1:
                cluster.meeting.arrive()
            for buffer in self.inputs:
                yield from self.sim.read(buffer, step, 0.2)
            if spec.tile.k_warps > 1:
                yield from self.add_up(warp, step)
            if step == 0 and spec.cluster > 1:
                yield cluster.meeting, ROLE, 0
            self.send(warp, step)
            if step == 0 and warp == 0:
                cluster.windows[self.rank].write("after")
            yield self.sim.some_time(1.0)  # the state
            yield from self.receive(warp, step)
        self.running -= 1
        for buffer in [buffer for stage in self.sums for buffer in stage] if self.running == 0 else []:
            buffer.readers += 1  # nothing may arrive in a block that has left

    def add_up(self, warp: int, step: int) -> Role:
        """The exchange with the warps that share columns."""
        group, parts = warp // self.spec.tile.k_warps, self.parts[step % 2]
        parts[warp].write(step)
        yield self.columns[group].meet(ROLE)
        for other in range(self.spec.tile.k_warps):
            yield from self.sim.read(parts[group * self.spec.tile.k_warps + other], step, 0.2)

    def send(self, warp: int, step: int) -> None:
        spec, stage = self.spec, step % len(self.sums)
        if spec.splits == 1:
            self.sums[0][warp].write(step)
            return
        first = self.rank // spec.splits * spec.splits
        for block in self.cluster.blocks[first : first + spec.splits]:
            assert block.is_set_up, f"block {self.rank} sends to block {block.rank}, whose barriers are not set up"
            part = self.rank % spec.splits * spec.warps + warp
            self.sim.copy(block.sums_full[stage], block.sums[stage][part], step)

    def receive(self, warp: int, step: int) -> Role:
        stage, stages = step % len(self.sums), len(self.sums)
        if self.spec.splits == 1:
            yield self.all.meet(ROLE)
            stage = 0
        else:
            yield self.sums_full[stage], ROLE, step // stages % 2
            if self.spec.has_several_tokens and warp == 0:
                self.sums_full[stage].arrive(ROLE, copies=self.spec.parts)
        for buffer in self.sums[stage]:
            yield from self.sim.read(buffer, step, 0.1)


FORMS = {
    "four blocks a head, two heads": ((64, 8, 4), 32, True),
    "two blocks a head, one head": ((128, 8, 4), 16, True),
    "one block a head, two heads": ((256, 8, 4), 32, True),
    "one block": ((256, 8, 4), 16, True),
    "two blocks a head, K first": ((128, 16, 8), 16, False),
    "two blocks a head, K first, few columns": ((256, 16, 4), 16, False),
}


@pytest.mark.parametrize("tokens", [1, 2, 3, 8])
@pytest.mark.parametrize("name", list(FORMS))
def test_warps_neither_stop_nor_overwrite(name: str, tokens: int) -> None:
    spec = spec_of(*FORMS[name])
    assert spec.splits == {"four": 4, "two ": 2, "one ": 1}[name[:4]] and (spec.tile.k_warps > 1) == ("K first" in name)
    for seed in range(8):
        Cluster(Simulation(seed), spec, tokens).run()


@pytest.mark.parametrize("tiles", [(64, 8, 4), (128, 8, 4)])
def test_one_token_a_sequence(tiles: tuple[int, int, int]) -> None:
    for seed in range(8):
        Cluster(Simulation(seed), spec_of(tiles, has_drafts=False), 1).run()


@pytest.mark.parametrize(
    ("arrivals", "stages", "message"),
    [
        (Arrivals(ROLE, "warp"), 2, "deadlock"),  # one lane announces
        (Arrivals(ROLE, "role"), 1, "still read|holds|arrivals"),  # the sums of a token land on those that a slow warp reads
    ],
)
def test_the_simulation_finds_a_wrong_table(arrivals: Any, stages: int, message: str) -> None:
    spec = spec_of((64, 8, 4))
    spec.barriers = with_arrivals(spec.barriers, "sums_full", arrivals, stages=stages)
    with pytest.raises(AssertionError, match=message):
        for seed in range(8):
            Cluster(Simulation(seed), spec, 8).run()


def test_the_simulation_finds_a_missing_meeting_of_the_cluster() -> None:
    with pytest.raises(AssertionError, match="not set up|still read"):
        for seed in range(8):
            cluster = Cluster(Simulation(seed), spec_of((64, 8, 4)), 2)
            cluster.meeting.is_over = lambda parity: True  # type: ignore[method-assign]
            cluster.meeting.arrive = lambda: 0  # type: ignore[method-assign]
            cluster.run()


def test_the_notes_show_the_table() -> None:
    table = spec_of((64, 8, 4)).barriers
    assert table.count("sums_full") == 1
    assert str(table) in (Path(specs.__file__).parent / "DESIGN.md").read_text(encoding="utf-8")
