"""The recurrent kernel of a problem and its tiles."""

from typing import Any

import tilelang.language as T

from kernels_tl.common.rounding import mix_seed
from kernels_tl.recurrent.draft_tree import ancestor, start_path
from kernels_tl.recurrent.spec import Exchange, Inputs, Place, Registers, Spec, v_exists
from kernels_tl.recurrent.state import load_state, store_into_pool, store_state
from kernels_tl.recurrent.tokens import add_up, finish_token, load_token, multiply


def strides_of(*names: str) -> tuple[Any, ...]:
    return tuple(T.dynamic(name, "int64") for name in names)


class Types:
    """Types of the parameters; absent tensors have that of cu_seqlens, which stands in for them.

    One new buffer per parameter: two that are annotated with the same object would be one buffer to the compiler."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.num_tokens, self.num_offsets = T.dynamic("num_tokens"), T.dynamic("num_offsets")  # num_sequences + 1
        self.slots, self.finals = T.dynamic("slots", "int64"), T.dynamic("finals", "int64")
        # Strides of the batch, which is one row: torch may report anything.
        self.q_strides = strides_of("q_batch", "q_token", "q_head")
        self.k_strides = strides_of("k_batch", "k_token", "k_head")
        self.v_strides = strides_of("v_batch", "v_token", "v_head")
        self.out_strides = strides_of("out_batch", "out_token", "out_head")
        self.g_strides = strides_of("g_batch", "g_token", "g_head")
        self.beta_strides = strides_of("beta_batch", "beta_token", "beta_head")
        # The head strides are K * V, but not checked: torch may report any stride for a dim of size 1.
        self.slot_strides = strides_of("slot_stride", "slot_head")
        self.final_strides = strides_of("final_stride", "final_head")
        self.index_shape = (T.dynamic("index_rows"), T.dynamic("index_columns"))
        self.index_strides = strides_of("index_row", "index_column")
        self.final_index_shape = (T.dynamic("final_rows"), T.dynamic("final_columns"))
        self.final_index_strides = strides_of("final_row", "final_column")
        self.accepted_rows, self.accepted_row = T.dynamic("accepted_rows"), T.dynamic("accepted_row", "int64")

    def rows(self, heads: int, dim: int, strides: tuple[Any, ...]) -> Any:
        return T.StridedTensor((1, self.num_tokens, heads, dim), (*strides, 1), self.spec.problem.dtype)

    def cu_seqlens(self) -> Any:
        return T.Tensor((self.num_offsets,), self.spec.problem.cu_seqlens_dtype)

    def per_head(self) -> Any:
        return T.Tensor((self.spec.heads,), "float32") if self.spec.use_gate else self.cu_seqlens()

    def gate(self, strides: tuple[Any, ...], dtype: str | None) -> Any:
        return self.cu_seqlens() if dtype is None else T.StridedTensor((1, self.num_tokens, self.spec.heads), strides, dtype)

    def state(self, is_present: bool, slots: Any, strides: tuple[Any, ...], dtype: str) -> Any:
        if not is_present:
            return self.cu_seqlens()
        p = self.spec.problem
        inner = (p.head_v_dim, p.head_k_dim) if p.state_v_first else (p.head_k_dim, p.head_v_dim)
        return T.StridedTensor((slots, self.spec.heads, *inner), (*strides, inner[1], 1), dtype)

    def indices(self, is_present: bool, shape: tuple[Any, ...], strides: tuple[Any, ...]) -> Any:
        if not is_present:
            return self.cu_seqlens()
        rank = 2 if self.spec.problem.write_every_token else 1
        return T.StridedTensor(shape[:rank], strides[:rank], self.spec.problem.index_dtype)

    def accepted(self) -> Any:
        if not self.spec.problem.has_accepted:
            return self.cu_seqlens()
        return T.StridedTensor((self.accepted_rows,), (self.accepted_row,), "int32")

    def parents(self) -> Any:
        return T.Tensor((self.num_tokens,), "int32") if self.spec.problem.has_parent else self.cu_seqlens()

    def seed(self) -> Any:
        return T.Tensor((1,), "int64") if self.spec.problem.has_rounding else self.cu_seqlens()


def kernel(spec: Spec) -> Any:
    """The prim_func; its parameters are `gdn.problems.RecurrentParams` in order, with `pool` for initial_state."""
    problem, types = spec.problem, Types(spec)
    K, V = problem.head_k_dim, problem.head_v_dim
    lanes, groups_per_warp, k_warps, threads = spec.lanes, spec.groups_per_warp, spec.k_warps, spec.tiles.threads
    num_parts = threads // 32 if k_warps > 1 else 0
    every_token, has_parent = problem.write_every_token, problem.has_parent
    gate_dtype, beta_dtype = problem.gate_dtype or "float32", problem.beta_dtype or "float32"
    strides = (types.q_strides[1:], types.k_strides[1:], types.v_strides[1:])
    slot_stride, final_stride = types.slot_strides[0], types.final_strides[0]
    num_tokens, num_offsets = types.num_tokens, types.num_offsets
    index_columns, final_columns = types.index_shape[1], types.final_index_shape[1]

    @T.prim_func
    def recurrent(
        q: types.rows(problem.num_q_heads, K, types.q_strides),
        k: types.rows(problem.num_k_heads, K, types.k_strides),
        v: types.rows(problem.num_v_heads, V, types.v_strides),
        g: types.gate(types.g_strides, problem.gate_dtype),
        beta: types.gate(types.beta_strides, problem.beta_dtype),
        A_log: types.per_head(),
        dt_bias: types.per_head(),
        pool: types.state(spec.has_pool, types.slots, types.slot_strides, problem.state_dtype),
        state_indices: types.indices(problem.pooled, types.index_shape, types.index_strides),
        num_accepted_tokens: types.accepted(),
        final_state: types.state(spec.writes_new, types.finals, types.final_strides, "float32"),
        final_state_indices: types.indices(problem.has_final_indices, types.final_index_shape, types.final_index_strides),
        cu_seqlens: types.cu_seqlens(),
        parent_token: types.parents(),
        rounding_seed: types.seed(),
        out: types.rows(spec.heads, V, types.out_strides),
        scale: T.float32,
        null_slot: T.int64,
    ):
        with T.Kernel((num_offsets - 1) * (spec.heads * spec.v_blocks), threads=threads) as block:
            T.annotate_min_blocks_per_sm(spec.tiles.min_threads_per_sm // threads)
            thread = T.get_thread_binding(0)
            sequence = block // (spec.heads * spec.v_blocks)
            head = block // spec.v_blocks % spec.heads
            warp = thread // 32
            lane = thread % lanes if problem.state_v_first else warp % k_warps * spec.warp_lanes + thread % 32 // groups_per_warp
            group = thread // lanes if problem.state_v_first else warp // k_warps * groups_per_warp + thread % groups_per_warp
            v_start = (block % spec.v_blocks * (threads // lanes) + group) * spec.columns

            state = T.alloc_local((spec.columns * spec.entries,), "float32")
            q_next = T.alloc_local((spec.entries,), problem.dtype)
            k_next = T.alloc_local((spec.entries,), problem.dtype)
            v_next = T.alloc_local((spec.columns,), problem.dtype)
            g_next = T.alloc_local((1,), gate_dtype)
            beta_next = T.alloc_local((1,), beta_dtype)
            q_local = T.alloc_local((spec.entries,), "float32")
            k_local = T.alloc_local((spec.entries,), "float32")
            v_local = T.alloc_local((spec.columns,), "float32")
            sums = T.alloc_local((spec.num_sums,), "float32")
            u = T.alloc_local((spec.columns,), "float32")
            column_sums_shared, token_sums_shared = 0, 0
            if k_warps > 1:
                column_sums_shared = T.alloc_shared(
                    (2, num_parts, 2 * spec.columns // spec.sum_width, groups_per_warp, spec.sum_width), "float32"
                )
                token_sums_shared = T.alloc_shared((2, num_parts, 4), "float32")
            scalars = T.alloc_local((6,), "float32")
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
                start = T.alloc_local((spec.columns * spec.entries,), "float32")
                above = T.alloc_var("int32")
                node = T.alloc_var("int32")
            seed = T.alloc_var("uint32") if problem.has_rounding else 0
            place = Place(head, lane, v_start)
            inputs = Inputs(q, k, v, g, beta)
            registers = Registers(state, q_next, k_next, v_next, g_next, beta_next, q_local, k_local, v_local, sums, u, scalars)
            exchange = Exchange(column_sums_shared, token_sums_shared)

            begin = T.cast(cu_seqlens[sequence], "int32")
            count = T.max(T.cast(cu_seqlens[sequence + 1], "int32") - begin, 0)
            written_tokens = T.cast(cu_seqlens[num_offsets - 1], "int32")

            for i in T.unroll(spec.columns * spec.entries):
                state[i] = 0.0
            for i in T.unroll(spec.entries):
                q_next[i] = T.cast(0.0, problem.dtype)
                k_next[i] = T.cast(0.0, problem.dtype)
            for r in T.unroll(spec.columns):
                v_next[r] = T.cast(0.0, problem.dtype)
            minus_decay = 0.0
            bias = 0.0
            if spec.use_gate:
                minus_decay = A_log[head]
                bias = dt_bias[head]

            if count > 0 and not has_parent:
                load_token(spec, strides, begin, place, inputs, registers)

            # The slot to read. A padding sequence has none: its rows become zero and nothing else happens.
            read_slot = T.cast(sequence, "int64")
            live_count = count
            if problem.pooled:
                read_slot = null_slot
                if every_token:
                    accepted = 1
                    if problem.has_accepted:
                        accepted = num_accepted_tokens[sequence]
                    if accepted >= 1 and accepted <= index_columns:
                        read_slot = T.cast(state_indices[sequence, accepted - 1], "int64")
                else:
                    read_slot = T.cast(state_indices[sequence], "int64")
                if read_slot <= null_slot:
                    live_count = 0

            if problem.has_initial_state:
                if live_count > 0 or not problem.pooled:
                    load_state(spec, read_slot, slot_stride, place, pool, state)

            if problem.has_rounding:
                mix_seed(rounding_seed, seed)
            if spec.use_gate:
                minus_decay = -T.exp(minus_decay)

            # Zero rows, while the state is on its way: after the tokens, their bounds would have taken registers all along.
            if lane < spec.columns and v_exists(spec, v_start):
                for t in T.serial(count - live_count):
                    out[0, begin + t, head, v_start + lane] = T.cast(0.0, problem.dtype)
                # Rows beyond the last sequence are dealt to all blocks of the head.
                for t in T.serial(T.ceildiv(num_tokens - written_tokens - sequence, num_offsets - 1)):
                    out[0, written_tokens + sequence + t * (num_offsets - 1), head, v_start + lane] = T.cast(0.0, problem.dtype)

            if has_parent:
                for i in T.unroll(spec.columns * spec.entries):
                    start[i] = state[i]
            for t in T.serial(live_count):
                if has_parent:
                    start_path(t, begin, parent_token, start, state, above, node)
                    for step in T.serial(above + 1):
                        ancestor(t, above - step, begin, parent_token, node)
                        load_token(spec, strides, begin + node, place, inputs, registers)
                        multiply(spec, minus_decay, bias, registers)
                        add_up(spec, 0, thread, sums, exchange)
                        finish_token(spec, begin, node, step == above, place, scale, registers, out)
                else:
                    multiply(spec, minus_decay, bias, registers)
                    if t + 1 < live_count:
                        load_token(spec, strides, begin + t + 1, place, inputs, registers)
                    add_up(spec, t % 2, thread, sums, exchange)
                    finish_token(spec, begin, t, True, place, scale, registers, out)

                if spec.writes_pool and every_token:
                    write_slot = null_slot
                    if problem.has_final_indices:
                        if t < final_columns:
                            write_slot = T.cast(final_state_indices[sequence, t], "int64")
                    else:
                        if t < index_columns:
                            write_slot = T.cast(state_indices[sequence, t], "int64")
                    if write_slot > null_slot:
                        store_into_pool(spec, write_slot, slot_stride, place, seed, pool, state)

            if spec.writes_pool and not every_token:
                write_slot = read_slot
                if problem.has_final_indices:
                    write_slot = T.cast(final_state_indices[sequence], "int64")
                if live_count > 0 and write_slot > null_slot:
                    store_into_pool(spec, write_slot, slot_stride, place, seed, pool, state)
            if spec.writes_new:
                # Without a pool an empty sequence passes its state on.
                new_row = T.cast(sequence, "int64")
                store_state(spec, new_row, final_stride, min(spec.width, 4), "float32", place, final_state, state)

    return recurrent
