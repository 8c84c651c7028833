"""The kernel of sparse decode attention: a block computes one query token, one key head and a part of the positions."""

from typing import Any

import tilelang.language as T

from kernels_tl.attention.decode.sizes import ROWS, THREADS, TILE, VECTOR, Spec
from kernels_tl.attention.decode.spec import allocate, parameter_types
from kernels_tl.common import build
from kernels_tl.common.versions import prim_func

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
LOWEST = -1.0e30  # in place of -inf, whose differences are NaN

# Loops of asynchronous copies, which neither close a group of their own nor wait for it.
_ASYNC = {"parallel_prefer_async": True, "parallel_async_without_async_commit_wait": True}


def kernel(spec: Spec) -> Any:
    """The prim_func."""

    @prim_func
    def sparse_decode():
        types = parameter_types(spec)
        tensors = build.parameters(**types | {"gate": types["gate"] if spec.gates_sums else None})
        num_tokens, num_sequences = tensors.q.shape[0], tensors.seq_lens.shape[0]
        with T.Kernel(num_tokens * (spec.kv_heads * spec.splits), threads=THREADS) as block:
            thread = T.get_thread_binding(0)
            kv_head = block % spec.kv_heads
            split = block // spec.kv_heads % spec.splits
            token = block // (spec.kv_heads * spec.splits)
            own = allocate(spec)
            sequence, position, columns, first_tile, num_tiles = build.variables(5)
            here, after, page = build.variables(3)  # positions of this thread's row of the next tile and of that after it

            if thread == 0:
                own.found[0] = -1
            T.sync_threads()
            for c in T.serial(T.ceildiv(num_sequences, THREADS)):
                if c * THREADS + thread < num_sequences:
                    start = tensors.query_start_loc[c * THREADS + thread]
                    end = tensors.query_start_loc[c * THREADS + thread + 1]
                    if (start <= token) & (token < end):
                        own.found[0] = c * THREADS + thread
            for r, c, e in T.Parallel(ROWS, spec.dim // VECTOR, VECTOR):
                own.queries[r, c * VECTOR + e] = T.if_then_else(
                    r < spec.group,
                    tensors.q[token, kv_head * spec.group + T.min(r, spec.group - 1), c * VECTOR + e],
                    T.cast(0.0, spec.dtype),
                )
            T.clear(own.sums)
            T.clear(own.total)
            T.fill(own.best, LOWEST)
            T.sync_threads()

            sequence = own.found[0]
            position = -1
            if sequence >= 0:
                position = tensors.seq_lens[sequence] - tensors.query_start_loc[sequence + 1] + token
            count_columns(spec, tensors, token, position, columns)
            num_tiles = T.ceildiv(columns, TILE)
            first_tile = split * T.ceildiv(num_tiles, spec.splits)
            num_tiles = T.max(T.min(num_tiles - first_tile, T.ceildiv(num_tiles, spec.splits)), 0)
            columns = T.min(columns, (first_tile + num_tiles) * TILE)  # where this block's part ends

            for s in T.serial(spec.stages - 1):
                find_position(spec, tensors, token, position, columns, (first_tile + s) * TILE + thread, here)
                find_page(spec, tensors, sequence, here, page)
                publish(spec, own, tensors, kv_head, thread, s, here, page)
            T.sync_threads()
            for s in T.serial(spec.stages - 1):
                gather(spec, own, tensors, s)
            find_position(spec, tensors, token, position, columns, (first_tile + spec.stages - 1) * TILE + thread, here)
            find_page(spec, tensors, sequence, here, page)
            find_position(spec, tensors, token, position, columns, (first_tile + spec.stages) * TILE + thread, after)

            if spec.gates_sums:
                load_gates(spec, own, tensors, token, kv_head)
            for t in T.serial(num_tiles):
                publish(spec, own, tensors, kv_head, thread, (t + spec.stages - 1) % spec.stages, here, page)
                here = after
                find_page(spec, tensors, sequence, here, page)
                find_position(spec, tensors, token, position, columns, (first_tile + t + spec.stages + 1) * TILE + thread, after)
                T.ptx_wait_group(spec.stages - 2)
                T.sync_threads()  # tile t is there; the tile before it is read, so its stage is free; places are published
                gather(spec, own, tensors, (t + spec.stages - 1) % spec.stages)
                attend(spec, own, tensors.scale, t % spec.stages)

            T.ptx_wait_group(0)  # of rows after the last tile, which are zeros
            finish(spec, own, tensors, token, kv_head, split)

    return sparse_decode


@T.macro
def count_columns(spec, tensors, token, position, columns: T.Ref):
    """columns = the entries of the token's row that may count; dense: the positions that it sees."""
    if spec.dense:
        columns = position + 1
        # A page count times the block size may pass 2**31 where the table is wide: compare in 64 bits.
        if T.cast(columns, "int64") > T.cast(tensors.block_tables.shape[1], "int64") * spec.block_size:
            columns = tensors.block_tables.shape[1] * spec.block_size
    else:
        columns = 0
        if position >= 0:
            columns = tensors.topk_indices.shape[1]
            if spec.problem.has_topk_length:
                columns = T.min(columns, tensors.topk_length[token])
    columns = T.max(columns, 0)


@T.macro
def find_position(spec, tensors, token, position, columns, column, found: T.Ref):
    """found = the position in a column of the token's row; -1 for none, or one that it does not see."""
    found = -1
    if column < columns:
        if spec.dense:
            found = column
        else:
            # In the index's own width: what does not fit int32 is no position either.
            index = tensors.topk_indices[token, column]
            if (index >= 0) & (index <= position):
                found = T.cast(index, "int32")  # noqa: F841 - a reference


@T.macro
def find_page(spec, tensors, sequence, found: T.Ref, page: T.Ref):
    """page = the block that holds a position."""
    page = 0
    if found >= 0:
        page = tensors.block_tables[sequence, T.truncdiv(found, spec.block_size)]  # noqa: F841 - a reference


def unit(cache: Any, page: Any, slot: Any, kv_head: Any) -> Any:
    """Place of a row in a cache, in 16-byte units."""
    strides = [stride // VECTOR for stride in cache.strides[:3]]
    return T.cast(page, "int64") * strides[0] + T.cast(slot, "int64") * strides[1] + T.cast(kv_head, "int64") * strides[2]


@T.macro
def publish(spec, own, tensors, kv_head, thread, stage, found: T.Ref, page: T.Ref):
    """Places of this thread's row of a tile, for all threads."""
    if thread < TILE:
        own.key_place[stage, thread] = T.cast(-1, "int64")
        own.value_place[stage, thread] = T.cast(-1, "int64")
        if found >= 0:
            slot = T.truncmod(found, spec.block_size)
            own.key_place[stage, thread] = unit(tensors.k_cache, page, slot, kv_head)
            own.value_place[stage, thread] = unit(tensors.v_cache, page, slot, kv_head)


@T.macro
def gather(spec, own, tensors, stage):
    """Starts the copies of a tile's rows, zeros where there is none, and closes their group."""
    for i, c, e in T.Parallel(TILE, spec.dim // VECTOR, VECTOR, annotations=_ASYNC):
        own.keys[stage, i, c * VECTOR + e] = T.if_then_else(
            own.key_place[stage, i] >= 0,
            tensors.k_cache[0, 0, 0, (own.key_place[stage, i] + c) * VECTOR + e],
            T.cast(0.0, spec.dtype),
        )
    for i, c, e in T.Parallel(TILE, spec.dim // VECTOR, VECTOR, annotations=_ASYNC):
        own.values[stage, i, c * VECTOR + e] = T.if_then_else(
            own.value_place[stage, i] >= 0,
            tensors.v_cache[0, 0, 0, (own.value_place[stage, i] + c) * VECTOR + e],
            T.cast(0.0, spec.dtype),
        )
    T.ptx_commit_group()


@T.macro
def attend(spec, own, scale, stage):
    """Adds a tile's positions to the running softmax."""
    scores, sums, best, best_before, total = own.scores, own.sums, own.best, own.best_before, own.total
    T.gemm(own.queries, own.keys[stage, :, :], scores, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullCol)
    for r, i in T.Parallel(ROWS, TILE):
        scores[r, i] = T.if_then_else(own.key_place[stage, i] >= 0, scores[r, i] * (scale * LOG2_E), -T.infinity("float32"))
    T.copy(best, best_before)
    T.reduce_max(scores, best, dim=1, clear=False)
    for r, i in T.Parallel(ROWS, TILE):
        scores[r, i] = T.exp2(scores[r, i] - best[r])
    T.reduce_sum(scores, own.tile_total, dim=1, clear=True)
    for r in T.Parallel(ROWS):
        best_before[r] = T.exp2(best_before[r] - best[r])  # the factor of what was summed before
    for r in T.Parallel(ROWS):
        total[r] = total[r] * best_before[r] + own.tile_total[r]
    T.copy(scores, own.weights)
    T.sync_threads()
    for r, d in T.Parallel(ROWS, spec.dim):
        sums[r, d] = sums[r, d] * best_before[r]
    T.gemm(own.weights, own.values[stage, :, :], sums, policy=T.GemmWarpPolicy.FullCol)


@T.macro
def load_gates(spec, own, tensors, token, kv_head):
    """Gates of the block's results, which are there when the last tile is."""
    row = unit(tensors.gate, token, kv_head * spec.group, 0)
    for r, d in T.Parallel(ROWS, spec.dim):
        if r < spec.group:
            own.gates[r, d] = tensors.gate[0, 0, (row + r * T.truncdiv(tensors.gate.strides[1], VECTOR)) * VECTOR + d]


def gated(spec: Spec, value: Any, gate: Any, total: Any) -> Any:
    """A rounded result times the sigmoid of its gate; zero without a position (total 0), whatever the gate is."""
    product = T.cast(T.cast(value, "float32") * T.sigmoid(T.cast(gate, "float32")), spec.dtype)
    return T.if_then_else(total == 0.0, T.cast(0.0, spec.dtype), product)


@T.macro
def finish(spec, own, tensors, token, kv_head, split):
    """Writes the result, or this block's part of it for the merge."""
    head = kv_head * spec.group
    if spec.splits == 1:
        for r, d in T.Parallel(ROWS, spec.dim):
            own.sums[r, d] = T.if_then_else(own.total[r] == 0.0, 0.0, own.sums[r, d] / own.total[r])  # NaN stays NaN
        for r, d in T.Parallel(ROWS, spec.dim):
            if r < spec.group:
                if spec.gates_sums:
                    tensors.out[token, head + r, d] = gated(
                        spec, T.cast(own.sums[r, d], spec.dtype), own.gates[r, d], own.total[r]
                    )
                else:
                    tensors.out[token, head + r, d] = T.cast(own.sums[r, d], spec.dtype)
        for r in T.Parallel(ROWS):
            if r < spec.group:
                tensors.lse[token, head + r] = T.if_then_else(
                    own.total[r] == 0.0, -T.infinity("float32"), (own.best[r] + T.log2(own.total[r])) * LN_2
                )
    else:
        parts = T.cast(tensors.q.shape[0], "int64") * (spec.heads * spec.splits)
        part = (T.cast(token, "int64") * spec.heads + head) * spec.splits + split
        for r, d in T.Parallel(ROWS, spec.dim):
            if r < spec.group:
                tensors.workspace[(part + r * spec.splits) * spec.dim + d] = own.sums[r, d]
        for r in T.Parallel(ROWS):
            if r < spec.group:
                tensors.workspace[parts * spec.dim + (part + r * spec.splits) * 2] = own.best[r]
                tensors.workspace[parts * spec.dim + (part + r * spec.splits) * 2 + 1] = own.total[r]
