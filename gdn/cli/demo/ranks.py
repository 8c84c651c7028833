"""The demo's ranks: one process each, started by torchrun, which says in the environment who they are."""

import contextlib
import gc
import importlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import typer

from gdn.runtime import env

TIMEOUT = timedelta(minutes=10)  # of an exchange: a rank may compile kernels while the others wait


def are_launched() -> bool:
    """Whether torchrun started this process."""
    return dist.is_available() and dist.is_torchelastic_launched()


def own_device(device: torch.device) -> torch.device:
    """The GPU of this process where torchrun started it and the demo runs on GPUs; else the device itself."""
    if device.type != "cuda" or not are_launched():
        return device
    index: int = dist.get_node_local_rank()
    count = torch.cuda.device_count()
    if index >= count:
        message = f"expected a GPU for each process of a host, got {count} for process {index + 1}"
        raise typer.BadParameter(message, param_hint="--device")
    return torch.device("cuda", index)


def join(device: torch.device, timeout: timedelta, **where: Any) -> dist.ProcessGroup:
    """Makes the group of all processes, NCCL on GPUs and gloo on CPUs, and returns it. where: as for `init_process_group`.

    NVLink multicast stays off where the environment does not say otherwise: not all programs of a host may survive it.
    """
    # This module takes the group that exists at its import as a default argument, and torch imports it when a model first runs.
    # It would keep the group, whose threads may abort the process when the interpreter ends. Imported now, it finds no group.
    importlib.import_module("torch.distributed.nn")
    if device.type == "cuda":
        env.set_default("NCCL_NVLS_ENABLE", "0")
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timeout, device_id=device, **where)
    else:
        dist.init_process_group("gloo", timeout=timeout, **where)
    group = dist.group.WORLD
    assert group is not None
    return group


@contextlib.contextmanager
def joined(ranks: int, device: torch.device) -> Iterator[dist.ProcessGroup | None]:
    """Group of this number of ranks, which torchrun started, NCCL on GPUs and gloo on CPUs; None where this process is alone."""
    if not are_launched():
        yield None
        return
    group = join(device, TIMEOUT)
    if group.size() != ranks:
        dist.destroy_process_group()
        message = f"expected {group.size()} ranks, the number of processes that torchrun started, got {ranks}"
        raise typer.BadParameter(message, param_hint="--tp, --cp")
    yield group
    gc.collect()  # layers hold the group, and engines are in cycles
    dist.destroy_process_group()  # not after an error: other ranks may be waiting, and torchrun ends them


def divided(
    group: dist.ProcessGroup | None, tensor_parallel: int, context_parallel: int
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """This rank's tensor-parallel group, of adjacent ranks, and its context-parallel one, across those; None for one rank."""
    if group is None or context_parallel == 1:
        return group, None
    if tensor_parallel == 1:
        return None, group
    ranks = torch.arange(group.size(), device="cpu").view(context_parallel, tensor_parallel)
    found = []
    for rows in (ranks, ranks.t()):
        made = [dist.new_group(row, timeout=TIMEOUT) for row in rows.tolist()]  # every rank makes all of them
        (own,) = [one for one, row in zip(made, rows.tolist(), strict=True) if group.rank() in row]
        found.append(own)
    return found[0], found[1]


def told_by_all(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The values of all ranks, in the order of the ranks."""
    if group is None:
        return [value]
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values
