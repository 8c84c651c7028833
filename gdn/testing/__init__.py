"""What tests and the autotuner share: exact oracles, seeded inputs, comparisons."""
