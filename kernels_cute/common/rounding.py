"""Stochastic rounding of a bfloat16 state, as `gdn.ops.delta_rule.reference` defines its noise, bit for bit."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32


def mix(x: Any) -> Any:
    """The 32-bit finaliser of the definition."""
    x = Uint32(x)
    x = (x ^ (x >> 16)) * Uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * Uint32(0x846CA68B)
    return Int32(x ^ (x >> 16))


@cute.jit
def mixed_seed(gSeed: Any):
    """The seed of a launch, mixed: the first part of all keys; 0 without one."""
    if cutlass.const_expr(gSeed is None):
        return Int32(0)
    seed = Int64(gSeed[0])
    return mix(mix(Int32(seed & 0xFFFFFFFF)) ^ Int32(seed >> 32))


def key_of(seed: Any, slot: Any, head: Any) -> Any:
    """The key of a head's state in a slot; seed: mixed."""
    return mix(mix(seed ^ Int32(slot)) ^ head)


def rounded(value: Any, key: Any, element: Any) -> Any:
    """The value, rounded with noise, as a float32 that is a bfloat16; an infinity or NaN as it is."""
    bits, exponent = Float32(value).bitcast(Uint32), Uint32(0x7F800000)
    noisy = (bits + (Uint32(mix(key ^ element)) >> 16)) & Uint32(0xFFFF0000)
    return Uint32(cutlass.select_((bits & exponent) == exponent, bits, noisy)).bitcast(Float32)
