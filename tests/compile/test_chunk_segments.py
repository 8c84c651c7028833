"""Segments of the TileLang chunk kernel, as far as they need no GPU: compiled code, defaults, slots, workspace."""

import dataclasses
import importlib
from typing import Any

import pytest

from gdn import runtime
from gdn.device import H100
from gdn.ops.delta_rule.inputs import chunk_problem
from gdn.ops.delta_rule.problem import ChunkProblem
from gdn.runtime import compiled, select
from gdn.runtime.env import Switches

chunk = pytest.importorskip("kernels_tl.chunk", reason="needs TileLang")


def _problem(num_k_heads: int, num_v_heads: int, num_tokens: int, num_sequences: int = 1) -> ChunkProblem:
    return chunk_problem(
        num_q_heads=num_k_heads, num_k_heads=num_k_heads, num_v_heads=num_v_heads, head_k_dim=128, head_v_dim=128,
        dtype="bfloat16", num_tokens=num_tokens, num_sequences=num_sequences,
    )  # fmt: skip


def test_only_whether_there_are_segments_is_compiled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def script(function: Any, **options: Any) -> bytes:
        return bytes(function.script(), "utf-8")

    monkeypatch.setattr(importlib.import_module("kernels_tl.common.build"), "library", script)
    problem = dataclasses.replace(_problem(4, 8, 8192), head_k_dim=64, head_v_dim=64)  # without segments: two launches
    config = chunk.default_config(problem, H100)
    whole, short, long = (
        chunk.compile(problem, dataclasses.replace(config, split_chunks=split_chunks)) for split_chunks in (0, 3, 64)
    )
    assert short == long
    assert set(whole) == {"chunk_prepare", "chunk_chain"} and set(short) == {*whole, "chunk_summaries", "chunk_starts"}
    assert whole["chunk_prepare"] == short["chunk_prepare"] and whole["chunk_chain"] != short["chunk_chain"]
    keys = [
        compiled.entry_key("chunk", "tilelang", chunk, problem, dataclasses.replace(config, split_chunks=split_chunks))
        for split_chunks in (0, 3, 64)
    ]
    assert keys[0] != keys[1] == keys[2]


@pytest.mark.parametrize(
    ("heads", "tokens", "sequences", "split_chunks"),
    [
        ((4, 8), 8192, 1, 16), ((4, 8), 32768, 1, 64), ((2, 4), 32768, 1, 32),  # all SMs have a segment
        ((16, 32), 8192, 1, 0), ((16, 32), 32768, 1, 0),  # the halves of a head are enough blocks
        ((4, 8), 8192, 64, 0), ((4, 8), 512, 1, 0),  # so are many sequences, and few chunks are not worth two launches
    ],
)  # fmt: skip
def test_default(heads: tuple[int, int], tokens: int, sequences: int, split_chunks: int) -> None:
    assert chunk.default_config(_problem(*heads, tokens, sequences), H100).split_chunks == split_chunks


# Key and value heads, tokens -> us on an H100 by chunks of a segment.
MEASURED = {
    (4, 8, 8192): {0: 174.6, 16: 105.0, 32: 121.5, 64: 188.6},
    (4, 8, 32768): {0: 678.0, 16: 420.0, 32: 349.0, 64: 306.7},
    (2, 4, 32768): {0: 633.0, 16: 250.8, 32: 192.9, 64: 224.7},
}


@pytest.mark.parametrize("sizes", MEASURED, ids=str)
def test_the_default_is_about_the_fastest_measured(sizes: tuple[int, int, int]) -> None:
    times, (num_k_heads, num_v_heads, num_tokens) = MEASURED[sizes], sizes
    split_chunks = chunk.default_config(_problem(num_k_heads, num_v_heads, num_tokens), H100).split_chunks
    assert times[split_chunks] <= 1.1 * min(times.values())


def test_batch_invariance_fixes_the_length() -> None:
    """The length is that of one sequence of 32768 tokens, whatever the batch."""
    switches = Switches(batch_invariant=True, tuned="off")
    wanted = chunk.default_config(_problem(4, 8, 32768), H100)
    assert wanted.split_chunks > 0
    for sizes in ((1, 1), (8192, 1), (8192, 64), (100000, 3)):
        choice = select.choose(_problem(4, 8, *sizes), H100, runtime.candidates("chunk"), switches, "tilelang")
        assert choice.config == wanted


def test_what_is_tuned_for_unequal_lengths_has_segments() -> None:
    assert len({config.split_chunks for config in chunk.configs(_problem(4, 8, 16100, 4), H100)}) > 3


def test_configs_hold_the_default_and_whole_sequences() -> None:
    for problem in (_problem(4, 8, 8192), _problem(16, 32, 8192), _problem(4, 8, 16100, 4)):
        space = chunk.configs(problem, H100)
        assert chunk.default_config(problem, H100) in space and len(space) == len(set(space))
        assert all(chunk.fits(problem, config, H100) for config in space)
        assert any(config.split_chunks == 0 or config.split_if_longest_exceeds for config in space)


@pytest.mark.parametrize("piece", [64, 128, 192])
def test_slots_of_sequences_do_not_overlap(piece: int) -> None:
    """Every sequence, the empty ones too, owns a slot for each of its pieces and at least one."""
    from kernels_tl.chunk.sizes import CHUNK, num_slots

    lengths = [0, 1, piece, 0, piece + 1, piece - 1, 5 * piece, 0, 0, 7 * piece + 3, 1]
    begin, end = 0, 0
    for n, length in enumerate(lengths):
        first = begin // piece + n
        assert first >= end
        begin, end = begin + length, first + max(-(-length // piece), 1)
    assert end <= num_slots(sum(lengths), len(lengths), piece // CHUNK)


@pytest.mark.parametrize("num_tokens", [0, 1, 64])
def test_a_call_that_needs_no_segments_has_a_default(num_tokens: int) -> None:
    problem = _problem(2, 4, num_tokens)
    config = chunk.default_config(problem, H100)
    assert config.split_chunks == 0 and config in chunk.configs(problem, H100)
    assert chunk.workspace_bytes(problem, dataclasses.replace(config, split_chunks=2)) >= 0
