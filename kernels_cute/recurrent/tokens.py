"""Constants of the recurrent kernel, and its steps over a token: load its inputs, multiply, take the output, update the state."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64

from gdn.ops.delta_rule.problem import RecurrentParams, RecurrentProblem
from gdn.ops.delta_rule.tiles import Config, writes_new_state
from kernels_cute.common.delta_rule import HeadGate, Work, add_products, combine, decay, row_factors, store_out, store_zeros
from kernels_cute.common.memory import CUTE_DTYPES, load, pointer
from kernels_cute.common.ptx import use
from kernels_cute.common.ring import RingTile
from kernels_cute.common.state_sums import Exchange, add_up, parts_floats, storage_type
from kernels_cute.common.state_tile import Place, StateTile, is_live, store_kept_state, store_state


class Spec:
    """Compile-time constants: a problem, a configuration, and what follows from them."""

    def __init__(self, problem: RecurrentProblem, config: Config) -> None:
        self.problem, self.config, self.tile = problem, config, StateTile(problem, config)
        self.heads = problem.num_state_heads
        self.v_blocks = -(-problem.head_v_dim // config.block_v)  # blocks of a head
        # State heads that read one head of q, of k, of v.
        self.q_group, self.k_group = self.heads // problem.num_q_heads, self.heads // problem.num_k_heads
        self.v_group = self.heads // problem.num_v_heads
        self.dtype = CUTE_DTYPES[problem.dtype]
        self.gate_dtype, self.beta_dtype = [CUTE_DTYPES[dtype or "float32"] for dtype in (problem.gate_dtype, problem.beta_dtype)]
        self.has_gate, self.has_beta = problem.gate_dtype is not None, problem.beta_dtype is not None
        self.use_gate = problem.use_gate and self.has_gate  # g is the raw gate

        writes_pool = problem.has_final_state and problem.pooled
        self.writes_every_token = writes_pool and problem.write_every_token
        self.writes_last_token = writes_pool and not problem.write_every_token  # the pool takes the last state alone
        self.writes_new = writes_new_state(problem)
        self.writes_intermediate = problem.intermediate_dtype is not None
        # Without a prefetch, K first: a token's state leaves while the inputs of the next one are under way, for which the gates
        # wait.
        self.stores_meanwhile = not problem.state_v_first and self.writes_every_token

        # Sums of a thread: S k and S q of each column; k q; with norms k k and q q.
        self.num_sums = 2 * config.v_per_thread + (3 if problem.use_qk_l2norm else 1)
        has_one_buffer = problem.has_parent and problem.ring_rows is None
        self.shared_floats = parts_floats(self.tile, 1 if has_one_buffer else 2)  # for the sums that warps exchange
        self.ring = None
        if problem.ring_rows is not None:
            counts = (problem.ring_rows, problem.fold_every, problem.has_accepted, problem.num_k_heads, self.heads)
            self.ring = RingTile(*counts, self.tile)
            self.row_floats = self.tile.k_per_thread * self.tile.threads_per_column  # of q or k, with what the tile pads
            self.row_passes = -(-2 * self.ring.key_units // self.tile.threads)  # parts of q and k in a thread

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        replayed = 0 if self.ring is None else 4 * self.row_floats + self.ring.floats()
        return 4 * (self.shared_floats + replayed)


class Inputs(NamedTuple):
    """Registers of a token's inputs as they are loaded: q and k [K entries], v [columns], g and beta [1]."""

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any


class Block(NamedTuple):
    """Part of the work that a thread has."""

    sequence: Any  # Int32
    thread: Any  # Int32
    place: Place


def block_of(spec: Spec) -> Block:
    """The sequence, head and columns of a thread."""
    block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
    sequence = block // (spec.heads * spec.v_blocks)
    head = block // spec.v_blocks % spec.heads
    lane, group = spec.tile.lane_and_group(thread)
    v_start = (block % spec.v_blocks * spec.tile.groups + group) * spec.tile.v_per_thread
    return Block(sequence, thread, Place(head, lane, v_start))


def rows_of(params: RecurrentParams, sequence: Any) -> tuple[Any, Any, Any]:
    """Return the first row and the number of rows of a sequence, and the first row of the call that belongs to none. The number
    is negative where cu_seqlens falls."""
    begin = Int32(params.cu_seqlens[sequence])
    end = Int32(params.cu_seqlens[sequence + 1])
    return begin, end - begin, Int32(params.cu_seqlens[params.cu_seqlens.shape[0] - 1])


def shared_parts(spec: Spec) -> Any:
    """Address of the sums that warps exchange."""
    if spec.shared_floats == 0:
        return Int32(0)
    return cutlass.utils.SmemAllocator().allocate(storage_type(spec.shared_floats)).parts.data_ptr().toint()


def make_inputs(spec: Spec, k_entries: int, k_dtype: Any) -> Inputs:
    """Registers of a token's inputs; k_entries: registers of q and of k."""
    sizes = (k_entries, k_entries, spec.tile.v_per_thread, 1, 1)
    dtypes = (k_dtype, k_dtype, spec.dtype, spec.gate_dtype, spec.beta_dtype)
    return Inputs(*[cute.make_rmem_tensor(size, dtype) for size, dtype in zip(sizes, dtypes, strict=True)])


@cute.jit
def load_token(spec: Spec, params: RecurrentParams, token: Int32, place: Place, inputs: Inputs):
    tile, row, gQ, gK, gV = spec.tile, Int64(token), params.q, params.k, params.v
    size = cutlass.const_expr(spec.dtype.width // 8)
    q_offset = row * gQ.stride[0] + Int64(place.head // spec.q_group) * gQ.stride[1] + place.lane * tile.vector
    k_offset = row * gK.stride[0] + Int64(place.head // spec.k_group) * gK.stride[1] + place.lane * tile.vector
    q_source, k_source = pointer(gQ, q_offset, tile.vector * size), pointer(gK, k_offset, tile.vector * size)
    load_q_k(tile, place, ((q_source, inputs.q), (k_source, inputs.k)), tile.vector)
    v_offset = row * gV.stride[0] + Int64(place.head // spec.v_group) * gV.stride[1] + place.v_start
    load_v_and_gates(spec, params, token, place, pointer(gV, v_offset, tile.v_per_thread * size), inputs)


@cute.jit
def load_q_k(tile: StateTile, place: Place, parts: Any, width: Constexpr):
    """Load a thread's part of q and k. parts: pointers to both, and their registers; width: registers of a chunk."""
    for c in cutlass.range_constexpr(tile.chunks):
        live = cutlass.Boolean(True)
        if cutlass.const_expr(tile.masks_k):
            live = c * tile.threads_per_column * tile.vector + place.lane * tile.vector < tile.head_k_dim
        if live:
            for source, rX in parts:
                load(source + c * tile.threads_per_column * width, width, rX, c * width, False)


@cute.jit
def load_v_and_gates(spec: Spec, params: RecurrentParams, token: Int32, place: Place, v_source: cute.Pointer, inputs: Inputs):
    if is_live(spec.tile, place, None):
        load(v_source, spec.tile.v_per_thread, inputs.v, 0, False)
    if cutlass.const_expr(spec.has_gate):
        inputs.g[0] = params.g[token, place.head]
    if cutlass.const_expr(spec.has_beta):
        inputs.beta[0] = params.beta[token, place.head]


@cute.jit
def multiply(spec: Spec, inputs: Inputs, gate: HeadGate, rState: cute.Tensor, work: Work):
    """Compute the thread's parts of a token's dot products in work.sums, with v and k as float32 in work. Return the decay and
    beta."""
    for r in cutlass.range_constexpr(spec.tile.v_per_thread):
        work.v[r] = inputs.v[r].to(Float32)
    alpha, beta = gates(spec, inputs, gate)
    work.sums.fill(0.0)
    for i in cutlass.range_constexpr(spec.tile.k_per_thread):
        q_value = inputs.q[i].to(Float32)
        k_value = inputs.k[i].to(Float32)
        work.k[i] = k_value
        add_products(spec.tile, rState, i, k_value, q_value, spec.problem.use_qk_l2norm, work.sums)
    return alpha, beta


@cute.jit
def beta_of(spec: Spec, inputs: Any):
    """Return the token's beta, 1 where the problem has none."""
    beta = Float32(1.0)
    if cutlass.const_expr(spec.has_beta):
        beta = inputs.beta[0].to(Float32)
        if cutlass.const_expr(spec.problem.use_beta_sigmoid):
            beta = 1.0 / (1.0 + cute.math.exp(-beta))
    return beta


@cute.jit
def gates(spec: Spec, inputs: Inputs, gate: HeadGate):
    """Decay and beta of a token."""
    alpha = Float32(1.0)
    if cutlass.const_expr(spec.has_gate):
        g = inputs.g[0].to(Float32)
        alpha = decay(g + gate.bias, gate.minus_decay) if spec.use_gate else cute.math.exp(g)
    return alpha, beta_of(spec, inputs)


@cute.jit
def finish(spec: Spec, params: RecurrentParams, alpha: Float32, beta: Float32, place: Place, work: Work, exchange: Exchange):
    """Add up the threads' parts of the sums. Set work.u to each column's update, and return the output of column `lane`."""
    add_up(spec.tile, work.sums, spec.num_sums, exchange)
    factors = (alpha, beta, *row_factors(spec.tile, work.sums, params.scale, spec.problem.use_qk_l2norm))
    o_value, _ = combine(spec.tile, factors, place.lane, work)
    return o_value


@cute.jit
def slot_to_write(spec: Spec, params: RecurrentParams, sequence: Int32, node: Int32):
    """Return the slot for the state after token `node` of a sequence; null if it has no column."""
    gIndices = params.final_state_indices if spec.problem.has_final_indices else params.state_indices
    write_slot = params.null_slot
    if node < gIndices.shape[1]:
        write_slot = Int64(gIndices[sequence, node])
    return write_slot


@cute.jit
def store_node(spec: Spec, params: RecurrentParams, write_slot: Int64, place: Place, rState: cute.Tensor, seed: Int32):
    """Store a state into its slot of the pool, unless the slot is null."""
    if write_slot > params.null_slot:
        store_state(spec.tile, write_slot, place, spec.tile.width, params.initial_state, rState, seed)


@cute.jit
def store_intermediate(spec: Spec, params: RecurrentParams, sequence: Int32, token: Int32, place: Place, rState: cute.Tensor):
    """Store the state after token `token` of a sequence into its row of intermediate_states, unless the row is null."""
    if token < params.intermediate_states.shape[1]:
        row = Int64(params.intermediate_indices[sequence])
        if row > params.null_slot:
            store_kept_state(spec.tile, row, token, place, params.intermediate_states, rState)


@cute.jit
def store_idle(spec: Spec, params: RecurrentParams, block: Block, begin: Int32, live_count: Int32, count: Int32, written: Int32):
    """Zero rows of out: those of a padding sequence (live_count is 0), and the block's share of the rows that belong to no
    sequence, which are dealt to all blocks of the head."""
    for t in cutlass.range(live_count, count, unroll=1):
        store_out(spec.tile, params.out, begin + t, block.place, Float32(0.0))
    num_sequences = params.cu_seqlens.shape[0] - 1
    store_zeros(spec.tile, params.out, written + block.sequence, params.out.shape[0], num_sequences, block.place)


@cute.jit
def store_last(
    spec: Spec, params: RecurrentParams, block: Block, live_count: Int32, write_slot: Int64, rState: cute.Tensor, seed: Int32
):  # fmt: skip
    """Store the state after the last token, if it is stored once: into its slot, or into a new tensor."""
    if cutlass.const_expr(not (spec.writes_new or spec.writes_last_token)):
        use(rState[0])
    if cutlass.const_expr(spec.writes_last_token):
        if live_count > 0:
            store_node(spec, params, write_slot, block.place, rState, seed)
    if cutlass.const_expr(spec.writes_new):
        # Without a pool an empty sequence passes its state on.
        width = cutlass.const_expr(min(spec.tile.width, 4))
        store_state(spec.tile, Int64(block.sequence), block.place, width, params.final_state, rState, seed)
