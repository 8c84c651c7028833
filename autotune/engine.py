"""The search over shapes of kernels: what is tried when, what is judged when, within a budget of time.

Work comes in visits: a few configurations of one shape, whose inputs are made once. Visits come in rounds. The first rounds
visit every operator's most common size, so that a budget that ends early has covered every operator; the next refine it, and
then other sizes follow. A visit ends with a verdict on what was timed so far.

Everything is in the journals before and after it runs, so that the same command goes on where an earlier one ended.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from autotune import judge
from autotune.compiling import Compiler
from autotune.device import Device
from autotune.journal import DROPPED, INTERRUPTED, JUDGED, STARTED, TIMED, Journal, Record
from autotune.shapes import Shape
from autotune.tuning import Candidate, Kernel, Plan, Winner

VISIT = 8  # configurations
FINALISTS = 4
FINALIST_MARGIN = 1.15  # times the default's time: slower candidates are not compared with it


@dataclass
class Job:
    """One shape of one kernel."""

    plan: Plan
    shape: Shape
    journal: Journal
    rank: int  # of its size among those of its operator and tune key

    @cached_property
    def _key(self) -> tuple[str, dict[str, int]]:
        return self.shape.problem.static_key(), self.shape.problem.sizes()

    @property
    def label(self) -> str:
        return f"{self.plan.kernel.op}.{self.plan.kernel.backend} {self.shape.name}"

    @property
    def configs(self) -> list[Any]:
        return self.plan.configs[self.shape.name]

    def candidate(self, config: Any) -> Candidate:
        return self.plan.candidates[self._key[0], config]

    def record(self, config: Any) -> Record | None:
        return self.journal.find(*self._key, asdict(config))

    def note(self, config: Any, record: Record) -> None:
        self.journal.add(*self._key, asdict(config), record)

    def timed(self) -> list[tuple[Any, Record]]:
        """The configurations that were correct and timed, the fastest first."""
        every = ((config, self.record(config)) for config in self.configs)
        found = [(config, record) for config, record in every if record is not None and record.state == TIMED]
        return sorted(found, key=lambda item: item[1].time_us or 0.0)

    def left(self) -> list[Any]:
        """The configurations that are neither timed nor dropped."""
        return [config for config in self.configs if self.record(config) is None]

    def is_due(self) -> bool:
        """Whether a verdict can be given, and none is of all that was timed.

        The default and what the table has must have been tried: a winner replaces the table's entry.
        """
        known, count, judged = self.configs[: self.plan.known[self.shape.name]], len(self.timed()), self._judged()
        is_new = count > 0 and (judged is None or judged[1].timed != count)
        return is_new and all(self.record(config) is not None for config in known)

    def _judged(self) -> tuple[Any, Record] | None:
        """The configuration of the latest verdict, and what it says."""
        fields, found = self.journal.find_judged(*self._key) or (None, None)
        config = next((config for config in self.configs if asdict(config) == fields), None)
        return None if found is None or config is None else (config, found)

    def winner(self) -> Winner | None:
        """What the shape keeps; None before the first verdict."""
        if (judged := self._judged()) is None:
            return None
        config, found = judged
        assert found.time_us is not None and found.error is not None
        return Winner(self.shape, config, found.time_us, found.error, found.default_us, found.gain)


@dataclass
class Visit:
    """Configurations of a shape that are tried one after the other."""

    job: Job
    left: list[Any]

    def ready(self) -> list[Any]:
        """Those that are compiled, or failed to: where they are half of what is left, since one may hang in its compiler."""
        done = [config for config in self.left if self.job.candidate(config).is_done]
        return done if 2 * len(done) >= len(self.left) else []


def jobs(plans: Iterable[tuple[Plan, Journal]]) -> list[Job]:
    """A job for each shape that its kernel serves."""
    found = []
    for plan, journal in plans:
        ranks: dict[str, int] = {}
        for shape in plan.shapes.values():
            key = shape.problem.tune_key()
            ranks[key] = ranks.get(key, -1) + 1
            found.append(Job(plan, shape, journal, ranks[key]))
    return found


def visits(every: Sequence[Job]) -> list[Visit]:
    """What the journals leave to do, in the order of the work."""
    parts: list[tuple[int, int, Visit]] = []
    for job in every:
        left = job.left()
        starts = range(0, len(left), VISIT) if left else [0] if job.is_due() else []
        parts += [(job.rank, number, Visit(job, left[start : start + VISIT])) for number, start in enumerate(starts)]
    return [visit for _, _, visit in sorted(parts, key=lambda part: part[:2])]


def wanted(plan: Sequence[Visit]) -> list[tuple[Kernel, Candidate]]:
    """Candidates to compile, in the order in which they are tried."""
    found = [(visit.job.plan.kernel, visit.job.candidate(config)) for visit in plan for config in visit.left]
    return list({(kernel, id(candidate)): (kernel, candidate) for kernel, candidate in found}.values())


def run(
    plan: Sequence[Visit], compiler: Compiler, device: Device, deadline: float,
    on_step: Callable[[Job, Any, Record], None] = lambda job, config, record: None,
) -> None:  # fmt: skip
    """Tries what is compiled while the rest compiles, until all is done or the deadline has passed (time.monotonic())."""
    waiting = list(plan)
    while waiting and time.monotonic() < deadline:
        visit = next((one for one in waiting if not one.left or one.ready()), None)
        if visit is None:
            if not compiler.wait(deadline - time.monotonic()) and not any(one.ready() for one in waiting):
                return
            continue
        for config in visit.ready():
            if time.monotonic() >= deadline:
                break
            on_step(visit.job, config, _try(visit.job, config, device))
            visit.left.remove(config)
        if visit.job.is_due():
            _judge(visit.job, device)
        if not visit.left:
            waiting.remove(visit)


def _try(job: Job, config: Any, device: Device) -> Record:
    candidate = job.candidate(config)
    failure = candidate.failure
    if config != job.configs[0]:  # calls run the default, whatever it spills
        failure = failure or candidate.spills
    if failure is None:
        job.note(config, Record(STARTED))
        try:
            outcome = device.measure(job.plan.kernel, job.shape, config)
        except BaseException:  # not the candidate's doing
            job.note(config, Record(INTERRUPTED))
            raise
        failure = outcome.failure
    if failure is None:
        error, time_us = outcome.value
        record = Record(TIMED, time_us=time_us, error=error)
    else:
        record = Record(DROPPED, why=failure)
    job.note(config, record)
    return record


def _judge(job: Job, device: Device) -> None:
    """Notes the fastest of the finalists that is faster than the default beyond doubt, else the default."""
    timed = job.timed()
    times_us, default = {config: record.time_us or 0.0 for config, record in timed}, job.configs[0]
    if default not in times_us:  # it failed, so that there is nothing to compare with
        return _keep(job, timed[0][0], times_us[timed[0][0]], None, None)
    default_us = times_us.pop(default)
    near = [config for config, time_us in times_us.items() if time_us <= FINALIST_MARGIN * default_us]
    kept: list[tuple[judge.Comparison, Any, float, float]] = []
    for config in near[:FINALISTS]:
        outcome = device.compare(job.plan.kernel, job.shape, [default, config], judge.ROUNDS)
        if outcome.failure is not None:
            job.note(config, Record(DROPPED, why=outcome.failure))
            continue
        before, times = outcome.value
        default_us = statistics.median(before)
        found = judge.compare(times, before, len(timed))
        if found.is_kept:
            kept.append((found, config, statistics.median(times), default_us))
    if not kept:
        return _keep(job, default, default_us, default_us, None)
    found, config, time_us, default_us = min(kept, key=lambda item: item[0].ratio)
    return _keep(job, config, time_us, default_us, found.gain)


def _keep(job: Job, config: Any, time_us: float, default_us: float | None, gain: float | None) -> None:
    before = job.record(config)
    assert before is not None
    record = Record(JUDGED, time_us=time_us, error=before.error, default_us=default_us, gain=gain, timed=len(job.timed()))
    job.note(config, record)
