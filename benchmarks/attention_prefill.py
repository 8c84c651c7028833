"""Times of dense attention of prefill: the kernel's configurations, the kernel of decode, torch's on gathered keys and values.

    python -m benchmarks attention

FLOP are 4 D for each visible pair of positions and each query head. Torch gets keys and values that were gathered from the pages
beforehand.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer

import gdn
from autotune.console import JsonFile, console, device_spec, keep
from benchmarks import dense_attention
from gdn import runtime
from gdn.cli.plain import table
from gdn.core.tunable import example
from gdn.ops.attention.problem import AttentionPrefillParams, AttentionPrefillProblem
from gdn.ops.attention.sparse_attention import attend
from gdn.runtime import registry
from gdn.testing import timing

_PEERS = ("flash, causal_lower_right", "cudnn, causal_lower_right")  # of dense_attention.ways
# New tokens, context.
SHAPES = (
    (8192, 8192), (2048, 32768), (1024, 1024), (512, 32768), (256, 32768), (64, 32768), (16, 32768), (16, 131072)
)  # fmt: skip
_MOST_BY_DECODE = 256  # new tokens


@dataclass(frozen=True)
class Time:
    shape: str
    way: str
    us: float
    tflops: float


def arguments_of(problem: AttentionPrefillProblem, device: torch.device) -> AttentionPrefillParams:
    """One sequence on shuffled blocks."""
    g = torch.Generator(device).manual_seed(1)
    dtype, blocks = getattr(torch, problem.dtype), -(-problem.max_context_len // problem.block_size)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=g).to(dtype)

    q = normal(problem.num_tokens, problem.num_heads, problem.head_dim)
    shape = (blocks, problem.block_size, problem.num_kv_heads, problem.head_dim)
    return AttentionPrefillParams(
        q, normal(*shape), normal(*shape), torch.randperm(blocks, device=device, generator=g).int()[None],
        torch.tensor([0, problem.num_tokens], device=device, dtype=torch.int32),
        torch.tensor([problem.max_context_len], device=device, dtype=torch.int32), None, torch.empty_like(q),
        torch.empty(q.shape[:2], device=device), problem.head_dim**-0.5,
    )  # fmt: skip


def ways(problem: AttentionPrefillProblem, params: AttentionPrefillParams) -> Iterator[tuple[str, Callable[[], object]]]:
    """Every way to compute the call, by name."""
    device = params.q.device
    module = importlib.import_module(registry.operator("attention_prefill").modules["cute"])
    for config in module.configs(problem, device_spec()) if device.type == "cuda" else []:
        prepared = runtime.prepare(problem, device, "cute", config=config)
        assert prepared.launch is not None
        yield f"ours, {config}", lambda prepared=prepared: prepared.launch(params)  # type: ignore[misc]

    arguments: dict[str, Any] = {
        "q": params.q, "kv_cache": (params.k_cache, params.v_cache), "block_tables": params.block_tables,
        "query_start_loc": params.query_start_loc, "seq_lens": params.seq_lens,
    }  # fmt: skip
    host: dict[str, Any] = {"query_lens_host": (problem.num_tokens,), "seq_lens_host": (problem.max_context_len,)}
    yield "gdn.attention", lambda: gdn.attention(**arguments, **host)
    if problem.num_tokens <= _MOST_BY_DECODE:
        pages = [arguments[name] for name in ("block_tables", "query_start_loc", "seq_lens")]
        yield "the kernel of decode", lambda: attend(params.q, params.k_cache, params.v_cache, None, *pages, *[None] * 6)[0]
    for name, call in dense_attention.ways(arguments):
        if name in _PEERS:
            yield f"torch, {name}", call


def measure(device: torch.device, shapes: tuple[tuple[int, int], ...] = SHAPES) -> Iterator[Time | str]:
    """Times, or for a way that did not run its name and why."""
    for new, context in shapes:
        problem = example("attention_prefill", num_tokens=new, num_sequences=1, max_context_len=context)
        params, name = arguments_of(problem, device), f"{new} of {context}"
        for way, call in ways(problem, params):
            try:
                call()
                us = timing.time_us(call)
            except RuntimeError as error:
                yield f"{name}, {way}: {str(error).splitlines()[0]}"
                continue
            yield Time(name, way, us, problem.flops() / us * 1e-6)


def command(
    json_file: JsonFile = None, shapes: Annotated[int, typer.Option(min=1, help="How many shapes.")] = len(SHAPES)
) -> None:
    """Time dense attention of prefill: the kernel's configurations next to torch's kernels."""
    device_spec()
    made, rows = table("way", "us", "TFLOP/s", left=("way",)), []
    shape = ""
    for found in measure(torch.device("cuda"), SHAPES[:shapes]):
        if isinstance(found, str):
            console.print(f"did not run: {found}", markup=False)
            continue
        rows.append(vars(found))
        keep(json_file, {"rows": rows})
        if found.shape != shape:
            shape = found.shape
            made.add_row(shape, "", "")
        made.add_row(f"  {found.way}", f"{found.us:.0f}", f"{found.tflops:.0f}")
    console.print(made)
