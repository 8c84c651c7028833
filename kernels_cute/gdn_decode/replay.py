"""A token of the fused decode step with a ring: convolution, delta rule on a state some tokens old and its entries, norm.

The state stays as it is in registers over the sequence's tokens. After the last one, where the positions pass a fold, the state
takes in committed entries and is stored.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from gdn.ops.layer_step.problem import GdnDecodeParams
from kernels_cute.common import ptx, ring, ring_batch
from kernels_cute.common.delta_rule import Work, make_work, row_factors, store_out
from kernels_cute.common.ring import Entries, Live
from kernels_cute.common.staged_state import fill_state
from kernels_cute.common.state_sums import Exchange, add_up
from kernels_cute.common.state_tile import store_state
from kernels_cute.gdn_decode.convolution import beta_of, load_gates, load_row, log_decay_of, store_column
from kernels_cute.gdn_decode.spec import Block, Registers, Sequence, Shared, Spec, column_in_head
from kernels_cute.gdn_decode.token import (
    gate_of_norm,
    move_line,
    multiply,
    send_squares,
    squares_of_head,
    store_columns,
    sum_of_squares,
    write_convolved,
)

_MOST_COLUMN_TURNS = 2  # of a loop of a column's lanes over entries that is unrolled


@cute.jit
def run_token(
    spec: Spec, params: GdnDecodeParams, block: Block, sequence: Sequence, step: Int32, registers: Registers, shared: Shared
):
    """Compute token `step` of the sequence. registers hold its inputs, and afterwards those of the next token."""
    tile, place, rState, entries = spec.tile, block.place, registers.state, shared.entries
    positions = (sequence.first, sequence.committed)
    newest = sequence.committed - sequence.first + step
    if cutlass.const_expr(spec.stages_state):  # before the convolution, since the windows come last
        write_gates(spec, params, block, newest, registers, shared)
    write_convolved(spec, block, registers, shared)
    if cutlass.const_expr(not spec.stages_state):
        write_gates(spec, params, block, newest, registers, shared)
    if step == 0:
        cute.arch.cp_async_wait_group(1 if spec.stages_state else 0)  # the entries are there, the state need not be
    cute.arch.sync_threads()
    if cutlass.const_expr(spec.cluster > 1):
        # The windows of this block are read (its values have been used), and its barriers are set up.
        if step == 0:
            cute.arch.cluster_arrive_relaxed()

    live = ring.live_entries(spec.ring, entries, positions, params.fold_phase)
    alpha = weigh(spec, entries, live, newest, block.thread, shared)
    own_decay = ptx.load_one(entries.decays + newest * 4)
    beta = ptx.load_one(shared.tokens + 4 * spec.gates_at + 4)
    if cutlass.const_expr(spec.stages_state):
        if step == 0:
            cute.arch.cp_async_wait_group(0)
            fill_state(tile, params.ssm_state.element_type, shared.state, block.thread, rState)

    work = make_work(tile, 2 * tile.v_per_thread + 3)
    multiply(spec, shared.tokens, place.lane, rState, work)
    cute.arch.sync_threads()  # all weights are there
    unrolls = cutlass.const_expr(spec.stages_state and spec.ring.most_live <= _MOST_COLUMN_TURNS * tile.threads_per_column)
    ring.add_entries(spec.ring, entries, live, newest, None, alpha, place, block.thread, work.sums, unrolls)
    add_up(tile, work.sums, 2 * tile.v_per_thread + 3, Exchange(shared.warp_parts, step % 2))
    k_factor, q_factor = row_factors(tile, work.sums, params.scale, True)
    value, squares = finish(spec, block, (beta, k_factor, q_factor), work, shared.tokens)

    if cutlass.const_expr(spec.cluster > 1):
        if step == 0:
            cute.arch.cluster_wait()
    parity = step % 2
    if cutlass.const_expr(spec.has_norm):
        send_squares(spec, block, squares, parity, shared)

    # While the sums are under way: the entry, the window's new columns, and the next token's inputs.
    writes_key = block.rank == 0
    heads = (cutlass.select_(writes_key, block.key_head, Int32(-1)), block.rank % spec.splits == 0)
    slot = Int64(sequence.read_slot)
    entry, at_thread = (k_factor, own_decay, work), (place, block.thread)
    several = cutlass.const_expr(spec.has_several_tokens)
    ring.append(spec.ring, (params.ring, slot), live, newest, entry, heads, at_thread, entries, several)
    if live.is_valid:
        store_window(spec, params, block, sequence, step, registers)
    move_line(spec, registers.line)
    norm_gate = gate_of_norm(spec, registers)
    if cutlass.const_expr(spec.has_several_tokens):
        if step + 1 < sequence.count:
            token = sequence.begin + step + 1
            load_row(spec, params, token, block, registers)
            load_gates(spec, params, token, block, registers.gates)

    if cutlass.const_expr(spec.has_norm):
        total = sum_of_squares(spec, block, step, parity, shared)
        inverse = cute.math.rsqrt(total * (1.0 / tile.head_v_dim) + params.eps)
        value = value * inverse * registers.norm_weight * norm_gate
    elif cutlass.const_expr(spec.has_several_tokens):
        cute.arch.sync_threads()  # all have read the token's inputs, which the next one's replace
    store_out(tile, params.out, sequence.begin + step, place, cutlass.select_(live.is_valid, value, Float32(0.0)))
    if step + 1 == sequence.count:
        store_folded(spec, params, block, sequence, live, registers, shared)


@cute.jit
def write_gates(spec: Spec, params: GdnDecodeParams, block: Block, newest: Int32, registers: Registers, shared: Shared):
    """Write the token's log decay and beta to shared memory, in the thread that has loaded what they are made of."""
    if block.thread == spec.tiles.threads - 1:
        g, beta = [of(spec, params, block, registers.gates) for of in (log_decay_of, beta_of)]
        ptx.store_one(shared.entries.decays + newest * 4, g)
        ptx.store_one(shared.tokens + 4 * spec.gates_at + 4, beta)


@cute.jit
def weigh(spec: Spec, entries: Entries, live: Live, newest: Int32, thread: Int32, shared: Shared):
    """Write the weights of the entries before the token to shared memory, and return D."""
    if cutlass.const_expr(spec.stages_state):  # registers that the state has later are free for several entries of a warp at once
        rDecay = cute.make_rmem_tensor(1, Float32)
        ring_batch.weigh(spec.ring, entries, live, newest, 1, (shared.tokens, 0, None), thread, rDecay)
        return rDecay[0]
    lane, k_row = thread % 32, shared.tokens + 4 * spec.tile.head_k_dim
    rQ = cute.make_rmem_tensor(4 * spec.ring.key_passes, Float32)
    rK = cute.make_rmem_tensor(4 * spec.ring.key_passes, Float32)
    ring.lane_values(spec.ring, shared.tokens, lane, rQ)
    ring.lane_values(spec.ring, k_row, lane, rK)
    return ring.weigh(spec.ring, entries, live, newest, None, (rQ, rK), thread)


@cute.jit
def finish(spec: Spec, block: Block, factors: tuple[Float32, Float32, Float32], work: Work, tokens: Int32):
    """Set work.u to the correction of each column. Return the output of column `lane`, and the warp's sum of squared outputs."""
    tile, place = spec.tile, block.place
    for r in cutlass.range_constexpr(tile.v_per_thread):
        at = tokens + (2 * tile.head_k_dim + r) * 4
        work.v[r] = ptx.load_one(at + (place.v_start - column_in_head(spec, block.rank)) * 4)
    o_value, squares = ring.combine(tile, factors, place.lane, work)
    return o_value, squares_of_head(spec, squares)


@cute.jit
def store_window(spec: Spec, params: GdnDecodeParams, block: Block, sequence: Sequence, step: Int32, registers: Registers):
    """Store the window's new columns: with accepted counts those of every token, else the window after the token."""
    if cutlass.const_expr(spec.keeps_columns):
        store_columns(spec, params, block, sequence, step, registers.line)
    else:
        for p in cutlass.range_constexpr(spec.passes):
            for c in cutlass.range_constexpr(spec.history):
                store_column(spec, params, block, Int64(sequence.window_slot), Int32(c), (p, c + 1), registers.line)


@cute.jit
def store_folded(
    spec: Spec, params: GdnDecodeParams, block: Block, sequence: Sequence, live: Live, registers: Registers, shared: Shared
):  # fmt: skip
    """Store the state with the entries that it takes in after this call, if there are any."""
    tile, place, rState = spec.tile, block.place, registers.state
    if ring.needs_fold(live):
        if cutlass.const_expr(spec.batch > 1):
            fill_state(tile, params.ssm_state.element_type, shared.state, block.thread, rState)
        ring.fold(spec.ring, shared.entries, live, place, block.thread, rState)
        store_state(tile, Int64(sequence.read_slot), place, tile.width, params.ssm_state, rState, sequence.seed)
