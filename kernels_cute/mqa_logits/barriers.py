"""Barriers of both logits kernels. The table is the only place that states an arrive count: it initialises the mbarriers, and
warp roles arrive and wait through it under their own name. tests/compile/test_logits_barriers.py simulates the roles with it.
"""

from dataclasses import dataclass

import cutlass.cute as cute

from kernels_cute.common.barriers import Arrivals, Barrier, BarrierTable

WITH_BYTES = "with the bytes"  # that the copy engine will have written


@dataclass(frozen=True)
class NamedBarrier:
    """`count` neighbouring named barriers of the hardware, 1 to 15 (0 is the block's own), from `first_id` on."""

    first_id: int
    warps: int  # that complete a phase of one of them, those that wait included
    count: int = 1


# The other math warpgroup arrives, this one waits, before it issues a tile. Both meet the same tiles, so turns alternate
# strictly: warpgroup 1 hands out the first, warpgroup 0 takes the last when the list has ended.
TURN = NamedBarrier(2, warps=8, count=2)
SCORES = NamedBarrier(4, warps=4, count=2)  # a math warpgroup meets twice a tile, where scores go through shared memory
COSTS = NamedBarrier(6, warps=4)  # the fill warps arrive when costs are added up; copy and publish wait where the runs begin


def barriers(query_stages: int, key_stages: int, math_warps: int) -> BarrierTable:
    """Two rings, of items with their queries and of keys: x_full, completed by the roles that fill a stage, and x_free."""
    copy, publish, read = Arrivals("copy", "role", what=WITH_BYTES), Arrivals("publish", "thread"), Arrivals("math", "warp")
    return BarrierTable(
        {"copy": 1, "publish": 1, "math": math_warps},
        [
            Barrier("queries_full", query_stages, (copy, publish), ("math",)),
            Barrier("queries_free", query_stages, (read,), ("copy", "publish")),
            Barrier("keys_full", key_stages, (copy,), ("math",)),
            Barrier("keys_free", key_stages, (read,), ("copy",)),
        ],
    )


# What roles call. Functions, because the DSL takes an object whose method is called in a loop for one that the loop changes.


def initialise(table: BarrierTable, storage):
    """Initialises all mbarriers. One lane of the block calls it; the caller makes it visible to the others."""
    # Not init_barriers of common/barriers.py, which goes barrier by barrier: its order gives other machine code.
    for ring in ("queries", "keys"):
        for stage in range(table.barriers[f"{ring}_full"].stages):
            for name in (f"{ring}_full", f"{ring}_free"):
                cute.arch.mbarrier_init(pointer(storage, name, stage), table.count(name))


def pointer(storage, name: str, stage):
    return getattr(storage, name).data_ptr() + stage


def arrive(tiles, storage, name: str, stage, by: str):
    """One lane's arrival."""
    _arrival(tiles, name, by)
    cute.arch.mbarrier_arrive(pointer(storage, name, stage))


def arrive_and_expect(tiles, storage, name: str, stage, num_bytes, by: str):
    """One lane's arrival, and the number of bytes that the phase also waits for."""
    if _arrival(tiles, name, by).what != WITH_BYTES:
        raise ValueError(f"{name}: {by} arrives without bytes")
    cute.arch.mbarrier_arrive_and_expect_tx(pointer(storage, name, stage), num_bytes)


def _arrival(tiles, name: str, by: str) -> Arrivals:
    found = [one for one in tiles.barriers.barriers[name].arrivals if one.role == by]
    if not found:
        raise ValueError(f"{name}: {by} does not arrive at it")
    return found[0]


def wait(tiles, storage, name: str, stage, parity, by: str):
    if by not in tiles.barriers.barriers[name].waits:
        raise ValueError(f"{name}: {by} does not wait for it")
    cute.arch.mbarrier_wait(pointer(storage, name, stage), parity)


def arrive_named(barrier: NamedBarrier, which=0):
    """All lanes of a warp arrive and go on."""
    cute.arch.barrier_arrive(barrier_id=barrier.first_id + which, number_of_threads=32 * barrier.warps)


def wait_named(barrier: NamedBarrier, which=0):
    """All lanes of a warp arrive and wait for the other threads."""
    cute.arch.barrier(barrier_id=barrier.first_id + which, number_of_threads=32 * barrier.warps)
