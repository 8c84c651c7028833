"""Instructions of the top-k kernel that the DSL lacks, or lacks in this form: guarded loads, counting and listing in step with
the comparisons, shared memory by 32-bit address."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from kernels_cute.common.ptx import instruction, run


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
_FLOAT = """{
.reg .b32 sign;
shr.s32 sign, {$r0}, 31; not.b32 sign, sign; or.b32 sign, sign, 0x80000000;
xor.b32 {$w0}, {$r0}, sign;
}"""
_GREATER = """{
.reg .pred more; .reg .b64 one, two;
ld.shared.b64 one, [{$r1}]; ld.shared.b64 two, [{$r2}]; setp.gt.u64 more, one, two;
mov.b32 {$w0}, {$r0}; @more add.s32 {$w0}, {$r0}, 1;
}"""

load_access = instruction("ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", *[Uint32] * 4)  # 16 bytes as four words
prefetch_l2 = instruction("cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};")  # (address, bytes), both multiples of 16
float_of = instruction(_FLOAT, Uint32)  # bits of the float whose key this is
# The float32 with the bits of a word. (`bitcast` lets the compiler move it: up to 10 registers more, and spills.)
as_float = instruction("mov.b32 {$w0}, {$r0};", Float32)

# Shared memory. (address, count): adds count to a word; its value before. One address for all lanes: ptxas adds up the warp's
# counts first. (cute.arch.atomic_add: up to 8 instructions and 2 registers more.)
reserve = instruction("atom.shared.add.u32 {$w0}, [{$r0}], {$r1};", Int32)
load_pair = instruction("ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];", Uint32, Int32)  # an entry: two words
store_pair = instruction("st.shared.v2.b32 [{$r0}], {{$r1}, {$r2}};")
# (count, address, other): count, plus one if the pair at address is greater than the other; the second words compare first.
count_if_greater = instruction(_GREATER, Int32)


def key_of(bits: Any) -> Any:
    """float32 bits -> uint32 that orders as the scores do; -0.0 as 0.0, NaN as -inf."""
    # NaN loses in max, against -inf too; adding 0.0 turns -0.0 into 0.0. Then the usual order-preserving map of float bits.
    bits = (cute.arch.fmax(Uint32(bits).bitcast(Float32), -float("inf")) + Float32(0.0)).bitcast(Int32)
    return Uint32(bits ^ ((bits >> 31) | Int32(-(2**31))))


def half_of(word: Any, column: Any) -> Any:
    """float32 bits of one of a word's two bf16; the lower one belongs to an even column."""
    return cutlass.select_((column & 1) != 0, word & Uint32(0xFFFF0000), word << Uint32(16))


def opaque_uniform(value: Any) -> Any:
    """The value, equal in all lanes, hidden from ptxas: it compares again, which costs less than to keep all predicates."""
    return cute.arch.shuffle_sync(value, 0)


def count_digit(bins: Any, value: Any, lower: Any, shift: Any, top: Any) -> None:
    """bins[min((value - lower) >> shift, top)] += 1 in shared memory; a value below lower wraps, and falls into the last bin. An
    increment by one, so that the lanes of one bin share an access."""
    digit = cutlass.min((Uint32(value) - Uint32(lower)) >> Uint32(shift), Uint32(top))
    cute.arch.atomic_add(_shared(bins + Int32(digit) * 4), Uint32(1))


def or_shared(address: Any, bits: Any) -> None:
    cute.arch.atomic_or(_shared(address), bits)


def set_bit(bitmap: Any, number: Any) -> None:
    """Sets a bit of the words from an address on."""
    or_shared(bitmap + Int32(Uint32(number) >> Uint32(5)) * 4, cute.arch.shf(Uint32(1), Uint32(1), number))


def _shared(address: Any) -> Any:
    return cute.make_ptr(Uint32, address, cute.AddressSpace.smem, assumed_align=4)


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
    # The rank's standard deviation is about its square root for independent scores; neighbouring scores are similar.
    rank = Float32(k) * Float32(share)
    return Int32(rank + Float32(4.0) * cute.math.sqrt(rank, fastmath=True) + Float32(4.0))


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
