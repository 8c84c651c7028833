"""Helpers of tests, tuner and benchmarks: exact oracles, seeded inputs, comparisons, timing, machine code."""
