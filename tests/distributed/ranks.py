"""Runs many cases on the ranks of one group, and says by case what went wrong."""

import functools
import importlib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.layers.processes import run_ranks

Errors = dict[str, list[str]]  # of each case, one a rank that raised
NOT_RUN = "not run: a case before it failed"


class Worlds(dict[int, Errors]):
    """Errors of a module's CASES by number of ranks; the processes of a group start at the first question about it."""

    def __init__(self, module: str, folder: Path) -> None:
        super().__init__()
        self.module, self.folder = module, folder
        self.names = list(_cases(module))

    def __missing__(self, size: int) -> Errors:
        folder = self.folder / str(size)
        folder.mkdir()
        found = run_ranks(functools.partial(_work, self.module), size, folder)
        errors: Errors = {name: [] for name in self.names}
        for rank, failed in enumerate(found):
            if not isinstance(failed, dict):
                failed = dict.fromkeys(self.names, str(failed))
            for name, error in failed.items():
                errors[name].append(f"rank {rank}: {error}")
        self[size] = errors
        return errors


def _cases(module: str) -> dict[str, Callable[[Any], None]]:
    cases: dict[str, Callable[[Any], None]] = importlib.import_module(module).CASES
    return cases


def _work(module: str, group: Any, folder: Path) -> dict[str, str]:
    """Runs the cases on a rank up to the first that fails: the ranks may be out of step then."""
    names, cases = list(_cases(module)), _cases(module)
    for place, name in enumerate(names):
        try:
            with torch.inference_mode():
                cases[name](group)
        except SystemExit:  # a case that ends this rank
            return {}
        except BaseException:
            return {name: traceback.format_exc()} | dict.fromkeys(names[place + 1 :], NOT_RUN)
    return {}
