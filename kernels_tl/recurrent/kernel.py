"""The recurrent kernel of a problem and its tiles."""

from collections.abc import Callable
from typing import Any

import tilelang.language as T

from kernels_tl.common import build
from kernels_tl.common.rounding import mix_seed
from kernels_tl.common.versions import prim_func
from kernels_tl.recurrent.draft_tree import ancestor, start_path
from kernels_tl.recurrent.spec import Place, Spec, v_exists
from kernels_tl.recurrent.state import load_state, store_intermediate, store_into_pool, store_state
from kernels_tl.recurrent.tokens import add_up, allocate_exchange, allocate_registers, finish_token, load_token, multiply


def parameter_types(spec: Spec) -> dict[str, Any]:
    """Types of the parameters, `gdn.ops.delta_rule.problem.RecurrentParams` in order; None: absent."""
    p, heads, K, V = spec.problem, spec.heads, spec.problem.head_k_dim, spec.problem.head_v_dim
    num_tokens = T.dynamic("num_tokens")

    def strided(name: str, shape: tuple[Any, ...], dtype: str | None, inner: tuple[int, ...] = ()) -> Any:
        """Strides are free but for the inner ones, that of the batch too: it is one row, and torch may report anything."""
        free = (T.dynamic(f"{name}_stride_{dim}", "int64") for dim in range(len(shape) - len(inner)))
        return None if dtype is None else T.StridedTensor(shape, (*free, *inner), dtype)

    def rows(name: str, num_heads: int, dim: int) -> Any:
        return strided(name, (1, num_tokens, num_heads, dim), p.dtype, (1,))

    def state(name: str, dtype: str | None) -> Any:
        dims = (V, K) if p.state_v_first else (K, V)
        # The head stride is K * V, but not checked: torch may report any stride for a dim of size 1.
        return strided(name, (T.dynamic(f"{name}_slots", "int64"), heads, *dims), dtype, (dims[1], 1))

    def intermediate(dtype: str | None) -> Any:
        dims = (V, K) if p.state_v_first else (K, V)
        places = (T.dynamic("intermediate_rows", "int64"), T.dynamic("intermediate_tokens"))
        return strided("intermediate", (*places, heads, *dims), dtype, (dims[1], 1))

    def indices(name: str, is_present: bool) -> Any:
        shape = (T.dynamic(f"{name}_rows"), T.dynamic(f"{name}_columns"))
        return strided(name, shape if p.write_every_token else shape[:1], p.index_dtype if is_present else None)

    return {
        "q": rows("q", p.num_q_heads, K),
        "k": rows("k", p.num_k_heads, K),
        "v": rows("v", p.num_v_heads, V),
        "g": strided("g", (1, num_tokens, heads), p.gate_dtype),
        "beta": strided("beta", (1, num_tokens, heads), p.beta_dtype),
        "A_log": T.Tensor((heads,), "float32") if spec.use_gate else None,
        "dt_bias": T.Tensor((heads,), "float32") if spec.use_gate else None,
        "initial_state": state("initial_state", p.state_dtype if spec.has_pool else None),
        "state_indices": indices("state_indices", p.pooled),
        "num_accepted_tokens": strided("accepted", (T.dynamic("accepted_rows"),), "int32" if p.has_accepted else None),
        "final_state": state("final_state", "float32" if spec.writes_new else None),
        "final_state_indices": indices("final_state_indices", p.has_final_indices),
        "cu_seqlens": T.Tensor((T.dynamic("num_offsets"),), p.cu_seqlens_dtype),
        "parent_token": T.Tensor((num_tokens,), "int32") if p.has_parent else None,
        "rounding_seed": T.Tensor((1,), "int64") if p.has_rounding else None,
        "intermediate_states": intermediate(p.intermediate_dtype),
        "intermediate_indices": strided(
            "intermediate_indices", (T.dynamic("intermediate_count"),), p.index_dtype if p.intermediate_dtype else None
        ),
        **_ring_types(spec, strided),
        "out": rows("out", heads, V),
        "scale": T.float32(),
        "null_slot": T.int64(),
        "fold_phase": None if p.ring_rows is None else T.int32(),
    }


def _ring_types(spec: Spec, strided: Callable[..., Any]) -> dict[str, Any]:
    """Types of the ring and its counts; None without one."""
    rows = spec.problem.ring_rows
    if rows is None:
        return {"ring": None, "state_tokens": None, "num_computed_tokens": None}
    return {
        "ring": strided("ring", (T.dynamic("ring_slots", "int64"), rows, T.dynamic("ring_width", "int64")), "float32", (1,)),
        "state_tokens": strided("state_tokens", (T.dynamic("state_tokens_slots", "int64"),), "int32"),
        "num_computed_tokens": strided("computed", (T.dynamic("computed_rows"),), "int32"),
    }


def kernel(spec: Spec) -> Any:
    """The prim_func."""
    problem = spec.problem
    lanes, groups_per_warp, k_warps, threads = spec.lanes, spec.groups_per_warp, spec.k_warps, spec.tiles.threads
    every_token, has_parent = problem.write_every_token, problem.has_parent

    @prim_func
    def recurrent():
        tensors = build.parameters(**parameter_types(spec))
        cu_seqlens, out, pool, null_slot = tensors.cu_seqlens, tensors.out, tensors.initial_state, tensors.null_slot
        state_indices, final_state_indices = tensors.state_indices, tensors.final_state_indices
        num_tokens = tensors.q.shape[1]
        num_sequences = cu_seqlens.shape[0] - 1
        with T.Kernel(num_sequences * (spec.heads * spec.v_blocks), threads=threads) as block:
            T.annotate_min_blocks_per_sm(spec.tiles.min_threads_per_sm // threads)
            thread = T.get_thread_binding(0)
            sequence = block // (spec.heads * spec.v_blocks)
            head = block // spec.v_blocks % spec.heads
            warp = thread // 32
            lane = thread % lanes if problem.state_v_first else warp % k_warps * spec.warp_lanes + thread % 32 // groups_per_warp
            group = thread // lanes if problem.state_v_first else warp // k_warps * groups_per_warp + thread % groups_per_warp
            v_start = (block % spec.v_blocks * (threads // lanes) + group) * spec.columns

            registers = allocate_registers(spec)
            exchange = allocate_exchange(spec)
            state = registers.state
            minus_decay, bias = build.variables(2, "float32")
            read_slot, write_slot = build.variables(2, "int64")
            accepted, begin, count, live_count, written_tokens = build.variables(5)
            if has_parent:
                start = T.alloc_local((spec.columns * spec.entries,), "float32")
                above, node = build.variables(2)
            seed = T.alloc_var("uint32") if problem.has_rounding else 0
            place = Place(head, lane, v_start)

            begin = T.cast(cu_seqlens[sequence], "int32")
            count = T.max(T.cast(cu_seqlens[sequence + 1], "int32") - begin, 0)
            written_tokens = T.cast(cu_seqlens[num_sequences], "int32")

            for i in T.unroll(spec.columns * spec.entries):
                state[i] = 0.0
            for i in T.unroll(spec.entries):
                registers.q_next[i] = T.cast(0.0, problem.dtype)
                registers.k_next[i] = T.cast(0.0, problem.dtype)
            for r in T.unroll(spec.columns):
                registers.v_next[r] = T.cast(0.0, problem.dtype)
            minus_decay = 0.0
            bias = 0.0
            if spec.use_gate:
                minus_decay = tensors.A_log[head]
                bias = tensors.dt_bias[head]

            if count > 0 and not has_parent:
                load_token(spec, begin, place, tensors, registers)

            # The slot to read. A padding sequence has none: its rows become zero and nothing else happens.
            read_slot = T.cast(sequence, "int64")
            live_count = count
            if problem.pooled:
                read_slot = null_slot
                if every_token:
                    accepted = 1
                    if problem.has_accepted:
                        accepted = tensors.num_accepted_tokens[sequence]
                    if accepted >= 1 and accepted <= state_indices.shape[1]:
                        read_slot = T.cast(state_indices[sequence, accepted - 1], "int64")
                else:
                    read_slot = T.cast(state_indices[sequence], "int64")
                if read_slot <= null_slot:
                    live_count = 0

            if problem.has_initial_state:
                if live_count > 0 or not problem.pooled:
                    load_state(spec, read_slot, place, pool, state)

            if problem.has_rounding:
                mix_seed(tensors.rounding_seed, seed)
            if spec.use_gate:
                minus_decay = -T.exp(minus_decay)

            # Zero rows, while the state is on its way: after the tokens, their bounds would have taken registers all along.
            if lane < spec.columns and v_exists(spec, v_start):
                for t in T.serial(count - live_count):
                    out[0, begin + t, head, v_start + lane] = T.cast(0.0, problem.dtype)
                # Rows beyond the last sequence are dealt to all blocks of the head.
                for t in T.serial(T.ceildiv(num_tokens - written_tokens - sequence, num_sequences)):
                    out[0, written_tokens + sequence + t * num_sequences, head, v_start + lane] = T.cast(0.0, problem.dtype)

            if has_parent:
                for i in T.unroll(spec.columns * spec.entries):
                    start[i] = state[i]
            for t in T.serial(live_count):
                if has_parent:
                    start_path(t, begin, tensors.parent_token, start, state, above, node)
                    for step in T.serial(above + 1):
                        ancestor(t, above - step, begin, tensors.parent_token, node)
                        load_token(spec, begin + node, place, tensors, registers)
                        multiply(spec, minus_decay, bias, registers)
                        add_up(spec, 0, thread, registers.sums, exchange)
                        finish_token(spec, begin, node, step == above, place, tensors.scale, registers, out)
                else:
                    multiply(spec, minus_decay, bias, registers)
                    if t + 1 < live_count:
                        load_token(spec, begin + t + 1, place, tensors, registers)
                    add_up(spec, t % 2, thread, registers.sums, exchange)
                    finish_token(spec, begin, t, True, place, tensors.scale, registers, out)

                if spec.writes_pool and every_token:
                    write_slot = null_slot
                    if problem.has_final_indices:
                        if t < final_state_indices.shape[1]:
                            write_slot = T.cast(final_state_indices[sequence, t], "int64")
                    else:
                        if t < state_indices.shape[1]:
                            write_slot = T.cast(state_indices[sequence, t], "int64")
                    if write_slot > null_slot:
                        store_into_pool(spec, write_slot, place, seed, pool, state)

                if problem.intermediate_dtype is not None:
                    if t < tensors.intermediate_states.shape[1]:
                        write_slot = T.cast(tensors.intermediate_indices[sequence], "int64")
                        if write_slot > null_slot:
                            store_intermediate(spec, write_slot, t, place, tensors.intermediate_states, state)

            if spec.writes_pool and not every_token:
                write_slot = read_slot
                if problem.has_final_indices:
                    write_slot = T.cast(final_state_indices[sequence], "int64")
                if live_count > 0 and write_slot > null_slot:
                    store_into_pool(spec, write_slot, place, seed, pool, state)
            if spec.writes_new:
                # Without a pool an empty sequence passes its state on.
                new_row = T.cast(sequence, "int64")
                store_state(spec, new_row, min(spec.width, 4), "float32", place, tensors.final_state, state)

    return recurrent
