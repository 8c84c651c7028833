"""What an adapter does between its call and the call of its operator, counted: the same on every machine, loaded or not."""

from pathlib import Path as File
from typing import Any, NamedTuple

from torch import Tensor
from torch.overrides import TorchFunctionMode

import gdn
from tests.hosts.adapter_cost import Call, operators_of, watch
from tests.hosts.adapter_paths import Path

_FOLDER = str(File(gdn.__file__).parent)


class Counts(NamedTuple):
    """Python functions of this project that ran outside of operators, and operations of torch, as views are."""

    frames: int
    operations: int


def counts(path: Path) -> Counts:
    """Of one repeated call of a path."""
    _operations(path.step)  # the first calls make what later ones keep
    operations = _operations(path.step) - sum(map(_operations, operators_of(path))) - _operations(path.apart)
    return Counts(_frames(path.step), operations)


def _frames(step: Call) -> int:
    found = 0

    def begins(frame: Any) -> bool:
        nonlocal found
        name: str = frame.f_code.co_filename
        found += name.startswith(_FOLDER)
        return name.startswith("<gdn.")

    watch(step, begins)
    return found


class _Operations(TorchFunctionMode):
    """Counts what returns tensors, as views do."""

    def __init__(self) -> None:
        self.count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        self.count += isinstance(found, Tensor) or (isinstance(found, tuple | list) and any(isinstance(x, Tensor) for x in found))
        return found


def _operations(call: Call) -> int:
    for _ in range(3):
        call()
    with _Operations() as mode:
        call()
    return mode.count
