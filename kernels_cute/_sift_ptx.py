"""Instructions that the sifting logits kernel wants exactly so."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from kernels_cute import _topk_ptx as topk_ptx

# A query's lanes are every fourth. Their votes move to bits 0, 4, 8, ..., those for the second keys to bits 1, 5, 9, ...
# A comparison with NaN, on either side, is false.
_LIST_TWO = """{
.reg .pred near, far;
.reg .b32 near_lanes, far_lanes, before, all, place, next;
.reg .b64 at;
setp.ge.f32 near, {$r0}, {$r2};
setp.ge.f32 far, {$r1}, {$r2};
vote.sync.ballot.b32 near_lanes, near, 0xffffffff;
vote.sync.ballot.b32 far_lanes, far, 0xffffffff;
shr.u32 near_lanes, near_lanes, {$r5};
shf.r.wrap.b32 far_lanes, far_lanes, far_lanes, {$r11};
and.b32 near_lanes, near_lanes, 0x11111111;
and.b32 far_lanes, far_lanes, 0x22222222;
or.b32 all, far_lanes, near_lanes;
and.b32 before, all, {$r6};
popc.b32 before, before;
popc.b32 all, all;
add.s32 place, before, {$r7};
mad.lo.s32 place, place, {$r8}, {$r12};
mov.b32 next, place;
@near add.s32 next, place, {$r8};
mad.wide.s32 at, place, 8, {$r10};
@near st.global.v2.b32 [at], {{$r0}, {$r3}};
mad.wide.s32 at, next, 8, {$r10};
@far st.global.v2.b32 [at], {{$r1}, {$r4}};
add.s32 all, all, {$r7};
min.s32 {$w0}, all, {$r9};
}"""


def list_two(
    near: Any, far: Any, bound: Any, key: Any, lane: Any, count: Any, sign: Any, limit: Any, line: Any, first: Any
) -> Any:
    """Appends the lanes' two scores, of a key and of the eighth after it, where they reach the bound.

    Lanes of one query share a list, whose next entry goes to global[line + 8 * (first + sign * count)]. Returns how many it has
    then, `limit` at most: where that is reached 16 entries from there on may be written. lane: what `lane_masks` makes.
    """
    moved, moved_on, below = lane
    arguments = [near, far, bound, key, key + 8, moved, below, count, sign, limit, line, moved_on, first]
    return cute.arch.inline_ptx(_LIST_TWO, write_only_types=[Int32], read_only_args=arguments)


def lane_masks(lane: Any) -> Any:
    """By how many bits a lane's votes move (two votes), and the bits of its query's lanes before it."""
    return kept(lane % 4), kept(lane % 4 + 31), kept((Int32(1) << (lane & 28)) - 1)


def kept(value: Any) -> Any:
    """The same 32 bits, in a way that ptxas cannot follow: it would make them anew for every tile."""
    code = "shfl.sync.idx.b32 {$w0}, {$r0}, {$r1}, 31, 0xffffffff;"
    return cute.arch.inline_ptx(code, write_only_types=[Int32], read_only_args=[value, cute.arch.lane_idx()])


def kept_address(base: Any, offset: Any) -> Any:
    """base + 8 * offset, as one register pair: of two words kept apart ptxas makes a 64-bit addition at every use."""
    code = "mad.wide.u32 {$w0}, {$r0}, 8, {$r1};"
    return cute.arch.inline_ptx(code, write_only_types=[Int64], read_only_args=[kept(offset), base])


def add_global(address: Any, value: Any) -> Any:
    """What stood at a global address, to which value is added."""
    return cute.arch.inline_ptx(
        "atom.global.add.u32 {$w0}, [{$r0}], {$r1};", write_only_types=[Int32], read_only_args=[address, value]
    )


def largest_of(scores: list[Any]) -> Any:
    """The largest of float32 bits; NaN only where all are."""
    lines = [f"max.f32 most, most, {{$r{i}}};" for i in range(1, len(scores))]
    code = "{\n.reg .f32 most;\nmov.b32 most, {$r0};\n" + "\n".join(lines) + "\nmov.b32 {$w0}, most;\n}"
    return cute.arch.inline_ptx(code, write_only_types=[Uint32], read_only_args=[topk_ptx.as_float(one) for one in scores])


def warp_largest(value: Any) -> Any:
    code = "redux.sync.max.u32 {$w0}, {$r0}, 0xffffffff;"
    return cute.arch.inline_ptx(code, write_only_types=[Uint32], read_only_args=[value])


BATCH = 4  # entries of a list that a thread has loaded before it acts on any
_ENTRY = """setp.gt.s32 there{i}, {{$r1}}, {first};
mov.b32 score{i}, 0;
mov.b32 column{i}, 0;
@there{i} ld.shared.{what} [{{$r0}} + {offset}];
"""
_KEY_OF_ENTRY = """add.rn.f32 score{i}, score{i}, 0f00000000;
mov.b32 key, score{i};
shr.s32 sign, key, 31;
or.b32 sign, sign, 0x80000000;
xor.b32 key, key, sign;
"""


def _entries(what: str, step: int, act: str) -> str:
    """Instructions that load a thread's next entries, every step-th from shared[$r0] on of $r1 that are left, and act on each."""
    declared = "".join(f".reg .pred there{i};\n.reg .f32 score{i};\n.reg .b32 column{i};\n" for i in range(BATCH))
    loads = "".join(_ENTRY.format(i=i, first=i * step, offset=8 * i * step, what=what.format(i=i)) for i in range(BATCH))
    return declared + loads + "".join(act.replace("{i}", str(i)) for i in range(BATCH))


def count_entries(entry: Any, left: Any, step: int, bins: Any, lower: Any, shift: Any, top: Any) -> None:
    """bins[min((key - lower) >> shift, top)] += 1 for a thread's next entries. Keys are from lower on, or wrap."""
    act = _KEY_OF_ENTRY + (
        "sub.u32 key, key, {$r3};\nshr.u32 key, key, {$r4};\nmin.u32 key, key, {$r5};\nmad.lo.u32 key, key, 4, {$r2};\n"
        "@there{i} red.shared.add.u32 [key], 1;\n"
    )
    code = "{\n.reg .b32 key, sign;\n" + _entries("b32 score{i},", step, act) + "}"
    cute.arch.inline_ptx(code, read_only_args=[entry, left, bins, lower, shift, top])


def mark_entries(entry: Any, left: Any, step: int, bitmap: Any, lower: Any, highest: Any) -> Any:
    """Sets the bits of those of a thread's next entries whose keys are above `highest`; which have keys from lower to there."""
    act = _KEY_OF_ENTRY + (
        "setp.gt.u32 above, key, {$r4};\nsetp.ge.u32 between, key, {$r3};\nand.pred above, above, there{i};\n"
        "and.pred between, between, there{i};\nmov.b32 one, 1;\nshf.l.wrap.b32 one, one, one, column{i};\n"
        "shr.u32 column{i}, column{i}, 5;\nmad.lo.u32 column{i}, column{i}, 4, {$r2};\n"
        "@above red.shared.or.b32 [column{i}], one;\nnot.pred above, above;\nand.pred between, between, above;\n"
        "@between or.b32 found, found, 1 << {i};\n"
    )
    code = (
        "{\n.reg .b32 key, sign, one, found;\n.reg .pred above, between;\nmov.b32 found, 0;\n"
        + _entries("v2.b32 {{score{i}, column{i}}},", step, act)
        + "mov.b32 {$w0}, found;\n}"
    )
    return cute.arch.inline_ptx(code, write_only_types=[Int32], read_only_args=[entry, left, bitmap, lower, highest])


def place_entries(entry: Any, left: Any, step: int, bitmap: Any, before: Any, places: Any) -> None:
    """Of a thread's next entries the columns whose bits are set, each to its place among shared[places].

    That is the number of bits before its own; before: address of the sums over the words before each word.
    """
    entry_ends = 4  # the column's word
    act = (
        "shr.u32 at, column{i}, 5;\nmad.lo.u32 word, at, 4, {$r2};\nmad.lo.u32 sum, at, 4, {$r3};\n"
        "ld.shared.b32 bits, [word];\nld.shared.b32 sum, [sum];\nmov.b32 one, 1;\n"
        "shf.l.wrap.b32 one, one, one, column{i};\nand.b32 word, bits, one;\nsetp.ne.and.u32 there{i}, word, 0, there{i};\n"
        "sub.u32 one, one, 1;\nand.b32 bits, bits, one;\npopc.b32 bits, bits;\nadd.s32 sum, sum, bits;\n"
        "mad.lo.u32 sum, sum, 4, {$r4};\n@there{i} st.shared.b32 [sum], column{i};\n"
    )
    act = "{\n.reg .b32 at, word, sum, bits, one;\n" + act + "}\n"
    code = "{\n" + _entries("b32 column{i},", step, act) + "}"
    cute.arch.inline_ptx(code, read_only_args=[entry + entry_ends, left, bitmap, before, places])
