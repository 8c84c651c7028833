"""The recurrent kernels with a ring: every form compiles without spills, and which tiles they take."""

import importlib
from dataclasses import replace
from typing import Any

import pytest

from gdn.device import H100
from gdn.ops.delta_rule import tiles as recurrent_tiles
from gdn.ops.delta_rule.problem import RecurrentProblem
from gdn.ops.delta_rule.tiles import Tiles
from tests.compile import checks, session
from tests.compile.test_recurrent_prefetch import MAIN

MODULES = {"tilelang": "kernels_tl.recurrent", "cute": "kernels_cute.recurrent"}
ONE = replace(MAIN, ring_rows=16, fold_every=15, num_tokens=128, num_sequences=128)
DRAFTS = replace(ONE, has_accepted=True, ring_rows=22, num_tokens=512)
BF16: dict[str, Any] = {"state_dtype": "bfloat16"}
FORMS: dict[str, RecurrentProblem] = {
    "one": ONE,
    "drafts": DRAFTS,
    "tree": replace(DRAFTS, has_parent=True),
    "many": replace(DRAFTS, ring_rows=39, fold_every=24),
    "no update": replace(DRAFTS, has_final_state=False),
    "no gates": replace(DRAFTS, gate_dtype=None, use_gate=False, beta_dtype=None, use_beta_sigmoid=False, use_qk_l2norm=False),
    "odd": replace(DRAFTS, head_k_dim=100, head_v_dim=60),
    "wide": replace(DRAFTS, head_k_dim=256, head_v_dim=256),
    "bf16": replace(ONE, ring_rows=12, fold_every=11, **BF16),
    "bf16 drafts": replace(DRAFTS, **BF16),
    "noise": replace(ONE, has_rounding=True, **BF16),
    "noise, drafts": replace(DRAFTS, has_rounding=True, **BF16),
    "noise, tree": replace(DRAFTS, has_rounding=True, has_parent=True, **BF16),
}
K_FIRST = ("one", "drafts", "odd", "bf16 drafts", "noise, drafts")  # pairs of all fields are in the cover of the variants
ALL = FORMS | {f"{name}, K first": replace(FORMS[name], state_v_first=False) for name in K_FIRST}
LOW_END = ("one", "tree", "many", "drafts, K first")  # of the smaller cover at the low end of the DSLs' ranges
EVERY = pytest.mark.parametrize(
    "form", [pytest.param(form, marks=pytest.mark.low_end if form in LOW_END else ()) for form in ALL]
)
BACKENDS = pytest.mark.parametrize("backend", MODULES)


def variants_of(backend: str, form: str) -> list[tuple[RecurrentProblem, Any]]:
    """The default of a large batch, and of one sequence."""
    module: Any = importlib.import_module(MODULES[backend])
    problem = ALL[form]
    small = replace(problem, num_sequences=1, num_tokens=problem.num_tokens // problem.num_sequences)
    configs = dict.fromkeys(module.default_config(p, H100) for p in (problem, small))
    return [(problem, config) for config in configs]


def _tasks(backend: str, form: str) -> list[session.Task]:
    return checks.tasks_of(MODULES[backend], variants_of(backend, form))


@checks.compiles(_tasks)
@BACKENDS
@EVERY
def test_forms_do_not_spill(backend: str, form: str) -> None:
    checks.check(MODULES[backend], backend, variants_of(backend, form))


# Forms that spilled with the tiles of their neighbours: a bfloat16 state with K above 128, and int64 slots with K first.
_AS_GIVEN: dict[str, Any] = {
    "dtype": "float16",
    "use_gate": False,
    "use_beta_sigmoid": False,
    "num_sequences": 13,
    "num_tokens": 13,
}
_WIDE: dict[str, Any] = {"head_k_dim": 256, "head_v_dim": 256, "use_qk_l2norm": False}
_HEADS: dict[str, Any] = {"num_q_heads": 2, "num_k_heads": 2, "num_v_heads": 6}
TIGHT = {
    "cute": replace(ONE, **_AS_GIVEN, **_WIDE, **BF16),
    "tilelang": replace(ONE, **_AS_GIVEN, **_HEADS, index_dtype="int64", state_v_first=False),
}


@checks.compiles(lambda backend: checks.tasks_of(MODULES[backend], [(TIGHT[backend], None)]))
@BACKENDS
def test_tight_forms_do_not_spill(backend: str) -> None:
    checks.check(MODULES[backend], backend, [(TIGHT[backend], None)])


@checks.quick
@checks.compiles(lambda backend: _tasks(backend, "tree")[:1])
@BACKENDS
def test_a_tree(backend: str) -> None:
    checks.check(MODULES[backend], backend, variants_of(backend, "tree")[:1])


@BACKENDS
def test_every_problem_has_tiles(backend: str) -> None:
    module: Any = importlib.import_module(MODULES[backend])
    for k, v in ((4, 4), (60, 12), (100, 60), (128, 128), (256, 256), (36, 252)):
        for form in ("one", "tree", "noise, drafts, K first"):
            problem = replace(ALL[form], head_k_dim=k, head_v_dim=v)
            assert module.refusal(problem) is None
            assert module.fits(problem, module.default_config(problem, H100), H100)
            assert all(module.fits(problem, config, H100) for config in module.configs(problem, H100))


def test_what_is_refused() -> None:
    nodes = replace(ALL["tree"], ring_rows=100, fold_every=15)
    assert "31 nodes, got a ring of 100 rows" in str(recurrent_tiles.refusal(nodes))
    assert "shared memory, got 2000 rows" in str(recurrent_tiles.refusal(replace(ONE, ring_rows=2000)))
    assert recurrent_tiles.refusal(ONE) is None


def test_tiles_that_spill_do_not_fit() -> None:
    wide = Tiles(128, 8, 4, 512)
    cute, tilelang = (importlib.import_module(MODULES[backend]) for backend in ("cute", "tilelang"))
    assert tilelang.fits(ONE, wide, H100) and not tilelang.fits(DRAFTS, wide, H100)
    assert tilelang.fits(DRAFTS, Tiles(128, 8, 4, 384), H100) and not tilelang.fits(ALL["many"], Tiles(128, 8, 4, 384), H100)
    assert not cute.fits(DRAFTS, recurrent_tiles.Config(128, 8, 4, 512), H100)
    assert cute.fits(DRAFTS, recurrent_tiles.Config(256, 8, 4, 512), H100)
    assert not cute.fits(ALL["noise, drafts"], recurrent_tiles.Config(256, 8, 4, 512), H100)
    assert not cute.fits(ALL["wide"], recurrent_tiles.Config(256, 16, 4, 512), H100)
