"""Gated delta rule, token by token: decode, speculative decoding and short ragged sequences.

Per state head, S [K, V] float32 in registers over all tokens of a sequence, a = exp(g):

    u = beta * (v - a * S^T k)
    o = a * S^T q + u * (k . q)            equal to S_new^T q, and needs no second pass over S
    S = a * S + k u^T

q (times scale) and k are divided by their L2 norms on request; the norms are row scales, so they multiply the dot products
and u, never the registers of q and k.

Tensors: q [1, L, Hq, K], k [1, L, Hk, K], v and out [1, L, heads, V] bfloat16 | float16; g, beta [1, L, HS]; state
[slots, HS, V, K] or [slots, HS, K, V] float32 | bfloat16. `gdn.problems.RecurrentProblem` is the contract.

A block owns (sequence, state head, block_v columns of V). `lanes` threads share the K entries of `rows` columns each, so a
dot product is log2(lanes) shuffles; nothing passes through shared memory but the sums of K-first states, whose columns are
shared by several warps. A thread's part of the state is loaded at once (rows * K / lanes values in flight) and every byte of
it moves once each way. q, k, v and the gates of the next token are loaded while the current one is computed; those of the
first token before the state's slot is even known.
"""

from typing import Any

import tilelang.language as T

from gdn import recurrent_tiles
from gdn.device import DeviceSpec
from gdn.problems import DTYPE_BYTES, RecurrentProblem
from gdn.recurrent_tiles import TUNED_WITHIN, k_per_thread, k_vector, k_warps, reads_pool, refusal, writes_new_state
from gdn.recurrent_tiles import Tiles as Config
from kernels_tl.common import build
from kernels_tl.common.rounding import make_key, mix_seed, round_value
from kernels_tl.recurrent.draft_tree import ancestor, start_path

__all__ = ["TUNED_WITHIN", "Config", "compile", "configs", "default_config", "fits", "launch", "refusal", "workspace_bytes"]


def fits(problem: RecurrentProblem, config: Config, device: DeviceSpec) -> bool:
    """Whether the configuration can be compiled, without spills, and launched."""
    return recurrent_tiles.fits(problem, recurrent_tiles.prefetching(config), device)


def configs(problem: RecurrentProblem, device: DeviceSpec) -> list[Config]:
    """The feasible configurations worth measuring; the next token is always prefetched."""
    return [config.tiles for config in recurrent_tiles.configs_prefetching(problem, device)]


def default_config(problem: RecurrentProblem, device: DeviceSpec) -> Config:
    return recurrent_tiles.default_prefetching(problem, device).tiles


def workspace_bytes(problem: RecurrentProblem, config: Config) -> int:
    return 0


def compile(problem: RecurrentProblem, config: Config) -> dict[str, bytes]:
    """The one kernel, built for sm_90a."""
    # All indices are masked here; the automatic bounds checks would undo the 16-byte accesses.
    return {"recurrent": build.library(_kernel(problem, config), pass_configs={"tl.disable_safe_memory_legalize": True})}


def launch(
    compiled: Any,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    A_log: Any,
    dt_bias: Any,
    initial_state: Any,
    state_indices: Any,
    num_accepted_tokens: Any,
    final_state: Any,
    final_state_indices: Any,
    cu_seqlens: Any,
    parent_token: Any,
    rounding_seed: Any,
    out: Any,
    scale: float,
    null_slot: int,
) -> None:
    problem: RecurrentProblem = compiled.problem
    absent = cu_seqlens  # stands in for every tensor that the problem's flags leave out
    pool = initial_state if problem.has_initial_state else final_state
    compiled.functions["recurrent"](
        q,
        k,
        v,
        absent if problem.gate_dtype is None else g,
        absent if problem.beta_dtype is None else beta,
        A_log if problem.use_gate else absent,
        dt_bias if problem.use_gate else absent,
        pool if reads_pool(problem) else absent,
        state_indices if problem.pooled else absent,
        num_accepted_tokens if problem.has_accepted else absent,
        final_state if writes_new_state(problem) else absent,
        final_state_indices if problem.has_final_indices else absent,
        cu_seqlens,
        parent_token if problem.has_parent else absent,
        rounding_seed if problem.has_rounding else absent,
        out,
        scale,
        null_slot,
    )


def _kernel(problem: RecurrentProblem, config: Config) -> Any:
    threads, lanes, rows, block_v = config.threads, config.threads_per_column, config.v_per_thread, config.block_v
    K, V, HS = problem.head_k_dim, problem.head_v_dim, problem.num_state_heads
    q_group, k_group, v_group = HS // problem.num_q_heads, HS // problem.num_k_heads, HS // problem.num_v_heads
    v_first, pooled, every_token = problem.state_v_first, problem.pooled, problem.write_every_token
    has_pool, has_new_final = reads_pool(problem), writes_new_state(problem)
    read_state, write_pool = problem.has_initial_state, problem.has_final_state and pooled
    has_accepted, has_final_indices = problem.has_accepted, problem.has_final_indices
    has_gate, has_beta = problem.gate_dtype is not None, problem.beta_dtype is not None
    use_gate, use_sigmoid, use_l2norm = problem.use_gate and has_gate, problem.use_beta_sigmoid, problem.use_qk_l2norm
    dtype, state_dtype = problem.dtype, problem.state_dtype
    gate_dtype, beta_dtype = problem.gate_dtype or "float32", problem.beta_dtype or "float32"
    state_bytes = DTYPE_BYTES[state_dtype]

    has_parent, rounds = problem.has_parent, problem.has_rounding

    vec = k_vector(v_first, state_dtype, K)
    entries = k_per_thread(problem, lanes)
    chunks = entries // vec
    v_tiles = -(-V // block_v)
    # K first, several warps share columns, so that each reads whole lines of a row of V.
    warps_of_column = k_warps(v_first, V, config)
    warp_lanes = lanes // warps_of_column
    groups_per_warp = 32 // warp_lanes
    mask_k, mask_v = chunks * lanes * vec != K, V % block_v != 0
    # V first: the lanes of a group are neighbours, so that a group reads whole lines of one column's K entries. K first:
    # neighbouring lanes hold neighbouring columns.
    lane_step = 1 if v_first else groups_per_warp
    load_width = vec if v_first else min(rows, 16 // state_bytes)  # values per access, 16 bytes where dims allow
    final_store_width = min(load_width, 4)
    # In the larger code of these, the compiler takes `if lane == r: use u[r]` for u[lane], and keeps u in local memory.
    selects_values = has_parent or rounds or not v_first
    num_sums = 2 * rows + (3 if use_l2norm else 1)  # S.k and S.q per column, k.q, and k.k, q.q for the norms
    qk_sum, kk_sum, qq_sum = 2 * rows, 2 * rows + 1, 2 * rows + 2
    num_parts = threads // 32 if warps_of_column > 1 else 0
    sum_width = min(2 * rows, 4)

    L = T.dynamic("num_tokens")
    num_offsets = T.dynamic("num_offsets")  # num_sequences + 1
    slots, finals = T.dynamic("slots", "int64"), T.dynamic("finals", "int64")
    # Strides of the batch, which is one row: torch may report anything.
    q_batch, k_batch, v_batch, out_batch = (T.dynamic(s, "int64") for s in ("q_batch", "k_batch", "v_batch", "out_batch"))
    g_batch, beta_batch = T.dynamic("g_batch", "int64"), T.dynamic("beta_batch", "int64")
    q_token, q_head, k_token, k_head = (T.dynamic(s, "int64") for s in ("q_token", "q_head", "k_token", "k_head"))
    v_token, v_head, out_token, out_head = (T.dynamic(s, "int64") for s in ("v_token", "v_head", "out_token", "out_head"))
    g_token, g_head, beta_token, beta_head = (T.dynamic(s, "int64") for s in ("g_token", "g_head", "beta_token", "beta_head"))
    # The head strides are K * V, but not checked: torch may report any stride for a dim of size 1.
    slot_stride, slot_head = T.dynamic("slot_stride", "int64"), T.dynamic("slot_head", "int64")
    final_stride, final_head = T.dynamic("final_stride", "int64"), T.dynamic("final_head", "int64")
    index_rows, index_columns = T.dynamic("index_rows"), T.dynamic("index_columns")
    index_row, index_column = T.dynamic("index_row", "int64"), T.dynamic("index_column", "int64")
    final_rows, final_columns = T.dynamic("final_rows"), T.dynamic("final_columns")
    final_row, final_column = T.dynamic("final_row", "int64"), T.dynamic("final_column", "int64")
    accepted_rows, accepted_row = T.dynamic("accepted_rows"), T.dynamic("accepted_row", "int64")

    # One new buffer per parameter: two parameters annotated with the same object would be one buffer to the compiler.
    def offsets_type():
        return T.Tensor((num_offsets,), problem.cu_seqlens_dtype)

    def head_type():
        return T.Tensor((HS,), "float32") if use_gate else offsets_type()

    def gate_type(strides, gate):
        return offsets_type() if gate is None else T.StridedTensor((1, L, HS), strides, gate)

    def state_type(present, shape, strides, state):
        if not present:
            return offsets_type()
        inner = (V, K) if v_first else (K, V)
        return T.StridedTensor((shape, HS, *inner), (*strides, inner[1], 1), state)

    def index_type(present, shape, strides):
        if not present:
            return offsets_type()
        rank = 2 if every_token else 1
        return T.StridedTensor(shape[:rank], strides[:rank], problem.index_dtype)

    def accepted_type():
        return T.StridedTensor((accepted_rows,), (accepted_row,), "int32") if has_accepted else offsets_type()

    def parents_type():
        return T.Tensor((L,), "int32") if has_parent else offsets_type()

    def seed_type():
        return T.Tensor((1,), "int64") if rounds else offsets_type()

    def at(row, entry):
        """Place of (column row, K entry) in a thread's state: the dim that is contiguous in memory runs fastest."""
        return row * entries + entry if v_first else entry * rows + row

    # Accesses wider than one element use flat offsets in units of their width: strides are multiples of it, which the
    # compiler cannot know.
    def row_unit(token, token_stride, head, head_stride, width):
        """Offset of a row of q, k or v."""
        return token * (token_stride // width) + head * (head_stride // width)

    def k_entry(c, lane):
        """First K entry of a thread's chunk c."""
        return (c * lanes + lane) * vec

    # Access (r, c) of `width` values of a state: r counts columns and c accesses along K (V first), or r counts K entries
    # and c accesses along V.
    def state_unit(slot, slot_stride, head, lane, v_start, r, c, width):
        if v_first:
            per_chunk = vec // width
            within = (head * V + v_start + r) * (K // width) + (c // per_chunk * lanes + lane) * per_chunk + c % per_chunk
        else:
            within = (head * K + k_entry(r // vec, lane) + r % vec) * (V // width) + v_start // width + c
        return slot * (slot_stride // width) + within

    def state_place(r, c, width):
        return r * (entries if v_first else rows) + c * width

    def k_exists(entry):
        return entry < K if mask_k else True

    def v_exists(v_start):
        return v_start < V if mask_v else True

    def state_entry(lane, r, c, width):
        """First K entry of a state access."""
        return k_entry(c * width // vec if v_first else r // vec, lane)

    def state_element(lane, v_start, r, c, e):
        """k * V + v of value e of a state access."""
        first = k_entry(0, lane) * V + v_start
        if v_first:
            entry = c * load_width + e
            return first + (entry // vec * lanes * vec + entry % vec) * V + r
        return first + (r // vec * lanes * vec + r % vec) * V + c * load_width + e

    def outer_accesses():
        return rows if v_first else entries

    def inner_accesses(width):
        return (entries if v_first else rows) // width

    @T.macro
    def load_token(token, head, lane, v_start, q, k, v, g, beta, q_next, k_next, v_next, g_next, beta_next):
        for c in T.unroll(chunks):
            if k_exists(k_entry(c, lane)):
                for e in T.vectorized(vec):
                    unit = row_unit(token, q_token, head // q_group, q_head, vec) + c * lanes + lane
                    q_next[c * vec + e] = q[0, 0, 0, unit * vec + e]
                for e in T.vectorized(vec):
                    unit = row_unit(token, k_token, head // k_group, k_head, vec) + c * lanes + lane
                    k_next[c * vec + e] = k[0, 0, 0, unit * vec + e]
        if v_exists(v_start):
            for e in T.vectorized(rows):
                unit = row_unit(token, v_token, head // v_group, v_head, rows) + v_start // rows
                v_next[e] = v[0, 0, 0, unit * rows + e]
        if has_gate:
            g_next[0] = g[0, token, head]
        if has_beta:
            beta_next[0] = beta[0, token, head]

    @T.macro
    def load_state(slot, head, lane, v_start, pool, state):
        for r in T.unroll(outer_accesses()):
            for c in T.unroll(inner_accesses(load_width)):
                if v_exists(v_start) and k_exists(state_entry(lane, r, c, load_width)):
                    for e in T.vectorized(load_width):
                        unit = state_unit(slot, slot_stride, head, lane, v_start, r, c, load_width)
                        state[state_place(r, c, load_width) + e] = pool[0, 0, 0, unit * load_width + e]

    @T.macro
    def store_state(slot, stride, width, store_dtype, head, lane, v_start, target, state):
        for r in T.unroll(outer_accesses()):
            for c in T.unroll(inner_accesses(width)):
                if v_exists(v_start) and k_exists(state_entry(lane, r, c, width)):
                    for e in T.vectorized(width):
                        unit = state_unit(slot, stride, head, lane, v_start, r, c, width)
                        target[0, 0, 0, unit * width + e] = T.cast(state[state_place(r, c, width) + e], store_dtype)

    @T.macro
    def store_rounded(slot, head, lane, v_start, seed, pool, state):
        """Into the pool, with the noise of the seed."""
        key = T.alloc_var("uint32")
        noise = T.alloc_var("uint32")
        rounded = T.alloc_local((load_width,), "float32")
        make_key(seed, slot, head, key)
        for r in T.unroll(outer_accesses()):
            for c in T.unroll(inner_accesses(load_width)):
                for e in T.unroll(load_width):
                    element = state_element(lane, v_start, r, c, e)
                    round_value(state[state_place(r, c, load_width) + e], key, element, noise, rounded[e])
                if v_exists(v_start) and k_exists(state_entry(lane, r, c, load_width)):
                    for e in T.vectorized(load_width):
                        unit = state_unit(slot, slot_stride, head, lane, v_start, r, c, load_width)
                        pool[0, 0, 0, unit * load_width + e] = T.cast(rounded[e], state_dtype)

    @T.macro
    def store_into_pool(slot, head, lane, v_start, seed, pool, state):
        if rounds:
            store_rounded(slot, head, lane, v_start, seed, pool, state)
        else:
            store_state(slot, slot_stride, load_width, state_dtype, head, lane, v_start, pool, state)

    @T.macro
    def multiply(
        q_next, k_next, v_next, g_next, beta_next, minus_decay: T.Ref, bias: T.Ref, state, q_local, k_local, v_local, sums,
        gate: T.Ref, alpha: T.Ref, beta_value: T.Ref,
    ):  # fmt: skip
        """The thread's parts of a token's dot products in sums; its decay and beta."""
        for i in T.unroll(entries):
            q_local[i] = T.cast(q_next[i], "float32")
            k_local[i] = T.cast(k_next[i], "float32")
        for r in T.unroll(rows):
            v_local[r] = T.cast(v_next[r], "float32")
        alpha = 1.0
        if has_gate:
            gate = T.cast(g_next[0], "float32")
            if use_gate:
                gate = gate + bias
                gate = minus_decay * T.if_then_else(gate <= 20.0, T.log1p(T.exp(gate)), gate)
            alpha = T.exp(gate)  # noqa: F841 - a reference
        beta_value = 1.0
        if has_beta:
            beta_value = T.cast(beta_next[0], "float32")
            if use_sigmoid:
                beta_value = 1.0 / (1.0 + T.exp(-beta_value))

        for i in T.unroll(num_sums):
            sums[i] = 0.0
        for i in T.unroll(entries):
            sums[qk_sum] = sums[qk_sum] + q_local[i] * k_local[i]
            if use_l2norm:
                sums[kk_sum] = sums[kk_sum] + k_local[i] * k_local[i]
                sums[qq_sum] = sums[qq_sum] + q_local[i] * q_local[i]
            for r in T.unroll(rows):
                sums[2 * r] = sums[2 * r] + state[at(r, i)] * k_local[i]
                sums[2 * r + 1] = sums[2 * r + 1] + state[at(r, i)] * q_local[i]

    @T.macro
    def add_up(buffer, thread, sums, column_sums_shared, token_sums_shared):
        """The sums over all lanes of the columns. Buffers alternate from token to token: a warp writes one again behind the
        barrier of the token in between, at which every warp arrives when it has read (kernels_cute/common/state_sums.py)."""
        for step in T.unroll(warp_lanes.bit_length() - 1):
            for i in T.unroll(num_sums):
                sums[i] = sums[i] + T.shfl_xor(sums[i], lane_step << step)
        if warps_of_column > 1:
            if has_parent:  # one buffer, which the other warps may still read
                T.sync_threads()
            if thread % 32 < groups_per_warp:
                for c in T.unroll(2 * rows // sum_width):
                    for e in T.vectorized(sum_width):
                        column_sums_shared[buffer, thread // 32, c, thread % 32, e] = sums[c * sum_width + e]
            if thread % 32 == 0:
                for i in T.unroll(num_sums - 2 * rows):
                    token_sums_shared[buffer, thread // 32, i] = sums[2 * rows + i]
            T.sync_threads()
            for i in T.unroll(num_sums):
                sums[i] = 0.0
            for w in T.unroll(warps_of_column):
                for c in T.unroll(2 * rows // sum_width):
                    for e in T.vectorized(sum_width):
                        other = thread // 32 // warps_of_column * warps_of_column + w
                        sums[c * sum_width + e] = (
                            sums[c * sum_width + e] + column_sums_shared[buffer, other, c, thread % groups_per_warp, e]
                        )
                for i in T.unroll(num_sums - 2 * rows):
                    other = thread // 32 // warps_of_column * warps_of_column + w
                    sums[2 * rows + i] = sums[2 * rows + i] + token_sums_shared[buffer, other, i]

    @T.macro
    def finish_token(
        begin: T.Ref, t, is_wanted, head, lane, v_start, scale, alpha: T.Ref, beta_value: T.Ref, state, k_local, v_local,
        sums, u, out, q_factor: T.Ref, k_factor: T.Ref, out_value: T.Ref,
    ):  # fmt: skip
        """The token's output, stored where it is wanted, and the state after it."""
        q_factor = scale
        k_factor = 1.0
        if use_l2norm:
            q_factor = scale * T.rsqrt(sums[qq_sum] + 1e-6)
            k_factor = T.rsqrt(sums[kk_sum] + 1e-6)

        out_value = 0.0
        for r in T.unroll(rows):
            u[r] = k_factor * (beta_value * (v_local[r] - alpha * (k_factor * sums[2 * r])))
            if selects_values:
                o_row = q_factor * (alpha * sums[2 * r + 1] + u[r] * sums[qk_sum])
                if lane == r:
                    out_value = o_row
            elif lane == r:
                out_value = q_factor * (alpha * sums[2 * r + 1] + u[r] * sums[qk_sum])
        if lane < rows and v_exists(v_start) and is_wanted:
            out[0, begin + t, head, v_start + lane] = T.cast(out_value, dtype)

        for r in T.unroll(rows):
            for i in T.unroll(entries):
                state[at(r, i)] = alpha * state[at(r, i)] + u[r] * k_local[i]

    @T.prim_func
    def recurrent(
        q: T.StridedTensor((1, L, problem.num_q_heads, K), (q_batch, q_token, q_head, 1), dtype),
        k: T.StridedTensor((1, L, problem.num_k_heads, K), (k_batch, k_token, k_head, 1), dtype),
        v: T.StridedTensor((1, L, problem.num_v_heads, V), (v_batch, v_token, v_head, 1), dtype),
        g: gate_type((g_batch, g_token, g_head), problem.gate_dtype),
        beta: gate_type((beta_batch, beta_token, beta_head), problem.beta_dtype),
        A_log: head_type(),
        dt_bias: head_type(),
        pool: state_type(has_pool, slots, (slot_stride, slot_head), state_dtype),
        state_indices: index_type(pooled, (index_rows, index_columns), (index_row, index_column)),
        num_accepted_tokens: accepted_type(),
        final_state: state_type(has_new_final, finals, (final_stride, final_head), "float32"),
        final_state_indices: index_type(has_final_indices, (final_rows, final_columns), (final_row, final_column)),
        cu_seqlens: offsets_type(),
        parent_token: parents_type(),
        rounding_seed: seed_type(),
        out: T.StridedTensor((1, L, HS, V), (out_batch, out_token, out_head, 1), dtype),
        scale: T.float32,
        null_slot: T.int64,
    ):
        with T.Kernel((num_offsets - 1) * (HS * v_tiles), threads=threads) as block:
            T.annotate_min_blocks_per_sm(config.min_threads_per_sm // threads)
            thread = T.get_thread_binding(0)
            sequence = block // (HS * v_tiles)
            head = block // v_tiles % HS
            warp = thread // 32
            lane = thread % lanes if v_first else warp % warps_of_column * warp_lanes + thread % 32 // groups_per_warp
            group = thread // lanes if v_first else warp // warps_of_column * groups_per_warp + thread % groups_per_warp
            v_start = (block % v_tiles * (threads // lanes) + group) * rows

            state = T.alloc_local((rows * entries,), "float32")
            q_next = T.alloc_local((entries,), dtype)
            k_next = T.alloc_local((entries,), dtype)
            v_next = T.alloc_local((rows,), dtype)
            g_next = T.alloc_local((1,), gate_dtype)
            beta_next = T.alloc_local((1,), beta_dtype)
            q_local = T.alloc_local((entries,), "float32")
            k_local = T.alloc_local((entries,), "float32")
            v_local = T.alloc_local((rows,), "float32")
            sums = T.alloc_local((num_sums,), "float32")
            u = T.alloc_local((rows,), "float32")
            column_sums_shared, token_sums_shared = 0, 0
            if warps_of_column > 1:
                column_sums_shared = T.alloc_shared((2, num_parts, 2 * rows // sum_width, groups_per_warp, sum_width), "float32")
                token_sums_shared = T.alloc_shared((2, num_parts, 4), "float32")
            alpha = T.alloc_var("float32")
            beta_value = T.alloc_var("float32")
            q_factor = T.alloc_var("float32")
            k_factor = T.alloc_var("float32")
            gate = T.alloc_var("float32")
            out_value = T.alloc_var("float32")
            minus_decay = T.alloc_var("float32")
            bias = T.alloc_var("float32")
            accepted = T.alloc_var("int32")
            read_slot = T.alloc_var("int64")
            write_slot = T.alloc_var("int64")
            begin = T.alloc_var("int32")
            count = T.alloc_var("int32")
            live_count = T.alloc_var("int32")
            written_tokens = T.alloc_var("int32")
            if has_parent:
                start = T.alloc_local((rows * entries,), "float32")
                above = T.alloc_var("int32")
                node = T.alloc_var("int32")
            seed = T.alloc_var("uint32") if rounds else 0

            begin = T.cast(cu_seqlens[sequence], "int32")
            count = T.max(T.cast(cu_seqlens[sequence + 1], "int32") - begin, 0)
            written_tokens = T.cast(cu_seqlens[num_offsets - 1], "int32")

            for i in T.unroll(rows * entries):
                state[i] = 0.0
            for i in T.unroll(entries):
                q_next[i] = T.cast(0.0, dtype)
                k_next[i] = T.cast(0.0, dtype)
            for r in T.unroll(rows):
                v_next[r] = T.cast(0.0, dtype)
            minus_decay = 0.0
            bias = 0.0
            if use_gate:
                minus_decay = A_log[head]
                bias = dt_bias[head]

            if count > 0 and not has_parent:
                load_token(begin, head, lane, v_start, q, k, v, g, beta, q_next, k_next, v_next, g_next, beta_next)

            # The slot to read. A padding sequence has none: its rows become zero and nothing else happens.
            read_slot = T.cast(sequence, "int64")
            live_count = count
            if pooled:
                read_slot = null_slot
                if every_token:
                    accepted = 1
                    if has_accepted:
                        accepted = num_accepted_tokens[sequence]
                    if accepted >= 1 and accepted <= index_columns:
                        read_slot = T.cast(state_indices[sequence, accepted - 1], "int64")
                else:
                    read_slot = T.cast(state_indices[sequence], "int64")
                if read_slot <= null_slot:
                    live_count = 0

            if read_state:
                if live_count > 0 or not pooled:
                    load_state(read_slot, head, lane, v_start, pool, state)

            if rounds:
                mix_seed(rounding_seed, seed)
            if use_gate:
                minus_decay = -T.exp(minus_decay)

            # Zero rows, while the state is on its way: after the tokens, their bounds would have taken registers all along.
            if lane < rows and v_exists(v_start):
                for t in T.serial(count - live_count):
                    out[0, begin + t, head, v_start + lane] = T.cast(0.0, dtype)
                # Rows beyond the last sequence are dealt to all blocks of the head.
                for t in T.serial(T.ceildiv(L - written_tokens - sequence, num_offsets - 1)):
                    out[0, written_tokens + sequence + t * (num_offsets - 1), head, v_start + lane] = T.cast(0.0, dtype)

            if has_parent:
                for i in T.unroll(rows * entries):
                    start[i] = state[i]
            for t in T.serial(live_count):
                if has_parent:
                    start_path(t, begin, parent_token, start, state, above, node)
                    for step in T.serial(above + 1):
                        ancestor(t, above - step, begin, parent_token, node)
                        load_token(begin + node, head, lane, v_start, q, k, v, g, beta, q_next, k_next, v_next, g_next, beta_next)
                        multiply(
                            q_next, k_next, v_next, g_next, beta_next, minus_decay, bias, state, q_local, k_local, v_local,
                            sums, gate, alpha, beta_value,
                        )  # fmt: skip
                        add_up(0, thread, sums, column_sums_shared, token_sums_shared)
                        finish_token(
                            begin, node, step == above, head, lane, v_start, scale, alpha, beta_value, state, k_local,
                            v_local, sums, u, out, q_factor, k_factor, out_value,
                        )  # fmt: skip
                else:
                    multiply(
                        q_next, k_next, v_next, g_next, beta_next, minus_decay, bias, state, q_local, k_local, v_local, sums,
                        gate, alpha, beta_value,
                    )  # fmt: skip
                    if t + 1 < live_count:
                        load_token(
                            begin + t + 1, head, lane, v_start, q, k, v, g, beta, q_next, k_next, v_next, g_next, beta_next
                        )
                    add_up(t % 2, thread, sums, column_sums_shared, token_sums_shared)
                    finish_token(
                        begin, t, True, head, lane, v_start, scale, alpha, beta_value, state, k_local, v_local, sums, u,
                        out, q_factor, k_factor, out_value,
                    )  # fmt: skip

                if write_pool and every_token:
                    write_slot = null_slot
                    if has_final_indices:
                        if t < final_columns:
                            write_slot = T.cast(final_state_indices[sequence, t], "int64")
                    else:
                        if t < index_columns:
                            write_slot = T.cast(state_indices[sequence, t], "int64")
                    if write_slot > null_slot:
                        store_into_pool(write_slot, head, lane, v_start, seed, pool, state)

            if write_pool and not every_token:
                write_slot = read_slot
                if has_final_indices:
                    write_slot = T.cast(final_state_indices[sequence], "int64")
                if live_count > 0 and write_slot > null_slot:
                    store_into_pool(write_slot, head, lane, v_start, seed, pool, state)
            if has_new_final:
                # Without a pool an empty sequence passes its state on.
                new_row = T.cast(sequence, "int64")
                store_state(new_row, final_stride, final_store_width, "float32", head, lane, v_start, final_state, state)

    return recurrent
