"""States between global memory and the registers of a state warpgroup, which has S^T of 64 V columns."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from gdn.ops.delta_rule.problem import ChunkParams
from kernels_cute.chunk.operands import select
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.common import ptx


@cute.jit
def starts_from_initial(spec: ChunkSpec, has_initial_state: cute.Tensor, sequence: Int32, live_length: Int32):
    """Whether a sequence starts from its initial state, not from zero."""
    starts = Boolean(spec.has_initial)
    if cutlass.const_expr(spec.has_initial):
        if cutlass.const_expr(spec.pooled):
            starts = live_length > 0
        if cutlass.const_expr(spec.has_mask):
            starts = starts & Boolean(has_initial_state[sequence])
    return starts


def load_state(spec: Any, params: Any, state: Any, owner: Any, head: Any, row0: Any, pair: Any) -> None:
    """Load the state that a work tile or segment starts from. owner: that work tile or segment."""
    starts = starts_from_initial(spec, params.has_initial_state, owner.sequence, owner.live_length)
    fetch_state(spec, params.initial_state, state, starts, owner.read_slot, head, row0, pair)
    settle_state(spec, params.initial_state, state, state, pair)


@cute.jit
def fetch_state(
    spec: ChunkSpec, initial_state: cute.Tensor, fetched: cute.Tensor, starts: Boolean, read_slot: Int64, head: Int32,
    row0: Int32, pair: Int32, first_column: cutlass.Constexpr = 0,
):  # fmt: skip
    """Issue the loads of a lane's entries of a state, in the order of memory. settle_state turns them into accumulators.

    first_column: K column of the first, a multiple of 16, where `fetched` has only some.
    """
    skipped = cutlass.const_expr(first_column // 8)
    fetched.fill(0.0)
    if cutlass.const_expr(spec.has_initial):
        if starts:
            if cutlass.const_expr(has_wide_accesses(spec, initial_state)):
                source = wide_address(spec, initial_state, read_slot, head, row0, pair)
                for access in cutlass.range_constexpr(cute.size(fetched) // 4):
                    values = ptx.load_global_four(source + wide_offset(spec, skipped + access))
                    for i in cutlass.range_constexpr(4):
                        fetched[4 * access + i] = values[i]
            else:
                source = state_pointer(spec, initial_state, read_slot, head, row0, pair)
                for n in cutlass.range_constexpr(cute.size(fetched) // 4):
                    for side in cutlass.range_constexpr(2):
                        entries = state_pair(spec, source, skipped + n, side)
                        fetched[4 * n + 2 * side] = entries[0].to(Float32)
                        fetched[4 * n + 2 * side + 1] = entries[1].to(Float32)


@cute.jit
def settle_state(spec: ChunkSpec, initial_state: cute.Tensor, fetched: cute.Tensor, state: cute.Tensor, pair: Int32):
    """Make the accumulators from what fetch_state has loaded. Both may be the same registers."""
    if cutlass.const_expr(spec.has_initial and has_wide_accesses(spec, initial_state)):
        is_odd = pair % 2 == 1
        for n in cutlass.range_constexpr(0, cute.size(state) // 4, 2):
            own = [fetched[4 * n + i] for i in range(8)]
            for side in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(2):
                    low, high = own[4 * side + i], own[4 * side + 2 + i]
                    other = cute.arch.shuffle_sync_bfly(select(is_odd, low, high), 1)
                    state[4 * n + 2 * side + i] = select(is_odd, other, low)
                    state[4 * (n + 1) + 2 * side + i] = select(is_odd, high, other)
    else:
        for i in cutlass.range_constexpr(cute.size(state)):
            state[i] = fetched[i]


@cute.jit
def store_state(spec: ChunkSpec, params: ChunkParams, state: cute.Tensor, work_tile: Any, row0: Int32, pair: Int32):
    if cutlass.const_expr(spec.has_final):
        written = cutlass.Boolean(True)
        write_slot = work_tile.read_slot
        if cutlass.const_expr(spec.pooled):
            written = work_tile.live_length > 0
        if cutlass.const_expr(spec.has_final_indices):
            if written:
                write_slot = Int64(params.final_state_indices[work_tile.sequence])
                written = write_slot > params.null_slot
        if written:
            write_state(spec, params.final_state, write_slot, state, work_tile.head, row0, pair)


@cute.jit
def store_checkpoints(
    spec: ChunkSpec, params: ChunkParams, state: cute.Tensor, sequence: Int32, head: Int32, done: Int32, row0: Int32, pair: Int32,
    first_column: cutlass.Constexpr = 0,
):  # fmt: skip
    """Store the state after `done` tokens of the sequence to every slot that asks for it, of the pool or of checkpoint_states.
    first_column: as for write_state."""
    target = params.final_state
    if cutlass.const_expr(params.checkpoint_states is not None):
        target = params.checkpoint_states
    # Where a head has one block, slots of 64 bits leave no registers for wide accesses.
    is_wide = spec.dim > 64 or params.checkpoint_slots.element_type is Int32
    for column in cutlass.range(cute.size(params.checkpoint_offsets, mode=[1]), unroll=1):
        if Int32(params.checkpoint_offsets[sequence, column]) == done:
            slot = Int64(params.checkpoint_slots[sequence, column])
            if slot > params.null_slot:
                write_state(spec, target, slot, state, head, row0, pair, is_wide, first_column)


@cute.jit
def write_state(
    spec: ChunkSpec, final_state: cute.Tensor, slot: Int64, state: cute.Tensor, head: Int32, row0: Int32, pair: Int32,
    may_be_wide: cutlass.Constexpr = True, first_column: cutlass.Constexpr = 0,
):  # fmt: skip
    """Store a lane's entries. first_column: K column of the first, a multiple of 16."""
    skipped = cutlass.const_expr(first_column // 8)
    if cutlass.const_expr(may_be_wide and has_wide_accesses(spec, final_state)):
        target = wide_address(spec, final_state, slot, head, row0, pair)
        is_odd = pair % 2 == 1
        for n in cutlass.range_constexpr(0, cute.size(state) // 4, 2):
            for side in cutlass.range_constexpr(2):
                values = [None] * 4
                for i in cutlass.range_constexpr(2):
                    first, second = state[4 * n + 2 * side + i], state[4 * (n + 1) + 2 * side + i]
                    other = cute.arch.shuffle_sync_bfly(select(is_odd, first, second), 1)
                    values[i] = select(is_odd, other, first)
                    values[2 + i] = select(is_odd, second, other)
                ptx.store_global_four(target + wide_offset(spec, skipped + n + side), values)
    else:
        target = state_pointer(spec, final_state, slot, head, row0, pair)
        for n in cutlass.range_constexpr(cute.size(state) // 4):
            for side in cutlass.range_constexpr(2):
                entries = state_pair(spec, target, skipped + n, side)
                entries[0] = state[4 * n + 2 * side].to(final_state.element_type)
                entries[1] = state[4 * n + 2 * side + 1].to(final_state.element_type)


# Where K is contiguous and entries are float32, two neighbouring lanes swap halves, so that each has 16 bytes in a row:
# of 16 K columns the even lanes have the first 8, the odd ones the last 8. It takes a quarter of the accesses.
def has_wide_accesses(spec: Any, states: Any) -> bool:
    return spec.v_first and states.element_type is Float32


def wide_address(spec: Any, states: Any, slot: Any, head: Any, row0: Any, pair: Any) -> Any:
    """Address of a lane's first four."""
    offset = slot * states.stride[0] + Int64(head) * (spec.dim * spec.dim)
    offset += Int64(row0) * spec.dim + pair % 2 * 8 + pair // 2 * 4
    return states.iterator.toint() + offset * 4


def wide_offset(spec: Any, access: int) -> int:
    """Return the bytes to access number `access` of a lane, of four values: 16 K columns and 8 V rows take turns."""
    return access // 2 * 64 + access % 2 * 8 * spec.dim * 4


def state_pointer(spec: Any, states: Any, slot: Any, head: Any, row0: Any, pair: Any) -> Any:
    """A lane's first entry of a head's state: V row row0, K column 2 * pair."""
    offset = slot * states.stride[0] + Int64(head) * (spec.dim * spec.dim)
    if spec.v_first:
        offset += Int64(row0) * spec.dim + 2 * pair
    else:
        offset += Int64(pair) * (2 * spec.dim) + row0
    return states.iterator + offset


def state_pair(spec, first, n: int, side: int) -> Any:
    """Two neighbouring K entries, 8 n K columns and 8 * side V rows after the lane's first."""
    if spec.v_first:
        return cute.make_tensor(first + (8 * side * spec.dim + 8 * n), cute.make_layout(2))
    return cute.make_tensor(first + (8 * n * spec.dim + 8 * side), cute.make_layout(2, stride=spec.dim))


@cute.jit
def prefetch_state(spec: ChunkSpec, initial_state: cute.Tensor, work_tile: Any):
    """Asks the L2 cache for the state that a work tile starts from."""
    if cutlass.const_expr(spec.has_initial):
        if work_tile.starts:
            size = initial_state.element_type.width // 8
            # Lines of 128 bytes: all of 64 V rows, or 64 columns of every K row.
            pitch = spec.dim * size
            lines = (spec.dim if spec.v_first else 64) * size // 128
            rows = 64 if spec.v_first else spec.dim
            row0, column0 = (work_tile.piece * 64, Int32(0)) if spec.v_first else (Int32(0), work_tile.piece * 64)
            offset = work_tile.read_slot * initial_state.stride[0] + Int64(work_tile.head) * (spec.dim * spec.dim)
            first = (initial_state.iterator + offset).toint() + Int64(row0 * pitch + column0 * size)
            for i in cutlass.range(cute.arch.lane_idx(), rows * lines, 32, unroll=1):
                ptx.prefetch_line(first + Int64(i // lines * pitch + i % lines * 128))
