"""What a value head will need from memory, asked for while the block still works on something else."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from gdn.ops.delta_rule.problem import ChunkParams
from gdn.ops.layer_step.problem import Conv1dParams
from kernels_cute.chunk.roles.gates import head_offset
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.common import ptx
from kernels_cute.gdn_prefill.short.rows import Sequence
from kernels_cute.gdn_prefill.short.shape import THREADS

_LINE = 128  # bytes that one request brings into the L2 cache


@cute.jit
def ask_for_head(
    spec: ChunkSpec, steps: Any, conv: Conv1dParams, chunk: ChunkParams, z: cute.Tensor, sequence: Sequence, head: Int32,
    thread: Int32,
):  # fmt: skip
    """Have the L2 cache fetch the head's rows of V, before the convolution, and of z, and its state. steps: the convolution."""
    lines = cutlass.const_expr(2 * spec.dim // _LINE)  # of a row
    column = steps.column_of(2 * steps.keys + head * spec.dim)
    for i in cutlass.range(thread, sequence.length * lines, THREADS, unroll=1):
        token, line = Int64(sequence.begin + i // lines), i % lines * _LINE
        ptx.prefetch_line(conv.x.iterator.toint() + (token * conv.x.stride[0] + column) * 2 + line)
        ptx.prefetch_line(z.iterator.toint() + (token * z.stride[0] + head_offset(z, head)) * 2 + line)
    if sequence.is_continued:
        states = chunk.initial_state
        size = cutlass.const_expr(states.element_type.width // 8)
        entries = cutlass.const_expr(spec.dim * spec.dim)
        first = states.iterator.toint() + (sequence.slot * states.stride[0] + Int64(head) * entries) * size
        for i in cutlass.range_constexpr(entries * size // _LINE // THREADS):
            ptx.prefetch_line(first + (i * THREADS + thread) * _LINE)
