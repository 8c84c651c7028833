"""Roles and barriers of the CuTe chunk kernel's clusters of four SMs, simulated with random times from its barrier tables."""

from typing import Any

import pytest

from gdn.ops.delta_rule.inputs import chunk_problem
from tests.compile.barrier_simulation import Buffer, Role, Simulation, mbarriers

barriers = pytest.importorskip("kernels_cute.chunk.four_sm.barriers", reason="needs the CuTe DSL")
cluster = pytest.importorskip("kernels_cute.chunk.four_sm.forms", reason="needs the CuTe DSL")
shape = pytest.importorskip("kernels_cute.chunk.four_sm.shape", reason="needs the CuTe DSL")
specs = pytest.importorskip("kernels_cute.chunk.spec", reason="needs the CuTe DSL")

CHAINS, MAKERS, SETS, ROUND, SLOTS = shape.CHAINS, shape.MAKERS, shape.SETS, shape.ROUND, shape.SLOTS
KEY_STAGES = shape.SET_KEY_STAGES


def spec_of(stages: int) -> Any:
    problem = chunk_problem(head_k_dim=128, head_v_dim=128, dtype="bfloat16")
    return specs.ChunkSpec(problem, stages, 0, is_persistent=False, has_both_variants=False, is_split=False)


class Block:
    def __init__(self, simulation: Simulation, table: Any, rank: int, num_chunks: int) -> None:
        self.sim, self.rank, self.num_chunks = simulation, rank, num_chunks
        self.bars = mbarriers(table)

    def wait(self, role: str, name: str, stage: int, parity: int) -> Role:
        yield self.bars[name][stage], role, parity


class Chain(Block):
    """A block that carries the state of 64 V columns."""

    def __init__(self, simulation: Simulation, stages: int, rank: int, num_chunks: int) -> None:
        super().__init__(simulation, barriers.chain_barriers(spec_of(stages)), rank, num_chunks)
        self.stages = stages
        self.keys = [Buffer(f"K {i}") for i in range(stages)]
        self.queries = [Buffer(f"Q {i}") for i in range(stages)]
        self.values = [[Buffer(f"V {i}, warp {warp}") for warp in range(4)] for i in range(stages)]
        self.z, self.p = [Buffer(f"Z {i}") for i in range(SLOTS)], [Buffer(f"P {i}") for i in range(SLOTS)]
        self.chains: list[Chain] = []
        self.makers: list[Maker] = []

    def roles(self) -> dict[str, Role]:
        return {"load": self.load(), "values": self.load_values()} | {f"state {warp}": self.state(warp) for warp in range(4)}

    def place(self, chunk: int) -> tuple[int, int]:
        return chunk % self.stages, chunk // self.stages % 2

    def load(self) -> Role:
        form = cluster.ClusterForm
        for chunk in range(self.num_chunks):
            yield from self.bring("k", "keys", ("K", chunk), form.key_loader)
            yield from self.bring("q", "queries", ("Q", chunk), form.query_loader)

    def bring(self, name: str, field: str, content: tuple[str, int], loader: int) -> Role:
        """One chain loads for both; the other arms its own barrier once the last fill is there."""
        stage, turn = self.place(content[1])
        waited = f"{name}_empty" if self.rank == loader else f"{name}_full"
        yield from self.wait("load", waited, stage, turn ^ 1)
        self.bars[f"{name}_full"][stage].arrive("load", copies=1)
        if self.rank == loader:
            for chain in self.chains:
                self.sim.copy(chain.bars[f"{name}_full"][stage], getattr(chain, field)[stage], content)

    def load_value(self, chunk: int) -> None:
        stage, _ = self.place(chunk)
        full = self.bars["v_full"][stage]
        full.arrive("values", copies=4)
        for part in self.values[stage]:
            self.sim.copy(full, part, ("V", chunk))

    def load_values(self) -> Role:
        for chunk in range(min(self.num_chunks, self.stages)):
            self.load_value(chunk)
        for chunk in range(self.num_chunks):
            stage, turn = self.place(chunk)
            yield from self.wait("values", "stored", stage, turn)
            for part in self.values[stage]:
                yield from self.sim.read(part, ("O", chunk), 0.3)
            if chunk + self.stages < self.num_chunks:
                self.load_value(chunk + self.stages)

    def state(self, warp: int) -> Role:
        form = cluster.ClusterForm
        for chunk in range(self.num_chunks):
            (stage, turn), slot = self.place(chunk), chunk % SLOTS
            yield from self.wait("state", "k_full", stage, turn)
            yield from self.sim.read(self.keys[stage], ("K", chunk), 0.3)
            yield from self.wait("state", "v_full", stage, turn)
            yield from self.sim.read(self.values[stage][warp], ("V", chunk), 0.2)
            yield from self.wait("state", "ready", slot, chunk // SLOTS % 2)
            yield from self.wait("state", "q_full", stage, turn)
            self.chains[form.key_loader].bars["k_empty"][stage].arrive("state")
            yield from self.sim.read(self.queries[stage], ("Q", chunk), 0.3)
            yield from self.sim.read(self.z[slot], ("Z", chunk), 0.3)
            self.chains[form.query_loader].bars["q_empty"][stage].arrive("state")
            yield from self.sim.read(self.p[slot], ("P", chunk), 0.3)
            self.makers[slot % MAKERS].bars["tile_released"][slot // MAKERS].arrive("state")
            self.values[stage][warp].write(("O", chunk))
            self.bars["stored"][stage].arrive("state")


class Maker(Block):
    """A block that makes tiles for both chains, with two sets of warpgroups."""

    def __init__(self, simulation: Simulation, rank: int, num_chunks: int, chains: list[Chain]) -> None:
        super().__init__(simulation, barriers.maker_barriers(cluster.ClusterForm), rank, num_chunks)
        self.number, self.chains = rank - cluster.ClusterForm.first_maker, chains
        self.keys = [Buffer(f"K {i}") for i in range(SETS * KEY_STAGES)]
        self.rows = [Buffer(f"gates {i}") for i in range(SETS * 2)]
        self.queries, self.m, self.z, self.p = ([Buffer(f"{name} {i}") for i in range(SETS)] for name in "QMZP")

    def roles(self) -> dict[str, Role]:
        found = {"load": self.load(), "gates": self.gates()}
        for group in range(SETS):
            found |= {f"inverse {group}": self.inverse(group), f"score {group}": self.score(group)}
            found[f"hand_over {group}"] = self.hand_over(group)
        return found

    def key_place(self, group: int, turn: int) -> tuple[int, int]:
        return group * KEY_STAGES + turn % KEY_STAGES, turn // KEY_STAGES % 2

    def half(self, group: int, turn: int) -> tuple[int, int]:
        return group * 2 + turn % 2, turn // 2 % 2

    def own(self, group: int) -> range:
        return range(self.number + group * MAKERS, self.num_chunks, ROUND)

    def load(self) -> Role:
        for chunk in range(self.number, self.num_chunks, MAKERS):
            group, turn = chunk // MAKERS % SETS, chunk // ROUND
            stage, parity = self.key_place(group, turn)
            yield from self.wait("load", "k_empty", stage, parity ^ 1)
            self.bars["k_full"][stage].arrive("load", copies=1)
            self.sim.copy(self.bars["k_full"][stage], self.keys[stage], ("K", chunk))
            yield from self.wait("load", "q_empty", group, turn % 2 ^ 1)
            self.bars["q_full"][group].arrive("load", copies=1)
            self.sim.copy(self.bars["q_full"][group], self.queries[group], ("Q", chunk))

    def gates(self) -> Role:
        for chunk in range(self.number, self.num_chunks, MAKERS):
            half, parity = self.half(chunk // MAKERS % SETS, chunk // ROUND)
            yield self.sim.some_time(0.5)
            yield from self.wait("gates", "gates_free", half, parity ^ 1)
            self.rows[half].write(("gates", chunk))
            self.bars["gates_full"][half].arrive("gates", 32)

    def inverse(self, group: int) -> Role:
        for chunk in self.own(group):
            turn = chunk // ROUND
            (stage, parity), (half, half_parity) = self.key_place(group, turn), self.half(group, turn)
            yield from self.wait("inverse", "k_full", stage, parity)
            yield from self.sim.read(self.keys[stage], ("K", chunk), 1.0)
            yield from self.wait("inverse", "gates_full", half, half_parity)
            self.bars["factors_full"][half].arrive("inverse", 128)
            yield from self.sim.read(self.rows[half], ("gates", chunk), 1.0)
            yield from self.wait("inverse", "m_free", group, turn % 2 ^ 1)
            self.m[group].write(("M", chunk))
            self.bars["gates_free"][half].arrive("inverse", 4)
            self.bars["m_full"][group].arrive("inverse", 128)

    def score(self, group: int) -> Role:
        for chunk in self.own(group):
            turn = chunk // ROUND
            (stage, parity), (half, half_parity) = self.key_place(group, turn), self.half(group, turn)
            yield from self.wait("score", "q_full", group, turn % 2)
            yield from self.sim.read(self.queries[group], ("Q", chunk), 0.3)
            yield from self.wait("score", "k_full", stage, parity)
            yield from self.sim.read(self.keys[stage], ("K", chunk), 0.3)
            yield from self.wait("score", "gates_full", half, half_parity)
            self.bars["q_empty"][group].arrive("score", 4)
            yield from self.wait("score", "factors_full", half, half_parity)
            yield from self.sim.read(self.rows[half], ("gates", chunk), 0.3)
            yield from self.wait("score", "m_full", group, turn % 2)
            yield from self.sim.read(self.m[group], ("M", chunk), 0.3)
            self.bars["m_free"][group].arrive("score", 4)
            yield from self.wait("score", "tile_released", group, turn % 2 ^ 1)
            self.p[group].write(("P", chunk))
            yield from self.sim.read(self.keys[stage], ("K", chunk), 0.5)
            self.z[group].write(("Z", chunk))
            self.bars["gates_free"][half].arrive("score", 4)
            self.bars["k_empty"][stage].arrive("score", 4)
            self.bars["made"][group].arrive("score", 128)

    def hand_over(self, group: int) -> Role:
        slot = self.number + group * MAKERS
        for chunk in self.own(group):
            yield from self.wait("hand_over", "made", group, chunk // ROUND % 2)
            for chain in self.chains:
                ready = chain.bars["ready"][slot]
                ready.arrive("tiles", copies=2)
                self.sim.copy(ready, chain.z[slot], ("Z", chunk), self.z[group])
                self.sim.copy(ready, chain.p[slot], ("P", chunk), self.p[group])


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("num_chunks", [1, 2, 4, 5, 43])
def test_clusters_of_four(stages: int, num_chunks: int) -> None:
    """No deadlock, no overwrite of what is still read, the arrivals of the tables in every phase."""
    for seed in range(15):
        simulation = Simulation(seed)
        chains = [Chain(simulation, stages, rank, num_chunks) for rank in range(CHAINS)]
        makers = [Maker(simulation, CHAINS + number, num_chunks, chains) for number in range(MAKERS)]
        for chain in chains:
            chain.chains, chain.makers = chains, makers
        for block in (*chains, *makers):
            for name, role in block.roles().items():
                simulation.start(f"{name} of block {block.rank}", role)
        simulation.run()
