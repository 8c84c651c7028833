"""The public operators, a folder a family.

A family holds everything about its operators but their kernels: `problem.py` (what kernels are compiled for, tuned for and
launched with), `reference.py`, `oracle.py`, `checks.py`, the public functions, `inputs.py`, `examples.py` (problems of a model's
calls) and `cases.py` (shapes to tune). `OPERATORS` are the records that `import gdn` hands to the registry.
"""
