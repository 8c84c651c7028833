"""Other head dims than the chunk kernels have: copies that pad with zeros on the way in and cut off on the way out.

    pad     q, k, v [L, heads, D] -> [L, heads, P]; the states that sequences start from, [slots, HS, D, D] of either dtype,
            -> [N, HS, P, P] float32; slots [N] int32: the sequence's number, or -1 for a padding sequence; the places N + n C + c
            of the checkpoints [N, C] int32
    unpad   out [L, HS, P] -> [L, HS, D]; states [N + N C, HS, P, P] float32 -> the slots that they are to be stored in

With D = P no token is copied, only states. A state that a sequence does not start from (has_initial_state False, or none
given) is zero; of a padding sequence nothing is read or written, and nothing of an empty one in a pool. Rows and columns of
a state are padded alike, so nothing here depends on which of K and V comes first.

A block copies a piece of 8 columns a thread, in 4 tokens each, or 8 pieces of 4 values a thread of a state.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from gdn.problems import ChunkParams, ChunkProblem
from kernels_cute.chunk.shape import CHUNK
from kernels_cute.common import build
from kernels_cute.common.memory import fake, load, pointer, store

PAD, UNPAD = "gdn_cute_chunk_pad", "gdn_cute_chunk_unpad"
_THREADS = 128
_TOKENS = 4  # of a block
_COLUMNS = 8  # of a token, a thread: 16 bytes where it is padded, and twice 8 where it is not
_STATE_PIECES = 8  # of a thread, of 4 values


def needed(problem: ChunkProblem, dim: int) -> list[str]:
    """The copies around a call with head dim `dim` that have anything to copy."""
    has_states, tokens_differ = has_state_copies(problem), dim != problem.head_k_dim
    return [PAD] * (tokens_differ or has_states) + [UNPAD] * (tokens_differ or problem.has_final_state)


def compile(problem: ChunkProblem, dim: int) -> dict[str, bytes]:
    made = {PAD: (_Pad, _pad_arguments), UNPAD: (_Unpad, _unpad_arguments)}
    return {name: build.library(name, made[name][0](problem, dim), *made[name][1](problem, dim)) for name in needed(problem, dim)}


def has_state_copies(problem: ChunkProblem) -> bool:
    return problem.pooled or problem.has_initial_state or problem.has_final_state


class PadParams(NamedTuple):
    """Arguments of the copies in."""

    q: Any  # [L, heads, D], as k and v
    k: Any
    v: Any
    padded_q: Any  # [L, heads, P], as padded_k and padded_v
    padded_k: Any
    padded_v: Any
    cu_seqlens: Any
    initial_state: Any
    state_indices: Any
    has_initial_state: Any
    states: Any  # [N or more, HS, P, P] float32; None without states
    slots: Any  # [N] int32: of the sequences in `states`; None without states
    state_slots: Any  # [N, C] int32: of the checkpoints in `states`; None without checkpoints
    null_slot: Any


class UnpadParams(NamedTuple):
    """Arguments of the copies out."""

    padded_out: Any  # [L, HS, P]
    out: Any  # [L, HS, D]
    cu_seqlens: Any
    states: Any  # [N + N C, HS, P, P] float32; None where none is stored
    final_state: Any
    state_indices: Any
    final_state_indices: Any
    checkpoint_offsets: Any
    checkpoint_slots: Any
    null_slot: Any


def pad_values(params: ChunkParams, inner: ChunkParams, null_slot: int) -> PadParams:
    """The launch of the copies in. inner: the call that is computed instead."""
    return PadParams(
        *(params.q[0], params.k[0], params.v[0], inner.q[0], inner.k[0], inner.v[0], params.cu_seqlens, params.initial_state),
        *(params.state_indices, params.has_initial_state, inner.initial_state, inner.state_indices, inner.checkpoint_slots),
        null_slot,
    )


def unpad_values(params: ChunkParams, inner: ChunkParams, null_slot: int) -> UnpadParams:
    """The launch of the copies out."""
    stores = params.final_state is not None
    return UnpadParams(
        *(inner.out[0], params.out[0], params.cu_seqlens, inner.final_state if stores else None, params.final_state),
        *(params.state_indices, params.final_state_indices, params.checkpoint_offsets, params.checkpoint_slots, null_slot),
    )


def _tokens(problem: ChunkProblem, count: Any, heads: int, dim: int) -> Any:
    return fake(problem.dtype, count, heads, dim, last=1)


def _states(problem: ChunkProblem, dtype: str, dim: int, present: bool) -> Any:
    return fake(dtype, cute.sym_int64(), problem.num_state_heads, dim, dim, last=1) if present else None


def _indices(problem: ChunkProblem, present: bool) -> Any:
    return fake(str(problem.index_dtype), cute.sym_int()) if present else None


def _pad_arguments(problem: ChunkProblem, dim: int) -> PadParams:
    """Fake tensors and scalars of the compiled function."""
    tokens, has_states = cute.sym_int(), has_state_copies(problem)
    heads = (problem.num_q_heads, problem.num_k_heads, problem.num_v_heads)
    return PadParams(
        *(_tokens(problem, tokens, count, problem.head_k_dim) for count in heads),
        *(_tokens(problem, tokens, count, dim) for count in heads),
        cu_seqlens=fake(problem.cu_seqlens_dtype, cute.sym_int(), last=1),
        initial_state=_states(problem, problem.state_dtype, problem.head_k_dim, problem.has_initial_state),
        state_indices=_indices(problem, problem.pooled),
        has_initial_state=fake("bool", cute.sym_int(), last=1) if problem.has_mask else None,
        states=_states(problem, "float32", dim, has_states),
        slots=fake("int32", cute.sym_int(), last=1) if has_states else None,
        state_slots=fake("int32", cute.sym_int(), cute.sym_int(), last=1) if problem.has_checkpoints else None,
        null_slot=Int64(-1),
    )


def _unpad_arguments(problem: ChunkProblem, dim: int) -> UnpadParams:
    tokens, columns = cute.sym_int(), cute.sym_int()
    stores, has_checkpoints = problem.has_final_state, problem.has_checkpoints
    return UnpadParams(
        padded_out=_tokens(problem, tokens, problem.num_state_heads, dim),
        out=_tokens(problem, tokens, problem.num_state_heads, problem.head_v_dim),
        cu_seqlens=fake(problem.cu_seqlens_dtype, cute.sym_int(), last=1),
        states=_states(problem, "float32", dim, stores),
        final_state=_states(problem, problem.state_dtype if problem.pooled else "float32", problem.head_v_dim, stores),
        state_indices=_indices(problem, problem.pooled),
        final_state_indices=_indices(problem, problem.has_final_indices),
        checkpoint_offsets=fake("int32", cute.sym_int(), columns, last=1) if has_checkpoints else None,
        checkpoint_slots=fake(str(problem.index_dtype), cute.sym_int(), columns, last=1) if has_checkpoints else None,
        null_slot=Int64(-1),
    )


class _Copies:
    """What both directions share; attributes are compile-time constants. dim: the padded one."""

    def __init__(self, problem: ChunkProblem, dim: int) -> None:
        self.true_dim, self.dim, self.heads = problem.head_k_dim, dim, problem.num_state_heads
        self.q_heads, self.k_heads, self.v_heads = problem.num_q_heads, problem.num_k_heads, problem.num_v_heads
        self.has_initial, self.has_mask = problem.has_initial_state, problem.has_mask
        self.pooled, self.has_final_indices = problem.pooled, problem.has_final_indices
        self.has_checkpoints = problem.has_checkpoints
        self.tokens_differ = dim != problem.head_k_dim
        self.pieces = dim // _COLUMNS  # of a head of a token
        self.row_pieces = dim // 4  # of a row of a state
        self.state_pieces = dim * self.row_pieces
        self.state_blocks = -(-self.state_pieces // (_THREADS * _STATE_PIECES))  # of a head

    def slices(self, heads: int) -> int:
        """Blocks that share a tile of tokens."""
        return -(-heads * self.pieces // _THREADS)

    def token_blocks(self, x: Any, heads: int) -> Any:
        if not self.tokens_differ:
            return Int32(0)
        return (x.shape[0] + (_TOKENS - 1)) // _TOKENS * self.slices(heads)

    @cute.jit
    def copy_tokens(self, source: cute.Tensor, target: cute.Tensor, first: Int32, head: Int32, piece: Int32):
        """8 columns of a head in `_TOKENS` tokens; those beyond either tensor's head dim are zero, or not stored."""
        rX = cute.make_rmem_tensor(_TOKENS * _COLUMNS, source.element_type)
        rX.fill(0.0)
        last = source.shape[0] - 1
        column = piece * _COLUMNS
        for u in cutlass.range_constexpr(_TOKENS):
            token = cutlass.min(first + u, last)
            offset = Int64(token) * source.stride[0] + Int64(head) * source.stride[1] + column
            self.load_columns(source, offset, column, rX, u * _COLUMNS)
        for u in cutlass.range_constexpr(_TOKENS):
            if first + u <= last:
                offset = Int64(first + u) * target.stride[0] + Int64(head) * target.stride[1] + column
                self.store_columns(target, offset, column, rX, u * _COLUMNS)

    @cute.jit
    def load_columns(self, source: cute.Tensor, offset: Int64, column: Int32, rX: cute.Tensor, start: cutlass.Constexpr):
        if cutlass.const_expr(source.shape[2] % _COLUMNS == 0 and source.shape[2] == self.dim):
            load(pointer(source, offset, 16), _COLUMNS, rX, start, True)
        else:
            for half in cutlass.range_constexpr(2):
                if column + 4 * half < source.shape[2]:
                    load(pointer(source, offset + 4 * half, 8), 4, rX, start + 4 * half, True)

    @cute.jit
    def store_columns(self, target: cute.Tensor, offset: Int64, column: Int32, rX: cute.Tensor, start: cutlass.Constexpr):
        if cutlass.const_expr(target.shape[2] % _COLUMNS == 0 and target.shape[2] == self.dim):
            store(rX, start, _COLUMNS, pointer(target, offset, 16))
        else:
            for half in cutlass.range_constexpr(2):
                if column + 4 * half < target.shape[2]:
                    store(rX, start + 4 * half, 4, pointer(target, offset + 4 * half, 8))

    @cute.jit
    def load_state(self, states: cute.Tensor, slot: Int64, head: Int32, first: Int32, reads: Boolean, rS: cute.Tensor):
        """Pieces first, first + 128, ... of a state; zero where it has none, or is not to be read."""
        rS.fill(0.0)
        for i in cutlass.range_constexpr(_STATE_PIECES):
            piece = first + i * _THREADS
            row, column = piece // self.row_pieces, piece % self.row_pieces * 4
            if reads & self.is_inside(states, row, column):
                load(self.state_pointer(states, slot, head, row, column), 4, rS, 4 * i, True)

    @cute.jit
    def store_state(self, states: cute.Tensor, slot: Int64, head: Int32, first: Int32, rS: cute.Tensor):
        for i in cutlass.range_constexpr(_STATE_PIECES):
            piece = first + i * _THREADS
            row, column = piece // self.row_pieces, piece % self.row_pieces * 4
            if self.is_inside(states, row, column):
                store(rS, 4 * i, 4, self.state_pointer(states, slot, head, row, column))

    def is_inside(self, states: Any, row: Any, column: Any) -> Any:
        return (row < states.shape[2]) & (column < states.shape[3])

    @cute.jit
    def state_pointer(self, states: cute.Tensor, slot: Int64, head: Int32, row: Int32, column: Int32):
        dim = cutlass.const_expr(states.shape[3])
        offset = slot * states.stride[0] + head * (dim * dim) + row * dim + column
        return pointer(states, offset, states.element_type.width // 2)

    @cute.jit
    def length(self, cu_seqlens: cute.Tensor, sequence: Int32):
        return cutlass.max(Int32(cu_seqlens[sequence + 1]) - Int32(cu_seqlens[sequence]), 0)

    @cute.jit
    def is_live(self, params, sequence):
        """Whether a sequence has a state at all. Without a pool an empty one passes its state through."""
        live = Boolean(True)
        if cutlass.const_expr(self.pooled):
            slot = Int64(params.state_indices[sequence])
            live = (self.length(params.cu_seqlens, sequence) > 0) & (slot > params.null_slot)
        return live


class _Pad(_Copies):
    def __init__(self, problem: ChunkProblem, dim: int) -> None:
        super().__init__(problem, dim)
        self.has_states = has_state_copies(problem)
        self.all_heads = self.q_heads + self.k_heads + self.v_heads

    @cute.jit
    def __call__(self, *values):
        params, stream = PadParams(*values[:-1]), values[-1]
        blocks = self.token_blocks(params.q, self.all_heads)
        if cutlass.const_expr(self.has_states):
            blocks = blocks + (params.cu_seqlens.shape[0] - 1) * (self.heads * self.state_blocks)
        self.kernel(params).launch(grid=[blocks, 1, 1], block=[_THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, params: PadParams):
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        token_blocks = self.token_blocks(params.q, self.all_heads)
        if cutlass.const_expr(self.tokens_differ):
            if block < token_blocks:
                slices = cutlass.const_expr(self.slices(self.all_heads))
                item = block % slices * _THREADS + thread
                head, piece = item // self.pieces, item % self.pieces
                first = block // slices * _TOKENS
                if head < self.q_heads:
                    self.copy_tokens(params.q, params.padded_q, first, head, piece)
                elif head < self.q_heads + self.k_heads:
                    self.copy_tokens(params.k, params.padded_k, first, head - self.q_heads, piece)
                elif head < self.all_heads:
                    self.copy_tokens(params.v, params.padded_v, first, head - (self.q_heads + self.k_heads), piece)
        if cutlass.const_expr(self.has_states):
            if block >= token_blocks:
                self.bring_state(params, block - token_blocks, thread)

    @cute.jit
    def bring_state(self, params, part, thread):
        sequence = part // (self.heads * self.state_blocks)
        within = part % (self.heads * self.state_blocks)
        head = within // self.state_blocks
        live = self.is_live(params, sequence)
        if (within == 0) & (thread == 0):
            slot = Int32(-1)
            if live:
                slot = sequence
            params.slots[sequence] = slot
            if cutlass.const_expr(self.has_checkpoints):
                columns = params.state_slots.shape[1]
                for column in cutlass.range(columns, unroll=1):
                    params.state_slots[sequence, column] = params.cu_seqlens.shape[0] - 1 + sequence * columns + column
        if live:
            first = within % self.state_blocks * (_THREADS * _STATE_PIECES) + thread
            rS = cute.make_rmem_tensor(4 * _STATE_PIECES, Float32)
            rS.fill(0.0)
            if cutlass.const_expr(self.has_initial):
                source = Int64(sequence)
                if cutlass.const_expr(self.pooled):
                    source = Int64(params.state_indices[sequence])
                reads = Boolean(True)
                if cutlass.const_expr(self.has_mask):
                    reads = Boolean(params.has_initial_state[sequence])
                self.load_state(params.initial_state, source, head, first, reads, rS)
            self.store_state(params.states, Int64(sequence), head, first, rS)


class _Unpad(_Copies):
    def __init__(self, problem: ChunkProblem, dim: int) -> None:
        super().__init__(problem, dim)
        self.stores_states = problem.has_final_state

    @cute.jit
    def __call__(self, *values):
        params, stream = UnpadParams(*values[:-1]), values[-1]
        blocks = self.token_blocks(params.out, self.heads)
        if cutlass.const_expr(self.stores_states):
            count = params.cu_seqlens.shape[0] - 1
            if cutlass.const_expr(self.has_checkpoints):
                count = count * (1 + params.checkpoint_offsets.shape[1])
            blocks = blocks + count * (self.heads * self.state_blocks)
        self.kernel(params).launch(grid=[blocks, 1, 1], block=[_THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, params: UnpadParams):
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        token_blocks = self.token_blocks(params.out, self.heads)
        if cutlass.const_expr(self.tokens_differ):
            if block < token_blocks:
                slices = cutlass.const_expr(self.slices(self.heads))
                item = block % slices * _THREADS + thread
                if item < self.heads * self.pieces:
                    head, piece = item // self.pieces, item % self.pieces
                    self.copy_tokens(params.padded_out, params.out, block // slices * _TOKENS, head, piece)
        if cutlass.const_expr(self.stores_states):
            if block >= token_blocks:
                part = block - token_blocks
                place = part // (self.heads * self.state_blocks)  # in states
                within = part % (self.heads * self.state_blocks)
                target = self.target(params, place)
                if target > params.null_slot:
                    first = within % self.state_blocks * (_THREADS * _STATE_PIECES) + thread
                    head = within // self.state_blocks
                    rS = cute.make_rmem_tensor(4 * _STATE_PIECES, Float32)
                    self.load_state(params.states, Int64(place), head, first, Boolean(True), rS)
                    self.store_state(params.final_state, target, head, first, rS)

    @cute.jit
    def target(self, params, place):
        """Where the state at `place` goes; null_slot = nowhere."""
        sequences = params.cu_seqlens.shape[0] - 1
        target = params.null_slot
        if place < sequences:
            if self.is_live(params, place):
                target = Int64(place)
                if cutlass.const_expr(self.has_final_indices):
                    target = Int64(params.final_state_indices[place])
                elif cutlass.const_expr(self.pooled):
                    target = Int64(params.state_indices[place])
        if cutlass.const_expr(self.has_checkpoints):
            if place >= sequences:
                sequence = (place - sequences) // params.checkpoint_offsets.shape[1]
                column = (place - sequences) % params.checkpoint_offsets.shape[1]
                done = Int32(params.checkpoint_offsets[sequence, column])
                is_reached = (done > 0) & (done <= self.length(params.cu_seqlens, sequence)) & (done % CHUNK == 0)
                if is_reached & self.is_live(params, sequence):
                    target = Int64(params.checkpoint_slots[sequence, column])
        return target
