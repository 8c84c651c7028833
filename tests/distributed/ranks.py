"""Runs functions on the ranks of a gloo group: processes that start once for many functions, and report by name."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Case = Callable[[Any], None]  # of the group; raises where something is wrong
NOT_RUN = "not run: a case before it failed"


def start(module: str, names: list[str], world: int, folder: Path, timeout_s: float = 60.0) -> dict[str, list[str]]:
    """Runs cases of a module, each on all ranks; returns the errors of each, one a rank that raised."""
    context = multiprocessing.get_context("forkserver")  # one import for all processes
    context.set_forkserver_preload(["torch", "gdn.distributed", "gdn.layers", module])
    reports = context.SimpleQueue()
    store = str(folder / f"store{world}")
    processes = [
        context.Process(target=_run, args=(module, names, rank, world, store, timeout_s, reports)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    errors: dict[str, list[str]] = {name: [] for name in names}
    for _ in processes:
        rank, failed = reports.get()
        for name, error in failed.items():
            errors[name].append(f"rank {rank}: {error}")
    for process in processes:
        process.join()
    return errors


def _run(module: str, names: list[str], rank: int, world: int, store: str, timeout_s: float, reports: Any) -> None:
    failed: dict[str, str] = {}
    try:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s)
        )
        cases = __import__(module, fromlist=["CASES"]).CASES
        for name in names:
            try:
                with torch.inference_mode():
                    cases[name](dist.group.WORLD)
            except SystemExit:
                break
            except BaseException:
                failed = dict.fromkeys(names[names.index(name) + 1 :], NOT_RUN) | {name: traceback.format_exc()}
                break
    except BaseException:
        failed = dict.fromkeys(names, traceback.format_exc())
    finally:
        reports.put((rank, failed))
        os._exit(0)  # sockets close at once, so that ranks that wait for this one raise
