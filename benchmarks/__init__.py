"""Measures operators, layers and models, and tunes nothing: `python -m benchmarks --help`."""
