"""Initialisation of the mbarriers of a block, from their table."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from kernels_cute.common.barriers import BarrierTable


def init_barriers(table: BarrierTable, storage: Any, rank: Any) -> None:
    """Initialises the barriers of a block, by one lane. rank: of the block in its cluster.

    A plain function: inside a dynamic `if` the DSL takes a call of an object's method for a change of the object.
    """
    for name, barrier in table.barriers.items():
        for stage in range(barrier.stages):
            count: Any = table.count(name)
            if barrier.from_peer:
                count = _own_or_peer(rank, stage, count, table.count(name, is_from_peer=True))
            cute.arch.mbarrier_init(getattr(storage, name).data_ptr() + stage, count)


@cute.jit
def _own_or_peer(rank, stage, own, peer):
    count = Int32(peer)
    if rank == stage:
        count = Int32(own)
    return count
