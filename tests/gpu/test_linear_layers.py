"""Gated DeltaNet and MoE layers on the GPU: error next to torch in the same dtype, captured steps, shards, host time."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.layers import FORMS, on_host
from benchmarks.stacks import make_stack, shaped
from gdn.layers import GatedDeltaNet, GDNMetadata, GDNMetadataBuilder, HybridConfig
from gdn.layers.cuts import CUTS, Rank
from gdn.layers.mlp import MoE
from gdn.layers.named import NAMED
from gdn.layers.random_weights import fill_randomly
from gdn.runtime import env
from tests.gpu import graphs
from tests.gpu.waits import no_waits

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
DTYPE = torch.bfloat16
QUIET_PROJECTIONS_US = 29.0  # of torch's two products on a quiet host (gdn/tuned/h100/MEASURED.md)
NUM_SPEC, NUM_SLOTS = 3, 24
CONFIG = HybridConfig(  # a layer of Qwen3-Next-80B
    vocab_size=64, hidden_size=2048, num_hidden_layers=1, layer_types=("linear_attention",), num_attention_heads=16,
    num_key_value_heads=2, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
    linear_value_head_dim=128, num_experts=64, num_experts_per_tok=10, moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
)  # fmt: skip
# One step after another: new tokens, tokens before them, drafts (-1 = not speculative).
STEPS = [
    ([70, 1, 130], [0, 0, 0], [-1, -1, -1]), ([1, 1, 1], [70, 1, 130], [0, 0, 0]), ([4, 65, 2], [71, 2, 131], [3, -1, 1]),
    ([4, 2, 1], [72, 67, 132], [3, 1, 0]),
]  # fmt: skip


def layer_of(device: torch.device | str) -> GatedDeltaNet:
    layer = GatedDeltaNet(CONFIG, dtype=DTYPE)
    fill_randomly(layer)
    return layer.to(device)


def pools(layer: GatedDeltaNet, device: torch.device | str, dtype: torch.dtype = DTYPE) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    windows = torch.randn(NUM_SLOTS, 3 + NUM_SPEC, layer.conv_dim, generator=generator).to(DTYPE)
    states = torch.randn(NUM_SLOTS, layer.num_v_heads, layer.head_v_dim, layer.head_k_dim, generator=generator) * 0.1
    return windows.to(device, dtype).mT, states.to(device)


def metadata_of(step: int, device: torch.device | str) -> GDNMetadata:
    queries, contexts, drafts = STEPS[step]
    lengths = [new + old for new, old in zip(queries, contexts, strict=True)]
    slots = torch.arange(12).view(3, 4) * 2
    return GDNMetadataBuilder(device, num_spec=NUM_SPEC).build(queries, lengths, slots, num_draft_tokens=drafts)


def run(layer: GatedDeltaNet, device: torch.device | str, dtype: torch.dtype = DTYPE) -> list[Tensor]:
    """Outputs of all steps, on the CPU in float64."""
    caches, outputs = pools(layer, device, dtype), []
    generator = torch.Generator().manual_seed(2)
    with torch.inference_mode():
        for step, (queries, _, _) in enumerate(STEPS):
            hidden = torch.randn(sum(queries), layer.hidden_size, generator=generator).to(DTYPE).to(device, dtype)
            outputs.append(layer(hidden, metadata_of(step, device), *caches).cpu().double())
    return outputs


def row_error(found: Tensor, wanted: Tensor) -> float:
    """Largest error of a row: norm of the difference over the norm of what is wanted."""
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


@pytest.fixture
def reference_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Context in which every operator runs its plain-torch reference."""

    @contextmanager
    def context() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setenv("GDN_BACKEND", "reference")
            env.reload()
            yield
        env.reload()

    yield context
    env.reload()


def test_error_next_to_torch(device: torch.device, reference_backend: Any) -> None:
    layer = layer_of(device)
    found = run(layer, device)
    with reference_backend():
        of_torch = run(layer, device)
    wanted = run(copy.deepcopy(layer).cpu().double(), "cpu", torch.float64)
    for step, (ours, plain, exact) in enumerate(zip(found, of_torch, wanted, strict=True)):
        assert row_error(ours, exact) <= 2 * row_error(plain, exact), (step, row_error(ours, exact), row_error(plain, exact))


@pytest.mark.parametrize("size", [2, 8])
def test_sum_of_the_shards(size: int, device: torch.device) -> None:
    layer = layer_of(device)
    wanted = run(copy.deepcopy(layer).cpu().double(), "cpu", torch.float64)
    whole = run(layer, device)
    config = CONFIG.per_rank(size)
    sizes = [CONFIG.conv_dim, CONFIG.linear_value_dim, CONFIG.linear_num_value_heads, CONFIG.linear_num_value_heads]
    parts: list[Tensor] = []
    for number in range(size):
        rank, shard = Rank(CONFIG, number, size), GatedDeltaNet(config, dtype=DTYPE, device=device)
        qkv, *others = layer.in_proj[: sum(sizes)].split(sizes)
        projection = torch.cat([CUTS["qkv"].take(qkv, rank), *(rank.share(part) for part in others)])
        shard.in_proj.zero_()
        shard.in_proj[: len(projection)] = projection
        shard.conv_weight.copy_(CUTS["conv"].take(layer.conv_weight[:, None], rank))
        shard.norm_weight.copy_(layer.norm_weight)
        shard.out_proj.copy_(CUTS["columns"].take(layer.out_proj, rank))
        for name in ("A_log", "dt_bias"):
            getattr(shard, name).copy_(CUTS["rows"].take(getattr(layer, name), rank))
        windows, states = pools(layer, device)
        windows = CUTS["qkv"].take(windows.transpose(0, 1), rank).transpose(0, 1)
        caches, generator = (windows.mT.contiguous().mT, rank.share(states, 1).contiguous()), torch.Generator().manual_seed(2)
        with torch.inference_mode():
            for step, (queries, _, _) in enumerate(STEPS):
                hidden = torch.randn(sum(queries), shard.hidden_size, generator=generator).to(device, DTYPE)
                output = shard(hidden, metadata_of(step, device), *caches).cpu().double()
                if number == 0:
                    parts.append(output)
                else:
                    parts[step] += output
    for summed, one, exact in zip(parts, whole, wanted, strict=True):
        assert row_error(summed, exact) <= 2 * row_error(one, exact)


@pytest.mark.parametrize("kind", ["decode", "spec"])
def test_captured_steps(kind: str, device: torch.device) -> None:
    layer, rows = layer_of(device), 6
    columns = 1 if kind == "decode" else 1 + NUM_SPEC
    builder = GDNMetadataBuilder(device, num_spec=columns - 1, max_num_sequences=rows)
    slots = torch.arange(4 * columns).view(4, columns)
    generator = torch.Generator().manual_seed(3)

    def prepare(step: int) -> dict[str, Any]:
        nonlocal metadata
        options: dict[str, Any] = {}
        queries = [1] * 4
        if kind == "spec":
            queries, accepted = [[4, 1, 3, 2], [2, 4, 1, 1]][step % 2], [[1, 2, 4, 1], [3, 1, 2, 2]][step % 2]
            options = {"num_draft_tokens": [count - 1 for count in queries], "num_accepted_tokens": accepted}
        metadata = builder.build(queries, [step + (9 if kind == "decode" else 20)] * 4, slots, pad_to=rows, **options)
        return {"hidden": torch.randn(rows * columns, layer.hidden_size, generator=generator)}

    def run(hidden: Tensor, windows: Tensor, states: Tensor) -> Tensor:
        result: Tensor = layer(hidden, metadata, windows, states)
        padding.append(result[metadata.num_actual_tokens :])
        return result

    metadata: Any = None
    padding: list[Tensor] = []
    with torch.inference_mode():
        windows, states = pools(layer, device)
        arguments = {"hidden": prepare(0)["hidden"].to(device, DTYPE), "windows": windows, "states": states}
        graphs.check(run, arguments, ("windows", "states"), [partial(prepare, step) for step in range(6)], device)
        assert not any(bool(one.any()) for one in padding)


@pytest.mark.parametrize("tokens", [1, 33, 700])
def test_experts(tokens: int, device: torch.device) -> None:
    moe = MoE(CONFIG, device=device, dtype=DTYPE)
    fill_randomly(moe)
    hidden = torch.randn(tokens, CONFIG.hidden_size, generator=torch.Generator().manual_seed(4)).to(device, DTYPE)
    with torch.inference_mode():
        moe(hidden)
        weights, experts = moe.route(hidden)
        torch.cuda.synchronize(device)
        with no_waits():
            found = moe._grouped(hidden, weights, experts)
            assert moe(hidden).shape == hidden.shape
        of_torch = moe._every_expert(hidden, weights, experts)
        exact = copy.deepcopy(moe).double()._every_expert(hidden.double(), weights.double(), experts)
    assert row_error(found.double(), exact) <= 2 * row_error(of_torch.double(), exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("captured", [False, True])
def test_an_expert_that_overflows_reaches_the_tokens_that_select_it_alone(
    captured: bool, dtype: torch.dtype, device: torch.device
) -> None:
    moe = MoE(CONFIG, device=device, dtype=dtype)
    fill_randomly(moe)
    hidden = torch.randn(53, CONFIG.hidden_size, generator=torch.Generator().manual_seed(4)).to(device, dtype)
    with torch.inference_mode():
        selects = (moe.route(hidden)[1] == 3).any(dim=-1)
        wanted = moe(hidden)
        moe.gate_up_proj[3] = torch.finfo(dtype).max / 2
        found = moe(hidden)
        if captured:
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = moe(hidden)
            graph.replay()
    assert 0 < int(selects.sum()) < 53 and not found[selects].isfinite().all()
    assert found[~selects].isfinite().all()
    torch.testing.assert_close(found[~selects], wanted[~selects], rtol=3e-2, atol=3e-2)


def test_timing_of_an_eager_decode_step_on_the_host(device: torch.device, record_property: Any) -> None:
    """The limit is meant for a quiet host. On a slower or busier one it grows with the time that the projections alone take."""
    found = on_host(make_stack(shaped(NAMED["qwen3-next-80b"], FORMS[0].kind, 1), 32, 4096, device))
    record_property("host_us", found.found)
    slower = found.projections_us / QUIET_PROJECTIONS_US
    assert found.found <= found.must * (slower if slower > 1.2 else 1), found
