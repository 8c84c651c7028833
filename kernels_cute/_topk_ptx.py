"""Single instructions that the top-k kernel wants exactly so: guarded loads, and shared memory by 32-bit address."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

MINUS_INFINITY = 0xFF800000

_QUAD_FLOAT32 = """{
.reg .pred there;
.reg .b32 a, b, c, d;
mov.b32 a, 0x7fffffff;
mov.b32 b, a;
mov.b32 c, a;
mov.b32 d, a;
setp.ne.s32 there, {$r1}, 0;
@there ld.global.v4.b32 {a, b, c, d}, [{$r0}];
mov.b32 {$w0}, a;
mov.b32 {$w1}, b;
mov.b32 {$w2}, c;
mov.b32 {$w3}, d;
}"""
_QUAD_BFLOAT16 = """{
.reg .pred there;
.reg .b32 a, b;
mov.b32 a, 0x7fff7fff;
mov.b32 b, a;
setp.ne.s32 there, {$r1}, 0;
@there ld.global.v2.b32 {a, b}, [{$r0}];
shl.b32 {$w0}, a, 16;
and.b32 {$w1}, a, 0xffff0000;
shl.b32 {$w2}, b, 16;
and.b32 {$w3}, b, 0xffff0000;
}"""
_ONE_FLOAT32 = """{
.reg .pred there;
.reg .b32 a;
mov.b32 a, 0x7fffffff;
setp.ne.s32 there, {$r1}, 0;
@there ld.global.b32 a, [{$r0}];
mov.b32 {$w0}, a;
}"""
_ONE_BFLOAT16 = """{
.reg .pred there;
.reg .b16 a;
.reg .b32 b;
mov.b16 a, 0x7fff;
setp.ne.s32 there, {$r1}, 0;
@there ld.global.b16 a, [{$r0}];
cvt.u32.u16 b, a;
shl.b32 {$w0}, b, 16;
}"""
# NaN loses in max, against -inf too; adding 0.0 turns -0.0 into 0.0. Then the usual order-preserving map of float bits.
_KEY = """{
.reg .f32 x, least;
.reg .b32 bits, sign;
mov.b32 x, {$r0};
mov.b32 least, {$r1};
max.f32 x, x, least;
add.rn.f32 x, x, 0f00000000;
mov.b32 bits, x;
shr.s32 sign, bits, 31;
or.b32 sign, sign, 0x80000000;
xor.b32 {$w0}, bits, sign;
}"""
_COUNT = """{
.reg .pred counts;
setp.ge.u32 counts, {$r1}, {$r2};
@counts red.shared.add.u32 [{$r0}], 1;
}"""


def load_quad(is_float32: bool, address: Any, there: Any) -> Any:
    """Four neighbouring scores as float32 bits; NaN where `there` is 0, and then nothing is read."""
    code = _QUAD_FLOAT32 if is_float32 else _QUAD_BFLOAT16
    return cute.arch.inline_ptx(code, write_only_types=[Uint32] * 4, read_only_args=[address, there])


def load_one(is_float32: bool, address: Any, there: Any) -> Any:
    code = _ONE_FLOAT32 if is_float32 else _ONE_BFLOAT16
    return cute.arch.inline_ptx(code, write_only_types=[Uint32], read_only_args=[address, there])


def key_of(bits: Any, least: Any = MINUS_INFINITY) -> Any:
    """float32 bits -> uint32 that orders as the scores do; -0.0 as 0.0, NaN and what is less than `least` as `least`."""
    return cute.arch.inline_ptx(_KEY, write_only_types=[Uint32], read_only_args=[bits, Uint32(least)])


def count(address: Any) -> None:
    """shared[address] += 1. An increment of one: the lanes of one bin share an access."""
    cute.arch.inline_ptx("red.shared.add.u32 [{$r0}], 1;", read_only_args=[address])


def count_from(address: Any, value: Any, least: Any) -> None:
    """shared[address] += 1 where value >= least (unsigned)."""
    cute.arch.inline_ptx(_COUNT, read_only_args=[address, value, least])


def or_shared(address: Any, bits: Any) -> None:
    cute.arch.inline_ptx("red.shared.or.b32 [{$r0}], {$r1};", read_only_args=[address, bits])


def take_ticket(address: Any) -> Any:
    """The value of shared[address], which grows by one."""
    return cute.arch.inline_ptx("atom.shared.add.u32 {$w0}, [{$r0}], 1;", write_only_types=[Int32], read_only_args=[address])


def store_byte(address: Any, value: Any) -> None:
    cute.arch.inline_ptx("st.shared.b8 [{$r0}], {$r1};", read_only_args=[address, value])


def store_pair(address: Any, first: Any, second: Any) -> None:
    cute.arch.inline_ptx("st.shared.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, first, second])


def load_four(address: Any) -> Any:
    return cute.arch.inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=[Uint32] * 4, read_only_args=[address]
    )


def bits_from(least: Any, values: list[Any]) -> Any:
    """Bit i is set where values[i] >= least (unsigned)."""
    lines = [f"setp.ge.u32 set, {{$r{i + 1}}}, {{$r0}};\n@set or.b32 bits, bits, {1 << i};" for i in range(len(values))]
    code = "{\n.reg .pred set;\n.reg .b32 bits;\nmov.b32 bits, 0;\n" + "\n".join(lines) + "\nmov.b32 {$w0}, bits;\n}"
    return cute.arch.inline_ptx(code, write_only_types=[Int32], read_only_args=[least, *values])


def top_halves(first: Any, second: Any) -> Any:
    """The upper 16 bits of two words in one: first's below second's."""
    return cute.arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, 0x7632;", write_only_types=[Uint32], read_only_args=[first, second]
    )


def warp_sum(value: Any) -> Any:
    return cute.arch.inline_ptx(
        "redux.sync.add.s32 {$w0}, {$r0}, 0xffffffff;", write_only_types=[Int32], read_only_args=[value]
    )


def highest_bit(word: Any) -> Any:
    return cute.arch.inline_ptx("bfind.u32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[word])


def as_int(condition: Any) -> Any:
    return cutlass.select_(condition, Int32(1), Int32(0))
