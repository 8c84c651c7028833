"""The recurrent kernel without a prefetch, whatever the lengths: against the float64 oracle."""

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch

import gdn
from gdn import runtime
from gdn.device import H100
from gdn.ops.delta_rule.problem import RecurrentProblem
from gdn.ops.delta_rule.tiles import Config, k_per_thread
from gdn.runtime import env
from gdn.testing.compare import same_bits
from tests.gpu import cases
from tests.gpu.delta_rule import copied, run
from tests.gpu.test_recurrent import FUNCTION, arguments_of, check
from tests.gpu.twins import check_repeats

pytestmark = pytest.mark.gpu

RAW: dict[str, Any] = {"gate_dtype": "bfloat16", "use_gate": True, "beta_dtype": "bfloat16", "use_beta_sigmoid": True}
MAIN = replace(cases.MAIN_RECURRENT, **RAW)
DRAFTS = replace(cases.MAIN_SPECULATIVE, **RAW)
RAW_PROBLEMS = [
    MAIN,
    replace(MAIN, state_dtype="bfloat16"),
    replace(MAIN, state_dtype="bfloat16", has_rounding=True),
    replace(MAIN, index_dtype="int64", cu_seqlens_dtype="int64", has_final_indices=True, dtype="float16"),
    replace(MAIN, index_dtype=None),
    replace(MAIN, state_v_first=False),
    replace(MAIN, head_k_dim=256, head_v_dim=256),
    DRAFTS,
    replace(DRAFTS, state_dtype="bfloat16", has_final_indices=False, index_dtype="int64"),
    replace(DRAFTS, state_v_first=False),
    replace(cases.MAIN_VERIFY, **RAW),
]
SIX = [1, 1, 1, 1, 1, 1]


def tiles(problem: RecurrentProblem) -> list[Config]:
    """Configurations of this form: the one that holds the most of the state, and another one."""
    shapes = [(t, n, r) for t in (256, 128, 64, 32) for n in (8, 16, 4, 32) for r in (4, 2, 1)]
    module = importlib.import_module("kernels_cute.recurrent")
    space = [config for shape in shapes if module.fits(problem, config := Config(*shape, 512, False), H100)]
    most = max(
        space, key=lambda config: (config.v_per_thread * k_per_thread(problem, config.threads_per_column), config.threads == 128)
    )
    others = (config for config in space if (config.threads, config.v_per_thread) != (most.threads, most.v_per_thread))
    return [most, next(others)]


def force(monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    def prepare(problem: RecurrentProblem, device: torch.device, backend: str | None) -> runtime.Prepared:
        return runtime.prepare(problem, device, backend, config=tiles(problem)[which])

    operator = importlib.import_module("gdn.ops.delta_rule.recurrent")
    monkeypatch.setattr(operator, "prepare", prepare)
    env.reload()  # forgets calls seen before


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("problem", [*cases.recurrent_problems(), cases.MAIN_SPECULATIVE, cases.MAIN_VERIFY], ids=cases.name)
def test_variants(problem: RecurrentProblem, which: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, which)
    check(arguments_of(problem, device), "cute", monkeypatch)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("lengths", [None, SIX], ids=["ragged", "single"])
@pytest.mark.parametrize("problem", [p for p in RAW_PROBLEMS if not p.has_rounding], ids=cases.name)
def test_raw_gates(
    problem: RecurrentProblem, lengths: list[int] | None, which: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(monkeypatch, which)
    check(arguments_of(problem, device, **({} if lengths is None else {"lengths": lengths})), "cute", monkeypatch)


@pytest.mark.parametrize("lengths", [[0], [1], [0, 0, 2], [70], [1] * 128], ids=["0", "1", "0-0-2", "70", "128 x 1"])
def test_lengths(lengths: list[int], device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, 0)
    check(arguments_of(MAIN, device, lengths=lengths, null_sequences=[]), "cute", monkeypatch)


def test_accepted_beyond_a_warp_of_columns(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lanes of a warp hold the first columns of the index row, the others are loaded when the count is known."""
    force(monkeypatch, 0)
    arguments = arguments_of(DRAFTS, device, num_columns=40, null_sequences=[])
    counts = [33, 41, 40, 32, 0, 2]
    arguments["num_accepted_tokens"].copy_(torch.tensor(counts))
    source = torch.Generator(device).manual_seed(3)
    for slots, count in zip(arguments["ssm_state_indices"].tolist(), counts, strict=True):
        if 1 <= count <= len(slots):  # that slot is read; the others hold NaN
            state = arguments["initial_state"][slots[count - 1]]
            state.copy_(torch.randn(state.shape, generator=source, device=device))
    check(arguments, "cute", monkeypatch)


@pytest.mark.parametrize("every_token", [False, True])
def test_rounding_does_not_depend_on_the_form(every_token: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token with zero keys only decays the state: one product an element, so both forms store the same bits."""
    drafts: dict[str, Any] = {"write_every_token": True, "has_accepted": True} if every_token else {}
    arguments = arguments_of(replace(MAIN, state_dtype="bfloat16", has_rounding=True, **drafts), device)
    arguments["k"].zero_()
    prefetched, direct = copied(arguments), copied(arguments)
    run(FUNCTION, prefetched, "cute")
    force(monkeypatch, 0)
    run(FUNCTION, direct, "cute")
    assert same_bits(prefetched["initial_state"], direct["initial_state"])
    assert not same_bits(direct["initial_state"], arguments["initial_state"])


def test_repeats_give_the_same_bits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, 0)
    arguments = arguments_of(DRAFTS, device)
    check_repeats(gdn.fused_recurrent_gated_delta_rule, arguments, backend="cute")
