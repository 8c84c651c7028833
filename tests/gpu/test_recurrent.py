"""The recurrent operator on the GPU, every backend, against the float64 oracle."""

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch

import gdn
from gdn import runtime
from gdn.device import H100
from gdn.ops.delta_rule.inputs import CASES, recurrent_inputs
from gdn.ops.delta_rule.oracle import DeltaRuleResult
from gdn.ops.delta_rule.problem import RecurrentProblem
from gdn.ops.delta_rule.tiles import Config, k_per_thread
from gdn.runtime import env, registry
from gdn.testing.compare import same_bits
from tests.gpu import cases, graphs
from tests.gpu.delta_rule import Arguments, backends, copied, judge, run
from tests.gpu.twins import check_repeats

pytestmark = pytest.mark.gpu

LENGTHS = [1, 0, 4, 3, 2, 1]
FUNCTION = "fused_recurrent_gated_delta_rule"
BACKENDS = backends("recurrent")
LAYOUTS = pytest.mark.parametrize("v_first", [True, False], ids=["V-first", "K-first"])
K_FIRST: dict[str, Any] = {"state_v_first": False}
DIRECT = ("without a prefetch", "without a prefetch, other tiles")  # of cute, forced whatever the lengths
FORMS = pytest.mark.parametrize("form", [*BACKENDS, *DIRECT])
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


def arguments_of(problem: RecurrentProblem, device: torch.device, **changes: Any) -> dict[str, Any]:
    """Ragged, strided, padded; with a pool: null slots, gaps and NaN around every state."""
    options: dict[str, Any] = {"lengths": LENGTHS, "strided": True, "padded_tokens": 7}
    if problem.pooled:
        options |= {"slot_gap": 24, "null_sequences": [3], "null_slot": 0}
    if problem.write_every_token:
        options |= {"num_columns": 3}  # fewer than the longest sequence has tokens
    arguments = recurrent_inputs(problem, device, **{**options, **changes})
    v = arguments["v"]
    shape = (1, v.shape[1], problem.num_state_heads, problem.head_v_dim)
    arguments["out"] = torch.full(shape, torch.nan, dtype=v.dtype, device=device)
    return arguments


def check(arguments: Arguments, backend: str, monkeypatch: pytest.MonkeyPatch) -> DeltaRuleResult:
    """One call against the oracle, whose result it returns."""
    before = copied(arguments)
    return judge(FUNCTION, arguments, run(FUNCTION, arguments, backend), before, monkeypatch)


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


def backend_of(form: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The backend of a form, which the operator has from now on."""
    if form in BACKENDS:
        return form
    force(monkeypatch, DIRECT.index(form))
    return "cute"


@FORMS
@pytest.mark.parametrize(
    "problem",
    [*cases.recurrent_problems(), cases.MAIN_SPECULATIVE, cases.MAIN_VERIFY, replace(cases.MAIN_SPECULATIVE, **K_FIRST)],
    ids=cases.name,
)
def test_variants(problem: RecurrentProblem, form: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of(form, monkeypatch)
    check(arguments_of(problem, device), backend, monkeypatch)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("lengths", [None, SIX], ids=["ragged", "single"])
@pytest.mark.parametrize("problem", [p for p in RAW_PROBLEMS if not p.has_rounding], ids=cases.name)
def test_raw_gates(
    problem: RecurrentProblem, lengths: list[int] | None, which: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(monkeypatch, which)
    check(arguments_of(problem, device, **({} if lengths is None else {"lengths": lengths})), "cute", monkeypatch)


@LAYOUTS
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_hard_inputs(case: Any, backend: str, v_first: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = arguments_of(replace(cases.MAIN_RECURRENT, state_v_first=v_first), device, case=case)
    check(arguments, backend, monkeypatch)


@LAYOUTS
@pytest.mark.parametrize("form", [*BACKENDS, DIRECT[0]])
@pytest.mark.parametrize("lengths", [[0], [1], [0, 0, 2], [70], [1] * 128], ids=["0", "1", "0-0-2", "70", "128 x 1"])
def test_lengths(lengths: list[int], form: str, v_first: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of(form, monkeypatch)
    problem = replace(MAIN if form in DIRECT else cases.MAIN_RECURRENT, state_v_first=v_first)
    check(arguments_of(problem, device, lengths=lengths, null_sequences=[]), backend, monkeypatch)


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


@LAYOUTS
@pytest.mark.parametrize("backend", BACKENDS)
def test_speculative_rules(backend: str, v_first: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """num_accepted_tokens out of range is padding, a null write is skipped alone, extra rows of indices are ignored."""
    arguments = arguments_of(replace(cases.MAIN_SPECULATIVE, state_v_first=v_first), device, null_sequences=[])
    arguments["num_accepted_tokens"][2] = 0
    arguments["num_accepted_tokens"][4] = 4
    arguments["final_state_indices"][3, 1] = 0
    for name in ("ssm_state_indices", "final_state_indices", "num_accepted_tokens"):
        extra = torch.full_like(arguments[name][:1], 10**6)
        arguments[name] = torch.cat([arguments[name], extra])
    expected = check(arguments, backend, monkeypatch)
    assert expected.live == [True, False, False, True, False, True]


@LAYOUTS
@pytest.mark.parametrize("backend", BACKENDS)
def test_indices_with_strides(backend: str, v_first: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = arguments_of(replace(cases.MAIN_SPECULATIVE, state_v_first=v_first), device)
    for name in ("ssm_state_indices", "final_state_indices"):
        x = arguments[name]
        wide = torch.full((2 * x.shape[0], 2 * x.shape[1] + 1), 10**6, dtype=x.dtype, device=device)
        view = wide[::2, 1::2]
        view.copy_(x)
        arguments[name] = view
    accepted = arguments["num_accepted_tokens"]
    arguments["num_accepted_tokens"] = torch.stack([accepted, accepted + 100], dim=1)[:, 0]
    check(arguments, backend, monkeypatch)


@LAYOUTS
@pytest.mark.parametrize("backend", BACKENDS)
def test_in_place_without_indices(backend: str, v_first: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = recurrent_inputs(replace(cases.MAIN_RECURRENT, state_v_first=v_first), device, lengths=[2, 0, 3])
    states = plain["initial_state"][plain.pop("ssm_state_indices").long()]
    arguments = {**plain, "initial_state": states}
    before = copied(arguments)
    o, state = run(FUNCTION, {**arguments, "inplace_final_state": True}, backend)
    assert state is states
    judge(FUNCTION, arguments, (o, state), before, monkeypatch)


@LAYOUTS
@pytest.mark.parametrize("form", [*BACKENDS, DIRECT[0]])
def test_repeats_give_the_same_bits(form: str, v_first: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of(form, monkeypatch)
    arguments = arguments_of(replace(DRAFTS if form in DIRECT else cases.MAIN_SPECULATIVE, state_v_first=v_first), device)
    check_repeats(gdn.fused_recurrent_gated_delta_rule, arguments, backend=backend)


@LAYOUTS
@pytest.mark.parametrize("backend", BACKENDS)
def test_graph_replay_with_other_lengths(
    backend: str, v_first: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths, slots and accepted counts change between replays, as in a serving loop."""
    arguments = arguments_of(replace(cases.MAIN_SPECULATIVE, state_v_first=v_first), device)
    for name in ("initial_state", "q", "k", "v", "g", "beta"):  # rows that are padding now may be tokens later
        arguments[name].nan_to_num_(nan=0.1 if name == "initial_state" else -0.01)
    changes = []
    for shift, lengths in enumerate(([1, 0, 4, 3, 2, 1], [3, 3, 3, 3, 3, 3], [0, 0, 1, 0, 0, 0], [0] * 6)):
        change = {
            "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(arguments["cu_seqlens"]),
            "num_accepted_tokens": ((torch.arange(6) + shift) % 3 + 1).to(arguments["num_accepted_tokens"]),
            "ssm_state_indices": arguments["ssm_state_indices"].roll(1 + shift, 0),
        }
        check(copied(arguments) | change | {"out": torch.full_like(arguments["out"], torch.nan)}, backend, monkeypatch)
        changes.append(change)
    graphs.check(getattr(gdn, FUNCTION), arguments, ("initial_state",), changes, device, backend=backend)


@LAYOUTS
@pytest.mark.parametrize("backend", BACKENDS)
def test_slots_beyond_31_bits(backend: str, v_first: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool whose last slot starts beyond 2**31 elements."""
    arguments = arguments_of(
        replace(cases.MAIN_RECURRENT, state_v_first=v_first), device, lengths=[2, 1], null_sequences=[], slot_gap=0
    )
    small = arguments["initial_state"]
    last = small.shape[0] - 1
    stride = (2**31 // last + 4) // 4 * 4
    buffer = torch.empty(stride * last + small[0].numel(), dtype=small.dtype, device=device)
    pool = buffer.as_strided(small.shape, (stride, *small.stride()[1:]))
    pool.copy_(small)
    assert last * stride >= 2**31
    arguments["ssm_state_indices"][0] = last
    pool[last] = pool[int(arguments["ssm_state_indices"][1])]
    before = dict(arguments, initial_state=pool.clone())
    o, _ = gdn.fused_recurrent_gated_delta_rule(**{**arguments, "initial_state": pool}, backend=backend)
    close = pool.clone()
    del pool, buffer
    judge(FUNCTION, {**arguments, "initial_state": close}, (o, None), before, monkeypatch)


def k_first_cases() -> list[tuple[str, RecurrentProblem, list[int]]]:
    """Cases for which tiles of a K-first state differ: token counts, dtypes of the state, trees and rounding are other code."""
    every = {"write_every_token": True, "has_accepted": True}
    found = []
    for state_dtype in ("float32", "bfloat16"):
        base = replace(cases.MAIN_RECURRENT, state_dtype=state_dtype, **K_FIRST)
        found += [("single", base, [1] * 6), ("ragged", base, LENGTHS), ("drafts", replace(base, **every), LENGTHS)]
        found += [("256", replace(base, head_k_dim=256, head_v_dim=256), LENGTHS)]
        found += [("odd", replace(base, head_k_dim=100, head_v_dim=36), LENGTHS)]
        found += [("64", replace(base, head_k_dim=64, head_v_dim=64, dtype="float16"), LENGTHS)]
    return [(f"{name}-{problem.state_dtype}", problem, lengths) for name, problem, lengths in found]


@pytest.mark.parametrize("heads", [1, 512], ids=["few", "many"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", k_first_cases(), ids=lambda case: case[0])
def test_every_configuration_k_first(
    case: tuple[str, RecurrentProblem, list[int]], backend: str, heads: int, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Every configuration that a call of that many sequences (of one token where the case's are) may get is right, and repeats
    the same bits."""
    name, problem, lengths = case
    module = importlib.import_module(registry.operator("recurrent").modules[backend])
    tokens = heads if name.startswith("single") else 4 * heads
    space = module.configs(replace(problem, num_sequences=heads, num_tokens=tokens), H100)
    operator = importlib.import_module("gdn.ops.delta_rule.recurrent")
    assert space
    for config in space:

        def prepare(
            problem: RecurrentProblem, device: torch.device, backend: str | None, config: Any = config
        ) -> runtime.Prepared:
            return runtime.prepare(problem, device, backend, config=config)

        monkeypatch.setattr(operator, "prepare", prepare)
        env.reload()  # forgets calls seen before
        arguments = arguments_of(problem, device, lengths=lengths)
        before = copied(arguments)
        again = copied(arguments) | {"out": torch.full_like(arguments["out"], torch.nan)}
        results = run(FUNCTION, arguments, backend)
        judge(FUNCTION, arguments, results, before, monkeypatch)
        assert same_bits(run(FUNCTION, again, backend)[0], results[0]), config
        assert same_bits(again["initial_state"], arguments["initial_state"]), config


def test_inputs_are_left_alone(device: torch.device) -> None:
    for backend in BACKENDS:
        arguments = arguments_of(cases.MAIN_SPECULATIVE, device)
        kept = {k: x.clone() for k, x in arguments.items() if isinstance(x, torch.Tensor) and k not in ("out", "initial_state")}
        run(FUNCTION, arguments, backend)
        for name, x in kept.items():
            assert same_bits(arguments[name], x), name
