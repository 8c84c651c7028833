"""Single instructions of the chunk kernel. Addresses are 32-bit shared-memory addresses.

Every access of shared memory outside the copy engine and wgmma goes through here, so that the order in which the kernel
states them is the order of the PTX.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

_FOUR = [Int32] * 4


def load_matrices(address: Any, transposed: bool) -> Any:
    """Four 8 x 8 matrices of 16-bit elements; lane l gives the row l % 8 of matrix l // 8."""
    trans = ".trans" if transposed else ""
    return cute.arch.inline_ptx(
        f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}];",
        write_only_types=_FOUR,
        read_only_args=[address],
    )


def store_matrices(address: Any, values: Any, transposed: bool) -> None:
    """The inverse of load_matrices; values: four packed registers."""
    trans = ".trans" if transposed else ""
    cute.arch.inline_ptx(
        f"stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [{{$r0}}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};",
        read_only_args=[address, *values],
    )


def load_one(address: Any) -> Any:
    return cute.arch.inline_ptx("ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address])


def load_pair(address: Any) -> Any:
    return cute.arch.inline_ptx(
        "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Float32] * 2, read_only_args=[address]
    )


def load_four(address: Any) -> Any:
    return cute.arch.inline_ptx(
        "ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=[Float32] * 4, read_only_args=[address]
    )


def load_words(address: Any) -> Any:
    """16 bytes as four words."""
    return cute.arch.inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=_FOUR, read_only_args=[address]
    )


def store_one(address: Any, value: Any) -> None:
    cute.arch.inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[address, value])


def store_pair(address: Any, first: Any, second: Any) -> None:
    cute.arch.inline_ptx("st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, first, second])


def store_zeros(address: Any) -> None:
    """16 bytes."""
    zero = Int32(0)
    cute.arch.inline_ptx(
        "st.shared.v4.b32 [{$r0}], {{$r1}, {$r1}, {$r1}, {$r1}};", read_only_args=[address, zero]
    )


def store_global_words(pointer: Any, values: Any) -> None:
    """16 bytes to global memory."""
    cute.arch.inline_ptx(
        "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[pointer, *values]
    )


def multiply_half(sums: Any, left: Any, right0: Any, right1: Any) -> Any:
    """sums [16, 8] float32 + left [16, 16] right [16, 8], float16 fragments of mma.sync."""
    return cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*left, right0, right1, *sums],
    )


def pack(dtype: Any, low: Any, high: Any) -> Any:
    """Two float32 rounded to 16 bits, in one word."""
    name = {cutlass.BFloat16: "bf16x2", cutlass.Float16: "f16x2"}[dtype]
    return cute.arch.inline_ptx(
        f"cvt.rn.{name}.f32 {{$w0}}, {{$r1}}, {{$r0}};", write_only_types=[Int32], read_only_args=[low, high]
    )


def unpack(dtype: Any, word: Any) -> Any:
    """(low, high) of a word as float32."""
    if dtype is cutlass.BFloat16:
        code = "{shl.b32 {$w0}, {$r0}, 16;\nand.b32 {$w1}, {$r0}, 0xffff0000;}"
    else:
        code = "{.reg .b16 low, high;\nmov.b32 {low, high}, {$r0};\ncvt.f32.f16 {$w0}, low;\ncvt.f32.f16 {$w1}, high;}"
    return cute.arch.inline_ptx(code, write_only_types=[Float32] * 2, read_only_args=[word])
