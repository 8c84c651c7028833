"""Single instructions of the fused decode: sums that the blocks of a cluster hand to each other, and words of two values."""

from typing import Any

import cutlass.cute as cute

from kernels_cute.common.ptx import as_float, in_block, load_four, load_one, load_pair, pack, store_one, unpack

__all__ = [
    "as_float",
    "in_block",
    "load_four",
    "load_one",
    "load_some",
    "pack",
    "send",
    "store_four",
    "store_global_pair",
    "store_one",
    "store_some",
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


def store_four(address: Any, values: Any, positive: Any) -> None:
    """Where `positive` is. Without a branch: what the values are made of stays in one block of code with its loads."""
    cute.arch.inline_ptx(
        "{.reg .pred p;\nsetp.gt.s32 p, {$r5}, 0;\n@p st.shared.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};}",
        read_only_args=[address, *values, positive],
    )


def store_some(address: Any, values: Any, positive: Any) -> None:
    """One, two or four values, as store_four."""
    if len(values) == 4:
        store_four(address, values, positive)
        return
    kind, places = {1: ("", "{$r1}"), 2: (".v2", "{{$r1}, {$r2}}")}[len(values)]
    condition = f"{{$r{1 + len(values)}}}"
    cute.arch.inline_ptx(
        f"{{.reg .pred p;\nsetp.gt.s32 p, {condition}, 0;\n@p st.shared{kind}.f32 [{{$r0}}], {places};}}",
        read_only_args=[address, *values, positive],
    )


def load_some(address: Any, width: int) -> Any:
    """One, two or four neighbouring values."""
    if width == 1:
        return (load_one(address),)
    return load_four(address) if width == 4 else load_pair(address)


def store_global_pair(address: Any, first: Any, second: Any) -> None:
    """Two words to global memory."""
    cute.arch.inline_ptx("st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, first, second])
