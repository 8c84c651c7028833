"""Compile-time constants of the top-k kernel, its shared memory, and the values that its parts hand to each other."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Uint32

from kernels_cute.topk.shape import BINS, SPARE_WORDS

LEAST_KEY = 0x00800000  # smallest key of a score that may be selected; keys of NaN and -inf are below
FIRST_SHIFT = 20  # first digit: sign, exponent, three bits of the mantissa
COLUMN_BITS = 21
LAST_COLUMN = (1 << COLUMN_BITS) - 1
ACCESS = 16  # bytes


class Tiles:
    """Known at compile time; sizes, strides, ranges and k arrive at launch. See Config."""

    def __init__(self, problem: Any, config: Any) -> None:
        self.is_float32 = problem.dtype == "float32"  # else bfloat16
        self.element_bytes = 4 if self.is_float32 else 2
        self.by_score = problem.sorted_by == "score"  # the result is sorted by score, else by column
        self.ratio = problem.ratio  # tokens of a column, which the result lists
        self.threads, self.warps, self.unroll = config.threads, config.threads // 32, config.unroll
        self.blocks_per_sm, self.list_entries = config.blocks_per_sm, config.list_entries
        self.bitmap_words = config.max_columns // 32 + SPARE_WORDS

    def storage(self) -> Any:
        @cute.struct
        class Storage:
            # The list, pairs of score and column, takes both. After it they hold the result's columns, and keys to sort them by.
            keys: cute.struct.Align[cute.struct.MemRange[Uint32, self.list_entries], 16]
            columns: cute.struct.Align[cute.struct.MemRange[Int32, self.list_entries], 16]
            bins: cute.struct.Align[cute.struct.MemRange[Int32, BINS + 4], 16]  # one more for entries that are in no bin
            bitmap: cute.struct.Align[cute.struct.MemRange[Uint32, self.bitmap_words], 16]
            warp_sums: cute.struct.MemRange[Int32, 32]
            found: cute.struct.MemRange[Int32, 4]
            passed: cute.struct.MemRange[Int32, 4]

        return Storage


class Span(NamedTuple):
    """The row: columns [lead, stop) from a global address, which is a multiple of 16 bytes."""

    base: Any
    lead: Any
    stop: Any


class Entries(NamedTuple):
    """The entries that are counted: the list's, or one piece in 2**every_bits of the row."""

    from_list: bool
    num: Any
    every_bits: Any


class Digit(NamedTuple):
    """A digit of a key or, among keys that equal tie_key, of a column: (value - lower) >> shift, at most top."""

    lower: Any
    shift: Any
    top: Any
    is_tie: Any
    tie_key: Any
