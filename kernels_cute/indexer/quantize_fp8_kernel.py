"""Kernel of quantize_fp8.py, which has its formulas and tensors: the arguments to compile for, and the body."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from gdn.ops.indexer.problem import QuantizeFp8Params, QuantizeFp8Problem
from kernels_cute.common import build
from kernels_cute.common.memory import fake
from kernels_cute.indexer.forms import SCALED, WORDS
from kernels_cute.indexer.rows import IndexerRows, store_scale


def _fakes(problem: QuantizeFp8Problem) -> QuantizeFp8Params:
    tokens, groups = cute.sym_int(), problem.num_groups
    x, x_fp8 = [fake(dtype, tokens, groups, problem.group_dim, last=1) for dtype in (problem.dtype, "float8_e4m3fn")]
    return QuantizeFp8Params(x, x_fp8, scale=fake("float32", tokens, groups, last=1))


class _QuantizeFp8(IndexerRows, params=QuantizeFp8Params):
    def __init__(self, problem: QuantizeFp8Problem, config: Any) -> None:
        super().__init__(problem.group_dim, 0, config.threads)
        self.rows, self.num_groups, self.dtype = config.rows, problem.num_groups, problem.dtype
        self.block_rows = self.groups * self.rows

    def blocks(self, params: QuantizeFp8Params) -> Any:
        return Int32((Int64(params.x.shape[0]) * self.num_groups + self.block_rows - 1) // self.block_rows)

    @cute.kernel
    def kernel(self, params: QuantizeFp8Params):
        block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        group, lane = thread // self.lanes, thread % self.lanes
        count = Int64(params.x.shape[0]) * self.num_groups
        # The groups of a block take neighbouring rows, so that a block reads contiguous memory.
        first = Int64(block) * self.block_rows + group
        rRows = cute.make_rmem_tensor(self.rows * WORDS, Uint32)
        rCodes = cute.make_rmem_tensor(WORDS, Uint32)
        for u in cutlass.range_constexpr(self.rows):
            row = first + u * self.groups
            if row >= count:  # repeats the last row, because all lanes of a warp shuffle
                row = count - 1
            token = row // self.num_groups
            offset = token * params.x.stride[0] + (row - token * self.num_groups) * params.x.stride[1]
            self.load_row(params.x, offset, lane, rRows, u * WORDS)
        for u in cutlass.range_constexpr(self.rows):
            scale = self.encode(rRows, u * WORDS, self.dtype, SCALED, rCodes)
            row = first + u * self.groups
            if row < count:
                self.store_codes(rCodes, SCALED, params.x_fp8.iterator.toint() + row * self.dim, lane)
                if lane == 0:
                    store_scale(params.scale.iterator.toint() + row * 4, scale)


def library(problem: QuantizeFp8Problem, config: Any) -> dict[str, bytes]:
    return build.one_entry(problem.op, _QuantizeFp8(problem, config), _fakes(problem))
