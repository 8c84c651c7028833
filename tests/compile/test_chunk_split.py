"""Split calls of the CuTe chunk kernel: slots, workspace, and the choice of a length."""

import random
from dataclasses import replace

import pytest

from gdn import runtime
from gdn.device import H100
from gdn.ops.delta_rule.inputs import chunk_problem
from gdn.ops.delta_rule.problem import ChunkProblem
from gdn.runtime import compiled, select
from gdn.runtime.env import Switches

chunk = pytest.importorskip("kernels_cute.chunk", reason="needs the CuTe DSL")
segments = pytest.importorskip("kernels_cute.chunk.split.shape", reason="needs the CuTe DSL")


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


# State heads, tokens, sequences -> us on an H100 by chunks of a segment.
MEASURED = {
    (8, 8192, 1): {0: 204.0, 8: 120.7, 12: 124.7, 16: 82.0, 20: 88.9, 24: 98.7, 32: 118.8, 64: 208.6},
    (8, 32768, 1): {0: 777.0, 16: 383.0, 32: 266.0, 64: 238.5, 128: 427.0},
    (4, 8192, 1): {0: 200.0, 8: 66.9},
    (4, 32768, 1): {0: 796.0, 16: 215.0, 32: 145.7, 36: 153.0, 64: 227.0},
}


@pytest.mark.parametrize("sizes", MEASURED, ids=str)
def test_the_default_is_about_the_fastest_measured(sizes: tuple[int, int, int]) -> None:
    times = MEASURED[sizes]
    segment = chunk.default_config(problem_of(*sizes), H100).split_chunks
    assert times[segment] <= 1.1 * min(times.values())


@pytest.mark.parametrize(
    ("heads", "num_tokens", "num_sequences", "is_split"),
    [
        (2, 32768, 1, True), (8, 512, 1, False),
        (32, 8192, 1, False), (66, 8192, 1, False), (8, 65536, 16, False),  # most SMs have a block
        (8, 2048, 1, False), (8, 32768, 1, True),  # four SMs for a head and sequence, or a split
        (8, 1000, 4, False),
    ],
)  # fmt: skip
def test_the_default_splits_where_it_pays(heads: int, num_tokens: int, num_sequences: int, is_split: bool) -> None:
    problem = problem_of(heads, num_tokens, num_sequences)
    config = chunk.default_config(problem, H100)
    assert bool(config.split_chunks) == is_split and chunk.fits(problem, config, H100)
    found = chunk.configs(problem, H100)
    assert config in found and len(found) == len(set(found)) and any(one.split_chunks == 0 for one in found)


def test_what_is_tuned_for_unequal_lengths_has_segments() -> None:
    assert len({config.split_chunks for config in chunk.configs(problem_of(8, 16100, 4), H100)}) > 3


@pytest.mark.parametrize(
    ("heads", "num_tokens", "num_sequences", "prefetch"),
    [
        (32, 4096, 2, 2),
        (32, 3968, 2, 0),
        (32, 8192, 8, 0),
        (32, 16384, 8, 0),
        (32, 16384, 2, 2),
        (8, 8192, 1, 0),
        (8, 32768, 1, 2),
        (32, 32768, 1, 0),
    ],  # fmt: skip
)
def test_blocks_with_many_chunks_ask_the_cache_ahead(heads: int, num_tokens: int, num_sequences: int, prefetch: int) -> None:
    assert chunk.default_config(problem_of(heads, num_tokens, num_sequences), H100).prefetch == prefetch


def test_batch_invariance_fixes_the_length() -> None:
    """The length is that of one sequence of 32768 tokens, whatever the batch."""
    switches = Switches(batch_invariant=True, tuned="off")
    wanted = chunk.default_config(problem_of(8, 32768, 1), H100)
    assert wanted.split_chunks > 0
    for sizes in ((1, 1), (8192, 1), (8192, 64), (100000, 3)):
        choice = select.choose(problem_of(8, *sizes), H100, runtime.candidates("chunk"), switches, "cute")
        assert choice.config == wanted


def test_workspace() -> None:
    problem = problem_of(8, 8192, 3)
    config = replace(
        chunk.default_config(problem, H100), stages=4, split_chunks=16, num_four_sm_clusters=0, split_if_longest_exceeds=0
    )
    assert chunk.workspace_bytes(problem, replace(config, split_chunks=0)) == 0
    assert chunk.workspace_bytes(problem, config) == (8 + 3) * 8 * 2 * 128 * 128 * 4


def test_a_length_compiles_nothing_new() -> None:
    problem = problem_of(8, 8192, 1)
    config = chunk.default_config(problem, H100)
    keys = {
        length: compiled.entry_key("chunk", "cute", chunk, problem, replace(config, split_chunks=length)) for length in (0, 8, 16)
    }
    assert keys[8] == keys[16] != keys[0]


@pytest.mark.parametrize("num_tokens", [0, 1, 64])
def test_a_call_that_needs_no_segments_has_a_default(num_tokens: int) -> None:
    problem = problem_of(4, num_tokens, 1)
    config = chunk.default_config(problem, H100)
    assert config.split_chunks == 0 and config in chunk.configs(problem, H100)
    assert chunk.workspace_bytes(problem, replace(config, split_chunks=2)) >= 0
