"""Instructions that a kernel must hold, and those that it must not: the reason it was written in a DSL at all.

Patterns as in MachineCode.count; alternatives are joined by "|". HGMMA and QGMMA are warpgroup matmuls on 16-bit and FP8
operands, UTMALDG and UTMASTG bulk tensor copies, UBLKCP plain bulk copies. Each operator's expectation is with its variants.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from gdn.problem import Problem
from gdn.runtime import registry

TENSOR_CORES = ("HGMMA", "QGMMA", "HMMA")
# Steps that only move memory: rows in 16-byte accesses, several at once.
NO_REUSE = (*TENSOR_CORES, "LDS", "STS", "ATOMS")


@dataclass(frozen=True)
class Expectation:
    """Occurrences of instructions, over all entries of a compiled kernel."""

    at_least: dict[str, int] = field(default_factory=dict)  # pattern -> occurrences
    none_of: tuple[str, ...] = ()
    at_most: dict[str, int] = field(default_factory=dict)


def expectation(problem: Problem, backend: str, entries: Collection[str]) -> Expectation:
    """Expected instructions of a compiled problem; LookupError for an operator without variants, so that none goes unchecked."""
    found: Expectation = registry.operator(problem.op).described("variants").expectation(problem, backend, entries)
    return found
