"""The CuTe chunk kernel with two state heads a cluster: roles and barriers, simulated with random times from its table."""

from typing import Any

import pytest

from gdn.ops.delta_rule.inputs import chunk_problem
from tests.compile.barrier_simulation import Buffer, Role, Simulation, mbarriers, run_cluster, with_arrivals

barriers = pytest.importorskip("kernels_cute.chunk.key_head.barriers", reason="needs the CuTe DSL")
common = pytest.importorskip("kernels_cute.common.barriers", reason="needs the CuTe DSL")
kernel = pytest.importorskip("kernels_cute.chunk.key_head.kernel", reason="needs the CuTe DSL")
specs = pytest.importorskip("kernels_cute.chunk.spec", reason="needs the CuTe DSL")


def spec_of(**rings: int) -> Any:
    problem = chunk_problem(head_k_dim=128, head_v_dim=128, dtype="bfloat16")
    spec = specs.ChunkSpec(problem, 2, 0, is_persistent=True, has_both_variants=False, is_split=False)
    return kernel.key_head_spec(spec).changed(**rings)


class Block:
    """A block of the cluster. Every state warpgroup has four warps, which share what one of them reads and writes."""

    def __init__(self, simulation: Simulation, spec: Any, rank: int, num_chunks: int) -> None:
        self.sim, self.spec, self.rank, self.num_chunks = simulation, spec, rank, num_chunks
        self.peers: list[Block] = []
        self.bars = mbarriers(barriers.key_head_barriers(spec), rank)
        self.heads = range(spec.state_heads)
        self.keys = [Buffer(f"K {i}") for i in range(spec.key_stages)]
        self.queries = [Buffer(f"Q {i}") for i in range(spec.stages)]
        self.values = [[Buffer(f"V {i}, warp {warp}") for warp in range(4)] for i in range(spec.value_stages)]
        self.m_tiles, self.p_tiles, self.vectors = (
            [[Buffer(f"{name} {i} of head {head}") for head in self.heads] for i in range(2)] for name in ("M", "P", "vectors")
        )
        self.rows = [Buffer(f"gates {i}") for i in range(2)]

    def start(self) -> None:
        roles = {
            "load": self.load(),
            "gates": self.gates(),
            "maker": self.maker(),
            "store": self.store(),
            "hand_over": self.hand_over(),
        }
        roles |= {f"state {warp} of head {head}": self.state(head, warp) for head in self.heads for warp in range(4)}
        for name, role in roles.items():
            self.sim.start(f"{name} of block {self.rank}", role)

    def made(self) -> tuple[list[list[Buffer]], ...]:
        return self.m_tiles, self.p_tiles, self.vectors

    def own(self) -> range:
        """Chunks that this block prepares."""
        return range(self.rank, self.num_chunks, 2)

    def wait(self, role: str, name: str, stage: int, parity: int) -> Role:
        yield self.bars[name][stage], role, parity

    def place(self, stages: int, count: int) -> tuple[int, int]:
        return count % stages, count // stages % 2

    def value_place(self, chunk: int, head: int) -> tuple[int, int]:
        return self.place(self.spec.value_stages, chunk * self.spec.state_heads + head)

    def bring(self, name: str, buffers: list[Buffer], place: tuple[int, int], content: Any) -> Role:
        stage, turn = place
        yield from self.wait("load", f"{name}_empty", stage, turn ^ 1)
        full = self.bars[f"{name}_full"][stage]
        full.arrive("load", copies=len(buffers))
        for buffer in buffers:
            self.sim.copy(full, buffer, content)

    def load_keys(self, chunk: int) -> Role:
        place = self.place(self.spec.key_stages, chunk)
        yield from self.bring("k", [self.keys[place[0]]], place, ("K", chunk))

    def load(self) -> Role:
        yield from self.load_keys(0)
        for chunk in range(self.num_chunks):
            if chunk + 1 < self.num_chunks:
                yield from self.load_keys(chunk + 1)
            place = self.place(self.spec.stages, chunk)
            yield from self.bring("q", [self.queries[place[0]]], place, ("Q", chunk))
            for head in self.heads:
                place = self.value_place(chunk, head)
                yield from self.bring("v", self.values[place[0]], place, ("V", chunk, head))

    def gates(self) -> Role:
        for chunk in self.own():
            half, turn = self.place(2, chunk // 2)
            yield self.sim.some_time(0.5)
            yield from self.wait("gates", "gates_free", half, turn ^ 1)
            self.rows[half].write(("gates", chunk))
            self.bars["gates_full"][half].arrive("gates", 32)

    def maker(self) -> Role:
        for chunk in self.own():
            key_stage, key_turn = self.place(self.spec.key_stages, chunk)
            stage, turn = self.place(self.spec.stages, chunk)
            half, half_turn = self.place(2, chunk // 2)
            buffer, buffer_turn = self.place(2, chunk)
            yield from self.wait("maker", "k_full", key_stage, key_turn)
            yield from self.sim.read(self.keys[key_stage], ("K", chunk), 0.5)
            yield from self.wait("maker", "gates_full", half, half_turn)
            yield from self.sim.read(self.rows[half], ("gates", chunk), 1.0)
            yield from self.wait("maker", "m_tile_released", buffer, buffer_turn ^ 1)
            for tile in self.m_tiles[buffer]:
                tile.write(("M", chunk))
            yield from self.wait("maker", "q_full", stage, turn)
            yield from self.sim.read(self.queries[stage], ("Q", chunk), 0.5)
            yield from self.sim.read(self.keys[key_stage], ("K", chunk), 0.5)
            self.bars["q_empty"][stage].arrive("maker", 4)
            yield from self.sim.read(self.rows[half], ("gates", chunk), 0.5)
            self.bars["gates_free"][half].arrive("maker", 4)
            yield from self.wait("maker", "tile_released", buffer, buffer_turn ^ 1)
            for tile in self.p_tiles[buffer]:
                tile.write(("P", chunk))
            for tile in self.vectors[buffer]:
                tile.write(("vectors", chunk))
            self.bars["ready"][buffer].arrive("maker", 128)

    def hand_over(self) -> Role:
        other = self.peers[self.rank ^ 1]
        for chunk in self.own():
            yield from self.wait("hand_over", "ready", self.rank, chunk // 2 % 2)
            ready = other.bars["ready"][self.rank]
            ready.arrive("hand_over", copies=3 * len(self.heads))
            for head in self.heads:
                for name, mine, theirs in zip(("M", "P", "vectors"), self.made(), other.made(), strict=True):
                    self.sim.copy(ready, theirs[self.rank][head], (name, chunk), mine[self.rank][head])

    def state(self, head: int, warp: int) -> Role:
        for chunk in range(self.num_chunks):
            key_stage, key_turn = self.place(self.spec.key_stages, chunk)
            stage, turn = self.place(self.spec.stages, chunk)
            buffer, buffer_turn = self.place(2, chunk)
            value_stage, value_turn = self.value_place(chunk, head)
            values, released = self.values[value_stage][warp], self.peers[buffer].bars
            yield from self.wait("state", "k_full", key_stage, key_turn)
            yield from self.wait("state", "q_full", stage, turn)
            yield from self.sim.read(self.keys[key_stage], ("K", chunk), 0.3)
            yield from self.sim.read(self.queries[stage], ("Q", chunk), 0.3)
            self.bars["q_empty"][stage].arrive("state")
            yield from self.wait("state", "ready", buffer, buffer_turn)
            yield from self.wait("state", "v_full", value_stage, value_turn)
            yield from self.sim.read(values, ("V", chunk, head), 0.2)
            yield from self.sim.read(self.vectors[buffer][head], ("vectors", chunk), 0.1)
            yield from self.sim.read(self.m_tiles[buffer][head], ("M", chunk), 0.3)
            released["m_tile_released"][buffer].arrive("state")
            yield from self.sim.read(self.vectors[buffer][head], ("vectors", chunk), 0.1)
            yield from self.sim.read(self.keys[key_stage], ("K", chunk), 0.3)
            self.bars["k_empty"][key_stage].arrive("state")
            yield from self.sim.read(self.p_tiles[buffer][head], ("P", chunk), 0.3)
            released["tile_released"][buffer].arrive("state")
            values.write(("O", chunk, head))
            self.bars["stored"][value_stage].arrive("state")

    def store(self) -> Role:
        for chunk in range(self.num_chunks):
            for head in self.heads:
                stage, turn = self.value_place(chunk, head)
                yield from self.wait("store", "stored", stage, turn)
                for part in self.values[stage]:
                    yield from self.sim.read(part, ("O", chunk, head), 0.3)
                self.bars["v_empty"][stage].arrive("store")


def simulate(spec: Any, num_chunks: int, seed: int) -> None:
    simulation = Simulation(seed)
    run_cluster([Block(simulation, spec, rank, num_chunks) for rank in range(spec.sharers)])


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 5, 41])
def test_blocks_of_a_key_head(num_chunks: int) -> None:
    """No deadlock, no overwrite of what is still read, the arrivals of the table in every phase."""
    for seed in range(20):
        simulate(spec_of(), num_chunks, seed)


def test_a_ring_of_v_that_is_too_short_is_found() -> None:
    """A head with three tiles may not wait for the other one's fill between two of its own."""
    with pytest.raises(AssertionError, match="expected|deadlock|arrivals"):
        for seed in range(20):
            simulate(spec_of(value_stages=3), 41, seed)


@pytest.mark.parametrize("name", ["k_empty", "q_empty", "m_tile_released", "tile_released", "stored"])
def test_a_wrong_table_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrivals of one head where both must have arrived, or of both where there is one."""
    wrong = with_arrivals(barriers.key_head_barriers(spec_of()), name, common.Arrivals("state", "role"))
    monkeypatch.setattr(barriers, "key_head_barriers", lambda spec: wrong)
    with pytest.raises(AssertionError, match="arrivals of|still read|holds|deadlock"):
        simulate(spec_of(), 41, 0)


def test_the_table_says_what_the_kernel_needs() -> None:
    spec = spec_of()
    table = barriers.key_head_barriers(spec)
    assert (table.count("ready"), table.count("ready", is_from_peer=True)) == (128, 1)
    names = ("k_empty", "v_empty", "stored", "m_tile_released", "tile_released", "gates_full", "gates_free")
    found = [table.count(name) for name in names]
    assert found == [8, 1, 4, 16, 16, 32, 4]
    assert (table.count("q_empty"), table.count("q_empty", is_from_peer=True)) == (12, 8)
    assert table.count("work_empty") == 16  # every warp
    assert (spec.key_stages % 2, spec.stages % 2) == (0, 0)  # a maker sees every fill of the stages of its chunks
