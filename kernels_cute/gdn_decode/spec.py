"""Compile-time constants of the fused decode step, and the registers and places that its parts hand to each other."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int64

from gdn.ops.delta_rule.tiles import Tiles
from gdn.ops.layer_step.problem import GdnDecodeProblem
from kernels_cute.common import ring_batch
from kernels_cute.common.barriers import Arrivals, Barrier, BarrierTable
from kernels_cute.common.memory import CUTE_DTYPES
from kernels_cute.common.ring import Entries, RingTile
from kernels_cute.common.staged_state import is_possible, staged_bytes
from kernels_cute.common.state_sums import parts_floats
from kernels_cute.common.state_tile import Place, StateTile
from kernels_cute.gdn_decode.shape import CHANNELS


class Block(NamedTuple):
    """Part of the work that a thread has."""

    sequence: Any  # Int32
    key_head: Any  # Int32
    rank: Any  # Int32: of the block in its cluster
    thread: Any  # Int32
    place: Place  # value head, lane and columns


class Sequence(NamedTuple):
    """A live sequence."""

    begin: Any  # Int32: its first token
    count: Any  # Int32: its tokens
    read_slot: Any  # Int32: of the state
    window_slot: Any  # Int32
    lane_slot: Any  # Int32: state_indices of the sequence; with columns, the one of column `lane of the warp`
    column: Any  # Int32: of the window's first input
    seed: Any  # Int32, mixed: of stochastic rounding
    first: Any  # Int32, with a ring: position of the first entry that may be live
    committed: Any  # Int32, with a ring: position of its first token
    is_continued: Any = None  # Boolean: from the slot's window and state, not from zero; None: all are


class Registers(NamedTuple):
    """A thread's registers over all tokens of a sequence."""

    state: Any
    weight: Any  # words of the filter, item by item: two 16-bit values a word, one by one they would take a register each
    bias: Any  # of the filter
    line: Any  # words: the window and the token's row, item by item
    gates: Any  # A_log, dt_bias, a and b as loaded, in a thread that makes gates: words; of several tokens at once a tensor each
    z: Any  # the norm's gates of the thread's outputs
    norm_weight: Any  # Float32, of the same
    out: Any  # an item's outputs of the convolution


class Shared(NamedTuple):
    """Addresses in shared memory."""

    tokens: Any  # the token's [q | k | v of the block's columns | decay, beta], float32
    sums: Any  # sums of squares of o, of every warp of the head, for even and odd tokens
    sums_full: Any  # pointer to two barriers, which count the bytes of those sums
    warp_parts: Any  # sums over K of warps that share columns
    entries: Entries | None  # of the ring
    state: Any  # of `staged_state`, with a ring or several tokens at once, V first


class Spec:
    """A problem, its tiles, and what follows from them."""

    def __init__(self, problem: GdnDecodeProblem, tiles: Tiles) -> None:
        p, k, v = problem, problem.head_k_dim, problem.head_v_dim
        self.problem, self.tiles, self.tile = problem, tiles, StateTile(problem, tiles)
        self.ratio = p.num_v_heads // p.num_k_heads  # value heads of a key head
        self.splits = v // tiles.block_v  # blocks of a value head
        self.cluster = self.ratio * self.splits  # blocks of a key head and sequence
        self.warps = tiles.threads // 32
        self.has_norm = p.has_norm
        self.sends_squares = self.has_norm and self.splits > 1  # between the blocks of a value head
        self.parts = self.splits * self.warps  # of a sum over the head: one of each of its warps
        self.padded_parts = -(-self.parts // 4) * 4  # read four at a time
        self.history = p.width - 1  # inputs of a window
        self.dtype, self.weight_dtype = CUTE_DTYPES[p.dtype], CUTE_DTYPES[p.weight_dtype]
        self.weight_words = CHANNELS * p.width * self.weight_dtype.width // 32  # of the filter of an item
        # An item's input of a window is a word-wise copy: channels contiguous, no conversion.
        self.copies_windows = p.conv_channels_contiguous and p.conv_dtype == p.dtype
        self.group_width = 2 * k + 2 * self.ratio * v  # elements of an interleaved row, per key head
        self.has_several_tokens = p.cu_seqlens_dtype is not None  # without cu_seqlens each sequence has one token
        self.ring = None
        if p.ring_rows is not None:
            counts = (p.ring_rows, p.fold_every, p.has_accepted, p.num_k_heads, p.num_v_heads)
            self.ring = RingTile(*counts, self.tile)
        # Tokens of a sequence whose convolutions, gates and norms are computed at once.
        self.batch = 1
        if self.ring is not None and p.has_accepted and ring_batch.serves(self.tile):
            self.batch = 4 if self.ring.most_tokens > 2 else 2
        self.warp_columns = self.tile.groups_per_warp * tiles.v_per_thread
        if self.ring is None and self.has_several_tokens and ring_batch.serves(self.tile) and self.splits <= self.warp_columns:
            self.batch = 4
        self.lane_outputs = -(-self.warp_columns * self.batch // 32)  # of a batch, in a lane; without a ring
        self.line_rows = p.width - 1 + self.batch  # rows of an item: its window, and those of the tokens
        self.parity_bytes = 4 * self.batch * self.padded_parts  # of the sums of the tokens that are computed at once
        # Whether a window keeps the inputs of all tokens of a step, since some may be rejected.
        self.keeps_columns = p.has_columns or self.ring is not None and p.has_accepted
        self.shared_items = 2 * k // CHANNELS  # items of q and k: every block of the cluster computes them
        self.items = self.shared_items + tiles.block_v // CHANNELS  # of a block
        self.passes = -(-self.items // tiles.threads)  # items of a thread
        self.gates_at = 2 * k + tiles.block_v  # place of decay and beta in Shared.tokens
        self.num_parts = parts_floats(self.tile, 2 if self.has_several_tokens else 1)  # sums of warps that share columns
        self.num_entries = 0 if self.ring is None else self.ring.floats(self.batch)
        self.token_floats = self.gates_at + (4 if self.ring is not None or self.batch == 1 else 8)  # factors, without a ring
        self.num_tokens = self.batch * self.token_floats + (4 if self.batch > 1 else 0)  # and q . q of each
        self.stages_state = (self.ring is not None or self.batch > 1) and is_possible(self.tile)
        self.num_staged = 0
        if self.stages_state:  # without a ring the float32 state waits there between batches
            self.num_staged = staged_bytes(self.tile) // 4 if self.ring is not None else tiles.threads * self.tile.values
        num_floats = self.num_tokens + self.num_parts + self.num_entries + self.num_staged
        self.shared_bytes = 16 + 2 * self.parity_bytes + 4 * num_floats
        # One barrier for even and one for odd tokens; used where a head has several blocks.
        sums_full = Arrivals("token", "role", what="with the bytes of the head's warps")
        self.barriers = BarrierTable({"token": self.warps}, [Barrier("sums_full", 2, (sums_full,), ("token",))])

    def storage(self) -> Any:
        """Shared memory of a block."""
        num_sums, num_tokens, num_parts, num_entries = self.parity_bytes // 2, self.num_tokens, self.num_parts, self.num_entries
        num_barriers, num_staged = self.barriers.barriers["sums_full"].stages, self.num_staged

        @cute.struct
        class Storage:
            sums_full: cute.struct.MemRange[Int64, num_barriers]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, num_sums], 16]
            tokens: cute.struct.Align[cute.struct.MemRange[Float32, num_tokens], 16]
            warp_parts: cute.struct.Align[cute.struct.MemRange[Float32, num_parts], 16]
            entries: cute.struct.Align[cute.struct.MemRange[Float32, num_entries], 16]
            state: cute.struct.Align[cute.struct.MemRange[Float32, num_staged], 16]

        return Storage


def column_in_head(spec: Spec, rank: Any) -> Any:
    """First column of V of a block, in its head."""
    return rank % spec.splits * spec.tiles.block_v


def place_of_gates(spec: Spec, params: Any, block: Block) -> Any:
    """Tensor and column of a token's raw a, and of its b."""
    head = block.place.head
    if spec.problem.interleaved:
        at = block.key_head * (2 * spec.ratio) + block.rank // spec.splits
        return (params.b, at + spec.ratio), (params.b, at)
    return (params.a, head), (params.b, head)
