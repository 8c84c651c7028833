"""Sizes of the top-k kernel that its choice of a configuration needs."""

DIGIT_BITS = 12
BINS = 1 << DIGIT_BITS
MOST_COLUMNS = 1 << 20  # a bitmap of 128 KiB
SPARE_WORDS = 2  # words of the bitmap for columns before the range
