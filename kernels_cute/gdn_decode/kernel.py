"""The fused decode step: its launch, and a sequence from its slots to its rows of out."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from gdn.ops.layer_step.problem import GdnDecodeParams
from kernels_cute.common.delta_rule import store_zeros
from kernels_cute.common.init_barriers import init_barriers
from kernels_cute.common.memory import heads_of, narrowed
from kernels_cute.common.ptx import use
from kernels_cute.common.ring import boundary, entries_at, is_served, load_entries
from kernels_cute.common.rounding import mixed_seed
from kernels_cute.common.staged_state import copy_state
from kernels_cute.common.state_sums import carveout
from kernels_cute.common.state_tile import Place, load_state
from kernels_cute.gdn_decode import replay, replay_batch, several
from kernels_cute.gdn_decode.batch import load_rows
from kernels_cute.gdn_decode.convolution import load_filter, load_gates, load_head_gates, load_row, load_windows
from kernels_cute.gdn_decode.projections import flat_views
from kernels_cute.gdn_decode.shape import CHANNELS, WORDS
from kernels_cute.gdn_decode.spec import Block, Registers, Sequence, Shared, Spec, place_of_gates
from kernels_cute.gdn_decode.token import run_token, slot_of


class GdnDecode:
    """The kernel of one problem and configuration."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(self, *values):
        """values: GdnDecodeParams, and the stream."""
        spec, params, stream = self.spec, GdnDecodeParams(*values[:-1]), values[-1]
        num_sequences = params.mixed_qkv.shape[0]
        if cutlass.const_expr(spec.has_several_tokens):
            num_sequences = params.cu_seqlens.shape[0] - 1
        out = heads_of(params.out, 0, spec.problem.num_v_heads, spec.problem.head_v_dim)
        params = flat_views(spec.problem, params)._replace(out=out)
        self.kernel(params).launch(stream=stream, **launch_shape(spec, num_sequences))

    @cute.kernel
    def kernel(self, params: GdnDecodeParams):
        spec, problem = self.spec, self.spec.problem
        gIndices = params.state_indices
        block = block_of(spec)
        sequence, key_head, rank, thread, place = block

        # Everything that the slot depends on, at once.
        begin = Int32(sequence)
        count = Int32(1)
        if cutlass.const_expr(spec.has_several_tokens):
            begin = Int32(params.cu_seqlens[sequence])
            count = Int32(params.cu_seqlens[sequence + 1]) - begin
        accepted = Int32(1)
        if cutlass.const_expr(problem.has_accepted):
            accepted = params.num_accepted_tokens[sequence]
        committed = Int32(0)
        if cutlass.const_expr(spec.ring is not None):
            committed = Int32(params.num_computed_tokens[sequence])
        lane_slot = Int32(0)  # with columns: of column `lane of the warp`; -1 is null: null_slot is never less
        if cutlass.const_expr(problem.has_columns):
            lane_slot = narrowed(gIndices[sequence, cutlass.min(thread % 32, gIndices.shape[1] - 1)])
        else:
            lane_slot = narrowed(gIndices[sequence])
        seed = mixed_seed(params.rounding_seed)

        # While the index is under way, what does not wait for it.
        registers = make_registers(spec, params, block)
        if cutlass.const_expr(spec.batch == 1):  # the gates of several tokens come with their rows
            load_head_gates(spec, params, block, registers.gates)
        if cutlass.const_expr(not spec.has_several_tokens and spec.batch == 1):
            load_gates(spec, params, begin, block, registers.gates)
        if cutlass.const_expr(spec.stages_state):
            load_inputs(spec, params, block, begin, registers)
            cute.arch.sync_warp()  # else the compiler asks for them only where they are used, after the state

        # The slots to read, and the column at which the window starts. One that is null makes the sequence padding.
        read_slot = lane_slot
        window_slot = lane_slot
        column = Int32(0)
        is_live = count > 0
        if cutlass.const_expr(problem.has_columns):
            column = accepted - 1
            is_live = is_live & (column >= 0) & (column < gIndices.shape[1])
            is_live = is_live & (column <= params.conv_state.shape[2] - spec.history)
            if is_live:
                window_slot = cute.arch.shuffle_sync(lane_slot, 0)
                read_slot = slot_of(column, sequence, lane_slot, gIndices)
        first = Int32(0)
        if cutlass.const_expr(spec.ring is not None):
            is_live = is_live & is_served(spec.ring, committed, accepted, count) & (Int64(read_slot) < params.ring.shape[0])
            first = boundary(spec.ring, committed - accepted, params.fold_phase)
            if cutlass.const_expr(spec.keeps_columns):
                column = accepted - 1
                most = params.conv_state.shape[2] - spec.history
                is_live = is_live & (column <= most) & (count <= most + 1)
        is_live = is_live & (Int64(read_slot) > params.null_slot) & (Int64(window_slot) > params.null_slot)
        if is_live:
            live = Sequence(begin, count, read_slot, window_slot, lane_slot, column, seed, first, committed)
            run_sequence(spec, params, block, live, registers)
        else:
            store_zeros(spec.tile, params.out, begin, begin + count, Int32(1), place)
        if cutlass.const_expr(spec.has_several_tokens):
            # Rows beyond the last sequence are dealt to all blocks of the head.
            num_sequences = params.cu_seqlens.shape[0] - 1
            first = Int32(params.cu_seqlens[num_sequences]) + sequence
            store_zeros(spec.tile, params.out, first, params.out.shape[0], num_sequences, place)


def launch_shape(spec: Spec, num_sequences: Any) -> dict[str, Any]:
    """Grid, clusters, blocks and limits of the launch."""
    min_blocks = spec.tiles.min_threads_per_sm // spec.tiles.threads
    # Percent: a few KiB a block; without a value the DSL asks a device for its limit.
    needs_much = spec.tile.k_warps > 1 or spec.ring is not None
    percent = max(16, carveout(spec.shared_bytes, min_blocks)) if needs_much else 16
    grid = [num_sequences * (spec.problem.num_k_heads * spec.cluster), 1, 1]
    shape = {"grid": grid, "block": [spec.tiles.threads, 1, 1], "cluster": [spec.cluster, 1, 1]}
    return shape | {"min_blocks_per_mp": min_blocks, "preferred_smem_carveout": percent}


def gates_of(spec: Spec, params: GdnDecodeParams, block: Block) -> Any:
    """Registers of `Registers.gates`."""
    if spec.batch == 1:
        rGates = cute.make_rmem_tensor(4, Int32)
        rGates.fill(0)
        return rGates
    (gA, _), (gB, _) = place_of_gates(spec, params, block)
    found = [cute.make_rmem_tensor(1, gX.element_type) for gX in (params.A_log, params.dt_bias, gA, gB)]
    for rX in found:
        rX.fill(0.0)
    return tuple(found)


def block_of(spec: Spec) -> Block:
    """The sequence, heads and columns of a thread."""
    block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
    rank = block % spec.cluster
    sequence = block // (spec.cluster * spec.problem.num_k_heads)
    key_head = block // spec.cluster % spec.problem.num_k_heads
    value_head = key_head * spec.ratio + rank // spec.splits
    lane, group = spec.tile.lane_and_group(thread)
    v_start = rank % spec.splits * spec.tiles.block_v + group * spec.tile.v_per_thread
    return Block(sequence, key_head, rank, thread, Place(value_head, lane, v_start))


@cute.jit
def load_inputs(spec: Spec, params: GdnDecodeParams, block: Block, begin: Int32, registers: Registers):
    """Load what does not wait for the slot: the filter and, with one token, its row.

    Loads to registers share six counters, and what waits for one of them may wait for the state. Only where the state does not
    come to registers are these asked for before the slot is known.
    """
    if cutlass.const_expr(not spec.has_several_tokens):
        load_row(spec, params, begin, block, registers)
    load_filter(spec, params, block, registers)


@cute.jit
def run_sequence(spec: Spec, params: GdnDecodeParams, block: Block, sequence: Sequence, registers: Registers):
    """Compute a sequence that is no padding. Either all blocks of a cluster call it, or none."""
    place = block.place
    storage = cutlass.utils.SmemAllocator().allocate(spec.storage())
    tokens, sums, parts = [part.data_ptr().toint() for part in (storage.tokens, storage.sums, storage.warp_parts)]
    # The few bytes of the convolution before those of the ring and the many of the state: it is done while those are under way.
    window = (Int64(sequence.window_slot), sequence.column)
    if cutlass.const_expr(sequence.is_continued is None):
        load_windows(spec, params, block, *window, registers.line)
    else:
        registers.line.fill(0)
        if sequence.is_continued:
            load_windows(spec, params, block, *window, registers.line)
    if cutlass.const_expr(spec.batch > 1):
        load_rows(spec, params, block, sequence, Int32(0), registers)
    elif cutlass.const_expr(spec.has_several_tokens):
        load_row(spec, params, sequence.begin, block, registers)
        load_gates(spec, params, sequence.begin, block, registers.gates)
    if cutlass.const_expr(spec.stages_state):
        cute.arch.sync_warp()  # else the compiler asks for them last, since they take registers
    else:
        load_inputs(spec, params, block, sequence.begin, registers)
    entries = None
    if cutlass.const_expr(spec.ring is not None):
        entries = entries_at(spec.ring, storage.entries.data_ptr().toint(), spec.batch)
        tensors, positions = (params.ring, params.state_tokens), (sequence.first, sequence.committed)
        slot = Int64(sequence.read_slot)
        unrolls = cutlass.const_expr(spec.stages_state and spec.batch == 1)  # elsewhere addresses would spill
        load_entries(spec.ring, tensors, slot, block.key_head, place, positions, block.thread, entries, unrolls)
    norm_weight = Float32(0.0)
    if cutlass.const_expr(spec.has_norm and (spec.batch == 1 or spec.ring is not None)):
        columns = cutlass.const_expr(spec.tile.v_per_thread)
        if cutlass.const_expr(spec.batch > 1):
            if place.lane < 2 * columns:
                norm_weight = params.norm_weight[place.v_start + place.lane % columns].to(Float32)
        elif place.lane < columns:
            norm_weight = params.norm_weight[place.v_start + place.lane].to(Float32)
    if cutlass.const_expr(spec.stages_state):
        state = storage.state.data_ptr().toint()
        copy_state(spec.tile, Int64(sequence.read_slot), place, params.ssm_state, state, block.thread)
    elif cutlass.const_expr(sequence.is_continued is None):
        load_state(spec.tile, Int64(sequence.read_slot), place, params.ssm_state, registers.state)
    else:
        registers.state.fill(0.0)
        if sequence.is_continued:
            load_state(spec.tile, Int64(sequence.read_slot), place, params.ssm_state, registers.state)

    shared = Shared(tokens, sums, storage.sums_full.data_ptr(), parts, entries, storage.state.data_ptr().toint())
    if cutlass.const_expr(spec.sends_squares):
        if block.thread == 0:
            init_barriers(spec.barriers, storage, 0)
            cute.arch.mbarrier_init_fence()
            for i in cutlass.range_constexpr(2):
                cute.arch.mbarrier_arrive_and_expect_tx(shared.sums_full + i, 4 * spec.parts * spec.batch)

    filled = registers._replace(norm_weight=norm_weight)
    one_token = run_token if spec.ring is None else replay.run_token
    if cutlass.const_expr(spec.batch > 1):
        run_tokens = several.run_tokens if spec.ring is None else replay_batch.run_tokens
        run_tokens(spec, params, block, sequence, filled, shared)
    elif cutlass.const_expr(spec.has_several_tokens):
        for step in cutlass.range(sequence.count, unroll=1):
            one_token(spec, params, block, sequence, step, filled, shared)
        use(registers.state[0])
    else:
        one_token(spec, params, block, sequence, Int32(0), filled, shared)


def make_registers(spec: Spec, params: GdnDecodeParams, block: Block) -> Registers:
    """Registers of a sequence, without the weight of the norm."""
    rWeight = cute.make_rmem_tensor(spec.passes * spec.weight_words, Int32)
    rBias = cute.make_rmem_tensor(spec.passes * CHANNELS, Float32)
    rLine = cute.make_rmem_tensor(spec.passes * spec.line_rows * WORDS, Int32)
    rZ = cute.make_rmem_tensor(spec.batch, Float32)
    rState = cute.make_rmem_tensor(spec.tile.values, Float32)
    rOut = cute.make_rmem_tensor(CHANNELS, Float32)
    rBias.fill(0.0)
    rZ.fill(0.0)
    return Registers(rState, rWeight, rBias, rLine, gates_of(spec, params, block), rZ, Float32(0.0), rOut)
