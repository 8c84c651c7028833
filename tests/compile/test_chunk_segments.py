"""Segments of both chunk kernels, as far as they need no GPU: slots, workspace, compiled code, and the choice of a length."""

import importlib
import random
from dataclasses import replace
from typing import Any

import pytest

from gdn import runtime
from gdn.device import H100
from gdn.runtime import compiled, select
from gdn.runtime.env import Switches
from tests.compile.variants.delta_rule import chunk_of

cute = pytest.importorskip("kernels_cute.chunk", reason="needs the CuTe DSL")
segments = pytest.importorskip("kernels_cute.chunk.split.shape", reason="needs the CuTe DSL")
tilelang = pytest.importorskip("kernels_tl.chunk", reason="needs TileLang")

MODULES: dict[str, Any] = {"cute": cute, "tilelang": tilelang}
HEADS = {"cute": (8, 8), "tilelang": (4, 8)}  # 8 of states: segments are faster than whole sequences
BACKENDS = pytest.mark.parametrize("backend", MODULES)

# Backend, key and value heads, tokens -> us on an H100 by chunks of a segment.
MEASURED = {
    ("cute", (8, 8), 8192): {0: 204.0, 8: 120.7, 12: 124.7, 16: 82.0, 20: 88.9, 24: 98.7, 32: 118.8, 64: 208.6},
    ("cute", (8, 8), 32768): {0: 777.0, 16: 383.0, 32: 266.0, 64: 238.5, 128: 427.0},
    ("cute", (4, 4), 8192): {0: 200.0, 8: 66.9},
    ("cute", (4, 4), 32768): {0: 796.0, 16: 215.0, 32: 145.7, 36: 153.0, 64: 227.0},
    ("tilelang", (4, 8), 8192): {0: 174.6, 16: 105.0, 32: 121.5, 64: 188.6},
    ("tilelang", (4, 8), 32768): {0: 678.0, 16: 420.0, 32: 349.0, 64: 306.7},
    ("tilelang", (2, 4), 32768): {0: 633.0, 16: 250.8, 32: 192.9, 64: 224.7},
}


@pytest.mark.parametrize("measured", MEASURED, ids=str)
def test_the_default_is_about_the_fastest_measured(measured: tuple[str, tuple[int, int], int]) -> None:
    (backend, heads, num_tokens), times = measured, MEASURED[measured]
    assert times[MODULES[backend].default_config(chunk_of(heads, num_tokens), H100).split_chunks] <= 1.1 * min(times.values())


@BACKENDS
def test_what_is_tuned_for_unequal_lengths_has_segments(backend: str) -> None:
    assert len({config.split_chunks for config in MODULES[backend].configs(chunk_of(HEADS[backend], 16100, 4), H100)}) > 3


@BACKENDS
def test_batch_invariance_fixes_the_length(backend: str) -> None:
    """The length is that of one sequence of 32768 tokens, whatever the batch."""
    switches = Switches(batch_invariant=True, tuned="off")
    wanted = MODULES[backend].default_config(chunk_of(HEADS[backend], 32768), H100)
    assert wanted.split_chunks > 0
    for sizes in ((1, 1), (8192, 1), (8192, 64), (100000, 3)):
        choice = select.choose(chunk_of(HEADS[backend], *sizes), H100, runtime.candidates("chunk"), switches, backend)
        assert choice.config == wanted


def test_slots_of_longer_sequences_alone() -> None:
    """The rule of `find_longer`: every segment of a sequence of more than one token has a slot of its own, within those that a
    call has for so many sequences."""
    rng = random.Random(0)
    for _ in range(2000):
        lengths = [rng.choice((0, 1, 1, 1, 2, 3, rng.randint(1, 3000))) for _ in range(rng.randint(2, 90))]
        segment, begin, longer, taken = rng.choice((64, 128, 1024)), 0, 0, []
        for length in lengths:
            if length > 1:
                first = begin // segment + longer
                assert not taken or first > taken[-1]
                taken += range(first, first + -(-length // segment))
                longer += 1
            begin += length
        assert not taken or taken[-1] < segments.num_slots(sum(lengths), max(longer, 2), segment)


@BACKENDS
@pytest.mark.parametrize("num_tokens", [0, 1, 64])
def test_a_call_that_needs_no_segments_has_a_default(backend: str, num_tokens: int) -> None:
    module, problem = MODULES[backend], chunk_of((4, 4) if backend == "cute" else (2, 4), num_tokens)
    config = module.default_config(problem, H100)
    assert config.split_chunks == 0 and config in module.configs(problem, H100)
    assert module.workspace_bytes(problem, replace(config, split_chunks=2)) >= 0


@BACKENDS
@pytest.mark.parametrize(
    ("sizes", "dim", "alike", "other"),
    [
        ((8192, 1), 128, ((8, 0), (16, 0)), (0, 0)),
        ((8192, 1), 64, ((3, 0), (64, 0)), (0, 0)),
        ((16384, 4), 128, ((16, 5000), (32, 6000)), (32, 0)),
    ],
    ids=["segments", "segments of head dim 64", "lengths decide"],
)
def test_a_length_compiles_nothing_new(
    backend: str, sizes: tuple[int, int], dim: int, alike: tuple[tuple[int, int], ...], other: tuple[int, int]
) -> None:
    """Chunks of a segment, and tokens of the longest sequence that has segments: only whether there are any is compiled in."""
    problem = chunk_of(HEADS[backend], *sizes, dim)
    config = MODULES[backend].default_config(problem, H100)

    def key(split_chunks: int, split_if_longest_exceeds: int) -> str:
        changed = replace(config, split_chunks=split_chunks, split_if_longest_exceeds=split_if_longest_exceeds)
        return compiled.entry_key("chunk", backend, MODULES[backend], problem, changed)

    keys = [key(*lengths) for lengths in alike]
    assert keys[0] == keys[1] != key(*other)


@pytest.mark.parametrize(
    ("backend", "heads", "num_tokens", "num_sequences", "is_four_sm"),
    [
        ("cute", 8, 16384, 4, True), ("cute", 8, 16100, 4, True), ("cute", 4, 65536, 8, True), ("cute", 16, 8192, 4, False),
        ("cute", 8, 65536, 8, False),
        ("tilelang", (4, 8), 16384, 4, False), ("tilelang", (4, 8), 16100, 4, False), ("tilelang", (2, 4), 65536, 8, False),
        ("tilelang", (8, 16), 8192, 2, False),
    ],
)  # fmt: skip
def test_lengths_that_nobody_knows_decide(
    backend: str, heads: int | tuple[int, int], num_tokens: int, num_sequences: int, is_four_sm: bool
) -> None:
    module, problem = MODULES[backend], chunk_of(heads, num_tokens, num_sequences)
    config = module.default_config(problem, H100)
    assert config.split_chunks > 0 and bool(getattr(config, "num_four_sm_clusters", 0)) == is_four_sm
    assert module.fits(problem, config, H100) and num_tokens / num_sequences <= config.split_if_longest_exceeds < num_tokens
    found = module.configs(problem, H100)
    # No table may decide for lengths that it was not tuned on.
    assert config in found and len(found) == len(set(found)) and all(one.split_if_longest_exceeds for one in found)


# --- CuTe --------------------------------------------------------------------------------------------------------------------


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
    ("heads", "num_tokens", "num_sequences", "is_split"),
    [
        (2, 32768, 1, True), (8, 512, 1, False),
        (32, 8192, 1, False), (66, 8192, 1, False), (8, 65536, 16, False),  # most SMs have a block
        (8, 2048, 1, False), (8, 32768, 1, True),  # four SMs for a head and sequence, or a split
        (8, 1000, 4, False),
    ],
)  # fmt: skip
def test_the_default_splits_where_it_pays(heads: int, num_tokens: int, num_sequences: int, is_split: bool) -> None:
    problem = chunk_of(heads, num_tokens, num_sequences)
    config = cute.default_config(problem, H100)
    assert bool(config.split_chunks) == is_split and cute.fits(problem, config, H100)
    found = cute.configs(problem, H100)
    assert config in found and len(found) == len(set(found)) and any(one.split_chunks == 0 for one in found)


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
    assert cute.default_config(chunk_of(heads, num_tokens, num_sequences), H100).prefetch == prefetch


def test_workspace() -> None:
    problem = chunk_of(8, 8192, 3)
    config = replace(
        cute.default_config(problem, H100), stages=4, split_chunks=16, num_four_sm_clusters=0, split_if_longest_exceeds=0
    )
    assert cute.workspace_bytes(problem, replace(config, split_chunks=0)) == 0
    assert cute.workspace_bytes(problem, config) == (8 + 3) * 8 * 2 * 128 * 128 * 4


# --- TileLang ----------------------------------------------------------------------------------------------------------------


def test_the_length_of_segments_is_in_no_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def script(function: Any, **options: Any) -> bytes:
        return bytes(function.script(), "utf-8")

    monkeypatch.setattr(importlib.import_module("kernels_tl.common.build"), "library", script)
    problem = chunk_of((4, 8), 8192, dim=64)  # without segments: two launches
    config = tilelang.default_config(problem, H100)
    whole, short, long = (tilelang.compile(problem, replace(config, split_chunks=split_chunks)) for split_chunks in (0, 3, 64))
    assert short == long
    assert set(whole) == {"chunk_prepare", "chunk_chain"} and set(short) == {*whole, "chunk_summaries", "chunk_starts"}
    assert whole["chunk_prepare"] == short["chunk_prepare"] and whole["chunk_chain"] != short["chunk_chain"]


def test_configs_hold_the_default_and_whole_sequences() -> None:
    for problem in (chunk_of((4, 8), 8192), chunk_of((16, 32), 8192), chunk_of((4, 8), 16100, 4)):
        space = tilelang.configs(problem, H100)
        assert tilelang.default_config(problem, H100) in space and len(space) == len(set(space))
        assert all(tilelang.fits(problem, config, H100) for config in space)
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
