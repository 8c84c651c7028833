"""The choice of a backend and of tiles: precedence, refusals, conflicts, tables."""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from gdn.device import H100, H200, DeviceSpec
from gdn.models import QWEN3_NEXT_80B
from gdn.ops.delta_rule.problem import ChunkProblem
from gdn.ops.indexer.problem import TopkProblem
from gdn.problem import Problem, size
from gdn.runtime import env, registry, select
from gdn.runtime.select import Choice, MissingTunedEntry, Tuned, choose
from tests.problems import KINDS


@dataclasses.dataclass(frozen=True)
class FakeProblem(Problem):
    op = "recurrent"  # both kernel backends

    dtype: str = "bfloat16"
    head_dim: int = 128
    num_tokens: int = dataclasses.field(default=7, metadata=size().metadata)


class Fake:
    """A kernel backend whose answers are given; counts how often it is asked to serve."""

    def __init__(self, name: str, *, refuses: str | None = None, entries: Sequence[Tuned] = (), says: str | None = None) -> None:
        self.name, self.refuses, self.entries, self.says = name, refuses, entries, says
        self.asked = 0
        self.seen: list[Problem] = []

    def refusal(self, problem: Problem) -> str | None:
        self.asked += 1
        return self.refuses

    def tuned(self, problem: Problem, device: Any) -> Sequence[Tuned]:
        self.seen.append(problem)
        return self.entries

    def default_config(self, problem: Problem, device: Any) -> str:
        self.seen.append(problem)
        return f"{self.name} default"

    def note(self, problem: Problem) -> str | None:
        return self.says


def both(**changes: dict[str, Any]) -> dict[str, Fake]:
    return {name: Fake(name, **changes.get(name, {})) for name in ("tilelang", "cute")}


def entry(config: str, time_us: float, num_tokens: int = 1) -> Tuned:
    return Tuned(config, (("num_tokens", num_tokens),), time_us, "table.json")


def pick(
    variables: Mapping[str, str] | None = None,
    backend: str | None = None,
    *,
    available: Mapping[str, Fake] | None = None,
    problem: Problem | None = None,
    gpu: bool = True,
    config: Any = None,
) -> Choice:
    return choose(
        problem or FakeProblem(num_tokens=7),
        H100 if gpu else None,
        both() if available is None else available,
        env.parse(variables or {}),
        backend,
        config=config,
        device_name="SM90 device" if gpu else "device cpu",
    )


# Each level of the precedence, strongest first: how it asks for a backend.
BLADNN = {"cute": "1", "tilelang": "0"}
LEVELS = ("argument", "GDN_BACKEND_RECURRENT", "VLLM_GDN_USE_BLADNN", "GDN_BACKEND", "table")


@pytest.mark.parametrize("wishes", list(itertools.product((None, "tilelang", "cute"), repeat=len(LEVELS))))
def test_the_strongest_level_that_asks_decides(wishes: tuple[str | None, ...]):
    asked = dict(zip(LEVELS, wishes, strict=True))
    variables = {}
    for name in LEVELS[1:4]:
        if asked[name] is not None:
            variables[name] = BLADNN[asked[name]] if name == "VLLM_GDN_USE_BLADNN" else asked[name]
    available = both()
    if asked["table"] is not None:
        for name, fake in available.items():
            fake.entries = [entry("tuned", 1.0 if name == asked["table"] else 2.0)]
    choice = pick(variables, asked["argument"], available=available)
    strongest = next((name for name in LEVELS if asked[name] is not None), None)
    if strongest is None:
        assert (choice.backend, choice.decided_by) == ("cute", "built-in order")
    else:
        assert choice.backend == asked[strongest]
        shown = {"argument": "the argument", "table": "tuned table"}
        assert choice.decided_by == shown.get(strongest, f"{strongest}={variables.get(strongest)}")
    # A note for each switch that the strongest switch contradicts.
    switches = [asked[name] for name in LEVELS[1:4] if asked[name] is not None]
    conflicts = sum(wish != switches[0] for wish in switches[1:])
    assert sum("overrides" in note for note in choice.notes) == len(choice.conflicts) == conflicts
    assert len(choice.switches) == len(switches)


def test_what_the_chosen_kernel_says_of_itself_is_a_note():
    available = both(cute={"says": "computed with head dim 128"}, tilelang={"says": "not chosen"})
    assert pick(backend="cute", available=available).notes == ("computed with head dim 128",)
    assert pick(backend="reference", available=available).notes == ()


@pytest.mark.parametrize("source", ["argument", "GDN_BACKEND_RECURRENT"])
def test_an_order_that_cannot_run_raises_with_every_reason(source: str):
    available = both(cute={"refuses": "requires head_dim 64, 128 or 256, got 96"})
    variables = {} if source == "argument" else {source: "cute"}
    backend = "cute" if source == "argument" else None
    with pytest.raises(ValueError, match="requires head_dim 64, 128 or 256, got 96") as caught:
        pick(variables, backend, available=available)
    assert "expected a backend that can run recurrent, got 'cute'" in str(caught.value)
    with pytest.raises(ValueError) as caught:
        pick(variables, backend, available=available, problem=FakeProblem(dtype="float32", num_tokens=1), gpu=False)
    for reason in ("requires an SM90 (Hopper) GPU, got device cpu", "got float32", "got 96"):
        assert reason in str(caught.value)


@pytest.mark.parametrize("source", ["VLLM_GDN_USE_BLADNN", "GDN_BACKEND"])
def test_a_preference_that_cannot_run_falls_through_with_a_note(source: str):
    available = both(cute={"refuses": "requires head_dim 64, got 96"})
    choice = pick({source: "1" if source.startswith("VLLM") else "cute"}, available=available)
    assert (choice.backend, choice.config, choice.config_source) == ("tilelang", "tilelang default", "default")
    assert choice.refusals == (("cute", "requires head_dim 64, got 96"),)
    (note,) = choice.notes
    assert choice.unmet == (note,) and not choice.conflicts
    assert note.startswith(source) and "prefers cute, which requires head_dim 64, got 96" in note


def test_after_a_preference_the_next_preference_is_tried():
    available = both(cute={"refuses": "requires luck"})
    choice = pick({"VLLM_GDN_USE_BLADNN": "1", "GDN_BACKEND": "reference"}, available=available)
    assert (choice.backend, choice.decided_by) == ("reference", "GDN_BACKEND=reference")
    assert len(choice.notes) == 2  # the conflict, and the preference that was not met


def test_all_kernels_refuse():
    available = both(cute={"refuses": "requires A"}, tilelang={"refuses": "requires B"})
    choice = pick(available=available)
    assert (choice.backend, choice.config, choice.config_source) == ("reference", None, "none")
    assert dict(choice.refusals) == {"cute": "requires A", "tilelang": "requires B"}
    assert "requires A" in str(choice) and "requires B" in str(choice)


def test_the_other_kernel_runs_where_one_refuses():
    choice = pick(available=both(tilelang={"refuses": "requires B"}))
    assert (choice.backend, choice.decided_by) == ("cute", "the only kernel that serves this")


def test_without_a_hopper_gpu_the_reference_runs_and_no_kernel_is_even_imported():
    available = both()
    choice = pick({"GDN_TUNED": "strict"}, available=available, gpu=False)
    assert (choice.backend, choice.decided_by) == ("reference", "no SM90 (Hopper) GPU")
    assert all(fake.asked == 0 for fake in available.values())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wide_inputs_take_the_reference(dtype: str):
    choice = pick(problem=FakeProblem(dtype=dtype, num_tokens=1))
    assert choice.backend == "reference"
    assert all(dtype in reason for _, reason in choice.refusals) and len(choice.refusals) == 2


@pytest.mark.parametrize("source", ["argument", "GDN_BACKEND_RECURRENT", "GDN_BACKEND"])
def test_the_reference_can_be_asked_for_anywhere(source: str):
    for gpu in (True, False):
        variables = {} if source == "argument" else {source: "reference"}
        choice = pick(variables, "reference" if source == "argument" else None, gpu=gpu)
        assert choice.backend == "reference" and choice.config is None and choice.refusals == ()


def test_a_backend_that_the_operator_lacks():
    available = {"tilelang": Fake("tilelang")}
    with pytest.raises(ValueError, match=r"has no kernel of recurrent \(kernels: tilelang\)"):
        pick(backend="cute", available=available)
    choice = pick({"VLLM_GDN_USE_BLADNN": "1"}, available=available)
    assert choice.backend == "tilelang" and "prefers cute, which has no kernel" in choice.notes[0]


def test_an_unknown_backend_argument():
    for wrong in ("triton", "auto", "CUTE", ""):
        with pytest.raises(ValueError, match="backend: expected 'tilelang', 'cute', 'reference' or None, got"):
            pick(backend=wrong)


@pytest.mark.parametrize(
    ("op", "variable", "value", "backend"),
    [
        ("chunk", "VLLM_GDN_USE_BLADNN", "1", "cute"),
        ("chunk", "VLLM_GDN_USE_BLADNN", "0", "tilelang"),
        ("recurrent", "VLLM_GDN_USE_BLADNN", "1", "cute"),
        ("mqa_logits", "VLLM_QSA_PREFILL_USE_TL_INDEXER", "1", "tilelang"),
        ("mqa_logits", "VLLM_QSA_PREFILL_USE_TL_INDEXER", "0", "cute"),
        ("paged_mqa_logits", "VLLM_QSA_DECODE_USE_TL_INDEXER", "1", "tilelang"),
        ("paged_mqa_logits", "VLLM_QSA_DECODE_USE_TL_INDEXER", "0", "cute"),
    ],
)
def test_which_switch_reaches_which_operator(op: str, variable: str, value: str, backend: str):
    for other in registry.OPERATORS:
        problem = dataclasses.make_dataclass("Other", [("dtype", str, "bfloat16")], bases=(Problem,), frozen=True)
        problem.op = other
        choice = pick({variable: value}, problem=problem())
        reached = op == other or {op, other} == {"chunk", "recurrent"}
        if other == op:
            assert choice.backend == backend
        assert choice.switches == ((f"{variable}={value}",) if reached else ())


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_attention_switches_are_heeded_in_their_phase(phase: str):
    own, other = ("PREFILL", "DECODE") if phase == "prefill" else ("DECODE", "PREFILL")
    variables = {f"VLLM_QSA_{own}_ATTN_BACKEND": "pai-fa3", f"VLLM_QSA_{other}_ATTN_BACKEND": "triton"}
    problem = registry.operator(f"sparse_attention_{phase}").example(QWEN3_NEXT_80B, fp8=False)
    assert problem is not None
    choice = pick(variables, problem=problem)
    assert choice.backend == "cute" and choice.switches == (f"VLLM_QSA_{own}_ATTN_BACKEND=cute",)
    assert pick({f"VLLM_QSA_{own}_ATTN_BACKEND": "fa3"}, problem=problem).switches == ()


def test_the_faster_table_entry_wins_and_brings_its_config():
    for fast, slow in (("cute", "tilelang"), ("tilelang", "cute")):
        available = both()
        available[fast].entries = [entry("fast", 2.0)]
        available[slow].entries = [entry("slow", 3.0)]
        choice = pick(available=available)
        assert (choice.backend, choice.config, choice.config_source) == (fast, "fast", "table")
        assert choice.decided_by == "tuned table" and "table.json" in choice.notes[-1]


def test_times_are_compared_on_one_and_the_same_problem():
    available = both()
    # Nearest first: TileLang's nearest entry is small and therefore quick; at the shared size CuTe is faster.
    available["tilelang"].entries = [entry("small", 1.0, 8), entry("shared", 9.0, 64)]
    available["cute"].entries = [entry("shared", 5.0, 64)]
    assert pick(available=available).backend == "cute"
    available["cute"].entries = [entry("shared", 50.0, 64)]
    assert pick(available=available).backend == "tilelang"
    available["cute"].entries = [dataclasses.replace(entry("shared", 50.0, 64), static="of other dtypes")]
    choice = pick(available=available)  # nothing in common: the tables cannot say
    assert (choice.backend, choice.decided_by, choice.config) == ("cute", "built-in order", "shared")


@pytest.mark.parametrize("op", ["chunk", "recurrent", "mqa_logits", "paged_mqa_logits"])
@pytest.mark.parametrize("spec", [H100, H200], ids=["h100", "h200"])
def test_the_built_in_order_is_what_was_measured(op: str, spec: DeviceSpec):
    """The order is the same in whatever order the kernels are listed."""
    problem = dataclasses.make_dataclass("Other", [("dtype", str, "bfloat16")], bases=(Problem,), frozen=True)
    problem.op = op
    for names in (("cute", "tilelang"), ("tilelang", "cute"), ("other", "tilelang", "cute")):  # unmeasured ones come last
        choice = choose(problem(), spec, {name: Fake(name) for name in names}, env.parse({}))
        assert (choice.backend, choice.decided_by) == ("cute", "built-in order")


def test_every_operator_of_two_kernels_has_a_statement_with_its_numbers():
    for operator in registry.OPERATORS.values():
        found = operator.measured
        assert bool(found) == (len(operator.modules) > 1)
        for one in found:
            assert set(one.order) == set(operator.modules)
            assert re.match(r"H[12]00, 20\d\d-\d\d-\d\d, ", one.measured) and re.search(r"\d\.\d+ ", one.measured)


def test_the_first_statement_that_holds_counts(monkeypatch: pytest.MonkeyPatch):
    narrow = registry.Statement(("tilelang", "cute"), "", "head_dim 64", lambda problem: problem.head_dim == 64)
    record = registry.OPERATORS["recurrent"]
    monkeypatch.setitem(registry.OPERATORS, "recurrent", dataclasses.replace(record, measured=(narrow, *record.measured)))
    assert pick(problem=FakeProblem(head_dim=64)).backend == "tilelang"
    assert pick(problem=FakeProblem(head_dim=128)).backend == "cute"


@pytest.mark.parametrize("slower", ["tilelang", "cute"])
def test_an_entry_that_the_other_kernel_lacks_decides_nothing(slower: str):
    """The one kernel with an entry ran at a7eedda, however slow."""
    available = both(**{slower: {"entries": [entry("tuned", 1.0, 7)]}})
    choice = pick(available=available)
    assert (choice.backend, choice.decided_by) == ("cute", "built-in order")
    assert choice.config == ("tuned" if slower == "cute" else "cute default")


@pytest.mark.parametrize(
    ("measured", "decides"),
    [
        ({}, True), ({"distance": select.DECIDES_WITHIN}, True), ({"distance": select.DECIDES_WITHIN + 0.01}, False),
        # Measured where states are written, asked for where they are only read: the order may be the other way round.
        ({"others": ("has_final_state",)}, False),
    ],
    ids=str,
)  # fmt: skip
def test_times_of_far_sizes_or_other_flags_choose_tiles_but_no_kernel(measured: dict[str, Any], decides: bool):
    def entries(time_us: float) -> dict[str, Any]:
        return {"entries": [dataclasses.replace(entry("tuned", time_us, 64), **measured)]}

    choice = pick(available=both(tilelang=entries(1.0), cute=entries(2.0)))
    assert (choice.backend, choice.config) == ("tilelang" if decides else "cute", "tuned")


def test_the_time_of_another_version_of_the_kernel_decides_nothing():
    """The stale entry's tiles still serve."""
    stale = dataclasses.replace(entry("stale", 1.0, 7), is_stale=True)
    available = both(tilelang={"entries": [stale]}, cute={"entries": [entry("tuned", 2.0, 7)]})
    assert pick(available=available).backend == "cute"
    choice = pick(backend="tilelang", available=available)
    assert choice.config == "stale" and "with another version of the kernel" in choice.notes[-1]


def test_the_note_names_what_else_the_entry_was_measured_with():
    tuned = dataclasses.replace(entry("tuned", 1.0, 7), others=("gate_dtype", "index_dtype"))
    choice = pick(available=both(cute={"entries": [tuned]}))
    assert choice.notes == ("tiles tuned at num_tokens=7 with another gate_dtype, index_dtype (1 us), from table.json",)


def test_tuned_off_ignores_tables():
    available = both(tilelang={"entries": [entry("tuned", 1.0)]}, cute={"entries": [entry("tuned", 2.0)]})
    choice = pick({"GDN_TUNED": "off"}, available=available)
    assert (choice.backend, choice.config, choice.config_source) == ("cute", "cute default", "default")


def test_tuned_strict_raises_where_there_is_no_entry():
    with pytest.raises(MissingTunedEntry, match="GDN_TUNED=strict.*cute on h100.*head_dim=128.* at num_"):
        pick({"GDN_TUNED": "strict"})
    available = both(cute={"entries": [entry("tuned", 1.0)]})
    assert pick({"GDN_TUNED": "strict"}, available=available).config == "tuned"
    with pytest.raises(MissingTunedEntry):
        pick({"GDN_TUNED": "strict"}, "tilelang", available=available)
    assert pick({"GDN_TUNED": "strict"}, "reference").backend == "reference"


def test_batch_invariance_hides_the_sizes_from_every_choice_of_tiles():
    seen = set()
    for num_tokens in (1, 100, 100_000):
        available = both()
        pick({"GDN_BATCH_INVARIANT": "1"}, available=available, problem=FakeProblem(num_tokens=num_tokens))
        seen |= {problem for fake in available.values() for problem in fake.seen}
    assert seen == {FakeProblem(num_tokens=select.INVARIANT_SIZES["num_tokens"])}
    available = both()
    pick(available=available)
    assert set(available["cute"].seen) == {FakeProblem(num_tokens=7)}


def test_invariant_sizes_name_every_size_there_is():
    assert len(KINDS) >= 10 and ChunkProblem in KINDS and TopkProblem in KINDS
    names = {f.name for kind in KINDS for f in dataclasses.fields(kind) if f.metadata.get("size")}
    assert names <= set(select.INVARIANT_SIZES)


def test_a_given_config_is_taken_as_it_is():
    available = both(cute={"entries": [entry("tuned", 1.0)]})
    choice = pick(backend="cute", available=available, config="mine")
    assert (choice.config, choice.config_source) == ("mine", "argument")
    with pytest.raises(ValueError, match="backend: expected tilelang or cute with a config, got None"):
        pick(config="mine")


def test_an_operator_without_a_kernel():
    """The operator has no kernel at all, or only of one backend where another one is asked for."""
    choice = pick(available={})
    assert (choice.backend, choice.decided_by, choice.notes) == ("reference", "no kernel serves this", ())
    choice = pick({"GDN_BACKEND": "cute"}, available={})
    assert choice.backend == "reference" and "prefers cute, which has no kernel of recurrent" in choice.notes[0]
    with pytest.raises(ValueError, match="expected a backend that can run recurrent, got 'cute'"):
        pick(backend="cute", available={})
    with pytest.raises(ValueError, match="GDN_BACKEND_RECURRENT=tilelang"):
        pick({"GDN_BACKEND_RECURRENT": "tilelang"}, available={})


def test_every_public_function_belongs_to_one_operator():
    import gdn

    functions = [name for operator in registry.OPERATORS.values() for name in operator.functions]
    assert {name for name in functions if functions.count(name) > 1} == {"attention", "sparse_attention"}  # decode and prefill
    without = {"__version__", "explain", "get_paged_mqa_logits_metadata", "ring_shape", "warmup"}
    assert set(functions) == set(gdn.__all__) - without
    for name in functions:
        assert name in registry.operator(name).functions
    with pytest.raises(ValueError, match="op: expected one of chunk"):
        registry.operator("chunky")
