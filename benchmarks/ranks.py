"""Times of decode over tensor-parallel ranks (`python -m benchmarks ranks`): a process for each GPU, with NCCL between them.

A step is that of the demo's engine: embedding, layers with their MLPs, head and greedy choice in one graph, replayed on the same
tokens. All ranks replay together, so the first one's clock is that of all.
"""

import gc
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch.multiprocessing.spawn import start_processes

from benchmarks.stacks import BLOCK_SIZE, decode_step, fill
from gdn.cli.demo.graphs import FixedStep
from gdn.cli.demo.ranks import join
from gdn.cli.plain import table
from gdn.layers import HybridCaches, HybridConfig, HybridModel
from gdn.layers.loading import load
from gdn.layers.named import NAMED, first_layers
from gdn.layers.random_weights import RandomTensors

SIZES = (1, 2, 4)
BATCHES = (64, 1)
MUST = {(2, 64): 1.2, (4, 64): 1.5}  # (ranks, batch) -> least times as fast as one rank
TIMEOUT = timedelta(minutes=3)  # of an exchange: a rank that hangs leaves a traceback within the time of a test run
WARM_UPS, CALLS = 3, 20  # samples before those that count, and steps of a sample


@dataclass(frozen=True)
class Row:
    """A decode step over some ranks, and how many times as fast it is as on one."""

    ranks: int
    batch: int
    step_us: float
    faster: float
    must: float | None  # None: reported

    @property
    def passed(self) -> bool:
        return self.must is None or self.faster >= self.must


@dataclass(frozen=True)
class Job:
    """Work of every rank: decode steps of these batches, of sequences of `context` tokens."""

    config: HybridConfig = first_layers(NAMED["qwen3-next-80b"], 4)
    batches: tuple[int, ...] = BATCHES
    context: int = 4096
    device_type: str = "cuda"
    samples: int = 21


def measure(ranks: int, job: Job) -> dict[int, float]:
    """Microseconds of a step by batch, over this number of ranks of this machine.

    Raises
    ------
    ProcessRaisedException, ProcessExitedException
        Where a rank failed; the others are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_rank, (ranks, job, folder), nprocs=ranks, start_method="spawn")
        found: dict[str, float] = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
    return {int(batch): step_us for batch, step_us in found.items()}


def rows(found: dict[int, dict[int, float]]) -> list[Row]:
    """The table, from the steps of each number of ranks, one rank among them."""
    return [
        Row(ranks, batch, step_us, found[1][batch] / step_us, MUST.get((ranks, batch)))
        for ranks, steps in found.items()
        for batch, step_us in steps.items()
    ]


def as_dict(row: Row) -> dict[str, Any]:
    """A row as JSON shows it."""
    return {**asdict(row), "passed": row.passed}


def command(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file too.")] = None,
) -> None:
    """Time a captured decode step of four layers of Qwen3-Next-80B over 1, 2 and 4 tensor-parallel GPUs of this machine.

    Exit code 1 where a row misses its limit.
    """
    if not torch.cuda.is_available():
        raise ValueError("This needs Hopper (SM90) GPUs, and torch sees none.")
    count, console = torch.cuda.device_count(), Console()
    told = rows({size: measure(size, Job()) for size in SIZES if size <= count})
    made = table("GPUs", "batch", "step, us", "times one GPU", "must")
    for row in told:
        must, color = "-" if row.must is None else f"{row.must:.2f}", "green" if row.passed else "red"
        made.add_row(str(row.ranks), str(row.batch), f"{row.step_us:.1f}", f"[{color}]{row.faster:.2f}[/]", must)
    console.print(made)
    if count < max(SIZES):
        console.print(f"{torch.cuda.get_device_name()}: {count} here, larger groups are not timed")
    if json_file is not None:
        shared = {"device": torch.cuda.get_device_name(), "torch": str(torch.__version__)}
        json_file.write_text(json.dumps(shared | {"rows": [as_dict(row) for row in told]}))
    raise typer.Exit(0 if all(row.passed for row in told) else 1)


def _rank(rank: int, ranks: int, job: Job, folder: str) -> None:
    """One rank's process."""
    is_cuda = job.device_type == "cuda"
    device = torch.device("cuda", rank) if is_cuda else torch.device("cpu")
    group = None
    if is_cuda:
        torch.cuda.set_device(device)
    if ranks > 1:
        group = join(device, TIMEOUT, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    dtype = torch.bfloat16 if is_cuda else torch.float32
    model = HybridModel(job.config, tp_group=group, device=device, dtype=dtype)
    load(model, RandomTensors(job.config, device=device, dtype=dtype), job.config, rank, ranks)
    found = {batch: step_us(model, batch, job.context, job.samples) for batch in job.batches}
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found), encoding="utf-8")
    if group is not None:
        del model
        gc.collect()  # layers hold the group, in cycles: at the end of the process its threads would outlive it
        dist.destroy_process_group()


@torch.inference_mode()
def step_us(model: HybridModel, batch: int, context: int, samples: int) -> float:
    """Median microseconds of a decode step of `batch` sequences of `context` tokens, the new one included."""
    config, device, dtype = model.config, model.embed_tokens.device, model.embed_tokens.dtype
    blocks = batch * -(-context // BLOCK_SIZE)
    # Without replay: a step that is repeated has the same positions each time, and would always fold or never.
    caches = HybridCaches(config, blocks, BLOCK_SIZE, batch, dtype=dtype, device=device, replay=False)
    generator = torch.Generator(device).manual_seed(0)
    fill(caches, generator)
    step = decode_step(config, batch, context, device)
    fixed = FixedStep(model, caches, batch, step, device, is_captured=device.type == "cuda")
    fixed.input_ids.random_(config.vocab_size, generator=generator)
    fixed.positions.fill_(context - 1)
    times = []
    for _ in range(WARM_UPS + samples):
        _wait(device)
        started = time.perf_counter()
        for _ in range(CALLS):
            fixed(step)
        _wait(device)
        times.append((time.perf_counter() - started) / CALLS * 1e6)
    return statistics.median(times[WARM_UPS:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
