"""Single instructions of the chunk kernel. Addresses are 32-bit shared-memory addresses.

Every access of shared memory outside the copy engine and wgmma goes through here, so that the order in which the kernel
states them is the order of the PTX.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

_FOUR = [Int32] * 4


def load_matrices(address: Any, transposed: bool) -> Any:
    """Four 8 x 8 matrices of 16-bit elements; lane l gives the row l % 8 of matrix l // 8."""
    trans = ".trans" if transposed else ""
    return cute.arch.inline_ptx(
        f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}];",
        write_only_types=_FOUR,
        read_only_args=[address],
    )


def store_matrices(address: Any, values: Any, transposed: bool) -> None:
    """The inverse of load_matrices; values: four packed registers."""
    trans = ".trans" if transposed else ""
    cute.arch.inline_ptx(
        f"stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [{{$r0}}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};",
        read_only_args=[address, *values],
    )


def transpose(word: Any) -> Any:
    """An 8 x 8 matrix of 16-bit elements, a lane's two of a row in a word, transposed within the warp."""
    return cute.arch.inline_ptx(
        "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[word]
    )


def load_one(address: Any) -> Any:
    return cute.arch.inline_ptx("ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address])


def load_pair(address: Any) -> Any:
    return cute.arch.inline_ptx(
        "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Float32] * 2, read_only_args=[address]
    )


def load_four(address: Any) -> Any:
    return cute.arch.inline_ptx(
        "ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=[Float32] * 4, read_only_args=[address]
    )


def load_words(address: Any) -> Any:
    """16 bytes as four words."""
    return cute.arch.inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=_FOUR, read_only_args=[address]
    )


def store_one(address: Any, value: Any) -> None:
    cute.arch.inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[address, value])


def store_pair(address: Any, first: Any, second: Any) -> None:
    cute.arch.inline_ptx("st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, first, second])


def store_zeros(address: Any) -> None:
    """16 bytes."""
    zero = Int32(0)
    cute.arch.inline_ptx("st.shared.v4.b32 [{$r0}], {{$r1}, {$r1}, {$r1}, {$r1}};", read_only_args=[address, zero])


def load_word(address: Any) -> Any:
    return cute.arch.inline_ptx("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


def store_word(address: Any, value: Any) -> None:
    cute.arch.inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[address, value])


def store_words(address: Any, values: Any) -> None:
    """16 bytes."""
    cute.arch.inline_ptx("st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *values])


def load_byte(address: Any) -> Any:
    """0 to 255."""
    return cute.arch.inline_ptx("ld.shared.u8 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


def store_byte(address: Any, value: Any) -> None:
    cute.arch.inline_ptx("st.shared.u8 [{$r0}], {$r1};", read_only_args=[address, value])


def load_global_if(address: Any, size: int, positive: Any) -> Any:
    """A word, or with size 2 its 16 bits, from global memory where `positive` is, else 0. Without a branch: what follows need not
    wait for it."""
    kind = "b32" if size == 4 else "u16"
    return cute.arch.inline_ptx(
        "{.reg .pred p;\n.reg .b32 w;\nsetp.gt.s32 p, {$r1}, 0;\nmov.b32 w, 0;\n@p ld.global."
        + kind
        + " w, [{$r0}];\nmov.b32 {$w0}, w;}",
        write_only_types=[Int32],
        read_only_args=[address, positive],
    )


def number(dtype: Any, word: Any) -> Any:
    """What load_global_if has loaded, as float32."""
    if dtype is Float32:
        return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word])
    return unpack(dtype, word)[0]


def prefetch_line(address: Any) -> None:
    """The L2 cache is asked for what lies around a global address."""
    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])


def store_global_words(address: Any, values: Any) -> None:
    """16 bytes to global memory."""
    cute.arch.inline_ptx("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *values])


def load_global_four(address: Any) -> Any:
    return cute.arch.inline_ptx(
        "ld.global.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=[Float32] * 4, read_only_args=[address]
    )


def store_global_four(address: Any, values: Any) -> None:
    cute.arch.inline_ptx("st.global.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *values])


def store_global_word(address: Any, value: Any) -> None:
    cute.arch.inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[address, value])


def multiply_small(dtype: Any, sums: Any, left: Any, right0: Any, right1: Any) -> Any:
    """sums [16, 8] float32 + left [16, 16] right [16, 8], fragments of mma.sync of 16-bit elements."""
    name = {cutlass.BFloat16: "bf16", cutlass.Float16: "f16"}[dtype]
    return cute.arch.inline_ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*left, right0, right1, *sums],
    )


def is_equal(first: Any, second: Any) -> Any:
    """1.0 where two float32 are equal, else 0.0."""
    return cute.arch.inline_ptx("set.eq.f32.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[first, second])


def exp2(value: Any) -> Any:
    return cute.arch.inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[value])


def in_block(address: Any, rank: Any) -> Any:
    """The same address in another block of the cluster."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[address, rank]
    )


def arrive_in_cluster(barrier: Any) -> None:
    cute.arch.inline_ptx("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [{$r0}];", read_only_args=[barrier])


def expect_in_cluster(barrier: Any, num_bytes: Any) -> None:
    """Arrives, and announces bytes."""
    cute.arch.inline_ptx(
        "mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _, [{$r0}], {$r1};",
        read_only_args=[barrier, num_bytes],
    )


def load_from_block(address: Any) -> Any:
    """A word of another block of the cluster; address: of in_block."""
    return cute.arch.inline_ptx("ld.shared::cluster.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


def copy_in_cluster(target: Any, source: Any, num_bytes: Any, barrier: Any) -> None:
    """Shared memory of this block to that of another, which counts the bytes on its barrier."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target, source, num_bytes, barrier],
    )


def copy_from_global(target: Any, source: Any, num_bytes: Any, barrier: Any) -> None:
    """Global memory to shared memory of this block, whose barrier counts the bytes."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target, source, num_bytes, barrier],
    )


def copy_from_global_to_blocks(target: Any, source: Any, num_bytes: Any, barrier: Any, blocks: Any) -> None:
    """The same to shared memory of several blocks of the cluster, a bit of the Int16 `blocks` each, and their barriers."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[{$r0}], [{$r1}], {$r2}, [{$r3}], {$r4};",
        read_only_args=[target, source, num_bytes, barrier, blocks],
    )


def copy_to_global(target: Any, source: Any, num_bytes: Any) -> None:
    """Shared memory of this block to global memory, in the thread's bulk group."""
    cute.arch.inline_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};", read_only_args=[target, source, num_bytes]
    )


def count_up(address: Any) -> Any:
    """Adds 1 to a word of global memory; what it was."""
    return cute.arch.inline_ptx(
        "atom.relaxed.gpu.global.add.u32 {$w0}, [{$r0}], 1;", write_only_types=[Int32], read_only_args=[address]
    )


def load_acquire(address: Any) -> Any:
    """A word of global memory that another block publishes with store_release."""
    return cute.arch.inline_ptx("ld.acquire.gpu.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


def store_release(address: Any, value: Any) -> None:
    cute.arch.inline_ptx("st.release.gpu.global.b32 [{$r0}], {$r1};", read_only_args=[address, value])


def sleep(nanoseconds: int) -> None:
    cute.arch.inline_ptx(f"nanosleep.u32 {nanoseconds};")


def pack(dtype: Any, low: Any, high: Any) -> Any:
    """Two float32 rounded to 16 bits, in one word."""
    name = {cutlass.BFloat16: "bf16x2", cutlass.Float16: "f16x2"}[dtype]
    return cute.arch.inline_ptx(
        f"cvt.rn.{name}.f32 {{$w0}}, {{$r1}}, {{$r0}};", write_only_types=[Int32], read_only_args=[low, high]
    )


def unpack(dtype: Any, word: Any) -> Any:
    """(low, high) of a word as float32."""
    if dtype is cutlass.BFloat16:
        code = "{shl.b32 {$w0}, {$r0}, 16;\nand.b32 {$w1}, {$r0}, 0xffff0000;}"
    else:
        code = "{.reg .b16 low, high;\nmov.b32 {low, high}, {$r0};\ncvt.f32.f16 {$w0}, low;\ncvt.f32.f16 {$w1}, high;}"
    return cute.arch.inline_ptx(code, write_only_types=[Float32] * 2, read_only_args=[word])


def as_float(word: Any) -> Any:
    """The float32 with these bits."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word])
