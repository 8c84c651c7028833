"""The CuTe chunk kernel with two state heads of a key head a cluster: what it serves, and its machine code."""

from dataclasses import replace
from typing import Any

import pytest

from gdn.device import H100, H200
from gdn.ops.delta_rule.problem import ChunkProblem
from tests.compile import checks, inspection, session
from tests.compile.variants import delta_rule

chunk = pytest.importorskip("kernels_cute.chunk", reason="needs the CuTe DSL")
shape = pytest.importorskip("kernels_cute.chunk.key_head.shape", reason="needs the CuTe DSL")
tiles = pytest.importorskip("kernels_cute.chunk.key_head.tiles", reason="needs the CuTe DSL")


def problem_of(heads: tuple[int, int, int] = (16, 16, 32), **changes: Any) -> ChunkProblem:
    return delta_rule.chunk_of(heads, **{"num_tokens": 8192, "num_sequences": 8, **changes})


def config_of(problem: ChunkProblem, **changes: int) -> Any:
    plain = {"split_chunks": 0, "split_if_longest_exceeds": 0, "num_four_sm_clusters": 0, "max_l2_ring_groups": 0}
    form = {"stages": shape.STAGES, "num_persistent_clusters": 66, "state_heads": 2}
    return replace(chunk.default_config(problem, H100), **{**plain, **form, **changes})


@pytest.mark.parametrize("heads", [(16, 16, 32), (16, 16, 64), (1, 1, 2), (2, 4, 8), (2, 2, 12)])
def test_pairs_of_heads_that_share_keys(heads: tuple[int, int, int]) -> None:
    problem = problem_of(heads)
    assert chunk.fits(problem, config_of(problem), H100)


@pytest.mark.parametrize("heads", [(4, 4, 4), (2, 2, 6), (4, 2, 4), (2, 4, 4)])
def test_heads_without_shared_keys_or_queries(heads: tuple[int, int, int]) -> None:
    problem = problem_of(heads)
    assert not chunk.fits(problem, config_of(problem), H100)


@pytest.mark.parametrize(
    "changes",
    [
        {"stages": 4}, {"state_heads": 4}, {"num_persistent_clusters": 0}, {"num_persistent_clusters": 1000},
        {"split_chunks": 16}, {"max_l2_ring_groups": 5}, {"num_four_sm_clusters": 28}, {"prefetch": 1},
    ],
    ids=str,
)  # fmt: skip
def test_configurations_that_do_not_fit(changes: dict[str, int]) -> None:
    problem = problem_of()
    assert not chunk.fits(problem, config_of(problem, **changes), H100)


def test_head_dim_64_is_refused() -> None:
    problem = problem_of(dim=64)
    assert not chunk.fits(problem, config_of(problem), H100)


@pytest.mark.parametrize("heads", [(16, 16, 32), (8, 8, 32)], ids=str)
def test_it_is_tried(heads: tuple[int, int, int]) -> None:
    """More work tiles than clusters share keys."""
    problem = problem_of(heads)
    assert chunk.default_config(problem, H100).state_heads == 1
    found = [config for config in chunk.configs(problem, H100) if config.state_heads == 2]
    assert found == [config_of(problem, prefetch=0)]


@pytest.mark.parametrize("heads", [(8, 8, 32), (16, 16, 64), (1, 1, 8), (4, 8, 32)], ids=str)
@pytest.mark.parametrize("length", [1, 93, 256])
def test_it_is_the_default_for_many_short_sequences(heads: tuple[int, int, int], length: int) -> None:
    problem = problem_of(heads, num_tokens=128 * length, num_sequences=128)
    assert chunk.default_config(problem, H100) == config_of(problem, prefetch=0)


@pytest.mark.parametrize(
    ("heads", "length", "count"),
    [((16, 16, 32), 93, 128), ((8, 8, 24), 93, 128), ((8, 8, 32), 257, 128), ((8, 8, 32), 93, 2)],
    ids=["two share keys", "three share keys", "longer", "all run at once"],
)
def test_it_is_not_the_default(heads: tuple[int, int, int], length: int, count: int) -> None:
    assert chunk.default_config(problem_of(heads, num_tokens=count * length, num_sequences=count), H100).state_heads == 1


@pytest.mark.parametrize("changes", [{"num_sequences": 1}, {"heads": (32, 32, 32)}], ids=str)
def test_it_is_not_tried(changes: dict[str, Any]) -> None:
    """All clusters run at once, or no two state heads share keys."""
    assert {config.state_heads for config in chunk.configs(problem_of(**changes), H100)} == {1}


def test_registers_are_the_pool() -> None:
    assert 2 * shape.STATE_REGISTERS + shape.MAKER_REGISTERS + shape.COPY_REGISTERS == 65536 // 128


def test_places_in_a_triangular_tile() -> None:
    """Every 16 bytes of a block on or below the diagonal have a place of their own, and none is left over."""
    found = [tiles.block_address(0, row, u, unit) for row in range(64) for u in range(row // 16 + 1) for unit in range(2)]
    assert sorted(found) == list(range(0, shape.TRIANGLE_BYTES, 16))


def test_matrices_have_no_bank_conflicts() -> None:
    """Eight neighbouring rows of 16 bytes are in all 32 banks."""
    for u in range(4):
        for row0 in range(16 * u, 64, 8):
            for unit in range(2):
                places = {tiles.block_address(0, row0 + i, u, unit) // 16 % 8 for i in range(8)}
                assert len(places) == 8


@checks.compiles(lambda: checks.tasks_of("kernels_cute.chunk", delta_rule.key_head_cover(chunk)))
def test_variants_compile_as_they_should() -> None:
    cover = delta_rule.key_head_cover(chunk)
    assert all(chunk.fits(problem, config, H100) and config.state_heads == 2 for problem, config in cover)
    checks.check("kernels_cute.chunk", "cute", cover)


@checks.compiles(lambda: checks.tasks_of("kernels_cute.chunk", delta_rule.key_head_cover(chunk)))
def test_products_do_not_wait_for_each_other() -> None:
    """ptxas waits after every product where registers do not suffice."""
    tasks = checks.tasks_of("kernels_cute.chunk", delta_rule.key_head_cover(chunk))
    for report in inspection.read([outcome.value for outcome in session.CURRENT.outcomes(tasks)]):
        assert report.count("HGMMA") >= 60 and report.count("WARPGROUP.DEPBAR") <= 16


# Heads, sequences, mean and longest length.
EQUAL: list[tuple[tuple[int, int, int], int, int, int]] = [
    ((16, 16, 32), 8, 8192, 8192), ((16, 16, 32), 32, 2048, 2048), ((16, 16, 64), 4, 8192, 8192), ((4, 4, 8), 32, 2048, 2048),
    ((16, 16, 32), 4, 4096, 4096), ((8, 8, 32), 16, 1024, 1040), ((16, 16, 32), 32, 1468, 4096),
]  # fmt: skip


@pytest.mark.parametrize(("heads", "count", "length", "longest"), EQUAL, ids=str)
def test_an_h200_takes_it_where_lengths_are_known_to_be_about_equal(
    heads: tuple[int, int, int], count: int, length: int, longest: int
) -> None:
    problem = problem_of(heads, num_tokens=count * length, num_sequences=count, longest=longest)
    assert chunk.default_config(problem, H200) == config_of(problem, prefetch=0)
    assert chunk.default_config(problem, H100).state_heads == 1
    assert chunk.default_config(replace(problem, longest=0), H200).state_heads == 1
    assert chunk.default_config(replace(problem, longest=problem.num_tokens + 1), H200).state_heads == 1


@pytest.mark.parametrize(
    ("heads", "count", "length", "longest"),
    [
        ((4, 4, 8), 32, 1468, 4096), ((16, 16, 32), 8, 8192, 10000), ((16, 16, 32), 5, 8192, 8192), ((8, 8, 24), 16, 2048, 2048),
        ((8, 8, 8), 64, 2048, 2048), ((16, 16, 32), 2, 8192, 8192),
    ],
    ids=["mixed", "one longer", "a round nearly empty", "three share keys", "nobody shares keys", "all run at once"],
)  # fmt: skip
def test_an_h200_does_not_take_it(heads: tuple[int, int, int], count: int, length: int, longest: int) -> None:
    problem = problem_of(heads, num_tokens=count * length, num_sequences=count, longest=longest)
    assert chunk.default_config(problem, H200).state_heads == 1
