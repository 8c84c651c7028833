"""The wide form of the CuTe chunk kernel: four SMs for a sequence and head, where it is chosen, and its machine code."""

from dataclasses import replace
from typing import Any

import pytest

from gdn import runtime
from gdn.device import H100
from gdn.problems import ChunkProblem
from gdn.runtime import select
from gdn.runtime.env import Switches
from gdn.testing.inputs import chunk_problem
from tests.compile import checks, variants

chunk = pytest.importorskip("kernels_cute.chunk", reason="needs the CuTe DSL")
wide = pytest.importorskip("kernels_cute._chunk_wide", reason="needs the CuTe DSL")
shape = pytest.importorskip("kernels_cute._chunk_wide_shape", reason="needs the CuTe DSL")


def problem_of(heads: int, num_tokens: int, num_sequences: int, head_dim: int = 128) -> ChunkProblem:
    return chunk_problem(
        num_q_heads=heads, num_k_heads=heads, num_v_heads=heads, head_k_dim=head_dim, head_v_dim=head_dim, dtype="bfloat16",
        num_tokens=num_tokens, num_sequences=num_sequences,
    )  # fmt: skip


def wide_config(problem: ChunkProblem) -> Any:
    return replace(chunk.default_config(problem, H100), paired=True, stages=3, segment=0, makers=2)


@pytest.mark.parametrize(
    ("heads", "num_tokens", "num_sequences", "is_wide"),
    [
        (32, 8192, 1, True), (33, 32768, 1, True), (32, 1024, 1, True), (24, 8192, 1, True), (8, 2048, 1, True),
        (16, 8192, 2, True), (8, 16384, 4, True),
        (34, 8192, 1, False), (32, 8192, 2, False), (64, 8192, 1, False),  # more blocks than SMs
        (16, 8192, 1, False), (8, 8192, 1, False), (4, 32768, 1, False),  # segments on all SMs are faster
        (32, 0, 1, False),
    ],
)  # fmt: skip
def test_where_it_is_chosen(heads: int, num_tokens: int, num_sequences: int, is_wide: bool) -> None:
    problem = problem_of(heads, num_tokens, num_sequences)
    config = chunk.default_config(problem, H100)
    assert bool(config.makers) == is_wide and chunk.fits(problem, config, H100)
    found = chunk.configs(problem, H100)
    assert config in found and {one.makers for one in found} == {0, 2}


@pytest.mark.parametrize(("heads", "num_sequences"), [(1, 1), (32, 1), (8, 4)])
def test_workspace(heads: int, num_sequences: int) -> None:
    """A place of counts more than there are sequences and heads, then a ring of tiles for each."""
    problem = problem_of(heads, 4096, num_sequences)
    tile, vectors = 64 * 64 * 2, 4 * 64 * 4
    groups = heads * num_sequences
    expected = 256 * (groups + 1) + groups * shape.RING * (3 * tile + vectors)
    assert chunk.workspace_bytes(problem, wide_config(problem)) == expected
    assert (shape.TAKEN + 1) * shape.WORD_BYTES <= shape.WORDS_BYTES
    # Makers wait for a count that the chains write when they read a later chunk, which must not be one that waits for it.
    assert shape.RING > shape.SLOTS + shape.TAKEN_EVERY


def test_what_does_not_fit() -> None:
    problem = problem_of(32, 8192, 1)
    config = wide_config(problem)
    assert chunk.fits(problem, config, H100)
    for changes in ({"segment": 16}, {"makers": 1}, {"stages": 1}, {"stages": 4}):
        assert not chunk.fits(problem, replace(config, **changes), H100)
    narrow = problem_of(32, 8192, 1, head_dim=64)
    assert not chunk.fits(narrow, wide_config(narrow), H100)
    assert all(one.makers == 0 for one in chunk.configs(narrow, H100))


def test_batch_invariance_fixes_the_form() -> None:
    """Whatever the batch: the default of one sequence of 32768 tokens."""
    switches = Switches(batch_invariant=True, tuned="off")
    for sizes in ((1, 1), (8192, 1), (8192, 64), (100000, 3)):
        choice = select.choose(problem_of(32, *sizes), H100, runtime.candidates("chunk"), switches, "cute")
        assert choice.config.makers == 2


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("parts", [1, 2])
def test_room(stages: int, parts: int) -> None:
    assert max(shape.chain_bytes(stages), shape.maker_bytes(parts)) <= H100.shared_bytes_per_block
    registers = shape.SETS * (shape.INVERSE_REGISTERS + shape.SCORE_REGISTERS) + shape.COPY_REGISTERS
    idle = (shape.WARPGROUPS - 2) * shape.IDLE_REGISTERS
    pool = 65536 // (shape.WARPGROUPS * 128) // 8 * 8 * shape.WARPGROUPS
    assert max(registers, shape.STATE_REGISTERS + shape.COPY_REGISTERS + idle) <= pool


def test_variants_compile_as_they_should() -> None:
    served = (problem for problem, _ in variants.cover("chunk", chunk) if isinstance(problem, ChunkProblem))
    found = [problem for problem in served if problem.head_v_dim == 128]
    tasks = [(problem, replace(wide_config(problem), prefetch=2 * (i % 2))) for i, problem in enumerate(dict.fromkeys(found))]
    assert len(tasks) >= 5
    failed = checks.failures("kernels_cute.chunk", "cute", tasks, H100)
    assert not failed, "\n".join(failed)
