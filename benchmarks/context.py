"""Times of prefill over context-parallel ranks (`python -m benchmarks context`): a process for each GPU, with NCCL between them.

One long sequence, at the shapes of Qwen3-Next-80B: the chunk operator alone, exchange included; a Gated DeltaNet layer, from its
input projection to its output projection; an attention layer with its indexer. A call's time is that of the slowest rank.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch import Tensor

import gdn
import gdn.distributed
from autotune.console import JsonFile
from benchmarks.spread import cells, finish, over_ranks, place, sizes, wait
from gdn.cli.plain import table
from gdn.layers import AttentionMetadataBuilder, GatedDeltaNet, GDNMetadataBuilder, HybridConfig, SparseAttention
from gdn.layers.named import NAMED
from gdn.layers.random_weights import fill_randomly

Call = Callable[[], object]

WARM_UPS, SAMPLES, CALLS = 10, 11, 5
BLOCK_SIZE = 64


@dataclass(frozen=True)
class Form:
    """A call that is timed. must: ranks -> least times as fast as one rank."""

    name: str
    tokens: int
    must: dict[int, float]


OPERATOR = Form("chunk operator, 16/32", 131072, {2: 1.15, 4: 1.9})
LAYER = Form("Gated DeltaNet layer", 131072, {2: 1.7, 4: 3.0})
ATTENTION = Form("attention layer, bf16 indexer", 65536, {2: 1.7, 4: 3.0})
FORMS = (OPERATOR, LAYER, ATTENTION)


@dataclass(frozen=True)
class Job:
    """Work of every rank."""

    config: HybridConfig = replace(NAMED["qwen3-next-80b"], max_position_embeddings=131072)
    forms: tuple[Form, ...] = FORMS
    device_type: str = "cuda"


@dataclass(frozen=True)
class Row:
    """A form over some ranks, and how many times as fast it is as on one."""

    name: str
    tokens: int
    ranks: int
    call_us: float
    faster: float
    must: float | None

    @property
    def passed(self) -> bool:
        return self.must is None or self.faster >= self.must


def measure(ranks: int, job: Job) -> list[float]:
    """Microseconds of a call of each form, over this number of ranks of this machine. Raises as `over_ranks`."""
    found: list[float] = over_ranks(_work, ranks, job)
    return found


def rows(found: dict[int, list[float]], forms: tuple[Form, ...] = FORMS) -> list[Row]:
    """The table, from the times by number of ranks, one rank among them."""
    return [
        Row(form.name, form.tokens, ranks, times[place], found[1][place] / times[place], form.must.get(ranks))
        for place, form in enumerate(forms)
        for ranks, times in found.items()
    ]


def command(
    only: Annotated[str, typer.Option(help="Only rows whose name contains this text.")] = "",
    json_file: JsonFile = None,
) -> None:
    """Time prefill of one long sequence over 1, 2 and 4 context-parallel GPUs of this machine.

    Exit code 1 where a row misses its limit.
    """
    forms = tuple(form for form in FORMS if only in form.name)
    if not forms:
        raise ValueError(f"only: expected part of one of {[form.name for form in FORMS]}, got {only!r}")
    told = rows({size: measure(size, Job(forms=forms)) for size in sizes()})
    made = table("call", "tokens", "GPUs", "us", "times one GPU", "must")
    for row in told:
        made.add_row(row.name, str(row.tokens), str(row.ranks), f"{row.call_us:.0f}", *cells(row))
    Console().print(made)
    finish(told, json_file)


@torch.inference_mode()
def _work(job: Job, group: Any, device: torch.device, dtype: torch.dtype) -> list[float]:
    """One rank's calls."""
    makers = {OPERATOR.name: operator_call, LAYER.name: layer_call, ATTENTION.name: attention_call}
    found = []
    for form in job.forms:
        call = makers[form.name](job.config, form.tokens, group, device, dtype)
        found.append(_call_us(call, group, device))
        del call
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def operator_call(config: HybridConfig, tokens: int, group: Any, device: torch.device, dtype: torch.dtype) -> Call:
    """`chunk_gated_delta_rule` on a rank's part of a sequence, with raw gates and a state in a pool."""
    rank, ranks = place(group)
    tokens = gdn.distributed.split_tokens(tokens, ranks)[rank]
    generator = torch.Generator(device).manual_seed(rank)
    heads, states = config.linear_num_key_heads, config.linear_num_value_heads
    K, V = config.linear_key_head_dim, config.linear_value_head_dim

    def random(*shape: int) -> Tensor:
        return torch.randn(1, tokens, *shape, device=device, dtype=dtype, generator=generator)

    q, k, v, a, b = random(heads, K), random(heads, K), random(states, V), random(states), random(states)
    options: dict[str, Any] = {
        "g": a - 4, "beta": b, "use_gate_in_kernel": True,
        "A_log": torch.linspace(0, 2.7, states, dtype=torch.float32, device=device),
        "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True, "state_v_first": True,
        "initial_state": torch.zeros(2, states, V, K, dtype=torch.float32, device=device),
        "state_indices": torch.ones(1, dtype=torch.int32, device=device),
        "has_initial_state": torch.zeros(1, dtype=torch.bool, device=device),
    }  # fmt: skip
    if group is None:
        return lambda: gdn.chunk_gated_delta_rule(q, k, v, **options)
    return lambda: gdn.distributed.chunk_gated_delta_rule(q, k, v, **options, group=group)


def layer_call(config: HybridConfig, tokens: int, group: Any, device: torch.device, dtype: torch.dtype) -> Call:
    """`GatedDeltaNet` on a rank's rows of a prompt."""
    rank, ranks = place(group)
    layer = GatedDeltaNet(config, cp_group=group, device=device, dtype=dtype)
    fill_randomly(layer)
    metadata = GDNMetadataBuilder(device, cp_rank=rank, cp_size=ranks).build([tokens], [tokens], [1])
    if metadata.parts is not None:
        first, stop = metadata.parts.bounds(rank, tokens)
        tokens = stop - first
    windows = torch.zeros(2, config.linear_conv_kernel_dim - 1, config.conv_dim, device=device, dtype=dtype).mT
    states = torch.zeros(2, layer.num_v_heads, layer.head_v_dim, layer.head_k_dim, dtype=torch.float32, device=device)
    hidden = torch.randn(tokens, config.hidden_size, device=device, dtype=dtype)
    return lambda: layer(hidden, metadata, windows, states)


def attention_call(config: HybridConfig, tokens: int, group: Any, device: torch.device, dtype: torch.dtype) -> Call:
    """`SparseAttention` with an indexer on a prompt, whose rows are on every rank before and after."""
    rank, ranks = place(group)
    layer = SparseAttention(config, cp_group=group, device=device, dtype=dtype)
    fill_randomly(layer)
    blocks = -(-tokens // BLOCK_SIZE)
    builder = AttentionMetadataBuilder(
        device, block_size=BLOCK_SIZE, max_seq_len=tokens, cp_rank=rank, cp_size=ranks, deal_longer_than=0
    )
    metadata = builder.build([tokens], [tokens], [list(range(blocks))], [0])
    assert (metadata.dealt is None) == (ranks == 1)
    kv = torch.zeros(2, blocks, BLOCK_SIZE, config.num_key_value_heads, config.head_dim, device=device, dtype=dtype)
    keys = torch.zeros(blocks, BLOCK_SIZE, config.index_kv_heads, config.index_head_dim, device=device, dtype=dtype)
    hidden = torch.randn(tokens, config.hidden_size, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(0))
    positions = torch.arange(tokens, device=device)
    return lambda: layer(hidden, positions, metadata, (kv[0], kv[1]), keys)


def _call_us(call: Call, group: Any, device: torch.device) -> float:
    """Median time of a call on the slowest rank; all begin together."""
    samples = []
    for _ in range(SAMPLES + -(-WARM_UPS // CALLS)):
        if group is not None:
            dist.barrier(group)
        wait(device)
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        wait(device)
        samples.append((time.perf_counter() - started) / CALLS * 1e6)
    slowest = torch.tensor(samples[-SAMPLES:], dtype=torch.float64, device=device)
    if group is not None:
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return float(statistics.median(slowest.tolist()))
