"""`tune --restamp` and `--prune`: the tables of kernels brought up to date without a GPU, and what was done said."""

from collections.abc import Sequence
from pathlib import Path

from autotune import tables
from autotune.console import console
from autotune.tuning import Kernel
from gdn.runtime import tuned


def run(kernels: Sequence[Kernel], folder: Path, num_workers: int, timeout_s: float, prune: bool) -> bool:
    """Restamps with so many processes, 0: not at all; then prunes where it is asked. Returns whether all entries are current."""
    current = [_restamp(kernel, folder, num_workers, timeout_s) for kernel in kernels] if num_workers else []
    for kernel, path in [(one, path) for one in kernels for path in tables.paths(folder, one)] if prune else []:
        count = tables.prune(path, kernel)
        gone = "" if path.is_file() else ", and with them the table"
        console.print(f"{path.parent.name}/{path.name}: {count} entries that repeat the default dropped{gone}", markup=False)
    return all(current)


def _restamp(kernel: Kernel, folder: Path, num_workers: int, timeout_s: float) -> bool:
    """Restamps the entries of a kernel's tables; returns whether all are current afterwards."""
    current = True
    for path in tables.paths(folder, kernel):
        found = tables.restamp(path, kernel, num_workers=num_workers, timeout_s=timeout_s)
        name = f"{path.parent.name}/{path.name}"
        for why in found.left:
            console.print(f"{name}: stale: {why}", markup=False)
        count = tuned.read(path).num_entries()
        console.print(f"{name}: {found.stamped} of {count} entries restamped, {len(found.left)} stale")
        current = current and not found.left
    return current
