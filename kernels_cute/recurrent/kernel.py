"""The recurrent kernel: its launch, and the form that prefetches the next token's inputs."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from gdn.ops.delta_rule.problem import RecurrentParams
from kernels_cute.common.delta_rule import HeadGate, make_work, store_out, update
from kernels_cute.common.memory import without_batch
from kernels_cute.common.rounding import mixed_seed
from kernels_cute.common.state_sums import Exchange, carveout
from kernels_cute.common.state_tile import load_state, opaque_place
from kernels_cute.recurrent import tokens
from kernels_cute.recurrent.draft_tree import run_tree
from kernels_cute.recurrent.replay import run_replayed
from kernels_cute.recurrent.single_token import run_without_prefetch
from kernels_cute.recurrent.tokens import Spec


class Recurrent:
    """The kernel of one problem and configuration."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(self, *values):
        """values: RecurrentParams, and the stream."""
        spec, params, stream = self.spec, RecurrentParams(*values[:-1]), values[-1]
        blocks = (params.cu_seqlens.shape[0] - 1) * (spec.heads * spec.v_blocks)
        q, k, v, g, beta, out = without_batch(params.q, params.k, params.v, params.g, params.beta, params.out)
        min_blocks = spec.config.min_threads_per_sm // spec.config.threads
        # Without a value the DSL asks a device for its limit.
        percent = carveout(spec.shared_bytes, min_blocks) if spec.shared_bytes else 0
        limits = {"min_blocks_per_mp": min_blocks, "preferred_smem_carveout": percent}
        kernel = self.kernel(params._replace(q=q, k=k, v=v, g=g, beta=beta, out=out))
        kernel.launch(grid=[blocks, 1, 1], block=[spec.config.threads, 1, 1], stream=stream, **limits)

    @cute.kernel
    def kernel(self, params: RecurrentParams):
        if cutlass.const_expr(self.spec.ring is not None):
            run_replayed(self.spec, params)
        elif cutlass.const_expr(self.spec.config.prefetch_next_token):
            run_with_prefetch(self.spec, params)
        else:
            run_without_prefetch(self.spec, params)


@cute.jit
def run_with_prefetch(spec: Spec, params: RecurrentParams):
    """Compute a sequence, head and columns of V. The inputs of the next token are loaded while the current one is computed."""
    tile, problem = spec.tile, spec.problem
    block = tokens.block_of(spec)
    sequence, place = block.sequence, block.place
    exchange_at = tokens.shared_parts(spec)
    rState = cute.make_rmem_tensor(tile.values, Float32)
    following = tokens.make_inputs(spec, tile.k_per_thread, spec.dtype)
    work = make_work(tile, spec.num_sums)
    for rX in (rState, *following):
        rX.fill(0)

    begin, count, written = tokens.rows_of(params, sequence)
    if count < 0:
        count = Int32(0)
    if cutlass.const_expr(not problem.has_parent):
        if count > 0:
            tokens.load_token(spec, params, begin, place, following)

    # A padding sequence has no slot: its rows become zero and nothing else happens.
    read_slot = Int64(sequence)
    live_count = count
    if cutlass.const_expr(problem.pooled):
        read_slot = slot_to_read(spec, params, sequence)
        if read_slot <= params.null_slot:
            live_count = Int32(0)

    if cutlass.const_expr(problem.has_initial_state):
        if cutlass.const_expr(problem.pooled):
            if live_count > 0:
                load_state(tile, read_slot, place, params.initial_state, rState)
        else:
            load_state(tile, read_slot, place, params.initial_state, rState)

    seed = mixed_seed(params.rounding_seed)
    minus_decay = Float32(0.0)
    bias = Float32(0.0)
    if cutlass.const_expr(spec.use_gate):
        minus_decay = -cute.math.exp(params.A_log[place.head])
        bias = params.dt_bias[place.head]
    gate = HeadGate(minus_decay, bias)

    # Zero rows, while the state is on its way: after the tokens, their bounds would have taken registers all along.
    tokens.store_idle(spec, params, block, begin, live_count, count, written)

    if cutlass.const_expr(problem.has_parent):
        exchange = Exchange(exchange_at, Int32(0), waits_first=True)
        run_tree(spec, params, block, begin, live_count, gate, seed, (rState, following, work), exchange)
    else:
        # Counted in tokens of the batch: counted from 0, the compiler peels the first token off and spills.
        for token in cutlass.range(begin, begin + live_count, unroll=1):
            alpha, beta = tokens.multiply(spec, following, gate, rState, work)
            if token + 1 < begin + live_count:
                # K first the exchange of sums needs the registers: addresses are made here, not kept from before the loop.
                tokens.load_token(spec, params, token + 1, opaque_place(place) if tile.k_warps > 1 else place, following)

            o_value = tokens.finish(spec, params, alpha, beta, place, work, Exchange(exchange_at, token % 2))
            store_out(tile, params.out, token, place, o_value)

            update(tile, alpha, work, rState)
            if cutlass.const_expr(spec.writes_every_token):
                tokens.store_node(spec, params, tokens.slot_to_write(spec, params, sequence, token - begin), place, rState, seed)
            if cutlass.const_expr(spec.writes_intermediate):
                tokens.store_intermediate(spec, params, sequence, token - begin, place, rState)

    write_slot = read_slot
    if cutlass.const_expr(spec.writes_last_token and problem.has_final_indices):
        write_slot = Int64(params.final_state_indices[sequence])
    tokens.store_last(spec, params, block, live_count, write_slot, rState, seed)


@cute.jit
def slot_to_read(spec: Spec, params: RecurrentParams, sequence: Int32):
    """Return the slot that a sequence of a pool starts from; null if its accepted count names no column."""
    if cutlass.const_expr(not spec.problem.write_every_token):
        return Int64(params.state_indices[sequence])
    accepted = Int32(1)
    if cutlass.const_expr(spec.problem.has_accepted):
        accepted = params.num_accepted_tokens[sequence]
    read_slot = params.null_slot
    if accepted >= 1:
        if accepted <= params.state_indices.shape[1]:
            read_slot = Int64(params.state_indices[sequence, accepted - 1])
    return read_slot
