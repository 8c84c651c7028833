"""Ranks of a gloo group as processes of this machine, which leave what they found in a folder.

The processes are forked from one that has imported this module, and what it imports, and runs nothing else.
"""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gdn.layers.rotary import cos_sin_table
from gdn.runtime import env

Work = Callable[[Any, Path], Any]  # group, folder -> what is kept

cos_sin_table(2, 1.0, 1, "meta")  # the first arithmetic without data imports for a second: once, before the forks


def run_ranks(work: Work, size: int, folder: Path, *, timeout_s: float = 60.0) -> list[Any]:
    """Runs `work` on every rank; returns what each returned, the traceback (str) where it raised, None where it died.

    timeout_s: of the group's exchanges.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "gdn.cli.demo.run"])
    processes = [context.Process(target=_rank, args=(work, rank, size, folder, timeout_s)) for rank in range(size)]
    for process in processes:
        process.start()
    end = time.monotonic() + 60 + 2 * timeout_s
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in late:
        processes[rank].kill()
    assert not late, f"ranks {late} do not end"
    kept = [folder / f"{rank}.pt" for rank in range(size)]
    return [torch.load(path, weights_only=False) if path.exists() else None for path in kept]


def _rank(work: Work, rank: int, size: int, folder: Path, timeout_s: float) -> None:
    torch.set_num_threads(1)
    for name in list(os.environ):
        if name.startswith(env.PREFIXES) and name != "GDN_CACHE_DIR":
            del os.environ[name]
    env.reload()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the machine's name may lead nowhere
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timeout)
    try:
        found = work(dist.group.WORLD, folder)
    except BaseException:
        found = traceback.format_exc()
    torch.save(found, folder / f"{rank}.new")
    os.rename(folder / f"{rank}.new", folder / f"{rank}.pt")
    os._exit(0)  # the end of a group waits for ranks that may be gone
