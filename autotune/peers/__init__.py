"""Other libraries on the shapes of this project's operators, measured in the same run where they are installed.

One module per library; its function with an operator's name returns the ways to call the library for that operator.
"""

import importlib
from collections.abc import Mapping
from typing import Any

from autotune.peers.base import Call, Operands, Outputs, Peer, PeerRow, operands, time_us
from gdn.problems import Problem

__all__ = ["Call", "Operands", "Outputs", "Peer", "PeerRow", "libraries", "operands", "time_us", "ways"]

_MODULES = {"FlashInfer": "flashinfer", "FlashQLA": "flash_qla", "FLA": "fla"}


def libraries() -> list[str]:
    """Names for `--peer`."""
    return list(_MODULES)


def ways(library: str, problem: Problem, arguments: Mapping[str, Any]) -> list[Peer]:
    """The ways to call a library, none where it has no kernel for the problem; ImportError where it is not installed.

    arguments: those of the public operator.
    """
    module = importlib.import_module(f"autotune.peers.{_MODULES[library]}")
    found = getattr(module, problem.op, None)
    return [] if found is None else list(found(problem, arguments))
