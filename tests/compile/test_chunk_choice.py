"""Calls of the CuTe chunk kernel that launch both whole sequences and segments: when, their sizes, and their machine code."""

from dataclasses import replace

import pytest

from gdn.device import H100
from tests.compile import checks
from tests.compile.variants.delta_rule import chunk_of

chunk = pytest.importorskip("kernels_cute.chunk", reason="needs the CuTe DSL")


@pytest.mark.parametrize(
    ("heads", "num_tokens", "num_sequences", "is_cut"),
    [
        (8, 8192, 1, True), (32, 8192, 1, False),  # the length of a sequence alone is known
        (8, 16384, 2, True), (4, 16384, 2, True),  # cut even where they are of one length
        (8, 1000, 4, False), (32, 16384, 2, False), (32, 8192, 8, False), (8, 65536, 16, False),  # never worth it, or no SM idle
    ],
)  # fmt: skip
def test_nothing_to_decide(heads: int, num_tokens: int, num_sequences: int, is_cut: bool) -> None:
    config = chunk.default_config(chunk_of(heads, num_tokens, num_sequences), H100)
    assert config.split_if_longest_exceeds == 0 and bool(config.split_chunks) == is_cut


def test_what_does_not_fit() -> None:
    problem = chunk_of(8, 16384, 4)
    config = chunk.default_config(problem, H100)
    narrow = replace(config, stages=4, num_four_sm_clusters=0, max_l2_ring_groups=0)
    assert chunk.fits(problem, config, H100) and chunk.fits(problem, narrow, H100)
    wrong: list[dict[str, int]] = [{"split_if_longest_exceeds": -1}, {"split_chunks": 0}, {"stages": 4}, {"prefetch": 4}]
    wrong += [{"max_l2_ring_groups": -1}, {"num_four_sm_clusters": 0}, {"num_persistent_clusters": 3}]
    for changes in wrong:
        assert not chunk.fits(problem, replace(config, **changes), H100)


def test_workspace_is_what_either_way_needs() -> None:
    problem = chunk_of(8, 16384, 4)
    config = chunk.default_config(problem, H100)
    whole = replace(config, split_chunks=0, split_if_longest_exceeds=0)
    cut = replace(config, split_if_longest_exceeds=0, num_four_sm_clusters=0, max_l2_ring_groups=0, stages=4)
    wanted = [chunk.workspace_bytes(problem, one) for one in (whole, cut)]
    assert all(wanted) and chunk.workspace_bytes(problem, config) == max(wanted)


# Next to the wide form, which the cover of the others does not hold.
VARIANTS = [
    (problem, chunk.default_config(problem, H100))
    for problem in (chunk_of(8, 16384, 4), chunk_of(8, 16384, 4, dtype="float16", index_dtype="int32", has_checkpoints=True))
]


@checks.compiles(lambda: checks.tasks_of("kernels_cute.chunk", VARIANTS))
def test_both_ways_compile() -> None:
    assert all(config.num_four_sm_clusters and config.split_if_longest_exceeds for _, config in VARIANTS)
    checks.check("kernels_cute.chunk", "cute", VARIANTS)
