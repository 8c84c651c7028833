"""Kernel of parts.py, which has its formulas and tensors: the arguments to compile for, and the body."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from gdn.ops.context.problem import ContextPartsParams, ContextPartsProblem
from kernels_cute.common import build
from kernels_cute.common.memory import fake

_CHUNK = 64  # tokens


def _fakes(problem: ContextPartsProblem) -> ContextPartsParams:
    p = problem
    cu_seqlens, state_indices = fake(p.cu_seqlens_dtype, None), fake(p.index_dtype, None)
    offsets = fake((p.cu_seqlens_dtype or "int32") if p.has_segments else None, None, last=1)
    rows, message = fake("int32", None, last=1), fake("float32", cute.sym_int64(), last=1)
    return ContextPartsParams(cu_seqlens, state_indices, offsets, rows, message, Int64(0), Int32(0), Int32(1), Int64(-1))


class _ContextParts(build.Kernel, params=ContextPartsParams):
    def __init__(self, problem: ContextPartsProblem, config: Any) -> None:
        self.threads = 128

    def blocks(self, params: ContextPartsParams) -> Any:
        return params.rows.shape[0] // self.threads + 1  # of one thread more than there are segments

    @cute.kernel
    def kernel(self, params: ContextPartsParams):
        place = cute.arch.block_idx()[0] * self.threads + cute.arch.thread_idx()[0]
        num_rows, segments = Int32(params.rows.shape[0]), params.num_segments
        if place < num_rows:
            sequence = place // segments
            segment = place - sequence * segments
            first, length = self.tokens_of(params, sequence)
            if segment == 0:
                params.message[params.flags_at + sequence] = cutlass.select_(length > 0, Float32(1.0), Float32(0.0))
            row = place
            if cutlass.const_expr(params.state_indices is not None):
                if params.state_indices[sequence] <= params.null_slot:
                    row = Int32(-1)
            params.rows[place] = row
            if cutlass.const_expr(params.offsets is not None):
                cut = segments * _CHUNK
                piece = (length + (cut - 1)) // cut * _CHUNK
                offset = first + cutlass.min(piece * segment, length)
                params.offsets[place] = params.offsets.element_type(offset)
        if cutlass.const_expr(params.offsets is not None):
            if place == num_rows:
                first, length = self.tokens_of(params, num_rows // segments - 1)
                params.offsets[place] = params.offsets.element_type(first + length)

    @cute.jit
    def tokens_of(self, params: ContextPartsParams, sequence: Int32):
        """First token of a sequence, and their number."""
        first, length = sequence * params.length, params.length
        if cutlass.const_expr(params.cu_seqlens is not None):
            first = Int32(params.cu_seqlens[sequence])
            length = Int32(params.cu_seqlens[sequence + 1]) - first
        return first, length


def library(problem: ContextPartsProblem, config: Any) -> dict[str, bytes]:
    return build.one_entry(problem.op, _ContextParts(problem, config), _fakes(problem))
