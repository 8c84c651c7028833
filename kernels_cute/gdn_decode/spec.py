"""Compile-time constants of the fused decode step, and the registers and places that its parts hand to each other."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int64

from gdn.problems import GdnDecodeProblem
from gdn.recurrent_tiles import Tiles
from kernels_cute.common.memory import CUTE_DTYPES
from kernels_cute.common.state_sums import parts_floats
from kernels_cute.common.state_tile import Place, StateTile

CHANNELS = 4  # channels of the convolution in an item, which a thread computes: one 8-byte access of a row
WORDS = CHANNELS // 2  # words of two values of an item in a row


class Block(NamedTuple):
    """What a thread works on."""

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


class HeadGate(NamedTuple):
    """A head's part of the decay, in the thread that makes the gates."""

    minus_decay: Any  # Float32: -exp(A_log)
    dt_bias: Any  # Float32


class Registers(NamedTuple):
    """A thread's registers over all tokens of a sequence."""

    state: Any
    weight: Any  # words of the filter, item by item: two 16-bit values a word, one by one they would take a register each
    bias: Any  # of the filter
    line: Any  # words: the window and the token's row, item by item
    gates: Any  # raw a and b, in the thread that makes the gates
    z: Any  # the norm's gate of the thread's column
    norm_weight: Any  # Float32, of the same
    out: Any  # an item's outputs of the convolution


class Shared(NamedTuple):
    """Addresses in shared memory."""

    tokens: Any  # the token's [q | k | v of the block's columns | decay, beta], float32
    sums: Any  # sums of squares of o, of every warp of the head, for even and odd tokens
    barriers: Any  # pointer to two barriers, which count the bytes of those sums
    warp_parts: Any  # sums over K of warps that share columns


@dataclass(frozen=True)
class Spec:
    """A problem, its tiles, and what follows from them."""

    problem: GdnDecodeProblem
    tiles: Tiles

    @cached_property
    def tile(self) -> StateTile:
        return StateTile(self.problem, self.tiles)

    @cached_property
    def ratio(self) -> int:
        """Value heads of a key head."""
        return self.problem.num_v_heads // self.problem.num_k_heads

    @cached_property
    def splits(self) -> int:
        """Blocks of a value head."""
        return self.problem.head_v_dim // self.tiles.block_v

    @cached_property
    def cluster(self) -> int:
        """Blocks of a key head and sequence."""
        return self.ratio * self.splits

    @cached_property
    def warps(self) -> int:
        return self.tiles.threads // 32

    @cached_property
    def parts(self) -> int:
        """Parts of a sum over the head: one of each of its warps."""
        return self.splits * self.warps

    @cached_property
    def parity_bytes(self) -> int:
        """Bytes of the sums of a token in shared memory, read four at a time."""
        return -(-self.parts // 4) * 16

    @cached_property
    def history(self) -> int:
        """Inputs of a window."""
        return self.problem.width - 1

    @cached_property
    def dtype(self) -> Any:
        return CUTE_DTYPES[self.problem.dtype]

    @cached_property
    def weight_dtype(self) -> Any:
        return CUTE_DTYPES[self.problem.weight_dtype]

    @cached_property
    def weight_words(self) -> int:
        """Words of the filter of an item."""
        return int(CHANNELS * self.problem.width * self.weight_dtype.width // 32)

    @cached_property
    def copies_windows(self) -> bool:
        """Whether an item's input of a window is a word-wise copy: channels contiguous, no conversion."""
        return self.problem.conv_channels_contiguous and self.problem.conv_dtype == self.problem.dtype

    @cached_property
    def group_width(self) -> int:
        """Elements of an interleaved row, per key head."""
        return 2 * self.problem.head_k_dim + 2 * self.ratio * self.problem.head_v_dim

    @cached_property
    def has_several_tokens(self) -> bool:
        """Whether sequences come with cu_seqlens; without, each has one token."""
        return self.problem.cu_seqlens_dtype is not None

    @cached_property
    def shared_items(self) -> int:
        """Items of q and k: every block of the cluster computes them."""
        return 2 * self.problem.head_k_dim // CHANNELS

    @cached_property
    def items(self) -> int:
        """Items of a block."""
        return self.shared_items + self.tiles.block_v // CHANNELS

    @cached_property
    def passes(self) -> int:
        """Items of a thread."""
        return -(-self.items // self.tiles.threads)

    @cached_property
    def gates_at(self) -> int:
        """Place of decay and beta in Shared.tokens."""
        return 2 * self.problem.head_k_dim + self.tiles.block_v

    @cached_property
    def warp_parts_floats(self) -> int:
        return max(4, parts_floats(self.tile, 2 if self.has_several_tokens else 1))

    @cached_property
    def shared_bytes(self) -> int:
        return 16 + 2 * self.parity_bytes + 4 * (self.gates_at + 4) + 4 * self.warp_parts_floats

    def storage(self) -> Any:
        """Shared memory of a block; without `warp_parts` where no warps share columns."""
        num_sums, num_tokens, num_parts = self.parity_bytes // 2, self.gates_at + 4, self.warp_parts_floats

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 2]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, num_sums], 16]
            tokens: cute.struct.Align[cute.struct.MemRange[Float32, num_tokens], 16]

        @cute.struct
        class StorageOfWarps:
            barriers: cute.struct.MemRange[Int64, 2]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, num_sums], 16]
            tokens: cute.struct.Align[cute.struct.MemRange[Float32, num_tokens], 16]
            warp_parts: cute.struct.Align[cute.struct.MemRange[Float32, num_parts], 16]

        return StorageOfWarps if self.tile.k_warps > 1 else Storage


def column_in_head(spec: Spec, rank: Any) -> Any:
    """First column of V of a block, in its head."""
    return rank % spec.splits * spec.tiles.block_v
