"""Sizes of the fused decode step that its choice of a configuration needs."""

CHANNELS = 4  # channels of the convolution in an item, which a thread computes: one 8-byte access of a row
WORDS = CHANNELS // 2  # words of two values of an item in a row
