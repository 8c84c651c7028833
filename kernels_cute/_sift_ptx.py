"""Single instructions that the sifting logits kernel wants exactly so."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

# A comparison with NaN, on either side, is false.
_CLAIM = """{
.reg .pred hit;
.reg .b32 place;
mov.b32 place, 0xffffffff;
setp.ge.f32 hit, {$r0}, {$r1};
setp.lt.and.u32 hit, {$r2}, {$r3}, hit;
@hit atom.shared.add.u32 place, [{$r4}], {$r5};
mov.b32 {$w0}, place;
}"""
_STORE_BELOW = """{
.reg .pred fits;
.reg .b64 at;
setp.lt.u32 fits, {$r0}, {$r1};
cvt.u64.u32 at, {$r0};
add.s64 at, at, {$r2};
@fits st.global.v2.b32 [at], {{$r3}, {$r4}};
}"""


def claim(score: Any, bound: Any, column: Any, length: Any, cursor: Any, step: Any) -> Any:
    """Where score >= bound and 0 <= column < length: the value of shared[cursor], which moves by step; else all ones."""
    return cute.arch.inline_ptx(_CLAIM, write_only_types=[Int32], read_only_args=[score, bound, column, length, cursor, step])


def store_below(place: Any, limit: Any, line: Any, score: Any, column: Any) -> None:
    """(score, column) to global[line + place] where place, without sign, is below limit."""
    cute.arch.inline_ptx(_STORE_BELOW, read_only_args=[place, limit, line, score, column])


def add_global(address: Any, value: Any) -> Any:
    """What stood at a global address, to which value is added."""
    return cute.arch.inline_ptx(
        "atom.global.add.u32 {$w0}, [{$r0}], {$r1};", write_only_types=[Int32], read_only_args=[address, value]
    )


def load_four(address: Any) -> Any:
    """Four words of shared memory."""
    return cute.arch.inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=[Int32] * 4, read_only_args=[address]
    )


def as_float(bits: Any) -> Any:
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])
