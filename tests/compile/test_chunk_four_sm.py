"""The four-SM form of the CuTe chunk kernel: four SMs for a sequence and head, where it is chosen, and its machine code."""

from dataclasses import replace
from typing import Any

import pytest

from gdn import runtime
from gdn.device import H100
from gdn.ops.delta_rule.problem import ChunkProblem
from gdn.runtime import compiled, select
from gdn.runtime.env import Switches
from tests.compile import checks
from tests.compile.variants import delta_rule
from tests.compile.variants.delta_rule import chunk_of

chunk = pytest.importorskip("kernels_cute.chunk", reason="needs the CuTe DSL")
kernel = pytest.importorskip("kernels_cute.chunk.kernel", reason="needs the CuTe DSL")
plan = pytest.importorskip("kernels_cute.chunk.plan", reason="needs the CuTe DSL")
shape = pytest.importorskip("kernels_cute.chunk.four_sm.shape", reason="needs the CuTe DSL")


def four_sm_config(problem: ChunkProblem) -> Any:
    return replace(
        chunk.default_config(problem, H100), stages=3, prefetch=0, split_chunks=0, split_if_longest_exceeds=0,
        num_persistent_clusters=0, num_four_sm_clusters=30, max_l2_ring_groups=3,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "num_tokens", "num_sequences", "is_four_sm"),
    [
        (32, 8192, 1, True), (33, 32768, 1, True), (32, 1024, 1, True), (24, 8192, 1, True), (8, 2048, 1, True),
        (16, 8192, 2, True), (8, 16384, 4, True), (30, 8192, 1, True), (31, 8192, 1, True),
        (34, 8192, 1, False), (32, 8192, 2, False), (64, 8192, 1, False), (96, 32768, 1, False),  # more blocks than SMs
        (16, 8192, 1, False), (8, 8192, 1, False), (4, 32768, 1, False),  # segments on all SMs are faster
        (32, 0, 1, False),
    ],
)  # fmt: skip
def test_where_it_is_chosen(heads: int, num_tokens: int, num_sequences: int, is_four_sm: bool) -> None:
    problem = chunk_of(heads, num_tokens, num_sequences)
    config = chunk.default_config(problem, H100)
    assert bool(config.num_four_sm_clusters) == is_four_sm and chunk.fits(problem, config, H100)
    found = chunk.configs(problem, H100)
    assert config in found and {bool(one.num_four_sm_clusters) for one in found} == {False, True}


@pytest.mark.parametrize(
    ("heads", "num_sequences", "groups"),
    [(1, 1, 0), (16, 1, 0), (30, 1, 0), (31, 1, 1), (32, 1, 2), (33, 1, 3), (8, 4, 2), (34, 1, 0), (32, 64, 0)],
)
def test_what_goes_through_the_ring(heads: int, num_sequences: int, groups: int) -> None:
    """The rest next to the clusters of four, unless it is more than there is room for: then nothing."""
    problem = chunk_of(heads, 4096, num_sequences)
    config = four_sm_config(problem)
    assert kernel.num_l2_ring_groups(heads * num_sequences, config) == groups
    assert kernel.num_l2_ring_groups(heads * num_sequences, replace(config, max_l2_ring_groups=0)) == 0
    # A place of counts more than there are rings of tiles.
    tile, vectors = 64 * 64 * 2, 4 * 64 * 4
    expected = 256 * (groups + 1) + groups * shape.RING * (3 * tile + vectors)
    assert chunk.workspace_bytes(problem, config) == expected


@pytest.mark.parametrize("num_sms", [132, 114, 144])
def test_all_run_at_once(num_sms: int) -> None:
    fours, groups = plan.four_sm_clusters(replace(H100, num_sms=num_sms))
    assert fours > 0 and groups >= 0 and shape.BLOCKS * (fours + groups) <= num_sms


def test_the_ring() -> None:
    assert (shape.TAKEN + 1) * shape.WORD_BYTES <= shape.WORDS_BYTES
    # Makers wait for a count that the chains write when they read a later chunk, which must not be one that waits for it.
    assert shape.RING > shape.SLOTS + shape.TAKEN_EVERY


def test_what_does_not_fit() -> None:
    problem = chunk_of(32, 8192, 1)
    config = four_sm_config(problem)
    assert chunk.fits(problem, config, H100)
    for changes in (
        {"split_chunks": 16},
        {"stages": 1},
        {"stages": 4},
        {"num_persistent_clusters": 1},
        {"num_four_sm_clusters": -1},
        {"max_l2_ring_groups": -1},
        {"prefetch": 4},
    ):
        assert not chunk.fits(problem, replace(config, **changes), H100)
    narrow = chunk_of(32, 8192, 1, dim=64)
    assert not chunk.fits(narrow, four_sm_config(narrow), H100)
    assert all(one.num_four_sm_clusters == 0 for one in chunk.configs(narrow, H100))
    assert not chunk.fits(problem, replace(config, num_four_sm_clusters=0, stages=4), H100)  # a ring of nobody
    assert chunk.fits(problem, replace(config, num_four_sm_clusters=0, max_l2_ring_groups=0, stages=4), H100)


def test_batch_invariance_fixes_the_form() -> None:
    """The form is that of one sequence of 32768 tokens, whatever the batch."""
    switches = Switches(batch_invariant=True, tuned="off")
    for sizes in ((1, 1), (8192, 1), (8192, 64), (100000, 3)):
        choice = select.choose(chunk_of(32, *sizes), H100, runtime.candidates("chunk"), switches, "cute")
        assert choice.config.num_four_sm_clusters > 0


def test_numbers_of_clusters_compile_nothing_new() -> None:
    problem = chunk_of(32, 8192, 1)
    config = four_sm_config(problem)
    keys = [
        compiled.entry_key("chunk", "cute", chunk, problem, replace(config, num_four_sm_clusters=clusters, max_l2_ring_groups=r))
        for clusters, r in ((30, 3), (1, 9), (2, 0))
    ]
    assert len(set(keys)) == 1


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("parts", [1, 2])
def test_room(stages: int, parts: int) -> None:
    assert max(shape.chain_bytes(stages), shape.maker_bytes(parts)) <= H100.shared_bytes_per_block
    registers = shape.SETS * (shape.INVERSE_REGISTERS + shape.SCORE_REGISTERS) + shape.COPY_REGISTERS
    idle = (shape.WARPGROUPS - 2) * shape.IDLE_REGISTERS
    pool = 65536 // (shape.WARPGROUPS * 128) // 8 * 8 * shape.WARPGROUPS
    assert max(registers, shape.STATE_REGISTERS + shape.COPY_REGISTERS + idle) <= pool


@checks.compiles(lambda: checks.tasks_of("kernels_cute.chunk", delta_rule.wide_cover(chunk)))
def test_variants_compile_as_they_should() -> None:
    cover = delta_rule.wide_cover(chunk)
    assert all(chunk.fits(problem, config, H100) and config.num_four_sm_clusters for problem, config in cover)
    checks.check("kernels_cute.chunk", "cute", cover)
