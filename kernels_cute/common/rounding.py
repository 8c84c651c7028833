"""Stochastic rounding of a bfloat16 state, as `gdn.reference.rounding` defines its noise, bit for bit."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels_cute.common.ptx import run


def mix(x: Any) -> Any:
    """The 32-bit finaliser of the definition."""
    code = (
        "{.reg .b32 x, t;\nshr.u32 t, {$r0}, 16;\nxor.b32 x, {$r0}, t;\nmul.lo.u32 x, x, 0x7feb352d;\nshr.u32 t, x, 15;\n"
        "xor.b32 x, x, t;\nmul.lo.u32 x, x, 0x846ca68b;\nshr.u32 t, x, 16;\nxor.b32 {$w0}, x, t;}"
    )
    return run(code, x, gives=[Int32])


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
    code = (
        "{.reg .pred p;\n.reg .b32 b, t;\nmov.b32 b, {$r0};\nand.b32 t, b, 0x7f800000;\nsetp.ne.u32 p, t, 0x7f800000;\n"
        "shr.u32 t, {$r1}, 16;\nadd.u32 t, b, t;\nand.b32 t, t, 0xffff0000;\nselp.b32 b, t, b, p;\nmov.b32 {$w0}, b;}"
    )
    return run(code, value, mix(key ^ element), gives=[Float32])
