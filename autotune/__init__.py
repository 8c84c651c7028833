"""Finds the fastest configuration of each kernel: `python -m autotune --help`."""
