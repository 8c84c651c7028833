"""Every class of problem that an operator has."""

from collections.abc import Iterator
from typing import Any

import gdn
from gdn.problem import Problem

assert gdn.__all__  # loads the operators, and with them their problems


def _below(kind: Any) -> Iterator[Any]:
    for one in kind.__subclasses__():
        yield one
        yield from _below(one)


KINDS: list[Any] = [one for one in _below(Problem) if one.__module__.startswith("gdn.") and "op" in vars(one)]
