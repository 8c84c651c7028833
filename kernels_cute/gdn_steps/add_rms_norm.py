"""Residual sum s = residual + x * (1 + layer_scale) and its RMS norm s / sqrt(mean(s * s) + eps) * gain over the last dim, in
float32; the gain is 1 + weight or weight, and s is rounded to the dtype of x before the norm. Without a residual s is x.

Tensors: x, residual [L, D], normed, total [L, D] contiguous, weight, layer_scale [D]. See `gdn.problems.AddRmsNormParams`.
A block owns `rows` rows; a thread holds `chunks` accesses of 8 elements of each. All of x and residual is loaded before anything
is summed; the sums cross a warp by shuffles and the block through shared memory, once.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

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
    vectors = {"weight": problem.weight_dtype, "layer_scale": problem.layer_scale_dtype}
    return unserved({HALF_DTYPES: {"x": problem.dtype}, FLOAT_DTYPES: vectors})


def _chunks(problem: AddRmsNormProblem, threads: int) -> int:
    return -(-problem.dim // (_VECTOR * threads))  # accesses of a thread to a row


def _threads(problem: AddRmsNormProblem, chunks: int) -> int:
    """Fewest threads, whole warps, that cover a row in `chunks` accesses each."""
    return -(-problem.dim // (_VECTOR * 32 * chunks)) * 32


def default_config(problem: AddRmsNormProblem, device: DeviceSpec) -> Config:
    """Fewest accesses a thread with up to 512 threads; several rows where every SM gets several blocks of them."""
    chunks = _chunks(problem, 512)
    allowed = [rows for rows in (4, 2) if 2 * rows * chunks * _VECTOR <= _MOST_ELEMENTS]
    rows = next((rows for rows in allowed if problem.num_tokens >= 8 * rows * device.num_sms), 1)
    return Config(_threads(problem, chunks), rows)


def _fakes(problem: AddRmsNormProblem) -> AddRmsNormParams:
    added = problem.dtype if problem.has_residual else None
    shape = (cute.sym_int(), problem.dim)
    x, residual, normed, total = [fake(dtype, *shape, last=1) for dtype in (problem.dtype, added, problem.dtype, added)]
    weight, scale = [fake(dtype, problem.dim, last=1) for dtype in (problem.weight_dtype, problem.layer_scale_dtype)]
    return AddRmsNormParams(x, residual, weight, scale, normed, total, eps=Float32(1e-6))


class _AddRmsNorm(build.Kernel, params=AddRmsNormParams):
    def __init__(self, problem: AddRmsNormProblem, config: Config) -> None:
        self.threads, self.rows, self.dim = config.threads, config.rows, problem.dim
        self.gain_offset, self.warps = float(problem.zero_centred), config.threads // 32
        self.chunks = _chunks(problem, config.threads)
        self.elements = self.chunks * _VECTOR  # of a row, in a thread

    def blocks(self, params: AddRmsNormParams) -> Any:
        return Int32((params.x.shape[0] + self.rows - 1) // self.rows)

    @cute.kernel
    def kernel(self, params: AddRmsNormParams):
        first, thread = Int64(cute.arch.block_idx()[0]) * self.rows, cute.arch.thread_idx()[0]
        count = Int64(params.x.shape[0])
        dtype = params.x.element_type
        rSum = self.load_rows(params.x, dtype, first, count, thread)
        rGain = self.load_rows(params.weight, Float32, Int64(0), Int64(1), thread)
        if cutlass.const_expr(params.residual is not None):
            rResidual = self.load_rows(params.residual, dtype, first, count, thread)
            if cutlass.const_expr(params.layer_scale is not None):
                rScale = self.load_rows(params.layer_scale, Float32, Int64(0), Int64(1), thread)
            for i in cutlass.range_constexpr(self.rows * self.elements):
                added = rSum[i].to(Float32)
                if cutlass.const_expr(params.layer_scale is not None):
                    added = added * (1.0 + rScale[i % self.elements])
                rSum[i] = (added + rResidual[i].to(Float32)).to(dtype)
            self.store_rows(rSum, params.total, first, count, thread)
        rFactors = self.factors(rSum, thread, params.eps)
        for i in cutlass.range_constexpr(self.rows * self.elements):
            gain = rGain[i % self.elements] + self.gain_offset
            rSum[i] = (rSum[i].to(Float32) * rFactors[i // self.elements] * gain).to(dtype)
        self.store_rows(rSum, params.normed, first, count, thread)

    @cute.jit
    def factors(self, rSum: cute.Tensor, thread: Int32, eps: Float32):
        """1 / sqrt(mean(s * s) + eps) of every row, in all threads."""
        sSums = cutlass.utils.SmemAllocator().allocate_tensor(Float32, cute.make_layout(self.warps * self.rows), 16)
        rSquares = cute.make_rmem_tensor(self.rows, Float32)
        rSquares.fill(0.0)
        for i in cutlass.range_constexpr(self.rows * self.elements):
            rSquares[i // self.elements] += rSum[i].to(Float32) * rSum[i].to(Float32)
        for step in cutlass.range_constexpr(5):
            for u in cutlass.range_constexpr(self.rows):
                rSquares[u] += cute.arch.shuffle_sync_bfly(rSquares[u], offset=1 << step)
        if thread % 32 == 0:
            for u in cutlass.range_constexpr(self.rows):
                sSums[u * self.warps + thread // 32] = rSquares[u]
        cute.arch.sync_threads()
        for u in cutlass.range_constexpr(self.rows):
            total = Float32(0.0)
            for w in cutlass.range_constexpr(self.warps):
                total += sSums[u * self.warps + w]
            rSquares[u] = cute.math.rsqrt(total * (1.0 / self.dim) + eps)
        return rSquares

    @cute.jit
    def load_rows(self, gX: cute.Tensor, dtype: Any, first: Int64, count: Int64, thread: Int32):
        """This thread's part of the block's rows [L, D], or of a vector [D]; zeros past D."""
        once = cutlass.const_expr(cute.rank(gX) == 2)
        rows = cutlass.const_expr(self.rows if once else 1)
        align = cutlass.const_expr(min(16, _VECTOR * gX.element_type.width // 8))
        rX = cute.make_rmem_tensor(rows * self.elements, dtype)
        rX.fill(0.0)
        for u in cutlass.range_constexpr(rows):
            row = cutlass.min(first + u, count - 1)
            for c in cutlass.range_constexpr(self.chunks):
                place = (c * self.threads + thread) * _VECTOR
                if place < self.dim:
                    source = pointer(gX, row * gX.stride[0] + place, align)
                    load(source, _VECTOR, rX, u * self.elements + c * _VECTOR, once)
        return rX

    @cute.jit
    def store_rows(self, rX: cute.Tensor, gX: cute.Tensor, first: Int64, count: Int64, thread: Int32):
        for u in cutlass.range_constexpr(self.rows):
            for c in cutlass.range_constexpr(self.chunks):
                place = (c * self.threads + thread) * _VECTOR
                if first + u < count and place < self.dim:
                    target = pointer(gX, (first + u) * self.dim + place, 2 * _VECTOR)
                    store(rX, u * self.elements + c * _VECTOR, _VECTOR, target)


fits, configs, compile, launch, workspace_bytes = build.step(
    _AddRmsNorm, _fakes, Config,
    lambda p, c: c.rows * (n := _chunks(p, c.threads)) * _VECTOR <= _MOST_ELEMENTS and c.threads == _threads(p, n),
    threads=range(32, 1025, 32), rows=(1, 2, 4),
)  # fmt: skip
