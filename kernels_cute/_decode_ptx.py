"""Single instructions of the fused decode: sums that the blocks of a cluster hand to each other."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32


def send(target: Any, value: Any, barrier: Any, positive: Any) -> None:
    """Where `positive` is: value (float32) to an address of shared memory in the cluster, whose block's barrier counts the
    four bytes. No branch: what follows may be moved in front of one."""
    cute.arch.inline_ptx(
        "{.reg .pred p;\nsetp.gt.s32 p, {$r3}, 0;\n"
        "@p st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [{$r0}], {$r1}, [{$r2}];}",
        read_only_args=[target, value, barrier, positive],
    )


def in_block(address: Any, rank: Any) -> Any:
    """The same address of shared memory in another block of the cluster."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[address, rank]
    )


def load_four(address: Any) -> Any:
    return cute.arch.inline_ptx(
        "ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=[Float32] * 4, read_only_args=[address]
    )


def load_one(address: Any) -> Any:
    return cute.arch.inline_ptx("ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address])


def store_one(address: Any, value: Any) -> None:
    cute.arch.inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[address, value])


def store_four(address: Any, values: Any) -> None:
    cute.arch.inline_ptx("st.shared.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *values])
