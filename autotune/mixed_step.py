"""`python -m autotune.mixed_step`: ways to run decode rows and prompts of one step through a Gated DeltaNet layer, on this GPU.

    whole        as the layer does: convolution, chunk form and norm over all rows
    dealt        the fused decode step on the decode rows, the others as above: each part with its own launches, no copy
    rule         the delta rule alone is dealt, as `gdn.gated_delta_rule` does: recurrent form, chunk form

Next to them the two parts of `dealt` by themselves. The layer's projections, the same in all ways, are left out. The results of
`dealt` stay in two tensors: a last operator with `out` would join them without a copy.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import gdn
from gdn.cli.plain import run_alone
from gdn.layers import GatedDeltaNet, GDNMetadata, GDNMetadataBuilder, GDNStateCache, HybridConfig
from gdn.layers.named import NAMED
from gdn.testing import timing

SHAPES = ((32, 2048), (128, 512), (8, 8192), (32, 512), (128, 2048), (128, 8192))  # decode rows, tokens of the one prompt
CONTEXT = 1000  # tokens of a decode row: any number but 1

Ways = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class MixedStep:
    """Decode rows, then a new prompt, after the input projection of a layer."""

    layer: GatedDeltaNet
    caches: GDNStateCache
    projected: Tensor  # [tokens, rows of in_proj]
    whole_step: GDNMetadata
    prompt_step: GDNMetadata  # of the prompt alone
    decodes: int

    @property
    def pools(self) -> tuple[Tensor, Tensor]:
        return self.caches.conv_states[0], self.caches.ssm_states[0]

    def whole(self) -> Tensor:
        return self.layer._prefill(self.projected, self.whole_step, *self.pools)

    def decode_rows(self) -> Tensor:
        slots = self.whole_step.non_spec_state_indices_tensor
        assert slots is not None
        return self.layer._decode(self.projected[: self.decodes], *self.pools, slots[: self.decodes], None, None)

    def prompt(self) -> Tensor:
        return self.layer._prefill(self.projected[self.decodes :], self.prompt_step, *self.pools)

    def dealt(self) -> tuple[Tensor, Tensor]:
        return self.decode_rows(), self.prompt()

    def rule(self) -> Tensor:
        layer, step, first = self.layer, self.whole_step, self.decodes
        windows, states = self.pools
        slots, offsets = step.non_spec_state_indices_tensor, step.non_spec_query_start_loc
        assert slots is not None and offsets is not None
        mixed_qkv, z, b, a, *_ = self.projected.split_with_sizes(layer._sizes, 1)
        mixed_qkv = gdn.causal_conv1d_fn(
            mixed_qkv, layer.conv_weight, conv_states=windows, query_start_loc=offsets, cache_indices=slots,
            has_initial_state=step.has_initial_state, null_slot=layer.null_slot,
        )  # fmt: skip
        q, k, v = layer._heads(mixed_qkv)
        o = torch.empty_like(v)

        def arguments(rows: slice) -> dict[str, Any]:
            parts = {"q": q[:, rows], "k": k[:, rows], "v": v[:, rows], "out": o[:, rows]}
            return parts | layer._gates(a[rows], b[rows]) | {"initial_state": states, "null_slot": layer.null_slot}

        gdn.fused_recurrent_gated_delta_rule(
            **arguments(slice(first)), cu_seqlens=offsets[: first + 1], ssm_state_indices=slots[:first], output_final_state=False
        )
        prompt = self.prompt_step
        gdn.chunk_gated_delta_rule(
            **arguments(slice(first, None)), cu_seqlens=prompt.non_spec_query_start_loc,
            state_indices=prompt.non_spec_state_indices_tensor, has_initial_state=prompt.has_initial_state,
        )  # fmt: skip
        return layer._norm(o, z)

    def ways(self) -> Ways:
        return {
            "whole": self.whole, "dealt": self.dealt, "rule": self.rule, "decode rows": self.decode_rows, "prompt": self.prompt,
        }  # fmt: skip


def make_step(
    decodes: int, prompt: int, device: torch.device, config: HybridConfig, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> MixedStep:
    """A step with random rows, parameters, windows and states."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(target: Tensor, scale: float) -> None:
        target.copy_(scale * torch.randn(target.shape, generator=generator, device=device))

    layer = GatedDeltaNet(config, device=device, dtype=dtype)
    for parameter in (layer.conv_weight, layer.A_log, layer.dt_bias):
        normal(parameter, 0.5)
    layer.norm_weight.fill_(1.0)
    caches = GDNStateCache(config, decodes + 1, dtype=dtype, device=device)
    normal(caches.conv_states[0], 1.0)
    normal(caches.ssm_states[0], 0.1)
    projected = torch.empty(decodes + prompt, layer.in_proj.shape[0], device=device, dtype=dtype)
    normal(projected, 1.0)
    build = GDNMetadataBuilder(device, max_num_sequences=decodes + 1).build
    slots = torch.randperm(decodes + 1, generator=torch.Generator().manual_seed(seed)).tolist()
    whole = build([1] * decodes + [prompt], [CONTEXT] * decodes + [prompt], slots)
    return MixedStep(layer, caches, projected, whole, build([prompt], [prompt], slots[-1:]), decodes)


def measure(decodes: int, prompt: int, device: torch.device, config: HybridConfig) -> dict[str, Any]:
    """Microseconds of every way, sampled in turns."""
    with torch.inference_mode():
        ways = make_step(decodes, prompt, device, config).ways()
        times = timing.interleaved_us([[call] for call in ways.values()])
    return {"decode_rows": decodes, "prompt": prompt, "us": dict(zip(ways, times, strict=True))}


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(NAMED)}.")] = "qwen3-next-80b",
    tp: Annotated[int, typer.Option(help="Tensor parallel ranks; the shapes of one rank are taken.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file too.")] = None,
) -> None:
    """Time mixed steps of a Gated DeltaNet layer, dealt and whole."""
    if model not in NAMED:
        raise ValueError(f"model: expected one of {', '.join(NAMED)}, got {model!r}")
    if not torch.cuda.is_available():
        raise ValueError("This needs a Hopper (SM90) GPU, and torch sees none.")
    device = torch.device("cuda", torch.cuda.current_device())
    config = NAMED[model].per_rank(tp)
    rows = [measure(*shape, device, config) for shape in SHAPES]
    found = {"device": torch.cuda.get_device_name(), "torch": str(torch.__version__), "model": model, "tp": tp, "rows": rows}
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    names = list(rows[0]["us"])
    table = Table("decode rows + prompt, us", *names, "dealt / whole", title=str(found["device"]))
    for row in rows:
        times = row["us"]
        ratio = times["dealt"] / times["whole"]
        table.add_row(f"{row['decode_rows']} + {row['prompt']}", *(f"{times[name]:.1f}" for name in names), f"{ratio:.2f}")
    Console(width=160).print(table)


if __name__ == "__main__":
    run_alone(main, "python -m autotune.mixed_step")
