"""Gated RMS norm: x / sqrt(mean(x * x) + eps) * weight * gate(z) over the last dim, in float32; gate silu or sigmoid.

Tensors: x, z [L, HV, V], out [L, HV, V] contiguous, weight [V]. See `gdn.problems.RmsNormGatedParams`.
A group of `lanes` threads owns `rows` rows (a row: one head of one token) and holds `chunks` accesses of each; all of x
and z is loaded before anything is summed, and the sums cross the group by shuffles.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64

from gdn.device import DeviceSpec
from gdn.problems import RmsNormGatedParams, RmsNormGatedProblem
from kernels_cute.common import build
from kernels_cute.common.memory import FLOAT_DTYPES, HALF_DTYPES, fake, load, pointer, sigmoid, store, unserved

_MOST_ELEMENTS = 64  # elements of x in a thread's registers


@dataclass(frozen=True)
class Config:
    threads: int  # threads of a block
    rows: int  # rows per group of threads: more bytes in flight, more registers, fewer blocks


def refusal(problem: RmsNormGatedProblem) -> str | None:
    if problem.head_dim % 4 or not 4 <= problem.head_dim <= 1024:
        return f"requires a last dim that is a multiple of 4 up to 1024, got {problem.head_dim}"
    others = {"z": problem.z_dtype, "weight": problem.weight_dtype}
    return unserved({HALF_DTYPES: {"x": problem.dtype}, FLOAT_DTYPES: others})


def _parts(problem: RmsNormGatedProblem) -> tuple[int, int, int]:
    """Elements per access; threads per row: a power of two, one access each if a warp is enough; elements of a row per thread."""
    vector = 4 if problem.head_dim % 8 else 8
    lanes = min(32, 1 << (-(-problem.head_dim // vector) - 1).bit_length())
    return vector, lanes, -(-problem.head_dim // (vector * lanes)) * vector


def default_config(problem: RmsNormGatedProblem, device: DeviceSpec) -> Config:
    """The most rows per group that leave every SM two full loads of threads, then the most threads per block."""
    _, lanes, elements = _parts(problem)
    rows = [rows for rows in (4, 2) if rows * elements <= _MOST_ELEMENTS]
    return build.by_load(Config, problem.num_tokens * problem.num_heads * lanes, device, rows, load=2048)


def _fakes(problem: RmsNormGatedProblem) -> RmsNormGatedParams:
    shape = (cute.sym_int(), problem.num_heads, problem.head_dim)
    x, z, out = [fake(dtype, *shape, last=1) for dtype in (problem.dtype, problem.z_dtype, problem.dtype)]
    return RmsNormGatedParams(x, z, fake(problem.weight_dtype, problem.head_dim, last=1), out, eps=Float32(1e-6))


class RmsNormGated(build.Kernel, params=RmsNormGatedParams):
    def __init__(self, problem: RmsNormGatedProblem, config: Config) -> None:
        self.threads, self.rows = config.threads, config.rows
        self.heads, self.dim, self.sigmoid = problem.num_heads, problem.head_dim, problem.sigmoid
        self.vector, self.lanes, self.elements = _parts(problem)
        self.chunks = self.elements // self.vector
        self.mask = self.elements * self.lanes != self.dim
        self.block_rows = config.threads // self.lanes * config.rows

    def blocks(self, params: RmsNormGatedParams) -> Any:
        return Int32((Int64(params.x.shape[0]) * self.heads + self.block_rows - 1) // self.block_rows)

    @cute.kernel
    def kernel(self, params: RmsNormGatedParams):
        block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        lane = thread % self.lanes
        groups = cutlass.const_expr(self.threads // self.lanes)
        # The groups of a block take neighbouring rows, so that a block reads contiguous memory.
        first = Int64(block) * self.block_rows + thread // self.lanes
        count = Int64(params.x.shape[0]) * self.heads
        rX = cute.make_rmem_tensor(self.rows * self.elements, params.x.element_type)
        rZ = cute.make_rmem_tensor(self.rows * self.elements, params.z.element_type)
        rWeight = cute.make_rmem_tensor(self.elements, Float32)
        rSums = cute.make_rmem_tensor(self.rows, Float32)
        rX.fill(0.0)
        rZ.fill(0.0)
        rWeight.fill(0.0)
        for u in cutlass.range_constexpr(self.rows):
            row = first + u * groups
            if row >= count:
                row = count - 1
            self.load_row(params.x, row, lane, rX, u * self.elements)
            self.load_row(params.z, row, lane, rZ, u * self.elements)
        for c in cutlass.range_constexpr(self.chunks):
            place = (c * self.lanes + lane) * self.vector
            if place < self.dim:
                self.load_piece(params.weight, Int64(place), rWeight, c * self.vector, False)

        rSums.fill(0.0)
        for u in cutlass.range_constexpr(self.rows):
            for i in cutlass.range_constexpr(self.elements):
                value = rX[u * self.elements + i].to(Float32)
                rSums[u] += value * value
        for step in cutlass.range_constexpr(self.lanes.bit_length() - 1):
            for u in cutlass.range_constexpr(self.rows):
                rSums[u] += cute.arch.shuffle_sync_bfly(rSums[u], offset=1 << step)

        rOut = cute.make_rmem_tensor(self.elements, Float32)
        for u in cutlass.range_constexpr(self.rows):
            factor = cute.math.rsqrt(rSums[u] * (1.0 / self.dim) + params.eps)
            for i in cutlass.range_constexpr(self.elements):
                value = rX[u * self.elements + i].to(Float32)
                gate = rZ[u * self.elements + i].to(Float32)
                weighted = value * factor * rWeight[i] * sigmoid(gate)
                if cutlass.const_expr(not self.sigmoid):
                    weighted = weighted * gate
                rOut[i] = self.finish(weighted, rSums[u])
            row = first + u * groups
            if row < count:
                for c in cutlass.range_constexpr(self.chunks):
                    place = (c * self.lanes + lane) * self.vector
                    if place < self.dim:
                        target = pointer(params.out, self.place_in_out(params.out, row) + place, 2 * self.vector)
                        store(rOut, c * self.vector, self.vector, target)

    def place_of(self, gX: cute.Tensor, row: Int64) -> Int64:
        """Number of elements before a row of x or z."""
        token = row // self.heads
        return token * gX.stride[0] + (row - token * self.heads) * gX.stride[1]

    def place_in_out(self, gOut: cute.Tensor, row: Int64) -> Int64:
        return row * self.dim

    def finish(self, value: Float32, squares: Float32) -> Float32:
        """The result, from the formula's value and the sum of squares of the row."""
        return value

    @cute.jit
    def load_row(self, gX: cute.Tensor, row: Int64, lane: Int32, rX: cute.Tensor, start: Constexpr):
        offset = self.place_of(gX, row)
        for c in cutlass.range_constexpr(self.chunks):
            place = (c * self.lanes + lane) * self.vector
            is_live = Boolean(True)
            if cutlass.const_expr(self.mask):
                is_live = place < self.dim
            if is_live:
                self.load_piece(gX, offset + place, rX, start + c * self.vector, True)

    @cute.jit
    def load_piece(self, gX: cute.Tensor, offset: Int64, rX: cute.Tensor, start: Constexpr, once: Constexpr):
        # A float32 row takes two accesses: 16 bytes are known of its alignment.
        align = cutlass.const_expr(min(16, self.vector * gX.element_type.width // 8))
        load(pointer(gX, offset, align), self.vector, rX, start, once)


fits, configs, compile, launch, workspace_bytes = build.step(
    RmsNormGated,
    _fakes,
    Config,
    lambda p, config: config.rows * _parts(p)[2] <= _MOST_ELEMENTS,
    threads=(32, 64, 128, 256),
    rows=(1, 2, 4, 8),
)
