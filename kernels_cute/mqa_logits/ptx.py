"""Single instructions that the logits kernels want exactly so."""

from typing import Any

import cutlass
import cutlass.cute as cute

_RANGE = """{
.reg .pred inside;
setp.ge.s32 inside, {$r2}, {$r3};
setp.lt.and.s32 inside, {$r2}, {$r4}, inside;
%s
}"""
_STORE = {
    cutlass.Float32: "@inside st.global.f32 [{$r0}], {$r1};",
    cutlass.BFloat16: ".reg .b16 short;\ncvt.rn.bf16.f32 short, {$r1};\n@inside st.global.b16 [{$r0}], short;",
}


def store_between(element_type: Any, place: Any, value: Any, key: Any, first: Any, end: Any) -> None:
    """place[0] = value where first <= key < end: a predicated store, where a branch a store would cost more than the sum."""
    cute.arch.inline_ptx(_RANGE % _STORE[element_type], read_only_args=[place, value, key, first, end])


def prefetch(place: Any) -> None:
    """Asks for the line of a global address; nothing waits for it."""
    cute.arch.inline_ptx("prefetch.global.L1 [{$r0}];", read_only_args=[place])


def add_shared(place: Any, value: Any) -> None:
    """place[0] += value, of 32-bit integers in shared memory, whoever else adds there."""
    cute.arch.inline_ptx("red.shared.add.s32 [{$r0}], {$r1};", read_only_args=[place, value])
