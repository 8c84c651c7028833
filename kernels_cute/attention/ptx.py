"""Instructions of the attention kernels that the DSL lacks. Addresses: of shared memory (32 bits), or global."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from kernels_cute.common.ptx import (
    exp2,
    in_block,
    instruction,
    load_global_four,
    load_global_if,
    load_word,
    pack,
    store_global_word,
    store_zeros,
    unpack,
)

__all__ = [
    "as_int", "copy_unit", "exp2", "in_block", "load_four_from_block", "load_global_four", "load_global_half", "load_global_if",
    "load_global_word", "load_pair_from_block", "load_pair_of_words", "load_word", "or_shared", "pack", "store_global_half",
    "store_global_word", "store_if_negative", "store_pair_of_halves", "store_two", "store_zeros", "unpack",
]  # fmt: skip

load_global_word = instruction("ld.global.b32 {$w0}, [{$r0}];", Int32)
# 16 bits, as a word.
load_global_half = instruction("{.reg .b16 half;\nld.global.b16 half, [{$r0}];\ncvt.u32.u16 {$w0}, half;}", Int32)
store_global_half = instruction("{.reg .b16 half;\ncvt.u16.u32 half, {$r1};\nst.global.b16 [{$r0}], half;}")
# (address, two 16-bit values in a word, positive where the address is a multiple of 4)
_PAIR = """{
.reg .pred whole; .reg .b16 low, high;
setp.gt.s32 whole, {$r2}, 0;
mov.b32 {low, high}, {$r1};
@whole st.global.b32 [{$r0}], {$r1};
@!whole st.global.b16 [{$r0}], low;
@!whole st.global.b16 [{$r0}+2], high;
}"""
store_pair_of_halves = instruction(_PAIR)
# (address in shared memory, float32)
store_if_negative = instruction(
    "{.reg .pred negative;\nsetp.lt.f32 negative, {$r1}, 0f00000000;\n@negative st.shared.f32 [{$r0}], {$r1};}"
)
load_pair_of_words = instruction("ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];", Int32, Int32)
store_two = instruction("st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};")
# Of an address in another block (in_block): neighbouring float32.
load_pair_from_block = instruction("ld.shared::cluster.v2.f32 {{$w0}, {$w1}}, [{$r0}];", Float32, Float32)
load_four_from_block = instruction("ld.shared::cluster.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", *[Float32] * 4)
# (shared target, global source): 16 bytes, past L1.
copy_unit = instruction("cp.async.cg.shared.global [{$r0}], [{$r1}], 16;")


def or_shared(address: Any, bits: Any) -> None:
    cute.arch.atomic_or(cute.make_ptr(Uint32, address, cute.AddressSpace.smem, assumed_align=4), bits)


def as_int(condition: Any) -> Any:
    return cutlass.select_(condition, Int32(1), Int32(0))
