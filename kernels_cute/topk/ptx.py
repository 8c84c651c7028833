"""Instructions of the top-k kernel that the DSL lacks, or lacks in this form: guarded loads, counting and listing in step with
the comparisons, shared memory by 32-bit address."""

import struct
from typing import Any

import cutlass
from cutlass import Int32, Uint32

from kernels_cute.common.ptx import as_float, instruction, run


def _block(lines: list[str]) -> str:
    """PTX with registers of its own."""
    return "{\n" + "\n".join(lines) + "\n}"


def _load_if(kind: str, registers: str, nan: int, outputs: list[str], address: Any, there: Any) -> Any:
    """Loads the registers where `there` is not 0, else they are `nan`; outputs: instructions that set the results from them."""
    names, bits = ", ".join(registers), kind[-3:]
    target = f"{{{names}}}" if len(registers) > 1 else names
    lines = [".reg .pred there;", f".reg .{bits} {names};", *(f"mov.{bits} {one}, {nan:#x};" for one in registers)]
    lines += ["setp.ne.s32 there, {$r1}, 0;", f"@there ld.global.{kind} {target}, [{{$r0}}];", *outputs]
    return run(_block(lines), address, there, gives=[Uint32] * len(outputs))


_MOVES = [f"mov.b32 {{$w{i}}}, {one};" for i, one in enumerate("abcd")]
_HALVES = ["shl.b32 {$w0}, a, 16;", "and.b32 {$w1}, a, 0xffff0000;", "shl.b32 {$w2}, b, 16;", "and.b32 {$w3}, b, 0xffff0000;"]
# NaN loses in max, against -inf too; adding 0.0 turns -0.0 into 0.0. Then the usual order-preserving map of float bits.
_KEY = """{
.reg .f32 x, least; .reg .b32 bits, sign;
mov.b32 x, {$r0}; mov.b32 least, 0xff800000;
max.f32 x, x, least; add.rn.f32 x, x, 0f00000000;
mov.b32 bits, x; shr.s32 sign, bits, 31; or.b32 sign, sign, 0x80000000;
xor.b32 {$w0}, bits, sign;
}"""
_FLOAT = """{
.reg .b32 sign;
shr.s32 sign, {$r0}, 31; not.b32 sign, sign; or.b32 sign, sign, 0x80000000;
xor.b32 {$w0}, {$r0}, sign;
}"""
_COUNT_DIGIT = """{
.reg .b32 digit;
sub.u32 digit, {$r1}, {$r2}; shr.u32 digit, digit, {$r3}; min.u32 digit, digit, {$r4};
mad.lo.u32 digit, digit, 4, {$r0}; red.shared.add.u32 [digit], 1;
}"""
_SET_BIT = """{
.reg .b32 address, bit;
shr.u32 address, {$r1}, 5; mad.lo.u32 address, address, 4, {$r0};
mov.b32 bit, 1; shf.l.wrap.b32 bit, bit, bit, {$r1};
red.shared.or.b32 [address], bit;
}"""
# The rank's standard deviation is about its square root for independent scores; neighbouring scores are similar.
_SAMPLE_RANK = """{
.reg .f32 rank, root;
cvt.rn.f32.s32 rank, {$r0}; mul.rn.f32 rank, rank, SHARE; sqrt.approx.f32 root, rank;
fma.rn.f32 rank, root, 0f40800000, rank; add.rn.f32 rank, rank, 0f40800000;
cvt.rzi.s32.f32 {$w0}, rank;
}"""
_HALF = """{
.reg .pred is_odd; .reg .b32 low, odd;
and.b32 odd, {$r1}, 1; setp.ne.s32 is_odd, odd, 0;
shl.b32 low, {$r0}, 16; and.b32 {$w0}, {$r0}, 0xffff0000;
@!is_odd mov.b32 {$w0}, low;
}"""
_GREATER = """{
.reg .pred more; .reg .b64 one, two;
ld.shared.b64 one, [{$r1}]; ld.shared.b64 two, [{$r2}]; setp.gt.u64 more, one, two;
mov.b32 {$w0}, {$r0}; @more add.s32 {$w0}, {$r0}, 1;
}"""

load_access = instruction("ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", *[Uint32] * 4)  # 16 bytes as four words
prefetch_l2 = instruction("cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};")  # (address, bytes), both multiples of 16
key_of = instruction(_KEY, Uint32)  # float32 bits -> uint32 that orders as the scores do; -0.0 as 0.0, NaN as -inf
float_of = instruction(_FLOAT, Uint32)  # bits of the float whose key this is
# (word, column): float32 bits of one of the word's two bf16; the lower one belongs to an even column.
half_of = instruction(_HALF, Uint32)
# The value, equal in all lanes, hidden from ptxas: it compares again, which costs less than to keep all predicates.
opaque_uniform = instruction("shfl.sync.idx.b32 {$w0}, {$r0}, 0, 31, 0xffffffff;", Uint32)

# Shared memory. (bins, value, lower, shift, top): bins[min((value - lower) >> shift, top)] += 1; a value below lower wraps, and
# falls into the last bin. An increment by one, so that the lanes of one bin share an access.
count_digit = instruction(_COUNT_DIGIT)
# (address, count): adds count to a word; its value before. One address for all lanes: ptxas adds up the warp's counts first.
reserve = instruction("atom.shared.add.u32 {$w0}, [{$r0}], {$r1};", Int32)
load_pair = instruction("ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];", Uint32, Int32)  # an entry: two words
store_pair = instruction("st.shared.v2.b32 [{$r0}], {{$r1}, {$r2}};")
# (count, address, other): count, plus one if the pair at address is greater than the other; the second words compare first.
count_if_greater = instruction(_GREATER, Int32)
or_shared = instruction("red.shared.or.b32 [{$r0}], {$r1};")  # (address, bits)
set_bit = instruction(_SET_BIT)  # (bitmap, place): a bit of the words from an address on


def load_quad(is_float32: bool, address: Any, there: Any) -> Any:
    """Four neighbouring scores as float32 bits; NaN, and no read, where `there` is 0."""
    if is_float32:
        return _load_if("v4.b32", "abcd", 0x7FFFFFFF, _MOVES, address, there)
    return _load_if("v2.b32", "ab", 0x7FFF7FFF, _HALVES, address, there)


def load_one(is_float32: bool, address: Any, there: Any) -> Any:
    """One score as float32 bits; NaN, and no read, where `there` is 0."""
    if is_float32:
        return _load_if("b32", "a", 0x7FFFFFFF, _MOVES[:1], address, there)
    wide = ".reg .b32 wide;\ncvt.u32.u16 wide, a;\nshl.b32 {$w0}, wide, 16;"
    return _load_if("b16", "a", 0x7FFF, [wide], address, there)


def load_access_of_bfloat16(address: Any, there: Any) -> Any:
    """Eight bf16 as four words; NaN, and no read, where `there` is 0."""
    return _load_if("v4.b32", "abcd", 0x7FFF7FFF, _MOVES, address, there)


def sample_rank(k: Any, share: float) -> Any:
    """Rank in a sample of `share` of the scores below which the k-th largest of all scores almost never falls."""
    code = _SAMPLE_RANK.replace("SHARE", "0f" + struct.pack(">f", share).hex())
    return run(code, k, gives=[Int32])


def count_from(least: Any, scores: list[Any]) -> Any:
    """Number of scores, given as float32 bits, that are at least `least`; NaN never is. Summed as floats next to the
    comparisons."""
    lines = [".reg .pred hit;", ".reg .f32 hits;", ".reg .b32 bits;", "mov.b32 hits, 0x4b000000;"]  # 2**23: counts are low bits
    for i in range(len(scores)):
        lines += [f"setp.ge.f32 hit, {{$r{i + 1}}}, {{$r0}};", "@hit add.rn.f32 hits, hits, 0f3f800000;"]
    lines += ["mov.b32 bits, hits;", "and.b32 {$w0}, bits, 255;"]
    return run(_block(lines), *[as_float(one) for one in (least, *scores)], gives=[Int32])


def store_from(least: Any, scores: list[Any], column: Any, slot: Any) -> Any:
    """Stores these scores, each with its column, from shared[slot] on; returns the next free slot."""
    lines = [".reg .pred hit;", ".reg .b32 slot, column;", "mov.b32 slot, {$r2};"]
    for i in range(len(scores)):
        lines += [f"setp.ge.f32 hit, {{$r{i + 3}}}, {{$r0}};", *_append(f"{{$r{i + 3}}}", i, "hit")]
    inputs = (as_float(least), column, slot, *[as_float(one) for one in scores])
    return run(_block([*lines, "mov.b32 {$w0}, slot;"]), *inputs, gives=[Int32])


def count_two_from(least: Any, words: list[Any]) -> Any:
    """`count_from` for words of two bf16 each, with `least` in both halves. Up to 256 per half are exact."""
    lines = [".reg .b32 hits, one, low, high;", "mov.b32 hits, 0;"]
    for i in range(len(words)):
        lines += [f"set.ge.bf16x2.bf16x2 one, {{$r{i + 1}}}, {{$r0}};", "add.rn.bf16x2 hits, hits, one;"]
    lines += ["shl.b32 low, hits, 16;", "and.b32 high, hits, 0xffff0000;", "add.rn.f32 low, low, high;"]
    return run(_block([*lines, "cvt.rzi.s32.f32 {$w0}, low;"]), least, *words, gives=[Int32])


def store_two_from(least: Any, words: list[Any], column: Any, slot: Any) -> Any:
    """`store_from` for words of two bf16 each: stores (word, column) for every half from `least` on."""
    lines = [".reg .pred low, high;", ".reg .b32 slot, column;", "mov.b32 slot, {$r2};"]
    for i in range(len(words)):
        word = f"{{$r{i + 3}}}"
        lines += [f"setp.ge.bf16x2 low|high, {word}, {{$r0}};", *_append(word, 2 * i, "low"), *_append(word, 2 * i + 1, "high")]
    return run(_block([*lines, "mov.b32 {$w0}, slot;"]), least, column, slot, *words, gives=[Int32])


def _append(word: str, offset: int, hit: str) -> list[str]:
    """Instructions that store a word with column $r1 + offset at `slot` where `hit`, and advance the slot."""
    store = f"@{hit} st.shared.v2.b32 [slot], {{{word}, column}};"
    return [f"add.s32 column, {{$r1}}, {offset};", store, f"@{hit} add.s32 slot, slot, 8;"]


def running_sum(value: Any) -> Any:
    """Sum over the warp's lanes up to and including this one."""
    lines = [".reg .pred there;", ".reg .b32 sum, other;", "mov.b32 sum, {$r0};"]
    for step in (1, 2, 4, 8, 16):
        lines += [f"shfl.sync.up.b32 other|there, sum, {step}, 0, 0xffffffff;", "@there add.s32 sum, sum, other;"]
    return run(_block([*lines, "mov.b32 {$w0}, sum;"]), value, gives=[Int32])


def as_int(condition: Any) -> Any:
    return cutlass.select_(condition, Int32(1), Int32(0))
