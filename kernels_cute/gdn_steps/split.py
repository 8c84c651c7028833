"""Interleaved input projections, taken apart: a permutation of whole heads, row by row.

Tensors: mixed_qkvz [L, H * (2 * K + 2 * r * V)] with groups [q (K) | k (K) | v (r * V) | z (r * V)], mixed_ba [L, 2 * HV]
with groups [b (r) | a (r)] -> mixed_qkv [L, 2 * H * K + HV * V] = [all q | all k | all v], z [L, HV * V], b, a [L, HV].
`gdn.problems.SplitProblem` is the contract.

A thread owns one 16-byte piece of a row, whose target is worked out once, in `rows` rows, which it loads together. The
last slice of blocks of every row tile moves b and a, element by element.
"""

from dataclasses import dataclass
from typing import Any

from kernels_cute.common import build

# isort: split
import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream

from gdn.device import DeviceSpec
from gdn.problems import SplitProblem
from kernels_cute.common.memory import FLOAT_DTYPES, fake, load, pointer, store


@dataclass(frozen=True)
class Config:
    threads: int  # threads of a block
    rows: int  # rows of a block: more bytes in flight per thread, fewer blocks


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
    """Elements of an access: what divides every piece of a group."""
    return 4 if problem.head_k_dim % 8 or problem.head_v_dim % 8 else 8


def _slices(problem: SplitProblem, threads: int) -> int:
    """Blocks that share a row of mixed_qkvz."""
    return -(-(problem.row_elements // _vector(problem)) // threads)


def fits(problem: SplitProblem, config: Config, device: DeviceSpec) -> bool:
    """Whether the configuration can be compiled and launched."""
    return config.threads in (64, 128, 256) and config.rows in (1, 2, 4, 8, 16)


def configs(problem: SplitProblem, device: DeviceSpec) -> list[Config]:
    """Every feasible configuration."""
    space = [Config(threads, rows) for threads in (64, 128, 256) for rows in (1, 2, 4, 8, 16)]
    return [config for config in space if fits(problem, config, device)]


def default_config(problem: SplitProblem, device: DeviceSpec) -> Config:
    """As many rows per thread as leave every SM a full load of threads."""
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


def launch(compiled: Any, mixed_qkvz: Any, mixed_ba: Any, mixed_qkv: Any, z: Any, b: Any, a: Any) -> None:
    if mixed_qkvz.shape[0] == 0:
        return
    compiled.functions["split"](mixed_qkvz, mixed_ba, mixed_qkv, z, b, a)


def _arguments(problem: SplitProblem) -> list[Any]:
    """Fake tensors in the order of the compiled function."""
    rows = cute.sym_int()
    keys, values = problem.num_k_heads * problem.head_k_dim, problem.num_v_heads * problem.head_v_dim
    return [
        fake(problem.dtype, rows, problem.row_elements, last=1),
        fake(problem.ba_dtype, rows, 2 * problem.num_v_heads, last=1),
        fake(problem.dtype, rows, 2 * keys + values, last=1),
        fake(problem.dtype, rows, values, last=1),
        fake(problem.ba_dtype, rows, problem.num_v_heads, last=1),
        fake(problem.ba_dtype, rows, problem.num_v_heads, last=1),
    ]


class _Split:
    """The kernel for one problem and configuration; attributes are compile-time constants."""

    def __init__(self, problem: SplitProblem, config: Config) -> None:
        self.threads, self.rows = config.threads, config.rows
        self.vector = _vector(problem)
        self.slices = _slices(problem, config.threads)
        self.heads, self.ratio = problem.num_k_heads, problem.num_v_heads // problem.num_k_heads
        # In accesses: a row, the parts of a group, and their places in mixed_qkv.
        self.row_pieces = problem.row_elements // self.vector
        self.key = problem.head_k_dim // self.vector
        self.value = self.ratio * problem.head_v_dim // self.vector
        self.group = 2 * self.key + 2 * self.value
        self.k_start, self.v_start = self.heads * self.key, 2 * self.heads * self.key

    @cute.jit
    def __call__(
        self,
        mixed_qkvz: cute.Tensor,
        mixed_ba: cute.Tensor,
        mixed_qkv: cute.Tensor,
        z: cute.Tensor,
        b: cute.Tensor,
        a: cute.Tensor,
        stream: CUstream,
    ):
        tiles = (mixed_qkvz.shape[0] + self.rows - 1) // self.rows
        self.kernel(mixed_qkvz, mixed_ba, mixed_qkv, z, b, a).launch(
            grid=[tiles * (self.slices + 1), 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        gIn: cute.Tensor,
        gBA: cute.Tensor,
        gQKV: cute.Tensor,
        gZ: cute.Tensor,
        gB: cute.Tensor,
        gA: cute.Tensor,
    ):
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        first = block // (self.slices + 1) * self.rows
        part = block % (self.slices + 1)
        if part < self.slices:
            piece = part * self.threads + thread
            if piece < self.row_pieces:
                self.move_piece(first, piece, gIn, gQKV, gZ)
        else:
            for element in cutlass.range(thread, 2 * self.heads * self.ratio, self.threads, unroll=1):
                self.move_gate(first, element, gBA, gB, gA)

    @cute.jit
    def move_piece(self, first: cutlass.Int32, piece: cutlass.Int32, gIn: cute.Tensor, gQKV: cute.Tensor, gZ: cute.Tensor):
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

        rPieces = cute.make_rmem_tensor(self.rows * vector, gIn.element_type)
        last = gIn.shape[0] - 1
        for u in cutlass.range_constexpr(self.rows):
            row = first + u
            if row > last:
                row = last
            source = pointer(gIn, cutlass.Int64(row) * gIn.stride[0] + piece * vector, align)
            load(source, vector, rPieces, u * vector, True)
        if is_z:
            self.store_pieces(rPieces, first, place, last, gZ)
        else:
            self.store_pieces(rPieces, first, place, last, gQKV)

    @cute.jit
    def store_pieces(
        self, rPieces: cute.Tensor, first: cutlass.Int32, place: cutlass.Int32, last: cutlass.Int32, gOut: cute.Tensor
    ):
        for u in cutlass.range_constexpr(self.rows):
            if first + u <= last:
                offset = cutlass.Int64(first + u) * gOut.stride[0] + place * self.vector
                store(rPieces, u * self.vector, self.vector, pointer(gOut, offset, 2 * self.vector))

    @cute.jit
    def move_gate(self, first: cutlass.Int32, element: cutlass.Int32, gBA: cute.Tensor, gB: cute.Tensor, gA: cute.Tensor):
        head = element // (2 * self.ratio)
        within = element % (2 * self.ratio)
        for u in cutlass.range_constexpr(self.rows):
            if first + u < gBA.shape[0]:
                if within < self.ratio:
                    gB[first + u, head * self.ratio + within] = gBA[first + u, element]
                else:
                    gA[first + u, head * self.ratio + within - self.ratio] = gBA[first + u, element]
