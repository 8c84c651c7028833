"""Instructions that the DSL lacks, for rows of 16-bit values (two in a 32-bit word, the first in its lower half) and e4m3."""

from typing import Any

import cutlass
from cutlass import Float32, Uint32

from kernels_cute.common.ptx import instruction, run

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


# The larger one in each half of two words, as unsigned integers.
larger = instruction("max.u16x2 {$w0}, {$r0}, {$r1};", Uint32)
# (value, least): the larger one; NaN stays NaN. (cute.arch.fmax makes four instructions more of quantize_fp8.)
at_least = instruction("max.NaN.f32 {$w0}, {$r0}, {$r1};", Float32)
# (value, inverse, divisor): value / divisor, correctly rounded for 16-bit values and divisors that are 448 or the scales of such:
# checked over all pairs of mantissas, with every `inverse` up to two units from the divisor's reciprocal.
quotient = instruction(_QUOTIENT, Float32)
to_e4m3 = instruction(_E4M3, Uint32)  # four values as e4m3 in one word


def magnitudes(word: Any) -> Any:
    """Both halves without their signs."""
    return word & Uint32(0x7FFF7FFF)


def larger_half(dtype: str, word: Any) -> Any:
    """The larger of a word's two magnitudes as a float; NaN where one is NaN."""
    return run(_LARGER % _TO_FLOAT[dtype], word, gives=[Float32])


def where_infinite(value: Any, then: Any, otherwise: Any) -> Any:
    """then where the value is +infinity, else otherwise; NaN is not infinite."""
    return cutlass.select_(value == Float32(float("inf")), then, otherwise)
