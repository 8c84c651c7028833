"""The kernel that a call takes is the one that was measured the faster: by `explain` for 300 seeded calls, and how such calls are
drawn, timed and judged."""

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from autotune import calls, cases, choice, choice_command, cli, workers
from autotune.choice import Question, Verdict
from autotune.shapes import Shape
from autotune.workers import Outcome
from gdn import runtime
from gdn.device import H100, H200, DeviceSpec
from gdn.ops.indexer.problem import MqaLogitsProblem
from gdn.runtime import Choice, Prepared, explaining, registry, select, tuned

CPU = torch.device("cpu")
CALLS = calls.calls(300)


# --- what runs -------------------------------------------------------------------------------------------------------


def _measured(op: str, backend: str) -> Iterator[tuple[dict[str, Any], dict[str, int], float]]:
    """Static fields, sizes, time of the entries of the H100's table, read as JSON."""
    path = tuned.SHIPPED / "h100" / f"{op}.{backend}.json"
    for group in json.loads(path.read_text())["groups"] if path.is_file() else []:
        for entry in group["entries"]:
            yield group["static"], entry["sizes"], entry["time_us"]


def _faster_by_table(shape: Shape) -> set[str]:
    """The kernels that a table may name for a call: faster than the other on a problem near it, both of its tune key."""
    found = set()
    for first, second in itertools.product(_measured(shape.op, "cute"), _measured(shape.op, "tilelang")):
        if first[:2] == second[:2] and tuned.distance(first[1], shape.problem.sizes()) <= select.DECIDES_WITHIN:
            if {name: first[0][name] for name in shape.problem.tune_names()} == shape.problem.tune_fields():
                found.add("cute" if first[2] < second[2] else "tilelang")
    return found


@pytest.mark.parametrize("spec", [H100, H200], ids=["h100", "h200"])
@pytest.mark.parametrize("op", calls.OPERATORS)
def test_the_chosen_kernel_is_the_one_that_was_measured_the_faster(op: str, spec: DeviceSpec) -> None:
    mine = [shape for shape in CALLS if shape.op == op]
    assert len(mine) == 75
    for shape in mine:
        chosen = runtime.explain_problem(shape.problem, spec)
        assert not chosen.refusals, shape.name  # both could run
        statement = registry.operator(op).statement(shape.problem)
        assert statement is not None
        if chosen.decided_by == "tuned table":
            assert spec is H100 and chosen.backend in _faster_by_table(shape), shape.name
        else:
            assert (chosen.decided_by, chosen.backend) == ("built-in order", statement.order[0]), shape.name


def test_some_calls_take_tiles_of_a_table_measured_with_other_fields() -> None:
    """A table served its own static fields alone at a7eedda."""
    found = [runtime.explain_problem(shape.problem, H100) for shape in CALLS]
    assert {one.config_source for one in found} == {"table", "default"}
    assert sum(one.config_source == "table" for one in found) >= 10
    assert sum(" with another " in note for one in found for note in one.notes) >= 5


@pytest.mark.parametrize("spec", [H100, H200], ids=["h100", "h200"])
def test_bf16_logits_with_float32_weights_take_the_faster_kernel(spec: DeviceSpec) -> None:
    """1247 us by default at a7eedda, 681 with the other kernel: the table's entry had bf16 weights."""
    problem = MqaLogitsProblem(16, 1, 128, "bfloat16", False, "float32", True, True, "float32", False, 4096, 32768, 32768)
    assert problem in [shape.problem for shape in CALLS]
    assert runtime.explain_problem(problem, spec).backend == "cute"


# --- the calls -------------------------------------------------------------------------------------------------------

_README = {"num_k_heads": 16, "num_v_heads": 32, "num_sequences": 8, "cu_seqlens_dtype": "int64", "state_v_first": True}

MUST: dict[str, tuple[str, dict[str, Any]]] = {
    "README's example": ("recurrent", _README),
    "int64 offsets": ("chunk", {"cu_seqlens_dtype": "int64"}),
    "int64 slots": ("recurrent", {"index_dtype": "int64"}),
    "K-first states of chunk": ("chunk", {"state_v_first": False}),
    "K-first states of recurrent": ("recurrent", {"state_v_first": False}),
    "24 value heads": ("chunk", {"num_v_heads": 24}),
    "48 value heads": ("recurrent", {"num_v_heads": 48}),
    "GQA": ("chunk", {"num_q_heads": 32, "num_v_heads": 4}),
    "float16": ("recurrent", {"dtype": "float16"}),
    "bf16 states": ("chunk", {"state_dtype": "bfloat16"}),
    "head_dim 64 of chunk": ("chunk", {"head_k_dim": 64}),
    "masks": ("chunk", {"has_mask": True}),
    "no masks": ("chunk", {"has_mask": False}),
    "drafts": ("recurrent", {"write_every_token": True}),
    "trees": ("recurrent", {"has_parent": True}),
    "24 indexer heads": ("mqa_logits", {"num_heads": 24}),
    "48 indexer heads": ("paged_mqa_logits", {"num_heads": 48}),
    "bf16 weights": ("mqa_logits", {"weights_dtype": "bfloat16"}),
    "bf16 out": ("mqa_logits", {"out_dtype": "bfloat16"}),
    "packed": ("mqa_logits", {"packed": True}),
    "not clean": ("mqa_logits", {"clean": False}),
    "head_dim 64 of logits": ("mqa_logits", {"head_dim": 64}),
    "page size 16": ("paged_mqa_logits", {"page_size": 16}),
    "page size 128": ("paged_mqa_logits", {"page_size": 128}),
    "page size 544": ("paged_mqa_logits", {"page_size": 544}),
    "next_n 4": ("paged_mqa_logits", {"next_n": 4}),
}


@pytest.mark.parametrize("name", MUST)
def test_what_must_be_among_the_calls_is_among_those_that_are_timed(name: str) -> None:
    op, fields = MUST[name]
    assert any(shape.op == op and fields.items() <= vars(shape.problem).items() for shape in CALLS[:60])


def test_calls_follow_from_their_seed() -> None:
    assert calls.calls(60) == CALLS[:60]
    assert calls.calls(300, seed=1)[60:] != CALLS[60:]
    assert len({shape.problem for shape in CALLS}) == len({(shape.op, shape.name) for shape in CALLS}) == 300
    assert [shape.op for shape in CALLS[:8]] == [*calls.OPERATORS, *calls.OPERATORS]


def test_calls_are_of_a_few_milliseconds_and_gigabytes() -> None:
    for shape in (*CALLS, *calls.calls(300, seed=1)):
        assert shape.problem.flops() < 2.5e12 and shape.problem.bytes_moved() < 5e9, shape.name


def _small(shape: Shape) -> Shape:
    """The same call with sizes that a CPU can fill."""
    problem: Any = shape.problem
    if shape.op in ("chunk", "recurrent"):
        count = min(problem.num_sequences, 3)
        tokens = 1 if shape.op == "recurrent" and not problem.write_every_token else 3
        return replace(shape, problem=replace(problem, num_tokens=tokens * count, num_sequences=count), lengths=(tokens,) * count)
    if shape.op == "mqa_logits":
        return replace(shape, problem=replace(problem, num_queries=5, num_keys=40, num_columns=40))
    return replace(shape, problem=replace(problem, batch=2, max_context_len=100))


@pytest.mark.parametrize("shape", [_small(shape) for shape in CALLS[:80]], ids=lambda shape: f"{shape.op}-{shape.name}")
def test_a_call_is_its_problem(shape: Shape) -> None:
    """The inputs that are timed are what the problem says: the public operator makes the same problem of them."""
    case = cases.make(shape, CPU, replace(H100, l2_bytes=1))  # one set of inputs
    with explaining() as asked:
        case.public_calls(None)[0]()
    assert [problem for _, problem in asked.answers] == [shape.problem]
    launched: list[tuple[Any, ...]] = []
    prepared = Prepared("cute", None, 256, lambda *tensors: launched.append(tensors), Choice(shape.op, "cute"))
    for call in case.launches(prepared):
        call()
    assert launched and len({len(tensors) for tensors in launched}) == 1


# --- the verdict -----------------------------------------------------------------------------------------------------


def _question(chosen: str = "cute", **configs: Any) -> Question:
    return Question(CALLS[0], Choice("chunk", chosen), configs or {"cute": 1, "tilelang": 2})


@pytest.mark.parametrize(
    ("cute_us", "tilelang_us", "passed"),
    [(100.0, 200.0, True), (105.0, 100.0, True), (105.1, 100.0, False), (2.5, 2.0, True), (2.51, 2.0, False), (9.0, 9.0, True)],
)
def test_the_chosen_kernel_may_be_a_little_slower(cute_us: float, tilelang_us: float, passed: bool) -> None:
    verdict = Verdict(_question(), {"cute": cute_us, "tilelang": tilelang_us})
    assert verdict.passed == passed
    assert verdict.ratio == pytest.approx(cute_us / min(cute_us, tilelang_us))


def test_what_seems_too_slow_is_timed_again() -> None:
    times = iter([{"cute": 150.0, "tilelang": 100.0}, {"cute": 101.0, "tilelang": 100.0}, {"cute": 1.0, "tilelang": 1.0}])
    verdict = choice.judge(_question(), lambda shape, configs: next(times))
    assert verdict.passed and verdict.chosen_us == 101.0
    assert len(list(times)) == 1  # a call that passes is timed once
    slow = choice.judge(_question(), lambda shape, configs: {"cute": 150.0, "tilelang": 100.0})
    assert not slow.passed and slow.as_dict()["ratio"] == 1.5


def test_a_call_that_cannot_be_timed_fails() -> None:
    def timer(shape: Shape, configs: dict[str, Any]) -> dict[str, float]:
        raise RuntimeError("out of memory")

    verdict = choice.judge(_question(), timer)
    assert not verdict.passed and verdict.as_dict()["failure"] == "RuntimeError: out of memory"
    assert choice.judge(_question(), timer, "cute did not compile").failure == "cute did not compile"


def test_a_question_names_the_tiles_that_each_kernel_would_run_with() -> None:
    shape = next(shape for shape in CALLS if runtime.explain_problem(shape.problem, H100).config_source == "table")
    question = choice.ask(shape, H100)
    assert set(question.configs) == {"cute", "tilelang"}
    assert question.configs[question.chosen.backend] == question.chosen.config
    for backend, config in question.configs.items():
        assert config == runtime.explain_problem(shape.problem, H100, backend).config


def _pool(outcomes: Callable[[int], Outcome], ran: list[tuple[Any, ...]]) -> Callable[..., Iterator[Outcome]]:
    def run(function: object, tasks: Sequence[tuple[Any, ...]], **_: Any) -> Iterator[Outcome]:
        for index, task in enumerate(tasks):
            ran.append(task)
            yield outcomes(index)

    return run


def test_every_kernel_is_compiled_and_failures_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    questions = [choice.ask(shape, H100) for shape in CALLS[:4]]
    ran: list[tuple[Any, ...]] = []
    monkeypatch.setattr(workers, "run", _pool(lambda at: Outcome(at, None, "it spills" if at == 2 else None, 1.0), ran))
    found = choice.compile_all(questions, num_workers=1, timeout_s=1)
    assert [kernel.backend for kernel, *_ in ran] == ["cute"] * 4 + ["tilelang"] * 4  # one DSL at a time
    assert {(kernel.module_name, problem, config) for kernel, problem, config in ran} == {
        (registry.operator(question.shape.op).modules[backend], question.shape.problem, config)
        for question in questions
        for backend, config in question.configs.items()
    }
    assert [found[question.name] is None for question in questions] == [True, True, False, True]
    assert found[questions[2].name] == "tilelang did not compile: it spills"


def test_a_spent_budget_leaves_out_what_was_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    questions = [choice.ask(shape, H100) for shape in CALLS[:4]]
    monkeypatch.setattr(workers, "run", _pool(lambda at: Outcome(at, None, None, 1.0), []))
    found = choice.compile_all(questions, num_workers=1, timeout_s=1, deadline=time.monotonic() - 1)
    assert found == {questions[0].name: None}  # one kernel of each DSL is always tried


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs `choice` with kernels of these times (us), all compiled."""

    def run(*options: str, **times: float) -> Any:
        monkeypatch.setattr(choice_command, "device_spec", lambda: H100)
        monkeypatch.setattr(choice, "compile_all", lambda questions, **_: {question.name: None for question in questions})
        monkeypatch.setattr(choice, "gpu_times_us", lambda spec, shape, configs: times)
        return CliRunner().invoke(cli.app, ["choice", *options])

    return run


def test_the_command_prints_a_table_and_writes_json(command: Callable[..., Any], tmp_path: Path) -> None:
    done = command("--calls", "4", "--json", str(tmp_path / "found.json"), cute=100.0, tilelang=130.0)
    assert done.exit_code == 0, done.output
    assert "4 of 4 calls timed, 0 failed (seed 0, h100)" in done.output
    assert "100.0" in done.output and "130.0" in done.output and "1.00" in done.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["device"], found["seed"], len(found["calls"])) == ("h100", 0, 4)
    assert found["calls"][0]["op"] == "chunk" and found["calls"][0]["times_us"] == {"cute": 100.0, "tilelang": 130.0}


def test_the_command_fails_where_a_slower_kernel_is_chosen(command: Callable[..., Any]) -> None:
    done = command("--calls", "4", cute=130.0, tilelang=100.0)
    assert done.exit_code == 1
    assert "4 failed" in done.output and "slower" in done.output and "1.30" in done.output


def test_the_command_keeps_to_its_budget(command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0, 10)
    monkeypatch.setattr(choice_command.time, "monotonic", lambda: float(next(clock)))
    done = command("--calls", "60", "--budget", "55", cute=100.0, tilelang=130.0)
    assert done.exit_code == 0, done.output
    (timed,) = [line for line in done.output.splitlines() if "calls timed" in line]
    assert 1 <= int(timed.split()[0]) <= 6 and "of 60 calls" in timed


def test_compile_only_needs_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Question] = []

    def compile_all(questions: list[Question], **_: Any) -> dict[str, str | None]:
        asked.extend(questions)
        return {
            question.name: "tilelang did not compile: it spills" if question.shape.op == "chunk" else None
            for question in questions
        }

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(choice, "compile_all", compile_all)
    done = CliRunner().invoke(cli.app, ["choice", "--calls", "8", "--compile-only", "--device", "h200"])
    assert done.exit_code == 1 and len(asked) == 8
    assert "6 of 8 calls are compiled" in done.output and "it spills" in done.output
    assert CliRunner().invoke(cli.app, ["choice", "--compile-only", "--device", "a100"]).exit_code == 2
    assert CliRunner().invoke(cli.app, ["choice"]).exit_code == 2
