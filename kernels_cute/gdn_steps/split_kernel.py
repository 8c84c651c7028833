"""Kernel of split.py, which has its formulas and tensors: the arguments to compile for, and the body."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from gdn.ops.layer_step.problem import SplitParams, SplitProblem
from kernels_cute.common import build
from kernels_cute.common.memory import fake, load, pointer, store
from kernels_cute.gdn_steps.accesses import row_pieces


def _fakes(problem: SplitProblem) -> SplitParams:
    rows, gates, heads, tokens = problem.dtype, problem.ba_dtype, problem.num_v_heads, cute.sym_int()
    keys, values = problem.num_k_heads * problem.head_k_dim, heads * problem.head_v_dim
    inputs = [(rows, problem.row_elements), (gates, 2 * heads)]
    outputs = [(rows, 2 * keys + values), (rows, values), (gates, heads), (gates, heads)]
    return SplitParams(*(fake(dtype, tokens, width, last=1) for dtype, width in inputs + outputs))


class _Split(build.Kernel, params=SplitParams):
    def __init__(self, problem: SplitProblem, config: Any) -> None:
        self.threads, self.rows = config.threads, config.rows
        self.vector, self.slices = row_pieces(problem, config.threads)
        self.heads, self.ratio = problem.num_k_heads, problem.num_v_heads // problem.num_k_heads
        # Sizes in accesses: a row, the parts of a group, and their starts in mixed_qkv.
        self.row_pieces = problem.row_elements // self.vector
        self.key = problem.head_k_dim // self.vector
        self.value = self.ratio * problem.head_v_dim // self.vector
        self.group = 2 * self.key + 2 * self.value
        self.k_start, self.v_start = self.heads * self.key, 2 * self.heads * self.key

    def blocks(self, params: SplitParams) -> Any:
        return (params.mixed_qkvz.shape[0] + self.rows - 1) // self.rows * (self.slices + 1)

    @cute.kernel
    def kernel(self, params: SplitParams):
        block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        first = block // (self.slices + 1) * self.rows
        part = block % (self.slices + 1)
        if part < self.slices:
            piece = part * self.threads + thread
            if piece < self.row_pieces:
                self.move_piece(params, first, piece)
        else:
            for element in cutlass.range(thread, 2 * self.heads * self.ratio, self.threads, unroll=1):
                self.move_gate(params, first, element)

    @cute.jit
    def move_piece(self, params: SplitParams, first: Int32, piece: Int32):
        vector, align = cutlass.const_expr(self.vector), cutlass.const_expr(2 * self.vector)
        head = piece // self.group
        within = piece % self.group
        is_z = within >= 2 * self.key + self.value
        target = head * self.key + within
        if is_z:
            target = head * self.value + within - (2 * self.key + self.value)
        elif within >= 2 * self.key:
            target = self.v_start + head * self.value + within - 2 * self.key
        elif within >= self.key:
            target = self.k_start + head * self.key + within - self.key

        rPieces = cute.make_rmem_tensor(self.rows * vector, params.mixed_qkvz.element_type)
        last = params.mixed_qkvz.shape[0] - 1
        for u in cutlass.range_constexpr(self.rows):
            row = first + u
            if row > last:
                row = last
            source = pointer(params.mixed_qkvz, Int64(row) * params.mixed_qkvz.stride[0] + piece * vector, align)
            load(source, vector, rPieces, u * vector, True)
        if is_z:
            self.store_pieces(rPieces, first, target, last, params.z)
        else:
            self.store_pieces(rPieces, first, target, last, params.mixed_qkv)

    @cute.jit
    def store_pieces(self, rPieces: cute.Tensor, first: Int32, target: Int32, last: Int32, gOut: cute.Tensor):
        for u in cutlass.range_constexpr(self.rows):
            if first + u <= last:
                offset = Int64(first + u) * gOut.stride[0] + target * self.vector
                store(rPieces, u * self.vector, self.vector, pointer(gOut, offset, 2 * self.vector))

    @cute.jit
    def move_gate(self, params: SplitParams, first: Int32, element: Int32):
        head = element // (2 * self.ratio)
        within = element % (2 * self.ratio)
        for u in cutlass.range_constexpr(self.rows):
            if first + u < params.mixed_ba.shape[0]:
                if within < self.ratio:
                    params.b[first + u, head * self.ratio + within] = params.mixed_ba[first + u, element]
                else:
                    params.a[first + u, head * self.ratio + within - self.ratio] = params.mixed_ba[first + u, element]


def library(problem: SplitProblem, config: Any) -> dict[str, bytes]:
    return build.one_entry(problem.op, _Split(problem, config), _fakes(problem))
