"""Times of decode over tensor-parallel ranks (`python -m benchmarks ranks`): a process for each GPU, with NCCL between them.

A step is that of the demo's engine: embedding, layers with their MLPs, head and greedy choice in one graph, replayed on the same
tokens. All ranks replay together, so the first one's clock is that of all.
"""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from autotune.console import JsonFile
from benchmarks.spread import SIZES, cells, finish, over_ranks, place, sizes, wait
from benchmarks.stacks import BLOCK_SIZE, decode_step, fill
from gdn.cli.demo.graphs import FixedStep
from gdn.cli.plain import table
from gdn.layers import HybridCaches, HybridConfig, HybridModel
from gdn.layers.loading import load
from gdn.layers.named import NAMED, first_layers
from gdn.layers.random_weights import RandomTensors

BATCHES = (64, 1)
MUST = {(2, 64): 1.2, (4, 64): 1.5}  # (ranks, batch) -> least times as fast as one rank
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
    """Microseconds of a step by batch, over this number of ranks of this machine. Raises as `over_ranks`."""
    found: dict[str, float] = over_ranks(_work, ranks, job)
    return {int(batch): step_us for batch, step_us in found.items()}


def rows(found: dict[int, dict[int, float]]) -> list[Row]:
    """The table, from the steps of each number of ranks, one rank among them."""
    return [
        Row(ranks, batch, step_us, found[1][batch] / step_us, MUST.get((ranks, batch)))
        for ranks, steps in found.items()
        for batch, step_us in steps.items()
    ]


def command(json_file: JsonFile = None) -> None:
    """Time a captured decode step of four layers of Qwen3-Next-80B over 1, 2 and 4 tensor-parallel GPUs of this machine.

    Exit code 1 where a row misses its limit.
    """
    console, told = Console(), rows({size: measure(size, Job()) for size in sizes()})
    made = table("GPUs", "batch", "step, us", "times one GPU", "must")
    for row in told:
        made.add_row(str(row.ranks), str(row.batch), f"{row.step_us:.1f}", *cells(row))
    console.print(made)
    if (count := torch.cuda.device_count()) < max(SIZES):
        console.print(f"{torch.cuda.get_device_name()}: {count} here, larger groups are not timed")
    finish(told, json_file)


def _work(job: Job, group: Any, device: torch.device, dtype: torch.dtype) -> dict[int, float]:
    """One rank's steps."""
    model = HybridModel(job.config, tp_group=group, device=device, dtype=dtype)
    load(model, RandomTensors(job.config, device=device, dtype=dtype), job.config, *place(group))
    return {batch: step_us(model, batch, job.context, job.samples) for batch in job.batches}


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
        wait(device)
        started = time.perf_counter()
        for _ in range(CALLS):
            fixed(step)
        wait(device)
        times.append((time.perf_counter() - started) / CALLS * 1e6)
    return statistics.median(times[WARM_UPS:])
