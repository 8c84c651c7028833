"""Single instructions of the fused decode: sums that the blocks of a cluster send to each other, and words of two values."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32


def send(target: Any, value: Any, barrier: Any, positive: Any) -> None:
    """Where `positive` is: value (float32) to an address of shared memory in the cluster, whose block's barrier counts the
    four bytes."""
    cute.arch.inline_ptx(
        "{.reg .pred p;\nsetp.gt.s32 p, {$r3}, 0;\n"
        "@p st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [{$r0}], {$r1}, [{$r2}];}",
        read_only_args=[target, value, barrier, positive],
    )


def store_global_pair(address: Any, first: Any, second: Any) -> None:
    """Stores two words to global memory."""
    cute.arch.inline_ptx("st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, first, second])


def as_float(word: Any) -> Any:
    """The float32 of these bits."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word])
