"""Stochastic rounding of a bfloat16 state, as `gdn.ops.delta_rule.reference` defines its noise, bit for bit."""

import tilelang.language as T

_EXPONENT = 0x7F800000  # of a float32; all ones: an infinity or NaN
_UPPER_HALF = 0xFFFF0000


@T.macro
def mix(x: T.Ref):
    """The 32-bit finaliser of the definition, in place."""
    x = x ^ (x >> T.uint32(16))
    x = x * T.uint32(0x7FEB352D)
    x = x ^ (x >> T.uint32(15))
    x = x * T.uint32(0x846CA68B)
    x = x ^ (x >> T.uint32(16))


@T.macro
def mix_seed(rounding_seed, seed: T.Ref):
    """seed = the first part of all keys of a launch."""
    seed = T.cast(rounding_seed[0], "uint32")
    mix(seed)
    seed = seed ^ T.cast(rounding_seed[0] >> T.int64(32), "uint32")
    mix(seed)


@T.macro
def make_key(seed, slot, head, key: T.Ref):
    """key = the key of a head's state in a slot; seed: mixed."""
    key = seed ^ T.cast(slot, "uint32")
    mix(key)
    key = key ^ T.cast(head, "uint32")
    mix(key)


@T.macro
def round_value(value, key, element, noise: T.Ref, result: T.Ref):
    """result = value as a float32 that is a bfloat16; an infinity or NaN as it is. noise: scratch."""
    noise = key ^ T.cast(element, "uint32")
    mix(noise)
    noise = (noise >> T.uint32(16)) + T.reinterpret(value, "uint32")
    is_finite = (T.reinterpret(value, "uint32") & T.uint32(_EXPONENT)) != T.uint32(_EXPONENT)
    result = T.if_then_else(is_finite, T.reinterpret(noise & T.uint32(_UPPER_HALF), "float32"), value)  # noqa: F841 - a reference
