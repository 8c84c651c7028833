"""What an adapter adds on the host's CPU to a call of the fused operator, a layer and step.

usage: python3 -m tests.hosts.adapter_cost

The adapter's step is timed, then the operator alone with the very arguments that the step gave it. Without a Hopper GPU kernels
are replaced by an empty function, as `autotune.host_cost` does: in both all that Python does is measured. At most 5 us may be
added.
"""

import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import gdn
from autotune.host_cost import times_us, without_device
from gdn.integrations._vllm_step import Step
from gdn.runtime import devices, env

MOST_US = 5.0
H, HV, K, V, WIDTH = 4, 8, 128, 128, 4  # a rank of Qwen3-Next-80B of four
CHANNELS = 2 * H * K + HV * V
Call = Callable[[], Any]


@dataclass(frozen=True)
class Added:
    """Medians of repeated calls, in microseconds: the adapter's step, and the operator alone."""

    what: str
    step_us: float
    operator_us: float

    @property
    def us(self) -> float:
        return self.step_us - self.operator_us


def added(what: str, step: Call, device: torch.device, *, apart: Call = lambda: None, repeats: int = 2000) -> Added:
    """What a step costs beyond its one operator. apart: what it calls besides and is not the adapter's; its time is left out."""
    handed: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    with contextlib.ExitStack() as patches:
        for name in ("fused_gdn_decode", "fused_gdn_prefill"):
            original = getattr(gdn, name)

            def spy(*arguments: Any, original: Any = original, **options: Any) -> Any:
                handed.append((original, arguments, options))
                return original(*arguments, **options)

            patches.enter_context(mock.patch.object(gdn, name, spy))
        step()
    ((operator, arguments, options),) = handed
    direct: Call = lambda: operator(*arguments, **options)  # noqa: E731
    calls = (step, direct, apart)
    for call in calls * 50:
        call()
    rounds = [[statistics.median(times_us([call] * (repeats // 5), device)) for call in calls] for _ in range(5)]
    whole, alone, other = (min(column) for column in zip(*rounds, strict=True))
    return Added(what, whole - other, alone)


def vllm_steps(device: torch.device, *, interleaved: bool) -> Iterator[tuple[str, Call]]:
    """Steps of vLLM's adapter: one token each, drafts, and prompts, on pages of windows and states."""

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    rows, spec, length = 8, 3, 512
    layer = SimpleNamespace(
        tp_size=1, num_k_heads=H, num_v_heads=HV, head_k_dim=K, head_v_dim=V, key_dim=H * K, value_dim=HV * V,
        layer_norm_epsilon=1e-6, activation="silu", gqa_interleaved_layout=interleaved, split_ba=lambda ba: ba.chunk(2, dim=-1),
        conv1d=SimpleNamespace(weight=zeros(CHANNELS, 1, WIDTH), bias=None), A_log=zeros(HV, dtype=torch.float32),
        dt_bias=zeros(HV), norm=SimpleNamespace(weight=zeros(V), activation="silu"),
        kv_cache=(zeros(64, WIDTH - 1 + spec, CHANNELS), zeros(64, HV, V, K, dtype=torch.float32)),
    )  # fmt: skip
    step = Step(layer, conv_dim_first=False)
    slots = ints(*range(1, rows + 1))
    table = ints(*range(1, 1 + rows * (1 + spec))).view(rows, 1 + spec)
    nothing = {"checkpoint": None, "spec_sequence_masks": None, "num_prefills": 0, "num_decodes": 0, "num_decode_tokens": 0}
    batches = {
        "decode": {"num_actual_tokens": rows, "num_decodes": rows, "non_spec_state_indices_tensor": slots},
        "drafts": {
            "num_actual_tokens": rows * (1 + spec), "spec_sequence_masks": zeros(rows, dtype=torch.bool),
            "spec_state_indices_tensor": table, "num_accepted_tokens": ints(*[1] * rows),
            "spec_query_start_loc": ints(*range(0, rows * (1 + spec) + 1, 1 + spec)),
        },
        "prompts": {
            "num_actual_tokens": rows * length, "num_prefills": rows, "prefill_state_indices": slots,
            "prefill_query_start_loc": ints(*range(0, rows * length + 1, length)),
            "prefill_has_initial_state": zeros(rows, dtype=torch.bool),
        },
    }  # fmt: skip
    for name, known in batches.items():
        metadata = SimpleNamespace(**(nothing | known))
        tokens = metadata.num_actual_tokens
        parts = (zeros(tokens, CHANNELS + HV * V), zeros(tokens, 2 * HV), zeros(tokens, HV, V), metadata)
        yield name, lambda parts=parts: step(*parts)


class _Given(nn.Module):
    """A projection that returns the same rows again and again, so that no product is timed."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, tokens: Tensor) -> Tensor:
        return self.rows


def transformers_step(device: torch.device, batch: int = 8) -> tuple[Call, Call]:
    """A decode step of a layer of Transformers, enabled, and its projections alone."""
    from transformers.cache_utils import DynamicCache
    from transformers.models.qwen3_next import Qwen3NextConfig, Qwen3NextForCausalLM

    from gdn.integrations.transformers import enable
    from tests.gpu.test_transformers import cache_name

    config = Qwen3NextConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, linear_num_key_heads=H, linear_num_value_heads=HV, linear_key_head_dim=K, linear_value_head_dim=V,
        layer_types=["linear_attention"], num_experts=0,
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config).to(device, torch.bfloat16).eval().requires_grad_(False)
    layer = model.model.layers[0].linear_attn
    hidden = torch.zeros(batch, 1, 64, dtype=torch.bfloat16, device=device)
    with torch.inference_mode():
        given = {name: _Given(getattr(layer, name)(hidden[:, 0])) for name in ("in_proj_qkvz", "in_proj_ba")}
    for name, module in given.items():
        setattr(layer, name, module)
    layer.out_proj = _Given(hidden[:, 0])
    cache = DynamicCache(config=config)
    enable(model, strict=True, allow_reference=True)
    named = {cache_name(layer): cache}
    layer(hidden, **named)  # the cache has a state from here on
    modules = (layer.in_proj_qkvz, layer.in_proj_ba, layer.out_proj)
    return lambda: layer(hidden, **named), lambda: [module(hidden) for module in modules]


@contextlib.contextmanager
def no_kernels() -> Iterator[None]:
    """`without_device`, also for the prefill step, whose launch picks functions by name."""
    with without_device(), mock.patch("kernels_cute.gdn_prefill.launch", lambda *_: None):
        yield


def measure(device: torch.device, repeats: int = 2000) -> list[Added]:
    """All adapters' steps."""
    env.reload()
    with torch.inference_mode():
        found = [
            added(f"vLLM, {'interleaved' if interleaved else 'flat'}, {name}", step, device, repeats=repeats)
            for interleaved in (False, True)
            for name, step in vllm_steps(device, interleaved=interleaved)
        ]
        step, apart = transformers_step(device)
        found.append(added("Transformers, decode", step, device, apart=apart, repeats=repeats))
    return found


def main() -> None:
    has_device = torch.cuda.is_available() and devices.spec(torch.device("cuda")) is not None
    device = torch.device("cuda" if has_device else "cpu")
    with contextlib.nullcontext() if has_device else no_kernels():
        found = measure(device)
    for one in found:
        print(f"{one.what:32} step {one.step_us:6.1f} us, operator {one.operator_us:6.1f} us, added {one.us:5.1f} us")
    sys.exit(any(one.us > MOST_US for one in found))


if __name__ == "__main__":
    main()
