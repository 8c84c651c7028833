"""What an adapter does between its call and the call of its operator, counted: the same on every machine, loaded or not."""

import sys
from pathlib import Path as File
from typing import Any, NamedTuple

from torch import Tensor
from torch.overrides import TorchFunctionMode

import gdn
from tests.hosts.adapter_cost import Call, calls_of
from tests.hosts.adapter_paths import Path

_FOLDER = str(File(gdn.__file__).parent)


class Counts(NamedTuple):
    """Python functions of this project that ran outside of operators, and operations of torch, as views are."""

    frames: int
    operations: int


def counts(path: Path) -> Counts:
    """Of one repeated call of a path."""
    _operations(path.step)  # the first calls make what later ones keep
    operators = calls_of(path.step)
    if len(operators) != path.operators:
        raise ValueError(f"{path.what}: expected {path.operators} calls of operators, got {len(operators)}")
    operations = _operations(path.step) - sum(map(_operations, operators)) - _operations(path.apart)
    return Counts(_frames(path.step), operations)


def _frames(step: Call) -> int:
    found, inside = 0, []  # type: ignore[var-annotated]  # the operator that runs

    def look(frame: Any, event: str, _: Any) -> None:
        nonlocal found
        name = frame.f_code.co_filename
        if event == "call" and not inside:
            if name.startswith("<gdn."):
                inside.append(frame)
            elif name.startswith(_FOLDER):
                found += 1
        elif event == "return" and inside and inside[0] is frame:
            inside.clear()

    sys.setprofile(look)
    try:
        step()
    finally:
        sys.setprofile(None)
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
