"""Residual sum s = x + residual and its RMS norm s / sqrt(mean(s * s) + eps) * gain over the last dim, in float32; the gain is
1 + weight or weight, and s is rounded to the dtype of x before the norm.

Tensors: x, residual [L, D], normed, total [L, D] contiguous, weight [D]. See `gdn.problems.AddRmsNormParams`.
A block owns `rows` rows; a thread holds `chunks` accesses of 8 elements of each. All of x and residual is loaded before anything
is summed; the sums cross a warp by shuffles and the block through shared memory, once.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64

from gdn.device import DeviceSpec
from gdn.problems import AddRmsNormParams, AddRmsNormProblem
from kernels_cute.common import build
from kernels_cute.common.memory import FLOAT_DTYPES, HALF_DTYPES, fake, load, pointer, store, unserved

_VECTOR = 8  # elements of an access
_MOST_ELEMENTS = 64  # elements of the sums in a thread's registers, all rows together


@dataclass(frozen=True)
class Config:
    threads: int  # threads of a block
    rows: int  # rows of a block: more bytes in flight, more registers, fewer blocks


def refusal(problem: AddRmsNormProblem) -> str | None:
    if problem.dim % _VECTOR or not _VECTOR <= problem.dim <= 16384:
        return f"requires a last dim that is a multiple of {_VECTOR} up to 16384, got {problem.dim}"
    return unserved({HALF_DTYPES: {"x": problem.dtype}, FLOAT_DTYPES: {"weight": problem.weight_dtype}})


def _elements(problem: AddRmsNormProblem, threads: int) -> int:
    """Elements of a row that a thread holds."""
    return -(-problem.dim // (_VECTOR * threads)) * _VECTOR


def default_config(problem: AddRmsNormProblem, device: DeviceSpec) -> Config:
    """One access a thread and row where a block is large enough; several rows where every SM gets several blocks of them."""
    threads = next((threads for threads in (64, 128, 256, 512) if _elements(problem, threads) == _VECTOR), 512)
    if _elements(problem, threads) > _MOST_ELEMENTS:
        threads = 1024
    rows = [rows for rows in (4, 2) if rows * _elements(problem, threads) <= _MOST_ELEMENTS // 2]
    return Config(threads, next((count for count in rows if problem.num_tokens >= 8 * count * device.num_sms), 1))


def _fakes(problem: AddRmsNormProblem) -> AddRmsNormParams:
    shape = (cute.sym_int(), problem.dim)
    x, residual, normed, total = [fake(problem.dtype, *shape, last=1) for _ in range(4)]
    return AddRmsNormParams(x, residual, fake(problem.weight_dtype, problem.dim, last=1), normed, total, eps=Float32(1e-6))


class _AddRmsNorm(build.Kernel, params=AddRmsNormParams):
    def __init__(self, problem: AddRmsNormProblem, config: Config) -> None:
        self.threads, self.rows, self.dim = config.threads, config.rows, problem.dim
        self.zero_centred, self.warps = problem.zero_centred, config.threads // 32
        self.elements = _elements(problem, config.threads)
        self.chunks = self.elements // _VECTOR

    def blocks(self, params: AddRmsNormParams) -> Any:
        return Int32((params.x.shape[0] + self.rows - 1) // self.rows)

    @cute.kernel
    def kernel(self, params: AddRmsNormParams):
        block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        first = Int64(block) * self.rows
        count = Int64(params.x.shape[0])
        smem = cutlass.utils.SmemAllocator()
        sSums = smem.allocate_tensor(Float32, cute.make_layout(self.warps * self.rows), 16)
        dtype = params.x.element_type
        rX = cute.make_rmem_tensor(self.rows * self.elements, dtype)
        rTotal = cute.make_rmem_tensor(self.rows * self.elements, dtype)  # the residual until it is added
        rGain = cute.make_rmem_tensor(self.elements, Float32)
        rX.fill(0.0)
        rTotal.fill(0.0)
        rGain.fill(0.0)
        for u in cutlass.range_constexpr(self.rows):
            row = first + u
            if row >= count:
                row = count - 1
            self.load_row(params.x, row * params.x.stride[0], thread, rX, u * self.elements, True)
            self.load_row(params.residual, row * params.residual.stride[0], thread, rTotal, u * self.elements, True)
        self.load_row(params.weight, Int64(0), thread, rGain, 0, False)
        self.add(rX, rTotal)
        self.store_rows(rTotal, params.total, first, count, thread)
        rFactors = self.factors(rTotal, sSums, thread, params.eps)

        for u in cutlass.range_constexpr(self.rows):
            for i in cutlass.range_constexpr(self.elements):
                gain = rGain[i]
                if cutlass.const_expr(self.zero_centred):
                    gain = gain + 1.0
                value = rTotal[u * self.elements + i].to(Float32)
                rX[u * self.elements + i] = (value * rFactors[u] * gain).to(dtype)
        self.store_rows(rX, params.normed, first, count, thread)

    @cute.jit
    def add(self, rX: cute.Tensor, rTotal: cute.Tensor):
        for i in cutlass.range_constexpr(self.rows * self.elements):
            rTotal[i] = (rX[i].to(Float32) + rTotal[i].to(Float32)).to(rTotal.element_type)

    @cute.jit
    def factors(self, rTotal: cute.Tensor, sSums: cute.Tensor, thread: Int32, eps: Float32):
        """1 / sqrt(mean(s * s) + eps) of every row, in all threads."""
        rSums = cute.make_rmem_tensor(self.rows, Float32)
        rSums.fill(0.0)
        for u in cutlass.range_constexpr(self.rows):
            for i in cutlass.range_constexpr(self.elements):
                value = rTotal[u * self.elements + i].to(Float32)
                rSums[u] += value * value
        for step in cutlass.range_constexpr(5):
            for u in cutlass.range_constexpr(self.rows):
                rSums[u] += cute.arch.shuffle_sync_bfly(rSums[u], offset=1 << step)
        if thread % 32 == 0:
            for u in cutlass.range_constexpr(self.rows):
                sSums[u * self.warps + thread // 32] = rSums[u]
        cute.arch.sync_threads()
        for u in cutlass.range_constexpr(self.rows):
            total = Float32(0.0)
            for w in cutlass.range_constexpr(self.warps):
                total += sSums[u * self.warps + w]
            rSums[u] = cute.math.rsqrt(total * (1.0 / self.dim) + eps)
        return rSums

    @cute.jit
    def load_row(self, gX: cute.Tensor, offset: Int64, thread: Int32, rX: cute.Tensor, start: Constexpr, once: Constexpr):
        for c in cutlass.range_constexpr(self.chunks):
            place = (c * self.threads + thread) * _VECTOR
            if place < self.dim:
                align = cutlass.const_expr(min(16, _VECTOR * gX.element_type.width // 8))
                load(pointer(gX, offset + place, align), _VECTOR, rX, start + c * _VECTOR, once)

    @cute.jit
    def store_rows(self, rX: cute.Tensor, gX: cute.Tensor, first: Int64, count: Int64, thread: Int32):
        for u in cutlass.range_constexpr(self.rows):
            row = first + u
            if row < count:
                for c in cutlass.range_constexpr(self.chunks):
                    place = (c * self.threads + thread) * _VECTOR
                    if place < self.dim:
                        target = pointer(gX, row * self.dim + place, 2 * _VECTOR)
                        store(rX, u * self.elements + c * _VECTOR, _VECTOR, target)


fits, configs, compile, launch, workspace_bytes = build.step(
    _AddRmsNorm,
    _fakes,
    Config,
    lambda p, config: config.rows * _elements(p, config.threads) <= _MOST_ELEMENTS,
    threads=(64, 128, 256, 512, 1024),
    rows=(1, 2, 4),
)
