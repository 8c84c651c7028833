"""Tables of the barriers of a kernel: name, who arrives and how often, who waits.

The table is the only place that states an arrive count: it initialises the barriers, warp roles arrive and wait through it under
their own name, and the host checks it when the kernel is compiled. tests/compile/test_logits_barriers.py simulates the roles
with it.
"""

from dataclasses import dataclass

import cutlass.cute as cute

LANES = 32
NAMED_BARRIERS = 16  # of a block; 0 is the block's own


@dataclass(frozen=True)
class Role:
    name: str
    warps: int


@dataclass(frozen=True)
class Arrival:
    """Arrivals of one role at one phase of a barrier."""

    role: Role
    lanes: int = 1  # lanes of each warp that arrive
    has_bytes: bool = False  # with the number of bytes that the copy engine will have written

    @property
    def count(self) -> int:
        return self.role.warps * self.lanes


@dataclass(frozen=True)
class Mbarrier:
    """An array of mbarriers in shared memory, one a stage; `name` is its field of the kernel's Storage."""

    name: str
    stages: int
    arrivals: tuple[Arrival, ...]
    waits: tuple[Role, ...]

    @property
    def count(self) -> int:
        """Arrivals that complete a phase."""
        return sum(arrival.count for arrival in self.arrivals)

    def arrival_of(self, by: str) -> Arrival:
        """ValueError where the role has none."""
        found = [arrival for arrival in self.arrivals if arrival.role.name == by]
        if not found:
            raise ValueError(f"{self.name}: {by} does not arrive at it")
        return found[0]


@dataclass(frozen=True)
class NamedBarrier:
    """`count` neighbouring named barriers of the hardware, from `first_id` on, that all threads of their roles meet at."""

    name: str
    first_id: int
    arrives: Role  # goes on at once
    waits: Role
    count: int = 1

    @property
    def threads(self) -> int:
        """Threads that complete a phase of one of them. A role that both arrives and waits is counted once."""
        warps = self.waits.warps + (self.arrives.warps if self.arrives != self.waits else 0)
        return LANES * warps


@dataclass(frozen=True)
class BarrierTable:
    mbarriers: tuple[Mbarrier, ...]
    named: tuple[NamedBarrier, ...]

    def __post_init__(self) -> None:
        """ValueError where the table contradicts itself."""
        rows = {barrier.name: barrier for barrier in self.mbarriers}
        if len(rows) < len(self.mbarriers):
            raise ValueError("two mbarriers have one name")
        for name, barrier in rows.items():
            roles = [arrival.role.name for arrival in barrier.arrivals]
            if len(set(roles)) < len(roles) or not roles or not barrier.waits:
                raise ValueError(f"{name}: expected roles that wait, and each role that arrives once")
            if any(not 1 <= arrival.lanes <= LANES for arrival in barrier.arrivals):
                raise ValueError(f"{name}: a warp arrives with 1 to {LANES} lanes")
        for full, free in self.rings():
            if free.stages != full.stages:
                raise ValueError(f"{free.name}: expected the {full.stages} stages of {full.name}, got {free.stages}")
            if {a.role for a in full.arrivals} != set(free.waits) or {a.role for a in free.arrivals} != set(full.waits):
                raise ValueError(f"{full.name}: who fills it must wait until it is free, and who waits for it must free it")
        ids = [0, *(barrier.first_id + which for barrier in self.named for which in range(barrier.count))]
        if len(set(ids)) < len(ids) or max(ids) >= NAMED_BARRIERS:
            raise ValueError(f"named barriers: expected different numbers from 1 to {NAMED_BARRIERS - 1}, got {ids[1:]}")

    def rings(self) -> list[tuple[Mbarrier, Mbarrier]]:
        """The pairs (x_full, x_free)."""
        rows = {barrier.name: barrier for barrier in self.mbarriers}
        names = [name.removesuffix("_full") for name in rows if name.endswith("_full")]
        if {f"{name}_{side}" for name in names for side in ("full", "free")} != set(rows):
            raise ValueError(f"expected pairs of mbarriers, x_full and x_free, got {', '.join(rows)}")
        return [(rows[f"{name}_full"], rows[f"{name}_free"]) for name in names]

    def __getattr__(self, name: str):
        for barrier in (*self.mbarriers, *self.named):
            if barrier.name == name:
                return barrier
        raise AttributeError(name)

    def text(self) -> str:
        """The table of DESIGN.md."""
        rows = [("barrier", "completed by", "waits")]
        for barrier in self.mbarriers:
            parts = [
                f"{a.role.name}: {a.count}" + (" with the bytes" if a.has_bytes else "") for a in barrier.arrivals
            ]  # fmt: skip
            waits = ", ".join(role.name for role in barrier.waits)
            rows.append((f"{barrier.name} x {barrier.stages}", f"{barrier.count} arrivals ({'; '.join(parts)})", waits))
        for barrier in self.named:
            ids = f"{barrier.name} (named {barrier.first_id}"
            ids += f" to {barrier.first_id + barrier.count - 1})" if barrier.count > 1 else ")"
            rows.append((ids, f"{barrier.threads} threads ({barrier.arrives.name})", barrier.waits.name))
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        return "\n".join(f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}" for row in rows)


# What roles call. Functions, because the DSL takes an object whose method is called in a loop for one that the loop changes.


def initialise(table: BarrierTable, storage):
    """Initialises all mbarriers. One lane of the block calls it; the caller makes it visible to the others."""
    for full, free in table.rings():
        for stage in range(full.stages):
            cute.arch.mbarrier_init(pointer(full, storage, stage), full.count)
            cute.arch.mbarrier_init(pointer(free, storage, stage), free.count)


def pointer(barrier: Mbarrier, storage, stage):
    return getattr(storage, barrier.name).data_ptr() + stage


def arrive(barrier: Mbarrier, storage, stage, by: str):
    """One lane's arrival."""
    barrier.arrival_of(by)
    cute.arch.mbarrier_arrive(pointer(barrier, storage, stage))


def arrive_and_expect(barrier: Mbarrier, storage, stage, num_bytes, by: str):
    """One lane's arrival, and the number of bytes that the phase also waits for."""
    if not barrier.arrival_of(by).has_bytes:
        raise ValueError(f"{barrier.name}: {by} arrives without bytes")
    cute.arch.mbarrier_arrive_and_expect_tx(pointer(barrier, storage, stage), num_bytes)


def wait(barrier: Mbarrier, storage, stage, parity, by: str):
    if by not in [role.name for role in barrier.waits]:
        raise ValueError(f"{barrier.name}: {by} does not wait for it")
    cute.arch.mbarrier_wait(pointer(barrier, storage, stage), parity)


def arrive_named(barrier: NamedBarrier, which=0):
    """All lanes of a warp arrive and go on."""
    cute.arch.barrier_arrive(barrier_id=barrier.first_id + which, number_of_threads=barrier.threads)


def wait_named(barrier: NamedBarrier, which=0):
    """All lanes of a warp arrive and wait for the other threads."""
    cute.arch.barrier(barrier_id=barrier.first_id + which, number_of_threads=barrier.threads)
