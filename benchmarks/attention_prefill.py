"""Times of dense attention of prefill: the kernel's configurations, and torch's kernels on gathered keys and values.

    python -m benchmarks attention

FLOP are 4 D for each visible pair of positions and each query head. Torch gets keys and values that were gathered from the pages
beforehand; "with the gather" counts that too, as `gdn.attention` does it.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from autotune.console import JsonFile, console, device_spec, keep
from gdn import runtime
from gdn.cli.plain import table
from gdn.core.tunable import example
from gdn.ops.attention import torch_attention
from gdn.ops.attention.problem import AttentionPrefillParams, AttentionPrefillProblem
from gdn.runtime import registry
from gdn.testing import timing

SHAPES = ((8192, 8192), (2048, 32768), (1024, 1024))  # new tokens, context


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


def flops(problem: AttentionPrefillProblem) -> int:
    """Of the pairs that the mask leaves, of one sequence."""
    new, context = problem.num_tokens, problem.max_context_len
    return 4 * problem.head_dim * problem.num_heads * (new * (context - new) + new * (new + 1) // 2)


def ways(problem: AttentionPrefillProblem, params: AttentionPrefillParams) -> Iterator[tuple[str, Callable[[], object]]]:
    """Every way to compute the call, by name."""
    from torch.nn.attention.bias import causal_lower_right  # it loads torch's compiler, which takes a second

    device = params.q.device
    module = importlib.import_module(registry.operator("attention_prefill").modules["cute"])
    for config in module.configs(problem, device_spec()) if device.type == "cuda" else []:
        prepared = runtime.prepare(problem, device, "cute", config=config)
        assert prepared.launch is not None
        yield f"ours, {config}", lambda prepared=prepared: prepared.launch(params)  # type: ignore[misc]

    def gathered(cache: torch.Tensor) -> torch.Tensor:
        return cache.index_select(0, params.block_tables[0]).flatten(0, 1)[None, : problem.max_context_len]

    q, keys, values = params.q[None], gathered(params.k_cache), gathered(params.v_cache)
    yield "torch, flash", lambda: torch_attention.attend(q, keys, values, params.scale)
    yield (
        "torch, flash, with the gather",
        lambda: torch_attention.attend(q, gathered(params.k_cache), gathered(params.v_cache), params.scale),
    )
    mask: Any = causal_lower_right(problem.num_tokens, problem.max_context_len)
    queries, *pair = (x.transpose(1, 2).contiguous() for x in (q, keys, values))

    def cudnn() -> object:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(queries, pair[0], pair[1], attn_mask=mask, enable_gqa=True)

    yield "torch, cuDNN", cudnn


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
            yield Time(name, way, us, flops(problem) / us * 1e-6)


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
