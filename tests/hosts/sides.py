"""Starts measurements of one side each, adapter off or on, in processes of their own."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SWITCHES = {"off": "0", "on": "strict"}  # of GDN_VLLM; strict: a layer that would be left to the host is an error
_HOST = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the process, where its scheduler can be asked
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it is compiled at the first start, for minutes
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # with the next four: no NVLink multicast
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "GDN_LOG": "info",  # how many layers are served, and how long the warm-up took
}
REPLAYED = "; decode by replay: "  # it goes on so where they replay
SERVED = re.compile(r"\b([1-9]\d*) Gated DeltaNet layers run on gdn's kernels")  # what the adapter says when all layers are there
_TAIL = 40  # lines of a failed process's log that are shown


def environment(
    plug: str, gpu: str | None = None, base: Mapping[str, str] | None = None, *, replay: bool = False
) -> dict[str, str]:
    """Environment of a side. gpu: the devices that it sees, None = all. replay: decode by replay where the adapter can."""
    found = dict(os.environ if base is None else base) | _HOST | {"GDN_VLLM": SWITCHES[plug]}
    if replay:
        found["GDN_REPLAY"] = "1"
    return found if gpu is None else found | {"CUDA_VISIBLE_DEVICES": gpu}


@dataclass
class Job:
    """One process: a module of this package with its arguments."""

    name: str
    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    log: Path


def run(jobs: Sequence[Job], limit: float) -> dict[str, int]:
    """Runs jobs at once. Returns the exit codes; those of jobs that were not done after `limit` seconds are -9.

    A failed job's last lines are printed.
    """
    began, processes = time.monotonic(), {}
    for job in jobs:
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("wb") as log:
            processes[job.name] = subprocess.Popen(
                [sys.executable, "-m", job.module, *job.arguments],
                env=dict(job.environment),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
    codes = {}
    for job in jobs:
        process = processes[job.name]
        try:
            codes[job.name] = process.wait(max(0.0, began + limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            codes[job.name] = process.wait()
        took = time.monotonic() - began
        print(f"## {job.name}: exit {codes[job.name]} after at most {took:.0f} s", flush=True)
        if codes[job.name]:
            print("\n".join(job.log.read_text(errors="replace").splitlines()[-_TAIL:]), flush=True)
    return codes


def unserved(jobs: Sequence[Job]) -> list[str]:
    """Names of jobs with the adapter on in which it says of no layer that it runs on gdn: both sides would be the host's own."""
    switched_on = [job for job in jobs if job.environment["GDN_VLLM"] != SWITCHES["off"]]
    found = [job.name for job in switched_on if not SERVED.search(job.log.read_text(errors="replace"))]
    for name in found:
        print(f"## {name}: no layer ran on gdn's kernels", flush=True)
    return found


def unreplayed(jobs: Sequence[Job]) -> list[str]:
    """Names of jobs with the adapter on that were to decode by replay, and in which no layer does."""
    asked = [job for job in jobs if job.environment["GDN_VLLM"] != SWITCHES["off"] and job.environment.get("GDN_REPLAY") == "1"]
    found = [job.name for job in asked if REPLAYED not in job.log.read_text(errors="replace")]
    for name in found:
        print(f"## {name}: no layer decodes by replay", flush=True)
    return found


def tell_marked(job: Job) -> None:
    """Prints the lines of a log that are meant to be read: those that begin with `##`, and the adapter's own of its layers."""
    for line in job.log.read_text(errors="replace").splitlines():
        if line.startswith("##") or "run on gdn's kernels" in line:
            print(f"{job.name} {line}", flush=True)
