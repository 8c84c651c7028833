"""Single instructions of the fused decode: sums that the blocks of a cluster hand to each other, and words of two values."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kernels_cute._chunk_ptx import in_block, load_four, load_one, pack, store_one, unpack

__all__ = [
    "as_float",
    "in_block",
    "load_four",
    "load_current",
    "load_one",
    "pack",
    "prefetch",
    "send",
    "store_four",
    "store_global_pair",
    "store_one",
    "unpack",
]


def send(target: Any, value: Any, barrier: Any, positive: Any) -> None:
    """Where `positive` is: value (float32) to an address of shared memory in the cluster, whose block's barrier counts the
    four bytes."""
    cute.arch.inline_ptx(
        "{.reg .pred p;\nsetp.gt.s32 p, {$r3}, 0;\n"
        "@p st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [{$r0}], {$r1}, [{$r2}];}",
        read_only_args=[target, value, barrier, positive],
    )


def store_four(address: Any, values: Any) -> None:
    cute.arch.inline_ptx("st.shared.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *values])


def store_global_pair(address: Any, first: Any, second: Any) -> None:
    """Two words to global memory."""
    cute.arch.inline_ptx("st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, first, second])


def as_float(word: Any) -> Any:
    """The float32 of these bits."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word])


def load_current(address: Any, width: int) -> Any:
    """An integer of `width` bits as it is in memory now, not in L1, and without leaving a copy there."""
    kind = {32: Int32, 64: Int64}[width]
    return cute.arch.inline_ptx(
        f"ld.relaxed.gpu.global.b{width} {{$w0}}, [{{$r0}}];", write_only_types=[kind], read_only_args=[address]
    )


def prefetch(address: Any, num_bytes: Any) -> None:
    """Asks for bytes of global memory to be in L2; address and number: multiples of 16."""
    cute.arch.inline_ptx("cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};", read_only_args=[address, num_bytes])
