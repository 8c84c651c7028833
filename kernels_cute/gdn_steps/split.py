"""Interleaved input projections, taken apart: a permutation of whole heads, row by row.

Tensors: mixed_qkvz [L, H * (2 * K + 2 * r * V)] with groups [q (K) | k (K) | v (r * V) | z (r * V)], mixed_ba [L, 2 * HV]
with groups [b (r) | a (r)] -> mixed_qkv [L, 2 * H * K + HV * V] = [all q | all k | all v], z [L, HV * V], b, a [L, HV].
`gdn.problems.SplitParams` is the contract.

A thread owns one 16-byte piece of a row. It computes the piece's target once and moves the piece in `rows` rows, which it
loads together. The last slice of blocks of every row tile moves b and a, element by element.
"""

from dataclasses import dataclass
from typing import Any

from kernels_cute.common import build

# isort: split
import cutlass
import cutlass.cute as cute

from gdn.device import DeviceSpec
from gdn.problems import SplitParams, SplitProblem
from kernels_cute.common.memory import FLOAT_DTYPES, fake, load, pointer, store


@dataclass(frozen=True)
class Config:
    threads: int  # threads of a block
    rows: int  # rows per block: more bytes in flight per thread, fewer blocks


def refusal(problem: SplitProblem) -> str | None:
    """None where this kernel serves the problem, else why not."""
    if problem.head_k_dim % 4 or problem.head_v_dim % 4:
        return f"requires head dims that are multiples of 4, got K={problem.head_k_dim}, V={problem.head_v_dim}"
    if problem.dtype not in ("bfloat16", "float16"):
        return f"requires mixed_qkvz of bfloat16 or float16, got {problem.dtype}"
    if problem.ba_dtype not in FLOAT_DTYPES:
        return f"requires mixed_ba of float32, bfloat16 or float16, got {problem.ba_dtype}"
    return None


def _vector(problem: SplitProblem) -> int:
    """Elements per access: a divisor of every part of a group."""
    return 4 if problem.head_k_dim % 8 or problem.head_v_dim % 8 else 8


def _slices(problem: SplitProblem, threads: int) -> int:
    """Number of blocks that share a row of mixed_qkvz."""
    return -(-(problem.row_elements // _vector(problem)) // threads)


def fits(problem: SplitProblem, config: Config, device: DeviceSpec) -> bool:
    """Whether the configuration can be compiled and launched."""
    return config.threads in (64, 128, 256) and config.rows in (1, 2, 4, 8, 16)


def configs(problem: SplitProblem, device: DeviceSpec) -> list[Config]:
    """Every feasible configuration."""
    space = [Config(threads, rows) for threads in (64, 128, 256) for rows in (1, 2, 4, 8, 16)]
    return [config for config in space if fits(problem, config, device)]


def default_config(problem: SplitProblem, device: DeviceSpec) -> Config:
    """The most rows per thread that leave every SM two full loads of threads."""
    threads = 128
    per_row = _slices(problem, threads) * threads
    for rows in (8, 4, 2):
        if -(-problem.num_tokens // rows) * per_row >= 2 * 1024 * device.num_sms:
            return Config(threads, rows)
    return Config(threads, 1)


def workspace_bytes(problem: SplitProblem, config: Config) -> int:
    return 0


def compile(problem: SplitProblem, config: Config) -> dict[str, bytes]:
    """The one kernel, built for sm_90a."""
    return {"split": build.library("split", _Split(problem, config), *_arguments(problem))}


def launch(compiled: Any, params: SplitParams) -> None:
    compiled.functions["split"](*params)


def _arguments(problem: SplitProblem) -> SplitParams:
    """Fake tensors and scalars to compile for."""
    rows = cute.sym_int()
    keys, values = problem.num_k_heads * problem.head_k_dim, problem.num_v_heads * problem.head_v_dim
    return SplitParams(
        mixed_qkvz=fake(problem.dtype, rows, problem.row_elements, last=1),
        mixed_ba=fake(problem.ba_dtype, rows, 2 * problem.num_v_heads, last=1),
        mixed_qkv=fake(problem.dtype, rows, 2 * keys + values, last=1),
        z=fake(problem.dtype, rows, values, last=1),
        b=fake(problem.ba_dtype, rows, problem.num_v_heads, last=1),
        a=fake(problem.ba_dtype, rows, problem.num_v_heads, last=1),
    )


class _Split:
    """The kernel for one problem and configuration; attributes are compile-time constants."""

    def __init__(self, problem: SplitProblem, config: Config) -> None:
        self.threads, self.rows = config.threads, config.rows
        self.vector = _vector(problem)
        self.slices = _slices(problem, config.threads)
        self.heads, self.ratio = problem.num_k_heads, problem.num_v_heads // problem.num_k_heads
        # Sizes in accesses: a row, the parts of a group, and their starts in mixed_qkv.
        self.row_pieces = problem.row_elements // self.vector
        self.key = problem.head_k_dim // self.vector
        self.value = self.ratio * problem.head_v_dim // self.vector
        self.group = 2 * self.key + 2 * self.value
        self.k_start, self.v_start = self.heads * self.key, 2 * self.heads * self.key

    @cute.jit
    def __call__(self, *values: Any):
        params, stream = SplitParams(*values[:-1]), values[-1]
        tiles = (params.mixed_qkvz.shape[0] + self.rows - 1) // self.rows
        self.kernel(params).launch(grid=[tiles * (self.slices + 1), 1, 1], block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, params: SplitParams):
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
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
    def move_piece(self, params: SplitParams, first: cutlass.Int32, piece: cutlass.Int32):
        vector, align = cutlass.const_expr(self.vector), cutlass.const_expr(2 * self.vector)
        head = piece // self.group
        within = piece % self.group
        is_z = within >= 2 * self.key + self.value
        place = head * self.key + within
        if is_z:
            place = head * self.value + within - (2 * self.key + self.value)
        elif within >= 2 * self.key:
            place = self.v_start + head * self.value + within - 2 * self.key
        elif within >= self.key:
            place = self.k_start + head * self.key + within - self.key

        rPieces = cute.make_rmem_tensor(self.rows * vector, params.mixed_qkvz.element_type)
        last = params.mixed_qkvz.shape[0] - 1
        for u in cutlass.range_constexpr(self.rows):
            row = first + u
            if row > last:
                row = last
            source = pointer(params.mixed_qkvz, cutlass.Int64(row) * params.mixed_qkvz.stride[0] + piece * vector, align)
            load(source, vector, rPieces, u * vector, True)
        if is_z:
            self.store_pieces(rPieces, first, place, last, params.z)
        else:
            self.store_pieces(rPieces, first, place, last, params.mixed_qkv)

    @cute.jit
    def store_pieces(
        self, rPieces: cute.Tensor, first: cutlass.Int32, place: cutlass.Int32, last: cutlass.Int32, gOut: cute.Tensor
    ):
        for u in cutlass.range_constexpr(self.rows):
            if first + u <= last:
                offset = cutlass.Int64(first + u) * gOut.stride[0] + place * self.vector
                store(rPieces, u * self.vector, self.vector, pointer(gOut, offset, 2 * self.vector))

    @cute.jit
    def move_gate(self, params: SplitParams, first: cutlass.Int32, element: cutlass.Int32):
        head = element // (2 * self.ratio)
        within = element % (2 * self.ratio)
        for u in cutlass.range_constexpr(self.rows):
            if first + u < params.mixed_ba.shape[0]:
                if within < self.ratio:
                    params.b[first + u, head * self.ratio + within] = params.mixed_ba[first + u, element]
                else:
                    params.a[first + u, head * self.ratio + within - self.ratio] = params.mixed_ba[first + u, element]
