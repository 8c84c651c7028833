"""Makes drawn calls in this process. A batch of calls is announced on stdout before it starts, so that a loss has a name."""

import json
import random
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from tests.fuzz.families import FAMILIES, Arguments, Family
from tests.fuzz.judging import WRITTEN, call, differ, fault, relaid
from tests.gpu.twins import twin

BATCH = 64  # calls between two looks at their results
Tensor = torch.Tensor


@dataclass
class Options:
    seed: int = 0
    device: str = "cuda"
    streams: int = 4
    backends: tuple[str, ...] = ()  # none: all that an operator has
    only: tuple[str, ...] = ()  # families, or operators; none: all
    cases: int = 24  # of a family and backend: each judged once by the reference, then held bit for bit
    seconds: float = float("inf")

    def rows(self) -> list[tuple[str, str]]:
        """Families, each with each backend."""
        found = []
        for name, family in FAMILIES.items():
            if self.only and not {name, family.op, family.function} & set(self.only):
                continue
            backends = ("reference",) if self.device == "cpu" else family.backends
            found += [(name, one) for one in backends if not self.backends or one in self.backends]
        return found


@dataclass
class Report:
    calls: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


@dataclass
class Case:
    arguments: Arguments
    expected: list[Tensor]


class Worker:
    def __init__(self, options: Options) -> None:
        self.options, self.report = options, Report()
        self.device = torch.device(options.device)
        self.rows, self.cases = options.rows(), {}
        self.is_gpu = self.device.type == "cuda"
        self.streams = [torch.cuda.Stream() for _ in range(options.streams)] if self.is_gpu else []

    def case(self, name: str, backend: str, number: int) -> Case | None:
        """A case, judged when it is first met; None where it is wrong."""
        key = (name, backend, number)
        if key not in self.cases:
            family = FAMILIES[name]
            if self.is_gpu:
                torch.cuda.synchronize()
            arguments = family.draw(random.Random(f"{self.options.seed} {name} {number}"), self.device)
            expected = call(family, twin(arguments), backend)
            wrong = fault(family, arguments, expected)
            if self.is_gpu:
                torch.cuda.synchronize()
            if wrong is not None:
                self.report.wrong.append(f"{name}, {backend}, case {number}: {wrong}")
            self.cases[key] = None if wrong is not None else Case(arguments, [x.clone() for x in expected])
        return self.cases[key]

    def run(self, first: int, last: int) -> None:
        started = time.monotonic()
        for low in range(first, last, BATCH):
            if time.monotonic() - started > self.options.seconds:
                break
            high = min(low + BATCH, last)
            self.tell(batch=[low, high])
            draws = [(index, random.Random(f"{self.options.seed} {index}")) for index in range(low, high)]
            picked = [(index, rng, *rng.choice(self.rows), rng.randrange(self.options.cases)) for index, rng in draws]
            for _, _, *key in picked:
                self.case(*key)
            flags = [(index, key, self.make(rng, *key)) for index, rng, *key in picked]
            if self.is_gpu:
                torch.cuda.synchronize()
            for index, (name, backend, number), is_wrong in flags:
                if is_wrong is None:
                    continue
                self.report.calls[f"{name}, {backend}"] += 1
                if isinstance(is_wrong, str) or bool(is_wrong):
                    why = is_wrong if isinstance(is_wrong, str) else "other bits than the first time"
                    self.report.wrong.append(f"call {index}: {name}, {backend}, case {number}: {why}")
        self.tell(is_done=True)

    def tell(self, **what: Any) -> None:
        print(json.dumps(what | {"calls": dict(self.report.calls), "wrong": self.report.wrong}), flush=True)

    def make(self, rng: random.Random, name: str, backend: str, number: int) -> Tensor | str | None:
        """One call on one of the streams; whether its results are others than the case's, on the device."""
        case = self.case(name, backend, number)
        if case is None:
            return None
        if not self.is_gpu:
            return self._call(rng, FAMILIES[name], case, backend)
        with torch.cuda.stream(rng.choice(self.streams)):
            if rng.random() < 0.05:
                torch.cuda._sleep(rng.randrange(2_000_000))
            if rng.random() < 0.005 and FAMILIES[name].op:  # an engine waits for the device
                return self._captured(FAMILIES[name], case, backend)
            return self._call(rng, FAMILIES[name], case, backend)

    def _call(self, rng: random.Random, family: Family, case: Case, backend: str) -> Tensor | str:
        arguments = twin(case.arguments)
        read = [
            key for key, x in arguments.items()
            if isinstance(x, Tensor) and key not in WRITTEN and x.dtype in (torch.bfloat16, torch.float16) and x.numel() > 1
        ]  # fmt: skip
        if read and rng.random() < 0.2 and "kv_cache" not in arguments:
            key = rng.choice(read)
            arguments[key] = relaid(arguments[key], rng.choice(["odd", "reversed"]))
        try:
            found = call(family, arguments, backend)
        except Exception as error:
            if "CUDA error" in str(error):
                raise
            return f"{type(error).__name__}: {error}"
        del arguments  # on its stream: the memory is free for later work of that stream alone
        return differ(found, case.expected)

    def _captured(self, family: Family, case: Case, backend: str) -> Tensor:
        """The call captured and replayed."""
        arguments, graph = twin(case.arguments), torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        stream.synchronize()
        with torch.cuda.graph(graph):
            found = call(family, arguments, backend)
        graph.replay()
        wrong = differ(found, case.expected)
        stream.synchronize()
        return wrong


def main(text: str) -> None:
    """text: JSON of the options and the range of calls."""
    given: dict[str, Any] = json.loads(text)
    first, last = given.pop("range")
    for name in ("backends", "only"):
        given[name] = tuple(given[name])
    Worker(Options(**given)).run(first, last)


def command(options: Options, first: int, last: int) -> str:
    """JSON for `main`."""
    seconds = options.seconds if options.seconds != float("inf") else 1e9
    return json.dumps(asdict(options) | {"seconds": seconds, "range": [first, last]})


if __name__ == "__main__":
    main(sys.argv[1])
