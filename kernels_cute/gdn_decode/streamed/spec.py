"""Compile-time constants of the streamed form, its shared memory and its barriers."""

from enum import IntEnum
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from gdn.ops.delta_rule.tiles import Tiles
from gdn.ops.layer_step.problem import GdnDecodeProblem
from gdn.problem import DTYPE_BYTES
from kernels_cute.common.barriers import Arrivals, Barrier, BarrierTable
from kernels_cute.common.memory import CUTE_DTYPES
from kernels_cute.common.ring import Entries, RingTile
from kernels_cute.common.state_tile import StateTile
from kernels_cute.gdn_decode.shape import CHANNELS
from kernels_cute.gdn_decode.streamed.sizes import DIM, PREPARE_WARPS, WARPS, Sizes

THREADS = 32 * PREPARE_WARPS  # that prepare


class NamedBarrier(IntEnum):
    """Named barriers on which some warps of a block meet. 0 is the whole block's."""

    PREPARE = 1  # the warps that prepare
    START = 2  # the two warps that copy
    HEAD = 3  # the four warps that multiply the first head; those of the next head have the next


class Item(NamedTuple):
    """A sequence and a key head; all Int32."""

    key_head: Any
    begin: Any  # the sequence's first token
    count: Any  # its tokens
    slot: Any
    column: Any  # of the window's first input
    first: Any  # position of the first entry that may be live
    committed: Any  # position of the sequence's first token


class Shared(NamedTuple):
    """Addresses in shared memory, of an item's buffers where there are several."""

    state: Any  # the stages: 32 columns of V each, as they lie in the pool
    entries: Entries  # keys, then updates of all value heads; `weights` of the first value head; `decays` too; `written`
    tokens: Any  # of each token [q | k | v of all value heads], float32, not normalised
    gates: Any  # of each token and value head: log decay and beta
    item: Any  # its numbers, as `handover` has them
    factors: Any  # of each token: that of k, that of q with the scale
    totals: Any  # of each value head and token: exp(sum of the log decays of all entries, and of the tokens up to it)
    sums: Any  # of each column: S0^T k and S0^T q of each token; of the first warp that multiplies, later of this one
    squares: Any  # of each of these warps and token, two buffers


class Spec(Sizes):
    """A problem, its configuration, and what follows from them. `convolution` reads it as it reads `gdn_decode.spec.Spec`: a
    block, alone in its cluster, has all value heads of its key head."""

    def __init__(self, problem: GdnDecodeProblem, config: Any) -> None:
        super().__init__(problem, config.stages)
        p = problem
        assert p.ring_rows is not None and p.fold_every is not None
        self.problem, self.num_blocks = p, config.num_blocks
        self.tiles = Tiles(THREADS, 8, 4, THREADS)
        self.ring = RingTile(p.ring_rows, p.fold_every, p.has_accepted, p.num_k_heads, p.num_v_heads, StateTile(p, self.tiles))
        self.dtype, self.weight_dtype, self.state_dtype = (CUTE_DTYPES[name] for name in (p.dtype, p.weight_dtype, p.state_dtype))
        self.vector = 16 // DTYPE_BYTES[p.state_dtype]  # elements of an access of the state
        self.has_norm, self.has_several_tokens, self.keeps_columns = p.has_norm, p.cu_seqlens_dtype is not None, p.has_accepted
        self.splits = self.cluster = self.passes = 1
        self.history, self.line_rows = p.width - 1, p.width - 1 + self.batch
        self.weight_words = CHANNELS * p.width * self.weight_dtype.width // 32
        self.copies_windows = p.conv_channels_contiguous and p.conv_dtype == p.dtype
        self.group_width = 2 * (1 + self.ratio) * DIM
        self.shared_items = 2 * DIM // CHANNELS
        self.items = self.shared_items + self.ratio * DIM // CHANNELS
        self.turns = -(-self.items // THREADS)  # of a thread that prepares: four channels each
        self.barriers = BarrierTable(
            {"states": 1, "entries": 1, "prepare": PREPARE_WARPS, "math": WARPS},
            [
                Barrier("state_full", self.stages, (Arrivals("states", "role", what="with the bytes"),), ("math", "states")),
                Barrier("state_free", self.stages, (Arrivals("math", "role", what="read by the tile's warp"),), ("states",)),
                Barrier(
                    "entries_full", self.buffers, (Arrivals("entries", "thread", what="with the bytes"),), ("prepare", "math")
                ),
                Barrier("entries_free", self.buffers, (Arrivals("math", "warp", what="read"),), ("entries",)),
                Barrier("tokens_full", 2, (Arrivals("prepare", "warp", what="tokens and numbers are there"),), ("math",)),
                Barrier("weights_full", 2, (Arrivals("prepare", "warp", what="weights and factors are there"),), ("math",)),
                Barrier("done", 2, (Arrivals("math", "warp", what="all of these read"),), ("prepare",)),
            ],
        )

    def storage(self) -> Any:
        stages, state_words, buffers = self.stages, self.stages * self.tile_bytes // 4, self.buffers
        num_keys, num_updates, num_decays, num_tokens, num_weights, num_others, num_sums, num_squares = self.floats.values()

        @cute.struct
        class Storage:
            state: cute.struct.Align[cute.struct.MemRange[Int32, state_words], 128]
            keys: cute.struct.Align[cute.struct.MemRange[Float32, num_keys], 16]
            updates: cute.struct.Align[cute.struct.MemRange[Float32, num_updates], 16]
            decays: cute.struct.Align[cute.struct.MemRange[Float32, num_decays], 16]
            tokens: cute.struct.Align[cute.struct.MemRange[Float32, num_tokens], 16]
            weights: cute.struct.Align[cute.struct.MemRange[Float32, num_weights], 16]
            others: cute.struct.Align[cute.struct.MemRange[Float32, num_others], 16]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, num_sums], 16]
            squares: cute.struct.Align[cute.struct.MemRange[Float32, num_squares], 16]
            state_full: cute.struct.MemRange[Int64, stages]
            state_free: cute.struct.MemRange[Int64, stages]
            entries_full: cute.struct.MemRange[Int64, buffers]
            entries_free: cute.struct.MemRange[Int64, buffers]
            tokens_full: cute.struct.MemRange[Int64, 2]
            weights_full: cute.struct.MemRange[Int64, 2]
            done: cute.struct.MemRange[Int64, 2]

        return Storage


def entries_of(spec: Spec, storage: Any, served: Any) -> Entries:
    """The entries of the live item of this number."""
    live, buffer = spec.most_live, served % spec.buffers
    keys = storage.keys.data_ptr().toint() + buffer * (4 * live * DIM)
    updates = storage.updates.data_ptr().toint() + buffer * (4 * live * spec.ratio * DIM)
    decays = storage.decays.data_ptr().toint()
    written = decays + 4 * (spec.buffers * spec.ratio * spec.decay_pitch) + buffer * 4
    decays = decays + buffer * (4 * spec.ratio * spec.decay_pitch)
    weights = storage.weights.data_ptr().toint() + served % 2 * (4 * spec.weights_floats)
    return Entries(keys, updates, weights, decays, written)


def shared_of(spec: Spec, storage: Any, served: Any) -> Shared:
    """Return the addresses of the live item of this number, and of what belongs to no item."""
    tokens = storage.tokens.data_ptr().toint() + served % 2 * (4 * spec.tokens_floats)
    others = storage.others.data_ptr().toint() + served % 2 * (4 * spec.others_floats)
    places = [others + 4 * at for at in (0, spec.factors_at, spec.totals_at)]
    state, sums, squares = (part.data_ptr().toint() for part in (storage.state, storage.sums, storage.squares))
    return Shared(state, entries_of(spec, storage, served), tokens, tokens + 4 * spec.gates_at, *places, sums, squares)


def tile_number(spec: Spec, served: Any, warp: Any, turn: Any) -> Any:
    """Return the number of a warp's tile `turn` of an item, among all tiles of the warp."""
    tiles = (spec.item_tiles + (WARPS - 1) - warp) // WARPS  # of the warp, in an item
    return served * tiles + turn


def stage_of(spec: Spec, served: Any, warp: Any, turn: Any) -> tuple[Any, Any]:
    """Return the stage of a warp's tile `turn` of an item, and the parity of the phase in which it is there."""
    number = tile_number(spec, served, warp, turn)
    return warp + number % spec.stages_of_warp * WARPS, number // spec.stages_of_warp % 2


def of_head(spec: Spec, entries: Entries, head: Any) -> Entries:
    """Return the entries with the weights and log decays of one value head of the key head."""
    weights = entries.weights + head * (4 * spec.entries * spec.vectors)
    return entries._replace(weights=weights, decays=entries.decays + head * (4 * spec.decay_pitch))
