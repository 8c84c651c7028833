"""The recurrent kernel with a ring: the state is some tokens old and stays in registers as it is; a token adds to it what the
ring's entries and the call's own tokens before it are worth (`ring`).

In a draft tree a node takes the call's tokens that are its ancestors. Nothing is computed twice. A token, in a block:

    q, k in float32 and its log decay to shared memory                                       | barrier
    weights of all entries                                                                   | barrier
    dot products with the state, entries added by lanes, sums by shuffles, output
    its entry to the ring, and to shared memory for the tokens after it

q and k have two buffers, for even and odd tokens: a warp writes one again after two barriers of the token between. The compiler
inserts no barriers of its own here (`kernels_tl.recurrent.compile`).
"""

from typing import Any

import tilelang.language as T

from kernels_tl.common import build, ptx
from kernels_tl.common.rounding import mix_seed
from kernels_tl.common.versions import prim_func
from kernels_tl.recurrent import ring as steps
from kernels_tl.recurrent.draft_tree import parent_of
from kernels_tl.recurrent.kernel import parameter_types
from kernels_tl.recurrent.ring import Live, RingSpec, allocate_registers
from kernels_tl.recurrent.spec import GATE, Place, Spec, v_exists
from kernels_tl.recurrent.state import load_state, store_into_pool
from kernels_tl.recurrent.tokens import add_up, allocate_exchange


@T.macro
def find_path(node, begin, parents, walker: T.Ref, path: T.Ref):
    """path = a bit for a node and each of its ancestors. walker: scratch."""
    path = 0
    walker = node
    while walker >= 0:
        path = path | (1 << walker)
        walker = parent_of(walker, begin, parents)


@T.macro
def find_live(ring, committed, phase, written, scratch: T.Ref, start: T.Ref, target: T.Ref, is_valid: T.Ref, first):
    """The live entries, once the slot's count is in shared memory. scratch: of `boundary`."""
    steps.boundary(ring, committed, phase, scratch, target)
    target = T.max(written[0], target) - first
    start = T.max(written[0], first) - first  # noqa: F841 - a reference
    is_valid = T.if_then_else(written[0] <= committed and written[0] >= 0, 1, 0)  # noqa: F841 - a reference


def replay_kernel(spec: Spec) -> Any:
    """The prim_func."""
    problem, ring = spec.problem, RingSpec(spec)
    lanes, groups_per_warp, k_warps, threads = spec.lanes, spec.groups_per_warp, spec.k_warps, spec.tiles.threads
    has_parent = problem.has_parent

    @prim_func
    def recurrent():
        tensors = build.parameters(**parameter_types(spec))
        cu_seqlens, out, pool, phase = tensors.cu_seqlens, tensors.out, tensors.initial_state, tensors.fold_phase
        num_tokens = tensors.q.shape[1]
        num_sequences = cu_seqlens.shape[0] - 1
        with T.Kernel(num_sequences * (spec.heads * spec.v_blocks), threads=threads, prelude=ptx.COPY) as block:
            T.annotate_min_blocks_per_sm(spec.tiles.min_threads_per_sm // threads)
            thread = T.get_thread_binding(0)
            sequence = block // (spec.heads * spec.v_blocks)
            head = block // spec.v_blocks % spec.heads
            warp = thread // 32
            lane = thread % lanes if problem.state_v_first else warp % k_warps * spec.warp_lanes + thread % 32 // groups_per_warp
            v_start = (block % spec.v_blocks * (threads // lanes) + steps.group_of(spec, thread)) * spec.columns
            place = Place(head, lane, v_start)

            registers = allocate_registers(spec, ring)
            exchange = allocate_exchange(spec)
            state = registers.state
            minus_decay, bias = build.variables(2, "float32")
            slot = T.alloc_var("int64")
            scratch = T.alloc_var("uint32")
            begin, count, live_count, written_tokens, committed, accepted = build.variables(6)
            first, base, start, target, is_valid, path, walker, newest, rows_at = build.variables(9)
            seed = T.alloc_var("uint32") if problem.has_rounding else 0
            live = Live(first, base, committed - first, start, target, is_valid)

            # Everything that the places of the entries depend on, at once.
            begin = T.cast(cu_seqlens[sequence], "int32")
            count = T.max(T.cast(cu_seqlens[sequence + 1], "int32") - begin, 0)
            written_tokens = T.cast(cu_seqlens[num_sequences], "int32")
            committed = tensors.num_computed_tokens[sequence]
            slot = T.cast(tensors.state_indices[sequence], "int64")
            accepted = 1
            if problem.has_accepted:
                accepted = tensors.num_accepted_tokens[sequence]
            minus_decay = 0.0
            bias = 0.0
            if spec.use_gate:
                minus_decay = -T.exp(tensors.A_log[head])
                bias = tensors.dt_bias[head]
            if problem.has_rounding:
                mix_seed(tensors.rounding_seed, seed)

            live_count = count
            if committed < 0 or accepted < 1 or accepted > ring.most_tokens or count > ring.most_tokens:
                live_count = 0
            if slot <= tensors.null_slot or slot >= tensors.ring.shape[0]:
                live_count = 0

            if live_count > 0:
                steps.boundary(ring, committed - accepted, phase, scratch, first)
                base = T.truncmod(first, ring.rows)
                steps.load_entries(ring, slot, place, thread, tensors, live, registers)
                for i in T.unroll(spec.columns * spec.entries):
                    state[i] = 0.0
                for i in T.unroll(4 * ring.row_passes):
                    registers.row_next[i] = T.cast(0.0, problem.dtype)
                for r in T.unroll(spec.columns):
                    registers.v_next[r] = T.cast(0.0, problem.dtype)
                steps.load_row(ring, begin, place, thread, tensors, registers)
                load_state(spec, slot, place, pool, state)
                if ring.row_floats > problem.head_k_dim:
                    steps.clear_padding(ring, thread, registers)

            # Zero rows, while the state is on its way: of padding, and beyond the last sequence, dealt to all blocks of the head.
            if lane < spec.columns and v_exists(spec, v_start):
                for t in T.serial(count - live_count):
                    out[0, begin + t, head, v_start + lane] = T.cast(0.0, problem.dtype)
                walker = written_tokens + sequence
                while walker < num_tokens:
                    out[0, walker, head, v_start + lane] = T.cast(0.0, problem.dtype)
                    walker = walker + num_sequences

            if live_count > 0:
                path = 0
                for t in T.serial(live_count if problem.has_accepted else 1):
                    newest = committed - first + t
                    rows_at = t % 2 * (2 * ring.row_floats)
                    steps.read_gates(spec, minus_decay, bias, registers)
                    steps.write_row(ring, rows_at, thread, registers)
                    if thread == 0:
                        registers.shared[ring.decays_at + newest] = registers.scalars[GATE]
                    for r in T.unroll(spec.columns):
                        registers.v[r] = T.cast(registers.v_next[r], "float32")
                    if t == 0:
                        ptx.wait_for_copies()
                    T.sync_threads()
                    if problem.has_accepted:
                        if t + 1 < live_count:
                            steps.load_row(ring, begin + t + 1, place, thread, tensors, registers)
                    find_live(ring, committed, phase, registers.written, scratch, start, target, is_valid, first)
                    if has_parent:
                        find_path(t, begin, tensors.parent_token, walker, path)
                    is_followed = t + 1 < live_count if problem.has_accepted else False
                    steps.weigh(ring, rows_at, live, newest, path, thread, registers)
                    T.sync_threads()  # all weights are there

                    steps.multiply(ring, rows_at, place, registers)
                    steps.add_entries(ring, live, newest, path, place, thread, registers)
                    add_up(spec, t % 2, thread, registers.sums, exchange)
                    steps.combine(spec, tensors.scale, registers)
                    steps.store_out(spec, begin + t, place, is_valid, registers, out)
                    steps.append(ring, rows_at, slot, live, newest, is_followed, place, thread, tensors, registers)

                if problem.has_final_state:
                    if is_valid != 0 and target > start:
                        steps.fold(ring, live, place, thread, registers)
                        store_into_pool(spec, slot, place, seed, pool, state)

    return recurrent
