"""Runs the warp roles of a kernel against its barrier tables, with random times: no GPU, no compiler.

A role is a generator that yields what it waits for: a time, or a barrier and the parity of the phase that must be over. The
simulation ends when every role has; it raises where none can go on, where a phase ends with other arrivals than the table says,
where a role waits that the table does not name, and where a buffer is written while somebody still reads it, or read before it
holds what is expected.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import replace
from typing import Any

Step = float | tuple["Mbarrier | Named", str, int]
Role = Generator[Step, None, None]


class Mbarrier:
    """One mbarrier: phases end when all arrivals and all announced bytes (here: copies) are there."""

    def __init__(self, table: Any, name: str, is_from_peer: bool = False) -> None:
        barrier = table.barriers[name]
        arrivals = barrier.from_peer if is_from_peer and barrier.from_peer else barrier.arrivals
        self.name, self.waits, self.phase, self.pending = name, set(barrier.waits), 0, 0
        self.expected = Counter({one.role: one.count(table.warps[one.role]) for one in arrivals})
        self.found: Counter[str] = Counter()

    def arrive(self, role: str, count: int = 1, copies: int = 0) -> None:
        self.found[role] += count
        self.pending += copies
        assert self.found[role] <= self.expected[role], f"{self.name}: {self.found[role]} arrivals of {role} in one phase"
        self._end()

    def complete(self) -> None:
        """One of the announced copies has ended."""
        self.pending -= 1
        self._end()

    def _end(self) -> None:
        if self.pending == 0 and self.found == self.expected:
            self.phase, self.found = self.phase + 1, Counter()

    def is_over(self, parity: int) -> bool:
        return self.phase % 2 != parity


def mbarriers(table: Any, rank: int | None = None) -> dict[str, list[Mbarrier]]:
    """All barriers of a block. rank: of a block whose other barriers of a name another block of the cluster arrives at."""
    return {
        name: [Mbarrier(table, name, is_from_peer=rank not in (None, stage)) for stage in range(one.stages)]
        for name, one in table.barriers.items()
    }


def with_arrivals(table: Any, name: str, *arrivals: Any, **changes: Any) -> Any:
    """The table with other arrivals on one barrier."""
    changed = replace(table.barriers[name], arrivals=arrivals, from_peer=(), **changes)
    return type(table)(table.warps, list((table.barriers | {name: changed}).values()))


class Named:
    """A barrier of the hardware: over as soon as all warps have come, of which some may not wait."""

    def __init__(self, name: str, warps: int, *waits: str) -> None:
        self.name, self.waits, self.warps, self.come, self.phase = name, set(waits), warps, 0, 0

    def arrive(self) -> int:
        """Parity of the phase that this arrival belongs to."""
        parity = self.phase % 2
        self.come += 1
        if self.come == self.warps:
            self.come, self.phase = 0, self.phase + 1
        return parity

    def meet(self, role: str) -> Step:
        """A warp's arrival, and its wait for the others."""
        return self, role, self.arrive()

    def is_over(self, parity: int) -> bool:
        return self.phase % 2 != parity


class Buffer:
    """Contents of one place in shared memory, and who reads it."""

    def __init__(self, name: str) -> None:
        self.name, self.content, self.readers = name, None, 0

    def write(self, content: Any) -> None:
        assert self.readers == 0, f"{self.name}: {content} is written over {self.content}, which is still read"
        self.content = content

    def begin(self, content: Any) -> None:
        """Somebody starts to read it."""
        assert self.content == content, f"{self.name}: expected {content}, holds {self.content}"
        self.readers += 1

    def end(self) -> None:
        self.readers -= 1


class Simulation:
    def __init__(self, seed: int) -> None:
        self.random, self.now = random.Random(seed), 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count, self._waiting = 0, []  # type: ignore[var-annotated]
        self._alive = 0

    def start(self, name: str, role: Role) -> None:
        self._alive += 1
        self.after(0.0, lambda: self._go(name, role))

    def after(self, delay: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + delay, self._count, action))

    def some_time(self, most: float) -> float:
        """Mostly short, sometimes very long."""
        return self.random.random() * most * (20 if self.random.random() < 0.05 else 1)

    def read(self, buffer: Buffer, content: Any, most: float) -> Role:
        buffer.begin(content)
        yield self.some_time(most)
        buffer.end()

    def copy(self, barrier: Mbarrier, buffer: Buffer, content: Any, source: Buffer | None = None) -> None:
        """An asynchronous copy into a buffer, which the barrier counts; it reads its source until it ends."""
        if source is not None:
            source.begin(content)

        def end() -> None:
            if source is not None:
                source.end()
            buffer.write(content)
            barrier.complete()

        self.after(self.some_time(3.0), end)

    def _go(self, name: str, role: Role) -> None:
        step = next(role, None)
        if step is None:
            self._alive -= 1
        elif isinstance(step, tuple):
            barrier, as_role, parity = step
            assert as_role in barrier.waits, f"{barrier.name}: {as_role} waits, which the table does not say"
            self._waiting.append((barrier, parity, name, role))
        else:
            self.after(step, lambda: self._go(name, role))

    def run(self) -> None:
        while self._events or self._waiting:
            still = []
            for waiting in self._waiting:
                barrier, parity, name, role = waiting
                if barrier.is_over(parity):
                    self.after(self.random.random() * 0.1, lambda name=name, role=role: self._go(name, role))  # type: ignore[misc]
                else:
                    still.append(waiting)
            self._waiting = still
            if not self._events:
                names = sorted(f"{name} on {barrier.name}" for barrier, _, name, _ in still)
                raise AssertionError(f"deadlock: {', '.join(names)}")
            self.now, _, action = heapq.heappop(self._events)
            action()
        assert self._alive == 0


def run_cluster(blocks: list[Any]) -> None:
    """Runs blocks of one simulation that know each other."""
    for block in blocks:
        block.peers = blocks
        block.start()
    blocks[0].sim.run()


def faults_found(blocks: Iterable[Any], name: str, expected: Mapping[str, int]) -> int:
    """How many of the blocks' runs fail where the barriers of this name expect other arrivals."""
    found = 0
    for block in blocks:
        for barrier in block.barriers[name]:
            barrier.expected = Counter(expected)
        try:
            block.run()
        except AssertionError:
            found += 1
    return found
