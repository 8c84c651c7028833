"""Work spread over ranks: a process for each GPU of this machine, with NCCL between them; and what comes of it as a command ends.

Shared by `benchmarks ranks` and `benchmarks context`.
"""

import gc
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import typer
from torch.multiprocessing.spawn import start_processes

from autotune.console import device_spec, keep
from gdn.cli.demo.ranks import join

SIZES = (1, 2, 4)
TIMEOUT = timedelta(minutes=3)  # of an exchange: a rank that hangs leaves a traceback within the time of a test run

Work = Callable[[Any, Any, torch.device, torch.dtype], Any]  # of one rank: job, group, device, dtype of the weights


def sizes() -> list[int]:
    """Numbers of ranks that are timed here; ValueError without a Hopper GPU."""
    device_spec()
    return [size for size in SIZES if size <= torch.cuda.device_count()]


def over_ranks(work: Work, ranks: int, job: Any) -> Any:
    """What the first rank's work returns, through JSON. work: importable by name; its group is None for one rank.

    Raises
    ------
    ProcessRaisedException, ProcessExitedException
        Where a rank failed; the others are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_rank, (ranks, work, job, folder), nprocs=ranks, start_method="spawn")
        return json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))


def _rank(rank: int, ranks: int, work: Work, job: Any, folder: str) -> None:
    """One rank's process."""
    is_cuda = job.device_type == "cuda"
    device, group = torch.device("cuda", rank) if is_cuda else torch.device("cpu"), None
    if is_cuda:
        torch.cuda.set_device(device)
    if ranks > 1:
        group = join(device, TIMEOUT, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found = work(job, group, device, torch.bfloat16 if is_cuda else torch.float32)
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found), encoding="utf-8")
    if group is not None:
        gc.collect()  # layers hold the group, in cycles: at the end of the process its threads would outlive it
        dist.destroy_process_group()


def place(group: Any) -> tuple[int, int]:
    """This rank, and the number of ranks."""
    return (0, 1) if group is None else (group.rank(), group.size())


def wait(device: torch.device) -> None:
    """Waits for the device's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cells(row: Any) -> tuple[str, str]:
    """How many times as fast as one GPU a row is, and must be, for a table."""
    color = "green" if row.passed else "red"
    return f"[{color}]{row.faster:.2f}[/]", "-" if row.must is None else f"{row.must:.2f}"


def finish(rows: Sequence[Any], json_file: Path | None) -> NoReturn:
    """Writes the rows to a file, if there is to be one, and ends the command: exit code 1 where a row misses its limit."""
    shared = {"device": torch.cuda.get_device_name(), "torch": str(torch.__version__)}
    keep(json_file, shared | {"rows": [asdict(row) | {"passed": row.passed} for row in rows]})
    raise typer.Exit(0 if all(row.passed for row in rows) else 1)
