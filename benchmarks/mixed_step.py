"""`python -m benchmarks.mixed_step`: ways to run decode rows and a prompt of one step through a Gated DeltaNet layer.

    whole        as the layer does: convolution, chunk form and norm over all rows
    rule         `gdn.gated_delta_rule` between convolution and norm of all rows: the recurrent form, the chunk form
    dealt        the fused decode step on the decode rows, the others as above; its two results are not joined, which a last
                 operator with `out` would do without a copy

Next to them the two parts of `dealt` by themselves. The layer's projections, the same in all ways, are left out.
"""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import gdn
from autotune.console import device_spec
from gdn.cli.plain import run_alone
from gdn.layers import GatedDeltaNet, GDNMetadata, GDNMetadataBuilder, GDNStateCache, HybridConfig
from gdn.layers.named import NAMED
from gdn.testing import timing

SHAPES = ((32, 2048), (128, 512), (8, 8192), (32, 512), (128, 2048), (128, 8192))  # decode rows, tokens of the one prompt
CONTEXT = 1024  # tokens before the step: all rows continue a state, as `gdn.gated_delta_rule` without a mask takes them


class MixedStep(NamedTuple):
    """Decode rows, then a prompt's next chunk, after the input projection of a layer."""

    layer: GatedDeltaNet
    projected: Tensor  # [tokens, rows of in_proj]
    metadata: GDNMetadata
    prompt_metadata: GDNMetadata  # of the prompt alone
    pools: tuple[Tensor, Tensor]  # windows and states
    decodes: int


def ways(step: MixedStep) -> dict[str, Callable[[], Any]]:
    """Calls of the same step, by name, and of its parts."""
    layer, projected, metadata, prompt_metadata, pools, decodes = step
    slots, offsets = metadata.non_spec_state_indices_tensor, metadata.non_spec_query_start_loc
    assert slots is not None and offsets is not None

    def rule() -> Tensor:
        mixed_qkv, z, b, a, *_ = projected.split_with_sizes(layer._sizes, 1)
        mixed_qkv = gdn.causal_conv1d_fn(
            mixed_qkv, layer.conv_weight, conv_states=pools[0], query_start_loc=offsets, cache_indices=slots
        )
        o, _ = gdn.gated_delta_rule(
            *layer._heads(mixed_qkv), **layer._gates(a, b), cu_seqlens=offsets, lengths_host=metadata.non_spec_lengths_host,
            initial_state=pools[1], state_indices=slots,
        )  # fmt: skip
        return layer._norm(o, z)

    def decode_rows() -> Tensor:
        return layer._decode(projected[:decodes], *pools, slots[:decodes], None, None)

    def prompt() -> Tensor:
        return layer._prefill(projected[decodes:], prompt_metadata, *pools)

    return {
        "whole": lambda: layer._prefill(projected, metadata, *pools), "rule": rule,
        "dealt": lambda: (decode_rows(), prompt()), "decode rows": decode_rows, "prompt": prompt,
    }  # fmt: skip


def make_step(
    decodes: int, prompt: int, device: torch.device, config: HybridConfig, dtype: torch.dtype = torch.bfloat16
) -> MixedStep:
    """A step with random rows, parameters, windows and states."""
    generator, source = torch.Generator(device).manual_seed(0), torch.Generator().manual_seed(0)
    layer = GatedDeltaNet(config, device=device, dtype=dtype)
    caches = GDNStateCache(config, decodes + 1, dtype=dtype, device=device, replay=False)
    projected = torch.empty(decodes + prompt, layer.in_proj.shape[0], device=device, dtype=dtype)
    pools = caches.conv_states[0], caches.ssm_states[0]
    layer.norm_weight.fill_(1.0)
    for target in (projected, layer.conv_weight, layer.A_log, layer.dt_bias, *pools):
        target.copy_(0.5 * torch.randn(target.shape, generator=generator, dtype=torch.float32, device=device))
    build = GDNMetadataBuilder(device, max_num_sequences=decodes + 1).build
    slots, queries = torch.randperm(decodes + 1, generator=source, device="cpu").tolist(), [1] * decodes + [prompt]
    whole, alone = (build(queries[n:], [CONTEXT + new for new in queries[n:]], slots[n:]) for n in (0, decodes))
    return MixedStep(layer, projected, whole, alone, pools, decodes)


@torch.inference_mode()
def measure(decodes: int, prompt: int, device: torch.device, config: HybridConfig) -> dict[str, float]:
    """Microseconds of every way, sampled in rotation."""
    calls = ways(make_step(decodes, prompt, device, config))
    return dict(zip(calls, timing.interleaved_us([[call] for call in calls.values()]), strict=True))


def main(tp: Annotated[int, typer.Option(help="Tensor parallel ranks; the shapes of one rank are taken.")] = 1) -> None:
    """Time mixed steps of a Gated DeltaNet layer of Qwen3-Next-80B, dealt and whole."""
    device_spec()
    device, config = torch.device("cuda", torch.cuda.current_device()), NAMED["qwen3-next-80b"].per_rank(tp)
    times = {shape: measure(*shape, device, config) for shape in SHAPES}
    names = list(times[SHAPES[0]])
    table = Table("decode rows + prompt, us", *names, "dealt / whole", title=torch.cuda.get_device_name())
    for (decodes, prompt), found in times.items():
        ratio = f"{found['dealt'] / found['whole']:.2f}"
        table.add_row(f"{decodes} + {prompt}", *(f"{found[name]:.1f}" for name in names), ratio)
    Console(width=160).print(table)


if __name__ == "__main__":
    run_alone(main, "python -m benchmarks.mixed_step")
