"""Instructions that the DSL lacks, for rows of 16-bit values (two in a 32-bit word, the first in its lower half) and e4m3."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

# The larger half as a float. Bits of non-negative values are ordered as the values are, with NaN above infinity.
_LARGER = """{
.reg .b32 low, high, most; .reg .b16 short;
and.b32 low, {$r0}, 0xffff; shr.u32 high, {$r0}, 16; max.u32 most, low, high;
%s
}"""
_TO_FLOAT = {
    "bfloat16": "shl.b32 most, most, 16; mov.b32 {$w0}, most;",
    "float16": "cvt.u16.u32 short, most; cvt.f32.f16 {$w0}, short;",
}
# Values to e4m3: nearest even, saturated, NaN stays NaN. The first one goes to the lowest byte.
_E4M3 = """{
.reg .b16 low, high;
cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0};
cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2};
mov.b32 {$w0}, {low, high};
}"""
# The remainder is negated, and so is its correction: otherwise -0.0 would not stay -0.0.
_QUOTIENT = """{
.reg .f32 near, rest, value, inverse;
mul.rn.f32 near, {$r0}, {$r1};
neg.f32 value, {$r0};
neg.f32 inverse, {$r1};
fma.rn.f32 rest, near, {$r2}, value;
fma.rn.f32 {$w0}, rest, inverse, near;
}"""


def magnitudes(word: Any) -> Any:
    """Both halves without their signs."""
    return word & Uint32(0x7FFF7FFF)


def larger(first: Any, second: Any) -> Any:
    """The larger one in each half, as unsigned integers."""
    return cute.arch.inline_ptx("max.u16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[first, second])


def larger_half(dtype: str, word: Any) -> Any:
    """The larger of a word's two magnitudes as a float; NaN where one is NaN."""
    return cute.arch.inline_ptx(_LARGER % _TO_FLOAT[dtype], write_only_types=[Float32], read_only_args=[word])


def at_least(value: Any, least: float) -> Any:
    """max(value, least); NaN stays NaN. (cute.arch.fmax makes four instructions more of quantize_fp8.)"""
    code = "max.NaN.f32 {$w0}, {$r0}, {$r1};"
    return cute.arch.inline_ptx(code, write_only_types=[Float32], read_only_args=[value, Float32(least)])


def quotient(value: Any, inverse: Any, divisor: Any) -> Any:
    """value / divisor, correctly rounded for 16-bit values and divisors that are 448 or the scales of such: checked over all
    pairs of mantissas, with every `inverse` up to two units from the divisor's reciprocal."""
    return cute.arch.inline_ptx(_QUOTIENT, write_only_types=[Float32], read_only_args=[value, inverse, divisor])


def to_e4m3(first: Any, second: Any, third: Any, fourth: Any) -> Any:
    """Four values as e4m3 in one word."""
    return cute.arch.inline_ptx(_E4M3, write_only_types=[Uint32], read_only_args=[first, second, third, fourth])


def where_infinite(value: Any, then: Any, otherwise: Any) -> Any:
    """then where the value is +infinity, else otherwise; NaN is not infinite."""
    return cutlass.select_(value == Float32(float("inf")), then, otherwise)
