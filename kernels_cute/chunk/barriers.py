"""The barriers of the blocks of the chunk kernels. What each protects: fused.py, four_sm/kernel.py."""

from typing import Any

from kernels_cute.chunk.four_sm.shape import CHAINS, SET_KEY_STAGES, SETS, SLOTS
from kernels_cute.chunk.scheduler import RECORDS
from kernels_cute.chunk.shape import BUFFERS
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.common.barriers import Arrivals, Barrier, BarrierTable


def block_barriers(spec: ChunkSpec) -> BarrierTable:
    """Of a block of the fused kernel; those of a segment's start are split/start.py's."""
    warps = {"state": 4, "inverse": 4, "score": 4, "load": 1, "gates": 1, "store": 1}
    ready_waits: tuple[str, ...] = ("state",)
    from_peer: tuple[Arrivals, ...] = ()
    if spec.paired:  # block b fills buffer b of both
        warps["hand_over"] = 1
        ready_waits, from_peer = (
            ("state", "hand_over"),
            (Arrivals("hand_over", "role", what="of the other block, with the bytes"),),
        )
    both = (Arrivals("inverse", "thread"), Arrivals("score", "thread"))
    barriers = [
        Barrier(
            "keys_full", spec.key_stages, (Arrivals("load", "role", what="with the bytes of K"),), ("state", "inverse", "score")
        ),
        Barrier("keys_empty", spec.key_stages, (Arrivals("state", "warp", what="S done"),), ("load",)),
        Barrier("full", spec.stages, (Arrivals("load", "role", what="with those of Q and V"),), ("state", "score")),
        Barrier("empty", spec.stages, (Arrivals("store", "role", what="O read"),), ("load",)),
        Barrier("stored", spec.stages, (Arrivals("state", "warp", what="O where V was"),), ("store",)),
        Barrier("ready", BUFFERS, both, ready_waits, from_peer),
        Barrier("taken", BUFFERS, (Arrivals("state", "warp", spec.sharers),), ("inverse", "score")),
        Barrier("gates_full", 2, (Arrivals("gates", "thread"),), ("inverse", "score")),
        Barrier("factors_full", 2, (Arrivals("inverse", "thread", what="key factors written"),), ("score",)),
        Barrier("gates_free", 2, (Arrivals("inverse", "warp"), Arrivals("score", "warp")), ("gates",)),
    ]
    if spec.is_persistent:
        barriers += [
            Barrier("work_full", RECORDS, (Arrivals("gates", "role"),), tuple(warps)),
            Barrier("work_empty", RECORDS, tuple(Arrivals(role, "warp") for role in warps), ("gates",)),
        ]
    return BarrierTable(warps, barriers)


def chain_barriers(spec: ChunkSpec) -> BarrierTable:
    """Of a chain block of the four-SM form. `tiles` is the warp that arms `ready`: in a cluster of four a maker's."""
    stages = spec.stages
    read = (Arrivals("state", "warp", CHAINS, "read, of either chain"),)
    return BarrierTable(
        {"state": 4, "load": 1, "values": 1, "tiles": 1},
        [
            Barrier("k_full", stages, (Arrivals("load", "role", what="with K"),), ("state", "load")),
            Barrier("k_empty", stages, read, ("load",)),
            Barrier("q_full", stages, (Arrivals("load", "role", what="with Q"),), ("state", "load")),
            Barrier("q_empty", stages, read, ("load",)),
            Barrier("v_full", stages, (Arrivals("values", "role", what="with V"),), ("state",)),
            Barrier("stored", stages, (Arrivals("state", "warp", what="O where V was"),), ("values",)),
            Barrier("ready", SLOTS, (Arrivals("tiles", "role", what="with Z, P M and vectors"),), ("state", "tiles")),
            Barrier("free", SLOTS, read, ("tiles",)),
        ],
    )


def maker_barriers(form: Any) -> BarrierTable:
    """Of a maker block of the four-SM form; inverse, score and hand_over are those of one set."""
    taken = (
        Arrivals("state", "warp", CHAINS, "read, of either chain") if form.taken_arrivals > 1 else Arrivals("hand_over", "role")
    )
    table = BarrierTable(
        {"inverse": 4, "score": 4, "load": 1, "gates": 1, "hand_over": 1, "state": 4},
        [
            Barrier("k_full", SETS * SET_KEY_STAGES, (Arrivals("load", "role", what="with K"),), ("inverse", "score")),
            Barrier("k_empty", SETS * SET_KEY_STAGES, (Arrivals("score", "warp", what="Z done"),), ("load",)),
            Barrier("q_full", SETS, (Arrivals("load", "role", what="with Q"),), ("score",)),
            Barrier("q_empty", SETS, (Arrivals("score", "warp", what="Q in registers"),), ("load",)),
            Barrier("m_full", SETS, (Arrivals("inverse", "thread"),), ("score",)),
            Barrier("m_free", SETS, (Arrivals("score", "warp", what="M in registers"),), ("inverse",)),
            Barrier("made", SETS, (Arrivals("score", "thread"),), ("hand_over",)),
            Barrier("taken", SETS, (taken,), ("score",)),
            Barrier("gates_full", SETS * 2, (Arrivals("gates", "thread"),), ("inverse", "score")),
            Barrier("factors_full", SETS * 2, (Arrivals("inverse", "thread", what="key factors written"),), ("score",)),
            Barrier("gates_free", SETS * 2, (Arrivals("inverse", "warp"), Arrivals("score", "warp")), ("gates",)),
        ],
    )
    assert table.count("taken") == form.taken_arrivals
    return table
