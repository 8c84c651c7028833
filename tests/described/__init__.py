"""What the tests know of the public functions: one module a family, which the record of the family names.

A module holds `CALLS`: for each public function one maker of its calls, what its arguments may be, and its results. Everything
that is tested by function draws from it: spoilings, empty batches, torch.library, the rules of the references, `gdn.explain`.
"""

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


def every() -> dict[str, Described]:
    """All public functions that run an operator, by name."""
    places = dict.fromkeys(one.family.calls for one in registry.OPERATORS.values() if one.family is not None)
    return {name: described for place in places for name, described in importlib.import_module(place).CALLS.items()}
