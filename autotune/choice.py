"""Check that calls take the faster kernel: seeded calls run on every kernel with the tiles that the runtime would choose."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autotune import cases, tuning, workers
from autotune.shapes import Shape
from gdn import runtime
from gdn.device import DeviceSpec
from gdn.problem import Problem
from gdn.runtime import Choice, compiled, registry
from gdn.testing import timing

WITHIN = 1.05  # times the fastest kernel's time: counts as equal
WITHIN_US = 0.5  # or this much more: a call does not show it

Timer = Callable[[Shape, dict[str, Any]], dict[str, float]]  # backend -> configuration, to microseconds of each


@dataclass(frozen=True)
class Question:
    """A call, the runtime's choice for it, and the candidates."""

    shape: Shape
    chosen: Choice  # the runtime's, with no backend asked for
    configs: dict[str, Any]  # by kernel backend that serves it: the tiles that it would run with

    @property
    def name(self) -> str:
        return f"{self.shape.op} {self.shape.name}"


@dataclass(frozen=True)
class Verdict:
    """Times of one call, and whether the choice passed."""

    question: Question
    times_us: dict[str, float] = field(default_factory=dict)  # by backend
    failure: str | None = None  # why there are no times

    @property
    def chosen_us(self) -> float:
        return self.times_us[self.question.chosen.backend]

    @property
    def ratio(self) -> float:
        """The chosen kernel's time over the fastest one's."""
        return self.chosen_us / min(self.times_us.values())

    @property
    def passed(self) -> bool:
        return self.failure is None and (self.ratio <= WITHIN or self.chosen_us <= min(self.times_us.values()) + WITHIN_US)

    def as_dict(self) -> dict[str, Any]:
        question = self.question
        found: dict[str, Any] = {
            "op": question.shape.op, "call": question.shape.name,
            "problem": question.shape.problem.static_fields() | question.shape.problem.sizes(),
            "chosen": question.chosen.backend, "decided_by": question.chosen.decided_by,
            "config_source": question.chosen.config_source,
            "configs": {backend: str(config) for backend, config in question.configs.items()}, "passed": self.passed,
        }  # fmt: skip
        if self.failure is not None:
            return found | {"failure": self.failure}
        return found | {"times_us": self.times_us, "ratio": self.ratio}


def ask(shape: Shape, spec: DeviceSpec) -> Question:
    chosen = runtime.explain_problem(shape.problem, spec)
    names = registry.operator(shape.op).modules
    serving = [name for name in names if runtime.candidates(shape.op)[name].refusal(shape.problem) is None]
    configs = {name: runtime.explain_problem(shape.problem, spec, name).config for name in serving}
    return Question(shape, chosen, configs)


def compile_one(kernel: tuning.Kernel, problem: Problem, config: Any) -> None:
    """Fills the disk cache; runs in a worker process. A kernel that spills is accepted: a call would run it too."""
    compiled.ensure(kernel.op, kernel.backend, kernel.module, problem, config)


def compile_all(
    questions: Sequence[Question], *, num_workers: int, timeout_s: float, deadline: float | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> dict[str, str | None]:  # fmt: skip
    """Fills the disk cache. For each call that was reached: why a kernel of it did not compile, or None where all did.

    deadline: of time.monotonic(); a call of which a kernel was not reached by then is left out.
    """
    left = {question.name: len(question.configs) for question in questions}
    failures: dict[str, str] = {}
    for group in registry.KERNEL_BACKENDS[::-1]:  # a worker process holds one DSL; those of CuTe compile faster
        mine = [question for question in questions if group in question.configs]
        kernels = (tuning.kernels(question.shape.op, group)[0] for question in mine)
        tasks = [(kernel, one.shape.problem, one.configs[group]) for kernel, one in zip(kernels, mine, strict=True)]
        for outcome in workers.run(compile_one, tasks, workers=num_workers, timeout_s=timeout_s):
            on_done()
            name = mine[outcome.index].name
            left[name] -= 1
            if outcome.failure is not None:
                failures[name] = f"{group} did not compile: {outcome.failure}"
            if deadline is not None and time.monotonic() > deadline:
                break
    return {name: failures.get(name) for name, count in left.items() if not count or name in failures}


def judge(question: Question, timer: Timer, failure: str | None = None) -> Verdict:
    """Times a call's kernels, interleaved, and once more where the chosen one seems too slow, which may be noise.

    failure: reason why they cannot be timed, if any.
    """
    if failure is not None:
        return Verdict(question, failure=failure)
    for _ in range(2):
        try:
            verdict = Verdict(question, timer(question.shape, question.configs))
        except Exception as error:
            return Verdict(question, failure=f"{type(error).__name__}: {error}")
        if verdict.passed:
            break
    return verdict


def gpu_times_us(spec: DeviceSpec, shape: Shape, configs: dict[str, Any]) -> dict[str, float]:
    """Times kernels on the current CUDA device, interleaved."""
    device = torch.device("cuda", torch.cuda.current_device())
    case = cases.make(shape, device, spec)
    kernels = [runtime.prepare(shape.problem, device, backend, config=config) for backend, config in configs.items()]
    return dict(zip(configs, timing.interleaved_us([case.launches(prepared) for prepared in kernels]), strict=True))
