"""Finds the fastest configuration of each kernel, and measures the operators: `python -m autotune --help`."""
