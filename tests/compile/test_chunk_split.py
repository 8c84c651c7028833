"""Split calls of the CuTe chunk kernel: slots, workspace, the choice of a length, and machine code with and without a split."""

import random
from dataclasses import replace

import pytest

from gdn.device import H100
from gdn.problems import ChunkProblem
from gdn.runtime import compiled
from gdn.testing.inputs import chunk_problem
from tests.compile import checks, variants

chunk = pytest.importorskip("kernels_cute.chunk", reason="needs the CuTe DSL")
segments = pytest.importorskip("kernels_cute._chunk_segments", reason="needs the CuTe DSL")


def problem_of(heads: int, num_tokens: int, num_sequences: int, head_dim: int = 128) -> ChunkProblem:
    return chunk_problem(
        num_q_heads=heads, num_k_heads=heads, num_v_heads=heads, head_k_dim=head_dim, head_v_dim=head_dim, dtype="bfloat16",
        num_tokens=num_tokens, num_sequences=num_sequences,
    )  # fmt: skip


def test_slots_are_distinct_and_enough() -> None:
    """The numbering that the device follows, for ragged batches with and without tokens beyond the last sequence."""
    source = random.Random(0)
    for _ in range(3000):
        size = 64 * source.choice((1, 2, 5))
        lengths = [source.choice((0, 1, size - 1, size, size + 1, 3 * size, source.randrange(5 * size))) for _ in range(6)]
        lengths = lengths[: source.randrange(1, 7)]
        padding = source.choice((0, 1, size))
        used: list[int] = []
        start = 0
        for n, length in enumerate(lengths):
            first = start // size + n
            used += range(first, first + max(-(-length // size), 1))
            start += length
        assert len(set(used)) == len(used) and used == sorted(used)
        if start + padding:
            assert used[-1] < segments.num_slots(start + padding, len(lengths), size), (lengths, padding, size)


@pytest.mark.parametrize(
    ("heads", "num_tokens", "is_split"), [(8, 8192, True), (2, 32768, True), (8, 512, False), (66, 8192, False)]
)
def test_the_default_splits_where_it_pays(heads: int, num_tokens: int, is_split: bool) -> None:
    problem = problem_of(heads, num_tokens, 1)
    config = chunk.default_config(problem, H100)
    assert bool(config.segment) == is_split and chunk.fits(problem, config, H100)
    found = chunk.configs(problem, H100)
    assert config in found and len(found) == len(set(found)) and any(one.segment == 0 for one in found)


def test_many_sequences_are_not_split() -> None:
    assert chunk.default_config(problem_of(8, 65536, 16), H100).segment == 0


def test_workspace() -> None:
    problem = problem_of(8, 8192, 3)
    config = replace(chunk.default_config(problem, H100), segment=16)
    assert chunk.workspace_bytes(problem, replace(config, segment=0)) == 0
    assert chunk.workspace_bytes(problem, config) == (8 + 3) * 8 * 2 * 128 * 128 * 4


def test_a_length_compiles_nothing_new() -> None:
    problem = problem_of(8, 8192, 1)
    config = chunk.default_config(problem, H100)
    keys = {
        segment: compiled.entry_key("chunk", "cute", chunk, problem, replace(config, segment=segment)) for segment in (0, 8, 16)
    }
    assert keys[8] == keys[16] != keys[0]


def test_two_stages() -> None:
    """Compositions of summaries go through as many buffers as there are stages; the cover has the default's."""
    cover = variants.cover("chunk", chunk)
    tasks = [(problem, replace(config, stages=2)) for problem, config in cover if config.segment][:2]
    failed = checks.failures("kernels_cute.chunk", "cute", tasks, H100)
    assert len(tasks) == 2 and not failed, "\n".join(failed)
