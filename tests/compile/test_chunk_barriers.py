"""Roles and barriers of the CuTe chunk kernel's blocks, simulated with random times from the kernel's own barrier tables."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from gdn.ops.delta_rule.inputs import chunk_problem
from tests.compile.barrier_simulation import Buffer, Role, Simulation, mbarriers, run_cluster, with_arrivals

barriers = pytest.importorskip("kernels_cute.chunk.barriers", reason="needs the CuTe DSL")
split_barriers = pytest.importorskip("kernels_cute.chunk.split.barriers", reason="needs the CuTe DSL")
common = pytest.importorskip("kernels_cute.common.barriers", reason="needs the CuTe DSL")
shape = pytest.importorskip("kernels_cute.chunk.shape", reason="needs the CuTe DSL")
scheduler = pytest.importorskip("kernels_cute.chunk.scheduler", reason="needs the CuTe DSL")
norm = pytest.importorskip("kernels_cute.chunk.roles.norm", reason="needs the CuTe DSL")
specs = pytest.importorskip("kernels_cute.chunk.spec", reason="needs the CuTe DSL")

RECORDS = scheduler.RECORDS


def spec_of(head_dim: int) -> Any:
    problem = chunk_problem(head_k_dim=head_dim, head_v_dim=head_dim, dtype="bfloat16")
    return specs.ChunkSpec(problem, shape.STAGES, 0, is_persistent=False, has_both_variants=False, is_split=False)


class Block:
    """A block of the fused kernel. work_tiles: chunks of each; in a persistent grid an end follows, and roles take records."""

    def __init__(self, simulation: Simulation, spec: Any, rank: int, work_tiles: list[int]) -> None:
        self.sim, self.spec, self.rank = simulation, spec, rank
        self.work_tiles = [*work_tiles, 0] if spec.is_persistent else work_tiles
        self.peers: list[Block] = []
        self.bars = mbarriers(barriers.block_barriers(spec), rank)
        self.keys = [Buffer(f"K {i}") for i in range(spec.key_stages)]
        self.queries = [Buffer(f"Q {i}") for i in range(spec.stages)]
        self.values = [[Buffer(f"V {i}, warp {warp}") for warp in range(4)] for i in range(spec.stages)]
        self.m, self.p = [Buffer(f"M {i}") for i in range(2)], [Buffer(f"P {i}") for i in range(2)]
        self.rows = [Buffer(f"gates {i}") for i in range(2)]

    def start(self) -> None:
        bodies = {"load": self.load, "inverse": self.inverse, "score": self.score, "store": self.store}
        if self.spec.paired:
            bodies["hand_over"] = self.hand_over
        roles = {name: self.tiles(name, body) for name, body in bodies.items()}
        roles |= {f"state {warp}": self.tiles("state", partial(self.state, warp)) for warp in range(4)}
        roles["gates"] = self.gates()
        for name, role in roles.items():
            self.sim.start(f"{name} of block {self.rank}", role)

    def tiles(self, role: str, body: Callable[[range], Role]) -> Role:
        """A role that takes work tile after work tile; body: for the chunks of one, counted since the block began."""
        first = 0
        for number, count in enumerate(self.work_tiles):
            if self.spec.is_persistent:
                yield from self.take(role, number)
            yield from body(range(first, first + count))
            first += count

    def take(self, role: str, number: int) -> Role:
        record, turn = self.place(RECORDS, number)
        yield from self.wait(role, "work_full", record, turn)
        self.bars["work_empty"][record].arrive(role, 4 if role in ("inverse", "score") else 1)

    def deal(self, number: int) -> Role:
        """The record of a work tile; nothing after the end."""
        if self.spec.is_persistent and number < len(self.work_tiles):
            record, turn = self.place(RECORDS, number)
            yield from self.wait("gates", "work_empty", record, turn ^ 1)
            self.bars["work_full"][record].arrive("gates")

    def own(self, chunks: range) -> list[int]:
        """The chunks among these that this block prepares."""
        return [chunk for chunk in chunks if not self.spec.paired or chunk % 2 == self.rank]

    def wait(self, role: str, name: str, stage: int, parity: int) -> Role:
        yield self.bars[name][stage], role, parity

    def place(self, stages: int, chunk: int) -> tuple[int, int]:
        return chunk % stages, chunk // stages % 2

    def half(self, chunk: int) -> tuple[int, int]:
        own = chunk // self.spec.aux_step
        return own % 2, own // 2 % 2

    def load_keys(self, chunk: int) -> Role:
        stage, turn = self.place(self.spec.key_stages, chunk)
        yield from self.wait("load", "k_empty", stage, turn ^ 1)
        self.bars["k_full"][stage].arrive("load", copies=1)
        self.sim.copy(self.bars["k_full"][stage], self.keys[stage], ("K", chunk))

    def load(self, chunks: range) -> Role:
        """Keys one chunk ahead of the rest."""
        for chunk in chunks[:1]:
            yield from self.load_keys(chunk)
        for chunk in chunks:
            if chunk + 1 in chunks:
                yield from self.load_keys(chunk + 1)
            yield from self.load_rest(chunk)

    def load_rest(self, chunk: int) -> Role:
        yield from self.load_values(chunk, copies=5)
        stage, _ = self.place(self.spec.stages, chunk)
        self.sim.copy(self.bars["full"][stage], self.queries[stage], ("Q", chunk))

    def load_values(self, chunk: int, copies: int) -> Role:
        """copies: with those that a caller adds."""
        stage, turn = self.place(self.spec.stages, chunk)
        yield from self.wait("load", "empty", stage, turn ^ 1)
        full = self.bars["full"][stage]
        full.arrive("load", copies=copies)
        for part in self.values[stage]:
            self.sim.copy(full, part, ("V", chunk))

    def gates(self) -> Role:
        yield from self.deal(0)
        first = 0
        for number, count in enumerate(self.work_tiles):
            if self.spec.is_persistent:
                yield from self.take("gates", number)
            yield from self.deal(number + 1)
            yield from self.make_gates(range(first, first + count))
            first += count

    def make_gates(self, chunks: range) -> Role:
        for chunk in self.own(chunks):
            half, turn = self.half(chunk)
            yield self.sim.some_time(0.5)
            yield from self.wait("gates", "gates_free", half, turn ^ 1)
            self.rows[half].write(("gates", chunk))
            self.bars["gates_full"][half].arrive("gates", 32)

    def inverse(self, chunks: range) -> Role:
        for chunk in self.own(chunks):
            stage, turn = self.place(self.spec.key_stages, chunk)
            half, half_turn = self.half(chunk)
            buffer, buffer_turn = self.place(2, chunk)
            yield from self.wait("inverse", "k_full", stage, turn)
            yield from self.sim.read(self.keys[stage], ("K", chunk), 1.0)
            yield from self.wait("inverse", "gates_full", half, half_turn)
            self.bars["factors_full"][half].arrive("inverse", 128)
            yield from self.sim.read(self.rows[half], ("gates", chunk), 1.0)
            self.bars["gates_free"][half].arrive("inverse", 4)
            yield from self.wait("inverse", "tile_released", buffer, buffer_turn ^ 1)
            self.m[buffer].write(("M", chunk))
            self.bars["ready"][buffer].arrive("inverse", 128)

    def score(self, chunks: range) -> Role:
        for chunk in self.own(chunks):
            yield from self.make_p(chunk)

    def make_p(self, chunk: int) -> Role:
        key_stage, key_turn = self.place(self.spec.key_stages, chunk)
        stage, turn = self.place(self.spec.query_stages, chunk)
        half, half_turn = self.half(chunk)
        buffer, buffer_turn = self.place(2, chunk)
        yield from self.wait("score", "k_full", key_stage, key_turn)
        yield from self.wait("score", "q_full" if self.spec.has_norm else "full", stage, turn)
        yield from self.sim.read(self.queries[stage], ("Q", chunk), 0.5)
        yield from self.sim.read(self.keys[key_stage], ("K", chunk), 0.5)
        yield from self.wait("score", "gates_full", half, half_turn)
        yield from self.wait("score", "factors_full", half, half_turn)
        yield from self.sim.read(self.rows[half], ("gates", chunk), 0.5)
        yield from self.wait("score", "tile_released", buffer, buffer_turn ^ 1)
        self.p[buffer].write(("P", chunk))
        self.bars["gates_free"][half].arrive("score", 4)
        self.bars["ready"][buffer].arrive("score", 128)

    def hand_over(self, chunks: range) -> Role:
        other = self.peers[self.rank ^ 1]
        for chunk in self.own(chunks):
            yield from self.wait("hand_over", "ready", self.rank, chunk // 2 % 2)
            ready = other.bars["ready"][self.rank]
            ready.arrive("hand_over", copies=2)
            self.sim.copy(ready, other.m[self.rank], ("M", chunk), self.m[self.rank])
            self.sim.copy(ready, other.p[self.rank], ("P", chunk), self.p[self.rank])

    def state(self, warp: int, chunks: range) -> Role:
        for chunk in chunks:
            key_stage, key_turn = self.place(self.spec.key_stages, chunk)
            stage, turn = self.place(self.spec.stages, chunk)
            query_stage, query_turn = self.place(self.spec.query_stages, chunk)
            buffer, buffer_turn = self.place(2, chunk)
            yield from self.wait("state", "k_full", key_stage, key_turn)
            yield from self.sim.read(self.keys[key_stage], ("K", chunk), 0.3)
            yield from self.wait("state", "full", stage, turn)
            yield from self.sim.read(self.values[stage][warp], ("V", chunk), 0.2)
            if self.spec.has_norm:
                yield from self.wait("state", "q_full", query_stage, query_turn)
            yield from self.sim.read(self.queries[query_stage], ("Q", chunk), 0.2)
            yield from self.wait("state", "ready", buffer, buffer_turn)
            yield from self.sim.read(self.m[buffer], ("M", chunk), 0.3)
            yield from self.sim.read(self.keys[key_stage], ("K", chunk), 0.3)
            self.bars["k_empty"][key_stage].arrive("state")
            if self.spec.has_norm:
                self.bars["q_empty"][query_stage].arrive("state")
            yield from self.sim.read(self.p[buffer], ("P", chunk), 0.3)
            self.values[stage][warp].write(("O", chunk))
            self.bars["stored"][stage].arrive("state")
            owner = self.peers[buffer] if self.spec.paired else self
            owner.bars["tile_released"][buffer].arrive("state")

    def store(self, chunks: range) -> Role:
        for chunk in chunks:
            stage, turn = self.place(self.spec.stages, chunk)
            yield from self.wait("store", "stored", stage, turn)
            for part in self.values[stage]:
                yield from self.sim.read(part, ("O", chunk), 0.3)
            self.bars["empty"][stage].arrive("store")


class NormBlock(Block):
    """A block whose score warpgroup norms the outputs: Q in a ring of its own, sums from the other block, z."""

    def __init__(self, simulation: Simulation, spec: Any, rank: int, work_tiles: list[int]) -> None:
        super().__init__(simulation, spec, rank, work_tiles)
        self.queries = [Buffer(f"Q {i}") for i in range(spec.query_stages)]
        self.gates_of = [Buffer(f"z {i}") for i in range(shape.Z_BUFFERS)]
        self.sums = [Buffer(f"sums {i}") for i in range(shape.SUM_BUFFERS)]
        self.done = 0

    def load_rest(self, chunk: int) -> Role:
        stage, turn = self.place(self.spec.query_stages, chunk)
        yield from self.wait("load", "q_empty", stage, turn ^ 1)
        self.bars["q_full"][stage].arrive("load", copies=1)
        self.sim.copy(self.bars["q_full"][stage], self.queries[stage], ("Q", chunk))
        yield from self.load_values(chunk, copies=4)

    def score(self, chunks: range) -> Role:
        for chunk in self.own(chunks):
            yield from self.make_p(chunk)
            yield from self.norm(range(max(chunk - 2, self.done), chunk), chunk)
        if self.finishes(chunks):
            first = max(norm.unfinished(chunks.stop, self.rank), self.done)
            yield from self.norm(range(first, chunks.stop + 1), chunks.stop)
            self.done = chunks.stop

    def finishes(self, chunks: range) -> bool:
        return len(chunks) == 0 or not self.spec.is_persistent

    def norm(self, counts: range, num_chunks: int) -> Role:
        for count in counts:
            if count < num_chunks:
                yield from self.send_sums(count)
            if count > self.done:
                yield from self.apply_norm(count - 1)

    def send_sums(self, chunk: int) -> Role:
        stage, turn = self.place(self.spec.stages, chunk)
        yield from self.wait("score", "stored", stage, turn)
        for part in self.values[stage]:
            yield from self.sim.read(part, ("O", chunk), 0.1)
        place = chunk % shape.SUM_BUFFERS
        other: Any = self.peers[self.rank ^ 1]
        self.bars["sums_full"][place].arrive("score", copies=1)
        self.sim.copy(other.bars["sums_full"][place], other.sums[place], ("sums", chunk))

    def apply_norm(self, chunk: int) -> Role:
        stage, _ = self.place(self.spec.stages, chunk)
        buffer, turn = self.place(shape.Z_BUFFERS, chunk)
        place, sums_turn = self.place(shape.SUM_BUFFERS, chunk)
        yield from self.wait("score", "z_full", buffer, turn)
        yield from self.wait("score", "sums_full", place, sums_turn)
        yield from self.sim.read(self.sums[place], ("sums", chunk), 0.2)
        yield from self.sim.read(self.gates_of[buffer], ("z", chunk), 0.4)
        for part in self.values[stage]:
            part.write(("result", chunk))
        self.bars["normed"][stage].arrive("score", 4)

    def ask_for_gates(self, chunk: int) -> None:
        buffer = chunk % shape.Z_BUFFERS
        self.bars["z_full"][buffer].arrive("store", copies=1)
        self.sim.copy(self.bars["z_full"][buffer], self.gates_of[buffer], ("z", chunk))

    def store(self, chunks: range) -> Role:
        for chunk in chunks[: shape.Z_BUFFERS]:
            self.ask_for_gates(chunk)
        for chunk in chunks:
            stage, turn = self.place(self.spec.stages, chunk)
            yield from self.wait("store", "normed", stage, turn)
            if chunk + shape.Z_BUFFERS in chunks:
                self.ask_for_gates(chunk + shape.Z_BUFFERS)
            for part in self.values[stage]:
                yield from self.sim.read(part, ("result", chunk), 0.3)
            self.bars["empty"][stage].arrive("store")


def norm_spec() -> Any:
    return spec_of(128).changed(has_norm=True, query_stages=shape.NORM_QUERY_STAGES)


def simulate(kind: type[Block], spec: Any, work_tiles: list[int], seed: int) -> None:
    simulation = Simulation(seed)
    run_cluster([kind(simulation, spec, rank, work_tiles) for rank in range(spec.sharers)])


@pytest.mark.parametrize("head_dim", [128, 64])
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 5, 41])
def test_blocks_of_the_fused_kernel(head_dim: int, num_chunks: int) -> None:
    """No deadlock, no overwrite of what is still read, the arrivals of the table in every phase."""
    for seed in range(20):
        simulate(Block, spec_of(head_dim), [num_chunks], seed)


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4, 5, 6, 42])
def test_blocks_with_the_norm(num_chunks: int) -> None:
    """The same where the outputs leave through the norm, for which the two blocks of a head wait for each other's sums."""
    for seed in range(40):
        simulate(NormBlock, norm_spec(), [num_chunks], seed)


WORK_TILES = [[3], [1] * 12, [0] * 12, [5, *[0] * 30], [0, 4, 0, 0, 1, 1, *[0] * 20, 3, 2], [2, 1, 0, 1, 7, 0, 3] * 3]


@pytest.mark.parametrize("work_tiles", WORK_TILES, ids=str)
@pytest.mark.parametrize("has_norm", [False, True])
def test_blocks_that_take_work_tiles(has_norm: bool, work_tiles: list[int]) -> None:
    """The same with records of work tiles, some of them without chunks."""
    kind, spec = (NormBlock, norm_spec()) if has_norm else (Block, spec_of(128))
    for seed in range(10):
        simulate(kind, spec.changed(is_persistent=True), work_tiles, seed)


def test_a_norm_that_waits_for_the_next_chunk_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """More work tiles without chunks than records follow the last chunk: its outputs may not wait for another one."""
    monkeypatch.setattr(NormBlock, "finishes", lambda block, chunks: False)
    with pytest.raises(AssertionError, match="deadlock"):
        simulate(NormBlock, norm_spec().changed(is_persistent=True), [5, *[0] * 30], 0)


def test_fewer_places_for_sums_are_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other block may be two chunks ahead with its sums."""
    for module in (shape, barriers):
        monkeypatch.setattr(module, "SUM_BUFFERS", 2)
    with pytest.raises(AssertionError):
        for seed in range(40):
            simulate(NormBlock, norm_spec(), [42], seed)


@pytest.mark.parametrize(("name", "stages"), [("k_empty", 5), ("empty", 4), ("tile_released", 2)])
def test_a_wrong_table_is_found(name: str, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One arrival too few or too many on a barrier."""
    table = barriers.block_barriers(spec_of(128))
    assert table.barriers[name].stages == stages
    arrivals = common.Arrivals("store", "thread") if name == "empty" else common.Arrivals("state", "role")
    wrong = with_arrivals(table, name, arrivals)
    monkeypatch.setattr(barriers, "block_barriers", lambda spec: wrong)
    with pytest.raises(AssertionError, match="arrivals of|still read|holds|deadlock"):
        simulate(Block, spec_of(128), [41], 0)


def test_tables_say_what_the_kernel_needs() -> None:
    table = barriers.block_barriers(spec_of(128))
    assert table.count("ready") == 256 and table.count("ready", is_from_peer=True) == 1
    assert (table.count("tile_released"), barriers.block_barriers(spec_of(64)).count("tile_released")) == (8, 4)
    assert "gates_free[2]" in str(table)
    segments = barriers.block_barriers(spec_of(128).changed(is_split=True))
    assert [segments.count(name) for name in ("brought", "used", "composed")] == [1, 4, 4]
    summary = split_barriers.summary_barriers(spec_of(128))
    assert (summary.count("ready"), summary.count("ready", is_from_peer=True), summary.count("tile_released")) == (160, 1, 16)
    assert [summary.count(name) for name in ("k_full", "empty", "gates_full", "factors_full", "gates_free")] == [1, 8, 32, 128, 5]
    assert split_barriers.summary_barriers(spec_of(64)).count("tile_released") == 8


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: common.Barrier("full", 2, (common.Arrivals("nobody", "warp"),), ("state",)),
        lambda: common.Barrier("full", 2, (common.Arrivals("state", "thread", blocks=10000),), ("state",)),
        lambda: common.Barrier("full", 2, (common.Arrivals("state", "warp"),), ("nobody",)),
    ],
)
def test_the_host_refuses_a_wrong_table(wrong: Any) -> None:
    with pytest.raises(ValueError, match="full: expected"):
        common.BarrierTable({"state": 4}, [wrong()])
