"""The gated norm of a prefill step, chunk by chunk: next to the chunk kernel, or after it.

A block has the rows of a head and a chunk of 64 tokens, in the order of the tokens; it asks for its rows of z, and replaces the
outputs by the result. Next to the chunk kernel it first waits for that one's blocks in its word of `outputs_done`
(kernels_cute.chunk.signals). The chunk kernel waits for nobody here, and its blocks have their SMs for themselves, so blocks that
wait are in nobody's way. Rows of padding are those of the chunk kernel, or of the last launch, which write zeros.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from gdn.ops.layer_step.problem import GdnPrefillParams, GdnPrefillProblem
from kernels_cute.chunk import signals
from kernels_cute.chunk.roles.gates import head_offset
from kernels_cute.chunk.shape import CHUNK
from kernels_cute.common.memory import load, pointer, sigmoid, store
from kernels_cute.conv1d.tiles import find_sequence
from kernels_cute.gdn_prefill.views import norm_z

_VECTOR = 8  # elements of an access
_THREADS = 256


class NormParams(NamedTuple):
    """Arguments of the launch."""

    z: Any  # [L, HV, V], or [L, (r, H), V]: HV in groups of r
    weight: Any  # [V]
    state_indices: Any  # [>= N]
    cu_seqlens: Any  # [N + 1]
    out: Any  # [L, HV, V]
    eps: Any
    null_slot: Any


def norm_params(problem: GdnPrefillProblem, p: GdnPrefillParams) -> NormParams:
    z = norm_z(problem, p, p.mixed_qkv.shape[0])
    return NormParams(z, p.norm_weight, p.state_indices, p.cu_seqlens, p.out, p.eps, p.null_slot)


class OutputNorm:
    """blocks_of_chunk: the chunk kernel's blocks that share a head, 0 where all outputs are there when this launch begins;
    skipped_tokens: sequences of so many tokens or fewer are another launch's."""

    def __init__(self, problem: GdnPrefillProblem, blocks_of_chunk: int, skipped_tokens: int) -> None:
        self.heads, self.dim, self.sigmoid = problem.num_v_heads, problem.head_v_dim, problem.gate_sigmoid
        self.blocks_of_chunk, self.skipped_tokens = blocks_of_chunk, skipped_tokens
        self.lanes = self.dim // _VECTOR  # threads of a row
        self.groups = _THREADS // self.lanes
        self.rows = CHUNK // self.groups  # of a thread
        # Blocks of an SM that registers must allow: float32 rows of z take twice as many.
        self.min_blocks = 3 if problem.z_dtype == "float32" else 4

    def launch_options(self, params: NormParams) -> dict[str, Any]:
        chunks = params.out.shape[0] // CHUNK + params.cu_seqlens.shape[0] - 1
        return {
            "grid": (chunks * self.heads, 1, 1),
            "block": (_THREADS, 1, 1),
            "min_blocks_per_mp": self.min_blocks,
            "preferred_smem_carveout": 0,
        }

    @cute.kernel
    def kernel(self, params: NormParams, outputs_done: Int64):
        if cutlass.const_expr(self.skipped_tokens > 0):
            cute.arch.griddepcontrol_launch_dependents()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        chunk, head = block // self.heads, block % self.heads
        sequences = params.cu_seqlens.shape[0] - 1
        sequence = find_sequence(CHUNK, chunk, sequences, params.cu_seqlens)
        begin = Int32(params.cu_seqlens[sequence])
        first = (chunk - begin // CHUNK - sequence) * CHUNK
        length = Int32(params.cu_seqlens[sequence + 1]) - begin
        valid = cutlass.min(length - first, CHUNK)
        is_live = (first >= 0) & (valid > 0)
        if cutlass.const_expr(self.skipped_tokens > 0):
            is_live = is_live & (length > self.skipped_tokens)
        if is_live:
            if Int64(params.state_indices[sequence]) > params.null_slot:
                self.normalise(params, outputs_done + Int64(block) * 4, begin + first, valid, head)
        if block == blocks - 1:
            # All outputs are there, but the chunk kernel may not have stored all states: what follows waits for this launch
            # alone.
            cute.arch.griddepcontrol_wait()

    @cute.jit
    def normalise(self, params: NormParams, done: Int64, token: Int32, valid: Int32, head: Int32):
        thread, _, _ = cute.arch.thread_idx()
        column, group = thread % self.lanes * _VECTOR, thread // self.lanes
        elements = self.rows * _VECTOR
        rX = cute.make_rmem_tensor(elements, params.out.element_type)
        rZ = cute.make_rmem_tensor(elements, params.z.element_type)
        rWeight = cute.make_rmem_tensor(_VECTOR, Float32)
        rOut = cute.make_rmem_tensor(_VECTOR, Float32)
        for u in cutlass.range_constexpr(self.rows):
            # After the last row that one again: no load has a condition.
            row = token + cutlass.min(group + u * self.groups, valid - 1)
            self.load_row(params.z, row, head, column, rZ, u * _VECTOR)
        align = cutlass.const_expr(min(16, _VECTOR * params.weight.element_type.width // 8))
        load(pointer(params.weight, Int64(column), align), _VECTOR, rWeight, 0, False)
        if cutlass.const_expr(self.blocks_of_chunk > 0):
            if thread == 0:
                signals.await_count(done, self.blocks_of_chunk)
            cute.arch.sync_threads()
        for u in cutlass.range_constexpr(self.rows):
            row = token + cutlass.min(group + u * self.groups, valid - 1)
            self.load_row(params.out, row, head, column, rX, u * _VECTOR)
        # Before any row is written: the last one may be read by several.
        cute.arch.sync_threads()
        for u in cutlass.range_constexpr(self.rows):
            squares = Float32(0.0)
            for i in cutlass.range_constexpr(_VECTOR):
                value = rX[u * _VECTOR + i].to(Float32)
                squares += value * value
            for step in cutlass.range_constexpr(self.lanes.bit_length() - 1):
                squares += cute.arch.shuffle_sync_bfly(squares, offset=1 << step)
            factor = cute.math.rsqrt(squares * (1.0 / self.dim) + params.eps)
            for i in cutlass.range_constexpr(_VECTOR):
                gate = rZ[u * _VECTOR + i].to(Float32)
                weighted = rX[u * _VECTOR + i].to(Float32) * factor * rWeight[i] * sigmoid(gate)
                if cutlass.const_expr(not self.sigmoid):
                    weighted = weighted * gate
                rOut[i] = weighted
            if group + u * self.groups < valid:
                offset = self.offset_of(params.out, token + group + u * self.groups, head, column)
                store(rOut, 0, _VECTOR, pointer(params.out, offset, 2 * _VECTOR))

    def offset_of(self, x: Any, row: Any, head: Any, column: Any) -> Any:
        return Int64(row) * x.stride[0] + head_offset(x, head) + column

    @cute.jit
    def load_row(self, x: cute.Tensor, row: Int32, head: Int32, column: Int32, rX: cute.Tensor, start: cutlass.Constexpr):
        align = cutlass.const_expr(min(16, _VECTOR * x.element_type.width // 8))
        load(pointer(x, self.offset_of(x, row, head, column), align), _VECTOR, rX, start, True)
