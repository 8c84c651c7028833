"""The two ways in which makers of the four-SM form hand tiles to chains: the forms of its blocks.

ClusterForm, to the chains of the same cluster of four: copies between shared memories. Ranks 0 and 1 are the chains, 2 and 3
the makers. A set's chunks go to one slot of both chains, and the set's own tiles stay in place until both chains are done with
theirs: they say so on the set's `tile_released`. `ready` of a slot gets its one arrival, with the bytes to come, from the maker;
`free` is not used.

RingForm, in clusters of two: through a ring in the workspace, which stays in the L2 cache. The workspace, with a group for every
(sequence, head), RING slots each:
    words   256 bytes; the first word counts the pairs of blocks that have begun
            256 bytes a group: chunks that each of the four sets has made; chunks that the chains have taken; 32 bytes apart
    slots   Z, P M and the vectors of chunk j of group g in slot g RING + j % RING, byte for byte as in shared memory
The words are zeroed by a launch of its own, the first of the call. A cluster is a pair of chains or of makers. Pairs take their
work from a counter as they begin: the makers of the first group, its chains, the makers of the second, ... So what has begun is
a part of this list without gaps, whatever the order in which blocks are placed on SMs, and of the groups that have begun at most
the last one waits for blocks that have not.

Tiles are moved by the copy engine (async proxy), words are of the generic proxy; what orders them:
    maker   wait for its bulk group, whose end includes a fence of the proxies: the tiles are written, seen by this thread;
            release of the chunks made
    chain   acquire of the chunks made; a fence of the proxies, or the copies that follow may be ahead of it; copies
    chain   `free` of a slot: both chains have the tiles in shared memory (they have waited for their bytes) and have read
            them; release of the chunks taken
    maker   acquire of the chunks taken; a fence of the proxies, for the copies that follow overwrite what was read
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64

from kernels_cute.chunk.four_sm import shape
from kernels_cute.chunk.four_sm.tiles import handed
from kernels_cute.chunk.rings import chunks_in
from kernels_cute.common import ptx

assert shape.SLOTS == shape.ROUND
CLEAR_THREADS = 256
_POLL_NANOSECONDS = 32


class ClusterForm:
    cluster_blocks, first_maker, released_arrivals = shape.BLOCKS, shape.CHAINS, 4 * shape.CHAINS
    key_loader, query_loader = 0, 1

    @cute.jit
    def place(self, chain: Any, workspace: cute.Tensor, warp: Int32):
        # Another launch may begin next to this one, once all of this one's blocks have begun.
        cute.arch.griddepcontrol_launch_dependents()
        block, _, _ = cute.arch.block_idx()
        rank = block % shape.BLOCKS
        return block // shape.BLOCKS, 1 - rank // shape.CHAINS, rank % shape.CHAINS

    @cute.jit
    def route(self, chain: Any, maker: Any, workspace: cute.Tensor, group: Int32):
        """Barriers and tiles of a chain's first slot, and a maker's `tile_released`: addresses as in that block."""
        return tuple(x.data_ptr().toint() for x in (chain.ready, chain.z, chain.p, chain.vectors, maker.tile_released))

    def leave(self, chain: Any) -> None:
        pass

    def free_slot(self, route: Any, slot: Any) -> None:
        """Signals the maker that fills the slot."""
        ptx.arrive_in_cluster(ptx.in_block(route[4] + slot // shape.MAKERS * 8, shape.CHAINS + slot % shape.MAKERS))

    @cute.jit
    def hand_over_set(self, storage: Any, route: Any, length: Int32, number: Int32, group: Int32):
        """Z, P M and the vectors of a set's chunks to both chains."""
        ready, *tiles, _ = route
        slot = number + group * shape.MAKERS
        for step in cutlass.range(slot, chunks_in(length), shape.ROUND, unroll=1):
            cute.arch.mbarrier_wait(storage.made.data_ptr() + group, step // shape.ROUND & 1)
            with cute.arch.elect_one():
                for rank in cutlass.range_constexpr(shape.CHAINS):
                    barrier = ptx.in_block(ready + slot * 8, Int32(rank))
                    ptx.expect_in_cluster(barrier, Int32(shape.HANDED_BYTES))
                    for (field, size, _), target in zip(handed(storage), tiles, strict=True):
                        to = ptx.in_block(target + slot * size, Int32(rank))
                        ptx.copy_in_cluster(to, field.data_ptr().toint() + group * size, Int32(size), barrier)

    def tile_warp(self, storage: Any, route: Any, length: Any, number: Any) -> None:
        pass


class RingForm:
    """The launch runs next to that of the clusters of four, which began before it."""

    cluster_blocks, first_maker, released_arrivals = 2, 0, 1
    # The other chain loads the tiles.
    key_loader = query_loader = 1 - shape.TILE_LOADER

    @cute.kernel
    def clear(self, workspace: cute.Tensor, num_bytes: Int32):
        """Zeroes the words."""
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        offset = (block * CLEAR_THREADS + thread) * 16
        if offset < num_bytes:
            ptx.store_global_words(workspace.iterator.toint() + offset, [Int32(0)] * 4)

    @cute.jit
    def place(self, chain: Any, workspace: cute.Tensor, warp: Int32):
        """The block's place by the ticket of its pair."""
        block, _, _ = cute.arch.block_idx()
        rank = block % 2
        ticket_address = chain.ticket.data_ptr().toint()
        if warp == 0:
            if rank == 0:
                with cute.arch.elect_one():
                    ptx.store_word(ticket_address, ptx.count_up(workspace.iterator.toint()))
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        ticket = cute.arch.make_warp_uniform(ptx.load_from_block(ptx.in_block(ticket_address, Int32(0))))
        if warp == 0:
            # For the end, where it would have cost a register all the way.
            ptx.store_word(ticket_address + 4, ticket)
        return ticket // 2, ticket % 2, rank

    @cute.jit
    def route(self, chain: Any, maker: Any, workspace: cute.Tensor, group: Int32):
        """The group's words and slots, and `free` of the chain that loads tiles."""
        blocks, _, _ = cute.arch.grid_dim()
        words = workspace.iterator.toint() + Int64(group + 1) * shape.WORDS_BYTES
        slots = workspace.iterator.toint() + Int64(blocks // shape.BLOCKS + 1) * shape.WORDS_BYTES
        slots += Int64(group) * (shape.RING * shape.HANDED_BYTES)
        return words, slots, ptx.in_block(chain.free.data_ptr().toint(), Int32(shape.TILE_LOADER))

    @cute.jit
    def leave(self, chain: Any):
        """Wait for the other launch in the blocks of the last group: the stream's next work waits for this launch alone. The
        other blocks leave, so that their SMs are free for blocks that have not begun."""
        blocks, _, _ = cute.arch.grid_dim()
        if ptx.load_word(chain.ticket.data_ptr().toint() + 4) // 2 == blocks // shape.BLOCKS - 1:
            cute.arch.griddepcontrol_wait()

    def free_slot(self, route: Any, slot: Any) -> None:
        ptx.arrive_in_cluster(route[2] + slot * 8)

    @cute.jit
    def wait_for_count(self, word: Int64, count: Int32):
        """Wait until a word that only grows is at least `count`, and return its value."""
        found = ptx.load_acquire(word)
        while found < count:
            ptx.sleep(_POLL_NANOSECONDS)
            found = ptx.load_acquire(word)
        cute.arch.fence_proxy("async.global")
        return found

    @cute.jit
    def hand_over_set(self, storage: Any, route: Any, length: Int32, number: Int32, group: Int32):
        """Z, P M and the vectors of a set's chunks to the ring."""
        words, slots, _ = route
        first = number + group * shape.MAKERS
        made, taken = words + first * shape.WORD_BYTES, Int32(0)
        for step in cutlass.range(first, chunks_in(length), shape.ROUND, unroll=1):
            cute.arch.mbarrier_wait(storage.made.data_ptr() + group, step // shape.ROUND & 1)
            if taken <= step - shape.RING:
                taken = self.wait_for_count(words + shape.TAKEN * shape.WORD_BYTES, step - shape.RING + 1)
            with cute.arch.elect_one():
                slot = slots + step % shape.RING * shape.HANDED_BYTES
                for field, size, before in handed(storage):
                    ptx.copy_to_global(slot + before, field.data_ptr().toint() + group * size, Int32(size))
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.mbarrier_arrive(storage.tile_released.data_ptr() + group)
                cute.arch.cp_async_bulk_wait_group(0, read=False)
                ptx.store_release(made, step // shape.ROUND + 1)

    @cute.jit
    def tile_warp(self, storage: Any, route: Any, length: Int32, rank: Int32):
        """Load Z, P M and the vectors from the ring. One chain loads for both. The other arms its own barrier once the last fill
        of the slot has arrived."""
        words, slots, _ = route
        made, next1, next2, next3 = Int32(0), Int32(0), Int32(0), Int32(0)  # by the set of this step, of the next, ...
        for step in cutlass.range(chunks_in(length), unroll=1):
            slot, parity = step % shape.SLOTS, step // shape.SLOTS & 1
            ready = storage.ready.data_ptr() + slot
            if rank == shape.TILE_LOADER:
                cute.arch.mbarrier_wait(storage.free.data_ptr() + slot, parity ^ 1)
            else:
                cute.arch.mbarrier_wait(ready, parity ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(ready, shape.HANDED_BYTES)
            if rank == shape.TILE_LOADER:
                if made <= step // shape.ROUND:
                    made = self.wait_for_count(words + step % shape.ROUND * shape.WORD_BYTES, step // shape.ROUND + 1)
                with cute.arch.elect_one():
                    source = slots + step % shape.RING * shape.HANDED_BYTES
                    for field, size, before in handed(storage):
                        target, chains = field.data_ptr().toint() + slot * size, Int16((1 << shape.CHAINS) - 1)
                        ptx.copy_from_global_to_blocks(target, source + before, Int32(size), ready.toint(), chains)
                    if step % shape.TAKEN_EVERY == shape.TAKEN_EVERY - 1:
                        # What was in this slot has left the ring. Rarely, for a release takes long.
                        ptx.store_release(words + shape.TAKEN * shape.WORD_BYTES, step - shape.SLOTS + 1)
            made, next1, next2, next3 = next1, next2, next3, made


Form = ClusterForm | RingForm
