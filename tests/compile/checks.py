"""Compiles variants in worker processes and says what is wrong with their machine code."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

from autotune import workers
from gdn.device import DeviceSpec
from gdn.problems import Problem
from tests.compile import inspection
from tests.compile.expectations import expectation
from tests.compile.inspection import Report

TARGET = "sm_90a"
MOST_REGISTERS = 255  # of a thread
TIMEOUT_S = 300  # one variant


def violations(report: Report, problem: Problem, backend: str, device: DeviceSpec) -> Iterator[str]:
    for entry, kernels in report.kernels.items():
        dynamic = report.dynamic_shared_bytes[entry]
        for kernel in kernels:
            where = f"{entry}: {kernel.name}"
            if kernel.target != TARGET:
                yield f"{where} is compiled for {kernel.target}"
            if kernel.spills or kernel.stack_bytes:
                yield f"{where} spills: {kernel.spills} local loads and stores, {kernel.stack_bytes} bytes of stack"
            if kernel.registers > MOST_REGISTERS:
                yield f"{where} takes {kernel.registers} registers a thread"
            if kernel.registers * kernel.max_threads > device.registers_per_sm:
                yield f"{where} cannot start: {kernel.registers} registers x {kernel.max_threads} threads"
            shared = dynamic + kernel.static_shared_bytes
            if shared > device.shared_bytes_per_block:
                yield f"{where} takes {shared} bytes of shared memory, a block has {device.shared_bytes_per_block}"
    expected = expectation(problem, backend)
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
    tasks = [(module_name, problem, config) for problem, config in variants]
    found = []
    for outcome in workers.run(inspection.inspect, tasks, workers=len(os.sched_getaffinity(0)), timeout_s=TIMEOUT_S):
        problem, config = variants[outcome.index]
        wrong = [outcome.failure] if outcome.failure is not None else violations(outcome.value, problem, backend, device)
        found += [f"{problem.static_key()} {config or 'default config'}:\n    {what}" for what in wrong]
    return found
