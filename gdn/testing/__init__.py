"""Helpers of tests and the autotuner: exact oracles, seeded inputs, comparisons, timing, machine code."""
