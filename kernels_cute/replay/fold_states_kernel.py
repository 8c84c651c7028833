"""Kernels of fold_states.py: the folds, and after them the counts.

All blocks list the sequences that have something to do, `threads` sequences at a time, each block for itself and all alike:
which work item is whose follows from that without a word between blocks. A work item is (sequence, layer, head, columns).
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from gdn.ops.delta_rule.problem import FoldStatesParams, FoldStatesProblem
from gdn.ops.delta_rule.tiles import Tiles
from kernels_cute.common import build, ptx, ring
from kernels_cute.common.memory import fake, narrowed
from kernels_cute.common.ring import RingTile
from kernels_cute.common.rounding import mixed_seed
from kernels_cute.common.state_sums import carveout
from kernels_cute.common.state_tile import Place, StateTile, load_state, store_state

_SMS = 132  # of an H100 and an H200; with fewer the blocks wait for places
_FACTS = 4  # words of a listed sequence
_COUNT_THREADS = 128


class Sequence(NamedTuple):
    """What a launch must know of a sequence."""

    slot: Any  # Int32
    target: Any  # Int32: slot that the state goes to; null = none
    committed: Any  # Int32
    accepted: Any  # Int32


class Spec:
    """Compile-time constants."""

    def __init__(self, problem: FoldStatesProblem, tiles: Tiles) -> None:
        self.problem, self.tiles, self.tile = problem, tiles, StateTile(problem, tiles)
        counts = (problem.ring_rows, problem.fold_every, problem.has_accepted, problem.num_k_heads, problem.num_state_heads)
        self.ring = RingTile(*counts, self.tile)
        self.v_blocks = -(-problem.head_v_dim // tiles.block_v)  # blocks of a head
        self.parts = problem.num_state_heads * self.v_blocks  # work items of a layer's sequence
        self.k_group = problem.num_state_heads // problem.num_k_heads
        self.warps = tiles.threads // 32
        self.min_blocks = tiles.min_threads_per_sm // tiles.threads
        self.list_words = _FACTS * tiles.threads
        self.shared_bytes = 4 * (self.ring.floats() + self.list_words + self.warps)

    def storage(self) -> Any:
        num_entries, num_words, num_counts = self.ring.floats(), self.list_words, self.warps

        @cute.struct
        class Storage:
            entries: cute.struct.Align[cute.struct.MemRange[Float32, num_entries], 16]
            listed: cute.struct.Align[cute.struct.MemRange[Int32, num_words], 16]
            counts: cute.struct.Align[cute.struct.MemRange[Int32, num_counts], 16]

        return Storage


class FoldStates:
    """The kernels of one problem and configuration."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(self, *values):
        """values: FoldStatesParams, and the stream."""
        spec, params, stream = self.spec, FoldStatesParams(*values[:-1]), values[-1]
        num_sequences = params.num_computed_tokens.shape[0]
        items = num_sequences * params.ssm_state.shape[0] * spec.parts
        blocks = cutlass.min(items, Int32(_SMS * spec.min_blocks))
        percent = carveout(spec.shared_bytes, spec.min_blocks)
        limits = {"min_blocks_per_mp": spec.min_blocks, "preferred_smem_carveout": percent}
        self.folds(params).launch(grid=[blocks, 1, 1], block=[spec.tiles.threads, 1, 1], stream=stream, **limits)
        grid = [(num_sequences + _COUNT_THREADS - 1) // _COUNT_THREADS, 1, 1]
        self.counts(params).launch(grid=grid, block=[_COUNT_THREADS, 1, 1], stream=stream)

    @cute.kernel
    def folds(self, params: FoldStatesParams):
        spec = self.spec
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        storage = cutlass.utils.SmemAllocator().allocate(spec.storage())
        entries = ring.entries_at(spec.ring, storage.entries.data_ptr().toint())
        listed, counts = storage.listed.data_ptr().toint(), storage.counts.data_ptr().toint()
        seed = mixed_seed(params.rounding_seed)
        num_sequences, num_layers = params.num_computed_tokens.shape[0], params.ssm_state.shape[0]
        for base in cutlass.range(0, num_sequences, spec.tiles.threads, unroll=1):
            count = list_sequences(spec, params, base + thread, num_sequences, thread, listed, counts)
            for item in cutlass.range(block, count * num_layers * spec.parts, blocks, unroll=1):
                fold_item(spec, params, item, num_layers, listed, entries, thread, seed)
            cute.arch.sync_threads()  # the list is read

    @cute.kernel
    def counts(self, params: FoldStatesParams):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        number = block * _COUNT_THREADS + thread
        if number < params.num_computed_tokens.shape[0]:
            sequence, is_valid, _ = sequence_of(self.spec, params, number)
            if is_valid & (Int64(sequence.target) > params.null_slot):
                params.state_tokens[sequence.target] = sequence.committed


@cute.jit
def sequence_of(spec: Spec, params: FoldStatesParams, number: Int32):
    """A sequence, whether it is none of padding, and the tokens that its state was last written with."""
    slot = narrowed(params.state_indices[number])
    committed = Int32(params.num_computed_tokens[number])
    accepted = Int32(1)
    if cutlass.const_expr(spec.problem.has_accepted):
        accepted = params.num_accepted_tokens[number]
    target = slot
    if cutlass.const_expr(spec.problem.has_final_indices):
        target = narrowed(params.final_state_indices[number])
    most = cutlass.const_expr(spec.ring.most_tokens)
    is_valid = (Int64(slot) > params.null_slot) & (slot >= 0) & (accepted >= 1) & (accepted <= most) & (committed >= 0)
    written = Int32(0)
    if is_valid:
        written = params.state_tokens[slot]
    has_ring = Int64(slot) < params.ring.shape[1]
    is_valid = is_valid & (written <= committed) & (has_ring | (written == committed))
    return Sequence(slot, target, committed, accepted), is_valid, written


@cute.jit
def list_sequences(
    spec: Spec, params: FoldStatesParams, number: Int32, num_sequences: Int32, thread: Int32, listed: Int32, counts: Int32
):
    """Lists those of the block's next sequences that have entries, or go to another slot; returns how many there are."""
    lane, warp = thread % 32, thread // 32
    facts = Sequence(Int32(0), Int32(0), Int32(0), Int32(1))
    is_listed = Boolean(False)
    if number < num_sequences:
        facts, is_valid, written = sequence_of(spec, params, number)
        is_listed = is_valid & (Int64(facts.target) > params.null_slot)
        if cutlass.const_expr(not spec.problem.has_final_indices):
            is_listed = is_listed & (written < facts.committed)
    votes = cute.arch.vote_ballot_sync(is_listed)
    if lane == 0:
        ptx.store_word(counts + warp * 4, cute.arch.popc(votes))
    cute.arch.sync_threads()
    before = cute.arch.popc(votes & ((Int32(1) << lane) - 1))
    total = Int32(0)
    for w in cutlass.range_constexpr(spec.warps):
        number_of_warp = ptx.load_word(counts + w * 4)
        if w < warp:
            before += number_of_warp
        total += number_of_warp
    if is_listed:
        ptx.store_words(listed + before * (4 * _FACTS), [*facts])
    cute.arch.sync_threads()
    return total


@cute.jit
def fold_item(
    spec: Spec, params: FoldStatesParams, item: Int32, num_layers: Int32, listed: Int32, entries: Any, thread: Int32, seed: Int32
):
    """A head's columns of a listed sequence in a layer."""
    tile = spec.tile
    part, rest = item % spec.parts, item // spec.parts
    layer, place_in_list = rest % num_layers, rest // num_layers
    slot, target, committed, accepted = ptx.load_words(listed + place_in_list * (4 * _FACTS))
    lane, group = tile.lane_and_group(thread)
    head = part // spec.v_blocks
    place = Place(head, lane, (part % spec.v_blocks * tile.groups + group) * tile.v_per_thread)
    gStates = layer_of(params.ssm_state, layer)
    phase = (params.fold_phase + layer) % spec.problem.fold_every
    first = ring.boundary(spec.ring, committed - accepted, phase)
    has_ring = Int64(slot) < params.ring.shape[1]
    first = cutlass.select_(has_ring, first, committed)  # nothing is live

    rState = cute.make_rmem_tensor(tile.values, Float32)
    rState.fill(0.0)
    written = cutlass.max(Int32(params.state_tokens[slot]), first)
    if cutlass.const_expr(spec.problem.has_final_indices):
        has_work = Boolean(True)
    else:
        has_work = written < committed
    if has_work:
        tensors, positions = (layer_of(params.ring, layer), params.state_tokens), (first, committed)
        ring.load_entries(spec.ring, tensors, Int64(slot), head // spec.k_group, place, positions, thread, entries, False)
        load_state(tile, Int64(slot), place, gStates, rState)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        live = ring.Live(Int32(0), committed - first, written - first, committed - first, Boolean(True))
        if ring.needs_fold(live):
            ring.fold(spec.ring, entries, live, place, thread, rState)
        store_state(tile, Int64(target), place, tile.width, gStates, rState, seed)
        cute.arch.sync_threads()  # the entries are read


@cute.jit
def layer_of(gX: cute.Tensor, layer: Int32):
    """[layers, slots, ...] as [slots, ...]."""
    inner = cute.select(gX.layout, mode=[*range(1, cute.rank(gX))])
    offset = Int64(layer) * gX.stride[0] * (gX.element_type.width // 8)
    return cute.make_tensor(
        cute.make_ptr(gX.element_type, gX.iterator.toint() + offset, cute.AddressSpace.gmem, assumed_align=16), inner
    )


def library(problem: FoldStatesProblem, config: Tiles) -> dict[str, bytes]:
    p, heads, K, V = problem, problem.num_state_heads, problem.head_k_dim, problem.head_v_dim
    inner = (V, K) if p.state_v_first else (K, V)
    layers, slots = cute.sym_int(), cute.sym_int64()
    state = fake(p.state_dtype, layers, slots, heads, *inner, last=(inner[1], 1))
    rings = fake("float32", layers, cute.sym_int64(), p.ring_rows, cute.sym_int64(), last=1)
    indices, final = fake(p.index_dtype, None), fake(p.index_dtype if p.has_final_indices else None, None)
    written, computed, accepted = fake("int32", slots), fake("int32", None), fake("int32" if p.has_accepted else None, None)
    seed = fake("int64" if p.has_rounding else None, 1, last=1)
    fakes = FoldStatesParams(state, rings, indices, written, computed, accepted, final, seed, Int32(0), Int64(-1))
    return build.one_entry("fold_states", FoldStates(Spec(problem, config)), fakes)
