"""Hashes of the machine code of every table entry and every variant of the compile cover, one line each, sorted.

usage: python -m tests.machine_code_hashes [--op NAME] [--backend NAME] [--workers N] > FILE

Written before and after a change of kernels that must change no instruction, the two files are equal. Needs no GPU.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from autotune import tables, tuning, workers
from gdn.device import H100
from gdn.problem import Problem
from gdn.runtime import registry, tuned
from gdn.testing import machine_code
from tests.compile import session, variants

TIMEOUT_S = 600


def hash_of(module_name: str, problem: Problem, config: Any) -> str:
    """Compiles a variant; runs in a worker process."""
    module = importlib.import_module(module_name)
    return machine_code.code_hash(list(module.compile(problem, config).values()))


def labelled(op: str | None, backend: str | None) -> Iterator[tuple[str, session.Task]]:
    """What to compile, and what its line says of it."""
    for operator in registry.with_kernels():
        if op not in (None, operator.name):
            continue
        for kernel in tuning.kernels(operator.name, None):
            if backend not in (None, kernel.backend):
                continue
            name, module_name = f"{kernel.op}.{kernel.backend}", kernel.module.__name__
            for problem, config in variants.cover(kernel.op, kernel.module):
                config = config or kernel.module.default_config(problem, H100)
                yield f"{name} {problem.static_key()} {config}", (module_name, problem, config)
            for path in tables.paths(tuned.SHIPPED, kernel):
                for row in tables.rows(kernel, tuned.read(path)):
                    label = f"{name} {path.parent.name} {row.problem.static_key()} {row.entry.sizes} {row.config}"
                    yield label, (module_name, row.problem, row.config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", help="of one operator")
    parser.add_argument("--backend", help="tilelang or cute")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    once = {session.key_of(task): task for _, task in labelled(options.op, options.backend)}
    hashes: dict[Any, str] = {}
    for group in session.in_order(list(once.items())):  # a worker process holds one DSL
        outcomes = workers.run(hash_of, [task for _, task in group], workers=options.workers, timeout_s=TIMEOUT_S)
        for done, outcome in enumerate(outcomes, 1):
            hashes[group[outcome.index][0]] = outcome.value if outcome.failure is None else f"failed: {outcome.failure}"
            print(f"\r{done} of {len(group)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    lines = {f"{label} {hashes[session.key_of(task)]}" for label, task in labelled(options.op, options.backend)}
    print("\n".join(sorted(lines)))


if __name__ == "__main__":
    main()
