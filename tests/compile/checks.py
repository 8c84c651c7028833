"""Says what is wrong with the machine code of variants, which the session's pool compiles."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from gdn.device import H100, DeviceSpec
from gdn.problem import Problem
from tests.compile import inspection, session
from tests.compile.expectations import expectation
from tests.compile.inspection import Report

TARGET = "sm_90a"
MOST_REGISTERS = 255  # of a thread


def compiles(tasks: Callable[..., Sequence[session.Task]]) -> pytest.MarkDecorator:
    """Marks a test with what it will ask `failures` for. tasks takes the arguments that the test is parametrized with."""
    return pytest.mark.compiles.with_args(tasks)


slow = partial(pytest.param, marks=pytest.mark.cover)  # one of several forms that takes long to compile
quick = pytest.mark.quick  # a test that compiles little enough for the test command; all others that compile are cover tests


def tasks_of(module_name: str, variants: Sequence[tuple[Problem, Any]]) -> list[session.Task]:
    return [(module_name, problem, config) for problem, config in variants]


def violations(report: Report, problem: Problem, backend: str, device: DeviceSpec) -> Iterator[str]:
    for entry, kernels in report.kernels.items():
        dynamic = report.dynamic_shared_bytes[entry]
        for kernel in kernels:
            where = f"{entry}: {kernel.name}"
            if kernel.target != TARGET:
                yield f"{where} is compiled for {kernel.target}"
            if kernel.spilled is not None:
                yield f"{where} spills: {kernel.spilled}"
            if kernel.registers > MOST_REGISTERS:
                yield f"{where} takes {kernel.registers} registers a thread"
            if kernel.registers * kernel.max_threads > device.registers_per_sm:
                yield f"{where} cannot start: {kernel.registers} registers x {kernel.max_threads} threads"
            shared = dynamic + kernel.static_shared_bytes
            if shared > device.shared_bytes_per_block:
                yield f"{where} takes {shared} bytes of shared memory, a block has {device.shared_bytes_per_block}"
    expected = expectation(problem, backend, report.kernels)
    for patterns, least in expected.at_least.items():
        found = sum(report.count(pattern) for pattern in patterns.split("|"))
        if found < least:
            yield f"{found} {patterns}, expected at least {least}"
    for pattern, most in expected.at_most.items():
        if report.count(pattern) > most:
            yield f"{report.count(pattern)} {pattern}, expected at most {most}"
    for pattern in expected.none_of:
        if report.count(pattern):
            yield f"{report.count(pattern)} {pattern}, expected none"


def failures(module_name: str, backend: str, variants: Sequence[tuple[Problem, Any]], device: DeviceSpec) -> list[str]:
    """One paragraph per (problem, config) that does not compile or whose machine code is not as it should be."""
    found = []
    outcomes = session.CURRENT.outcomes(tasks_of(module_name, variants))
    reports = iter(inspection.read([outcome.value for outcome in outcomes if outcome.failure is None]))
    for (problem, config), outcome in zip(variants, outcomes, strict=True):
        wrong = [outcome.failure] if outcome.failure is not None else violations(next(reports), problem, backend, device)
        found += [f"{problem.static_key()} {config or 'default config'}:\n    {what}" for what in wrong]
    return found


def check(module_name: str, backend: str, variants: Sequence[tuple[Problem, Any]], device: DeviceSpec = H100) -> None:
    """Fails with what is wrong with any of them."""
    failed = failures(module_name, backend, variants, device)
    assert not failed, f"{len(failed)} findings in {len(variants)} variants:\n" + "\n".join(failed)
