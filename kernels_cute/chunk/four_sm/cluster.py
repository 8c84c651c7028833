"""How the makers of the wide chunk kernel hand tiles to the chains of the same cluster of four: copies between shared memories.

Ranks 0 and 1 are the chains, 2 and 3 the makers. A set's chunks go to one slot of both chains, and the set's own tiles stay in
place until both chains are done with theirs: they say so on the set's `taken`. `ready` of a slot gets its one arrival, with the
bytes to come, from the maker; `free` is not used.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernels_cute.chunk.four_sm.shape import BLOCKS, CHAINS, HANDED_BYTES, MAKERS, ROUND, SLOTS
from kernels_cute.chunk.four_sm.tiles import handed
from kernels_cute.chunk.rings import chunks_in
from kernels_cute.common import ptx

assert SLOTS == ROUND


class _Route(NamedTuple):
    """Shared memory of the first slot of a chain, barriers of a maker: addresses as in that block."""

    ready: Any
    z: Any
    p: Any
    vectors: Any
    taken: Any


class ClusterForm:
    cluster_blocks, first_maker, taken_arrivals = BLOCKS, CHAINS, 4 * CHAINS
    key_loader, query_loader = 0, 1

    @cute.jit
    def place(self, chain, workspace, warp):
        # Another launch may begin beside this one, once all of this one's blocks have begun.
        cute.arch.griddepcontrol_launch_dependents()
        block, _, _ = cute.arch.block_idx()
        rank = block % BLOCKS
        return block // BLOCKS, 1 - rank // CHAINS, rank % CHAINS

    @cute.jit
    def route(self, chain, maker, workspace, group):
        fields = (chain.ready, chain.z, chain.p, chain.vectors, maker.taken)
        return _Route(*[field.data_ptr().toint() for field in fields])

    def leave(self, chain: Any) -> None:
        pass

    def free_slot(self, route: Any, slot: Any) -> None:
        """To the maker that fills the slot."""
        ptx.arrive_in_cluster(ptx.in_block(route.taken + slot // MAKERS * 8, CHAINS + slot % MAKERS))

    @cute.jit
    def hand_over_set(self, storage, route, length, number, group):
        """Z, P M and the vectors of a set's chunks to both chains."""
        slot = number + group * MAKERS
        for step in cutlass.range(slot, chunks_in(length), ROUND, unroll=1):
            cute.arch.mbarrier_wait(storage.made.data_ptr() + group, step // ROUND & 1)
            with cute.arch.elect_one():
                for rank in cutlass.range_constexpr(CHAINS):
                    barrier = ptx.in_block(route.ready + slot * 8, Int32(rank))
                    ptx.expect_in_cluster(barrier, Int32(HANDED_BYTES))
                    for (field, size, _), target in zip(handed(storage), (route.z, route.p, route.vectors), strict=True):
                        to = ptx.in_block(target + slot * size, Int32(rank))
                        ptx.copy_in_cluster(to, field.data_ptr().toint() + group * size, Int32(size), barrier)

    def tile_warp(self, storage: Any, route: Any, length: Any, number: Any) -> None:
        pass
