"""Instructions that the DSL lacks, for rows of 16-bit values (two in a 32-bit word, the first in its lower half) and e4m3."""

from typing import Any

import cutlass
from cutlass import Float32, Uint32

from kernels_cute.common.ptx import instruction

# Values to e4m3 (`to`: 5 to 20 instructions more): nearest even, saturated, NaN stays NaN. The first is the lowest byte.
_E4M3 = """{
.reg .b16 low, high;
cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0};
cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2};
mov.b32 {$w0}, {low, high};
}"""
# The DSL has no fma. The remainder is negated, and so is its correction: otherwise -0.0 would not stay -0.0.
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
# (value, inverse, divisor): value / divisor, correctly rounded for 16-bit values and divisors that are 448 or the scales of such:
# checked over all pairs of mantissas, with every `inverse` up to two units from the divisor's reciprocal.
quotient = instruction(_QUOTIENT, Float32)
to_e4m3 = instruction(_E4M3, Uint32)  # four values as e4m3 in one word


def magnitudes(word: Any) -> Any:
    """Magnitudes of both halves of a word."""
    return word & Uint32(0x7FFF7FFF)


def larger_half(dtype: str, word: Any) -> Any:
    """The larger of a word's two magnitudes as a float; NaN where one is NaN."""
    # Bits of non-negative values are ordered as the values are, with NaN above infinity.
    most = cutlass.max(word & Uint32(0xFFFF), word >> Uint32(16))
    if dtype == "bfloat16":
        return (most << Uint32(16)).bitcast(Float32)
    return cutlass.Uint16(most).bitcast(cutlass.Float16).to(Float32)


def where_infinite(value: Any, then: Any, otherwise: Any) -> Any:
    """`then` where the value is +infinity, else `otherwise`; NaN is not infinite."""
    return cutlass.select_(value == Float32(float("inf")), then, otherwise)
