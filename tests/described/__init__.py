"""What the tests know of the public functions: one module a family, which the record of the family names.

A module holds `CALLS`: for each public function one maker of its calls, what its arguments may be, and its results. Everything
that is tested by function draws from it: spoilings, empty batches, torch.library, the rules of the references, `gdn.explain`.
"""

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import gdn
from gdn.runtime import registry
from tests.ops.spoiling.call import Call, Draw
from tests.ops.spoiling.kinds import Kind

assert gdn.__all__  # loads the operators, and with them the records of their families


@dataclass(frozen=True)
class Described:
    """A public function.

    make: a call of it. What the maker draws decides the form, so that one maker serves random forms (`Draw`) and the plain one of
    a number of tokens (`Plain`).
    results: of each result its dimensions ("~": any; or the argument that it is like), and what rows hold that have no work
    (None: not promised).
    arguments: names of arguments -> what is accepted and refused of them. What follows from the signature is left out.
    changes: masks of the elements of pools that a call may change, by the pool's name. `out` is left out.
    """

    make: Callable[[Draw], Call]
    results: tuple[tuple[str, Any], ...]
    arguments: Mapping[str, Kind]
    changes: Callable[[Call], dict[str, torch.Tensor]] | None = None


@functools.cache
def every() -> dict[str, Described]:
    """All public functions that run an operator, by name. LookupError for a family whose record names no module of calls."""
    found: dict[str, Described] = {}
    for operator in registry.OPERATORS.values():
        if operator.family is None:
            continue
        if not operator.family.calls:
            raise LookupError(f"{operator.name}: expected a family whose record names the module of its calls, got none")
        found |= importlib.import_module(operator.family.calls).CALLS
    return found
