"""The recurrent kernel without a prefetch: which calls get it, and that 64 values of the state a thread spill nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gdn import runtime
from gdn.device import H100
from gdn.ops.delta_rule import tiles as recurrent_tiles
from gdn.ops.delta_rule.problem import RecurrentProblem
from gdn.ops.delta_rule.tiles import Config
from gdn.runtime import tuned
from tests.compile import checks
from tests.compile.variants.base import example

MAIN: RecurrentProblem = example("recurrent", num_tokens=8, num_sequences=8)
QUARTER = replace(MAIN, num_q_heads=4, num_k_heads=4, num_v_heads=8)
DRAFTS = replace(MAIN, state_dtype="bfloat16", write_every_token=True, has_accepted=True)
WAVE = Config(threads=128, threads_per_column=8, v_per_thread=4, min_threads_per_sm=512, prefetch_next_token=False)
VARIANTS = [(MAIN, WAVE), (DRAFTS, replace(WAVE, threads=256))]


@checks.compiles(lambda: checks.tasks_of("kernels_cute.recurrent", VARIANTS))
def test_whole_wave_in_registers() -> None:
    assert all(recurrent_tiles.fits(problem, config, H100) for problem, config in VARIANTS)
    checks.check("kernels_cute.recurrent", "cute", VARIANTS)


@pytest.mark.parametrize(
    ("problem", "batch", "tokens", "prefetches"),
    [
        (MAIN, 1, 1, False),
        (MAIN, 8, 8, False),
        (MAIN, 8, 9, True),  # more than one token a sequence
        (MAIN, 32, 32, True),  # several waves
        (QUARTER, 32, 32, False),
        (QUARTER, 128, 128, True),
        (DRAFTS, 8, 32, True),
        (replace(DRAFTS, has_parent=True), 8, 8, True),
    ],
)
def test_choice(problem: RecurrentProblem, batch: int, tokens: int, prefetches: bool) -> None:
    call = replace(problem, num_sequences=batch, num_tokens=tokens)
    assert recurrent_tiles.default_config(call, H100).prefetch_next_token == prefetches
    assert recurrent_tiles.default_prefetching(call, H100).prefetch_next_token
    space = recurrent_tiles.configs(call, H100)
    assert all(recurrent_tiles.fits(call, config, H100) for config in space) and len(space) <= 40
    assert any(not config.prefetch_next_token for config in space) == (tokens <= batch and not problem.has_parent)


def test_a_tuned_entry_of_single_tokens_serves_single_tokens() -> None:
    module = pytest.importorskip("kernels_cute.recurrent")
    entry = tuned.Entry(sizes=MAIN.sizes(), config=vars(WAVE), time_us=1.0, date="2026-11-20", kernel_source="")
    found = tuned.Found(entry, WAVE, Path("table.json"), tuple(sorted(MAIN.sizes().items())), "", ())
    assert runtime.near_enough(module, MAIN, [found], H100)
    assert runtime.near_enough(module, replace(MAIN, num_tokens=9, num_sequences=9), [found], H100)
    assert not runtime.near_enough(module, replace(MAIN, num_tokens=12), [found], H100)


def test_the_wave_is_chosen_for_it() -> None:
    assert recurrent_tiles.default_config(MAIN, H100) == WAVE
    assert recurrent_tiles.default_config(replace(QUARTER, num_tokens=32, num_sequences=32), H100) == WAVE


@pytest.mark.parametrize(
    "changes",
    [{"use_gate": False}, {"has_parent": True, "write_every_token": True}, {"head_v_dim": 96}, {"dtype": "float16"}],
    ids=str,
)
def test_what_would_spill_does_not_fit(changes: dict[str, Any]) -> None:
    assert not recurrent_tiles.fits(replace(MAIN, **changes), WAVE, H100)
    assert not recurrent_tiles.fits(MAIN, replace(WAVE, min_threads_per_sm=384), H100)


def test_tilelang_always_prefetches() -> None:
    recurrent = pytest.importorskip("kernels_tl.recurrent")
    tiles = replace(WAVE, min_threads_per_sm=384).tiles
    assert recurrent.fits(MAIN, tiles, H100) and not recurrent.fits(MAIN, WAVE.tiles, H100)
    assert recurrent.default_config(MAIN, H100) in recurrent.configs(MAIN, H100)
    assert recurrent.default_config(MAIN, H100) == recurrent_tiles.default_prefetching(MAIN, H100).tiles
