"""A fuzz of every operator that launches kernels, and of the layers, on several streams at once: `python -m tests.fuzz`.

A developer's tool for a machine with a Hopper GPU, and no part of the test command. Without a GPU it runs on the reference, which
tests its own logic.
"""
