"""Compile-time constants of the top-k kernel, its shared memory, and the values that its parts hand to each other."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Uint32

DIGIT_BITS = 12
BINS = 1 << DIGIT_BITS
LEAST_KEY = 0x00800000  # smallest key of a score that may be selected; keys of NaN and -inf are below
OPEN = 32  # undecided bits of a key with no bound from above
FIRST_SHIFT = 20  # first digit: sign, exponent, three bits of the mantissa
FIRST_VALID = BINS - 8  # bins of it that scores can have; the others hold what is less than the bound, NaN and -inf too
# First digit of the list: 4096 bins of two octaves, or, where the sample was counted twice and many scores are close to each
# other, of a quarter of one. 13 would leave a last digit of one bit, and `find` leaves out bins by fours.
LIST_SHIFT = 12
FINE_SHIFT = 9
RANKED = 128  # up to this many entries of the list in one bin are ranked by comparison, without further digits
COLUMN_BITS = 21
LAST_COLUMN = (1 << COLUMN_BITS) - 1
MOST_COLUMNS = 1 << 20  # a bitmap of 128 KiB
SPARE_WORDS = 2  # words of the bitmap for columns before the range
SAMPLE_BITS = 4  # one piece of sixteen is sampled
PIECE_BITS = 1  # a piece is two neighbouring quads: 32 bytes of float32, which memory reads anyway
ACCESS = 16  # bytes
PREFETCH_BYTES = 65536  # bytes of the row that the L2 fetches while the sample is searched


@dataclass(frozen=True)
class Tiles:
    """Known at compile time; sizes, strides, ranges and k arrive at launch."""

    is_float32: bool  # else bfloat16
    by_score: bool  # the result is sorted by score, else by column
    threads: int
    unroll: int  # quads of scores that a thread has in flight
    blocks_per_sm: int
    list_entries: int
    bitmap_words: int

    @property
    def element_bytes(self) -> int:
        return 4 if self.is_float32 else 2

    @property
    def warps(self) -> int:
        return self.threads // 32

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
