"""Instructions that the DSL lacks, or lacks in this form (chunk/LAB-NOTES.md). Addresses: 32 bits in shared memory, or global.

Every access of shared memory of the chunk kernel outside the copy engine and wgmma goes through here, so that the order in which
the kernel states them is the order of the PTX.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

_TYPES = {"f32": Float32, "b32": Int32, "u8": Int32}
_WIDTHS = {1: "", 2: ".v2", 4: ".v4"}


def run(code: str, *arguments: Any, gives: Any = ()) -> Any:
    """Instructions on the arguments r0, r1, ...; `gives`: types of the results w0, w1, ..."""
    return cute.arch.inline_ptx(code, write_only_types=list(gives), read_only_args=list(arguments))


def instruction(code: str, *gives: Any) -> Callable[..., Any]:
    """`run` of an instruction as a function of its arguments."""
    return lambda *arguments: run(code, *arguments, gives=gives)


def _operands(letter: str, first: int, count: int) -> str:
    """Registers `first` and on, in braces where they are several."""
    names = ", ".join(f"{{${letter}{first + i}}}" for i in range(count))
    return names if count == 1 else f"{{{names}}}"


def _loads(instruction: str, kind: str, count: int = 1) -> Callable[[Any], Any]:
    """A function of an address: loads `count` neighbouring values."""
    code = f"{instruction}{_WIDTHS[count]}.{kind} {_operands('w', 0, count)}, [{{$r0}}];"
    return lambda address: run(code, address, gives=[_TYPES[kind]] * count)


def _stores(instruction: str, kind: str, count: int = 1) -> Callable[..., None]:
    """A function of an address and a value, two values, or a sequence of four: stores them next to each other."""
    code = f"{instruction}{_WIDTHS[count]}.{kind} [{{$r0}}], {_operands('r', 1, count)};"
    return lambda address, *values: run(code, address, *(values[0] if count == 4 else values))


# Shared memory: of an address, and what is stored there.
load_one, load_pair, load_four = (_loads("ld.shared", "f32", count) for count in (1, 2, 4))
load_word, load_words = (_loads("ld.shared", "b32", count) for count in (1, 4))
load_byte = _loads("ld.shared", "u8")  # 0 to 255
store_one, store_pair = (_stores("st.shared", "f32", count) for count in (1, 2))
store_word, store_words = (_stores("st.shared", "b32", count) for count in (1, 4))
store_byte = _stores("st.shared", "u8")
_store_four_alike = instruction("st.shared.v4.b32 [{$r0}], {{$r1}, {$r1}, {$r1}, {$r1}};")

# Global memory.
load_global_four = _loads("ld.global", "f32", 4)
store_global_four = _stores("st.global", "f32", 4)
store_global_word, store_global_pair, store_global_words = (_stores("st.global", "b32", count) for count in (1, 2, 4))
# (target, source, bytes) from shared memory of this block, in the thread's bulk group.
copy_to_global = instruction("cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};")

# (target, source): 4, 8, 16 bytes from global to shared memory, in the thread's group.
copy_one, copy_pair = (instruction(f"cp.async.ca.shared.global [{{$r0}}], [{{$r1}}], {size};") for size in (4, 8))
copy_four = instruction("cp.async.cg.shared.global [{$r0}], [{$r1}], 16;")

# Other blocks of the cluster.
in_block = instruction("mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", Int32)  # (address, rank): the same address there
load_from_block = _loads("ld.shared::cluster", "b32")  # a word there; address: of in_block
arrive_in_cluster = instruction("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [{$r0}];")
# (barrier, bytes): arrives, and announces bytes.
expect_in_cluster = instruction("mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _, [{$r0}], {$r1};")
# (target, source, bytes, barrier that counts them), from shared memory of this block to another's.
_COUNTED = "mbarrier::complete_tx::bytes"
_FROM_TO = "[{$r0}], [{$r1}], {$r2}, [{$r3}]"
copy_in_cluster = instruction(f"cp.async.bulk.shared::cluster.shared::cta.{_COUNTED} {_FROM_TO};")
# The same from global memory to this block.
copy_from_global = instruction(f"cp.async.bulk.shared::cluster.global.{_COUNTED} {_FROM_TO};")
# The same to several blocks of the cluster and their barriers; last argument: a bit of an Int16 for each.
copy_from_global_to_blocks = instruction(
    f"cp.async.bulk.shared::cluster.global.{_COUNTED}.multicast::cluster {_FROM_TO}, {{$r4}};"
)

# Registers.
exp2 = instruction("ex2.approx.ftz.f32 {$w0}, {$r0};", Float32)
is_equal = instruction("set.eq.f32.f32 {$w0}, {$r0}, {$r1};", Float32)  # 1.0 where two float32 are equal, else 0.0
# An 8 x 8 matrix of 16-bit elements, a lane's two of a row in a word, transposed within the warp.
transpose = instruction("movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};", Int32)
# A copy of an int32 that the compiler takes for another value: what follows from it (an address, a condition) is computed after
# this place, not before a loop around it and kept in registers all along.
opaque = instruction("mov.b32 {$w0}, {$r0};", Int32)
# No instruction, but the value must be there. With nothing live after a loop, its branch back is compiled in a form from which
# ptxas peels an iteration: twice the code, and spills.
use = instruction("// {$r0} is used")


def _global(address: Any) -> Any:
    return cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)


def load_acquire(address: Any) -> Any:
    """A word of global memory that another block publishes with store_release."""
    return cute.arch.load(_global(address), Int32, sem="acquire", scope="gpu")


def store_release(address: Any, value: Any) -> None:
    cute.arch.store(_global(address), Int32(value), sem="release", scope="gpu")


def count_up(address: Any) -> Any:
    """Adds 1 to a word of global memory; what it was."""
    return cute.arch.atomic_add(_global(address), Int32(1), sem="relaxed", scope="gpu")


def prefetch_line(address: Any) -> None:
    cute.arch.prefetch(_global(address).to_llvm_ptr(), cache_level="L2")  # asks the L2 cache for the line of an address


def store_zeros(address: Any) -> None:
    """16 bytes of shared memory."""
    _store_four_alike(address, Int32(0))


def store_where(address: Any, values: Any, positive: Any) -> None:
    """Stores one, two or four float32 where `positive` is. Without a branch: what the values are made of stays in one block of
    code with its loads."""
    count = len(values)
    code = f"setp.gt.s32 p, {{$r{1 + count}}}, 0;\n@p st.shared{_WIDTHS[count]}.f32 [{{$r0}}], {_operands('r', 1, count)};"
    run(f"{{.reg .pred p;\n{code}}}", address, *values, positive)


def load_matrices(address: Any, transposed: bool) -> Any:
    """Four 8 x 8 matrices of 16-bit elements; lane l gives the row l % 8 of matrix l // 8."""
    trans = ".trans" if transposed else ""
    code = f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {_operands('w', 0, 4)}, [{{$r0}}];"
    return run(code, address, gives=[Int32] * 4)


def store_matrices(address: Any, values: Any, transposed: bool) -> None:
    """The inverse of load_matrices; values: four packed registers."""
    trans = ".trans" if transposed else ""
    run(f"stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [{{$r0}}], {_operands('r', 1, 4)};", address, *values)


def load_global_if(address: Any, size: int, positive: Any) -> Any:
    """A word, or with size 2 its 16 bits, from global memory where `positive` is, else 0. Without a branch: what follows need not
    wait for it."""
    load = f"@p ld.global.{'b32' if size == 4 else 'u16'} w, [{{$r0}}];"
    code = f"{{.reg .pred p;\n.reg .b32 w;\nsetp.gt.s32 p, {{$r1}}, 0;\nmov.b32 w, 0;\n{load}\nmov.b32 {{$w0}}, w;}}"
    return run(code, address, positive, gives=[Int32])


def number(dtype: Any, word: Any) -> Any:
    """Value that load_global_if has loaded, as float32."""
    return word.bitcast(Float32) if dtype is Float32 else unpack(dtype, word)[0]


def multiply_small(dtype: Any, sums: Any, left: Any, right0: Any, right1: Any) -> Any:
    """sums [16, 8] float32 + left [16, 16] right [16, 8], fragments of mma.sync of 16-bit elements."""
    name = {cutlass.BFloat16: "bf16", cutlass.Float16: "f16"}[dtype]
    places = [_operands("w", 0, 4), *(_operands("r", first, count) for first, count in ((0, 4), (4, 2), (6, 4)))]
    code = f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 {', '.join(places)};"
    return run(code, *left, right0, right1, *sums, gives=[Float32] * 4)


def multiply_tf32(sums: Any, left: Any, right0: Any, right1: Any) -> Any:
    """sums [16, 8] float32 + left [16, 8] right [8, 8], fragments of mma.sync of tf32: the low 13 bits of a word do not count."""
    places = [_operands("w", 0, 4), *(_operands("r", first, count) for first, count in ((0, 4), (4, 2), (6, 4)))]
    code = f"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {', '.join(places)};"
    return run(code, *left, right0, right1, *sums, gives=[Float32] * 4)


def send(target: Any, value: Any, barrier: Any, positive: Any) -> None:
    """Sends a float32 to shared memory of the cluster where `positive` > 0; its block's barrier counts the four bytes."""
    store = "@p st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [{$r0}], {$r1}, [{$r2}];"
    run(f"{{.reg .pred p;\nsetp.gt.s32 p, {{$r3}}, 0;\n{store}}}", target, value, barrier, positive)


def sleep(nanoseconds: int) -> None:
    run(f"nanosleep.u32 {nanoseconds};")


def pack(dtype: Any, low: Any, high: Any) -> Any:
    """Two float32 rounded to 16 bits, in one word."""
    name = {cutlass.BFloat16: "bf16x2", cutlass.Float16: "f16x2"}[dtype]
    return run(f"cvt.rn.{name}.f32 {{$w0}}, {{$r1}}, {{$r0}};", low, high, gives=[Int32])


def unpack(dtype: Any, word: Any) -> Any:
    """(low, high) of a word as float32."""
    code = "{.reg .b16 low, high;\nmov.b32 {low, high}, {$r0};\ncvt.f32.f16 {$w0}, low;\ncvt.f32.f16 {$w1}, high;}"
    if dtype is cutlass.BFloat16:
        code = "{shl.b32 {$w0}, {$r0}, 16;\nand.b32 {$w1}, {$r0}, 0xffff0000;}"
    return run(code, word, gives=[Float32] * 2)
