"""e4m3 values with one scale per group: scale = max(amax, 1e-4) / 448, x_fp8 = x / scale to nearest even, saturated.

Tensors: x [L, G, group] bfloat16 | float16 -> x_fp8 [L, G, group] float8_e4m3fn, scale [L, G] float32.
`gdn.problems.QuantizeFp8Params` is the contract. A group of lanes owns `rows` groups of values, which it loads together;
`rows.py` describes them in registers. The results are bit for bit the reference's.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from gdn.device import DeviceSpec
from gdn.problems import QuantizeFp8Params, QuantizeFp8Problem
from kernels_cute.common import build
from kernels_cute.common.memory import fake
from kernels_cute.indexer import rows as _indexer_rows
from kernels_cute.indexer.rows import SCALED, WORDS, IndexerRows, store_scale


@dataclass(frozen=True)
class Config:
    threads: int  # threads of a block
    rows: int  # groups of values per group of lanes: more bytes in flight, more registers, fewer blocks


def refusal(problem: QuantizeFp8Problem) -> str | None:
    if problem.num_groups < 1:
        return f"requires at least one group, got {problem.num_groups}"
    return _indexer_rows.refusal(problem.group_dim, {"x": problem.dtype}, None, {})


def default_config(problem: QuantizeFp8Problem, device: DeviceSpec) -> Config:
    """The most rows that leave every SM a full load of threads, then blocks small enough to reach every SM."""
    threads_wanted = problem.num_tokens * problem.num_groups * _indexer_rows.lanes_of(problem.group_dim)
    return build.by_load(Config, threads_wanted, device)


def _fakes(problem: QuantizeFp8Problem) -> QuantizeFp8Params:
    tokens, groups = cute.sym_int(), problem.num_groups
    x, x_fp8 = [fake(dtype, tokens, groups, problem.group_dim, last=1) for dtype in (problem.dtype, "float8_e4m3fn")]
    return QuantizeFp8Params(x, x_fp8, scale=fake("float32", tokens, groups, last=1))


class _QuantizeFp8(IndexerRows, params=QuantizeFp8Params):
    def __init__(self, problem: QuantizeFp8Problem, config: Config) -> None:
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


fits, configs, compile, launch, workspace_bytes = build.step(
    _QuantizeFp8, _fakes, Config, threads=(32, 64, 128, 256), rows=(1, 2, 4, 8)
)
