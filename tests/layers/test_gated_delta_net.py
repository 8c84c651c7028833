"""The Gated DeltaNet layer alone: draft trees, checkpoints, padding, an engine's null slot, dtypes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn.layers.config import HybridConfig
from gdn.layers.gated_delta_net import GatedDeltaNet
from gdn.layers.metadata import GDNMetadataBuilder
from tests.layers import hf
from tests.layers.serving import gdn_metadata

SLOTS = 12


def layer_of(seed: int = 0, **options: Any) -> GatedDeltaNet:
    config = HybridConfig.from_transformers(hf.build("qwen3_5", 0).config)
    layer = GatedDeltaNet(config, dtype=torch.float32, **options)
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        scale = 1.0 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return layer


def pools(layer: GatedDeltaNet, num_spec: int = 0, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Stale windows and states."""
    generator = torch.Generator().manual_seed(seed)
    windows = torch.randn(SLOTS, layer.conv_dim, 3 + num_spec, generator=generator)
    return windows, torch.randn(SLOTS, layer.num_v_heads, layer.head_v_dim, layer.head_k_dim, generator=generator)


def inputs(layer: GatedDeltaNet, tokens: int, seed: int = 2) -> Tensor:
    return torch.randn(tokens, layer.hidden_size, generator=torch.Generator().manual_seed(seed))


def one(layer: GatedDeltaNet, hidden: Tensor, states: tuple[Tensor, Tensor], slot: int, context: int = 0) -> Tensor:
    """Prefill of one sequence."""
    metadata = gdn_metadata([len(hidden)], [context], [False], torch.tensor([[slot]], dtype=torch.int32), [1])
    return layer(hidden, metadata, *states)


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def close_pools(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    for pool, other in zip(found, wanted, strict=True):
        close(pool, other)


def test_a_draft_tree_runs_every_path_from_the_root() -> None:
    layer, hidden = layer_of(), inputs(layer_of(), 11)
    parents = [-1, 0, 0, 2, 1, 2]  # of six nodes
    prompt, nodes = hidden[:5], hidden[5:]
    states = pools(layer, num_spec=5)
    one(layer, prompt, states, 3)
    slots = torch.tensor([[3, 1, 7, 0, 5, 9]], dtype=torch.int32)
    builder = GDNMetadataBuilder("cpu", num_spec=5)
    metadata = builder.build([6], [11], slots, num_draft_tokens=[5], num_accepted_tokens=[1], parent_token=parents)
    found = layer(nodes, metadata, *states)
    for node in range(6):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        alone = pools(layer)
        wanted = one(layer, torch.cat([prompt, nodes[path]]), alone, 4)
        close(found[node], wanted[-1])
        close(states[1][slots[0, node]], alone[1][4])


def test_a_checkpoint_continues_in_another_slot() -> None:
    layer = layer_of()
    hidden, states = inputs(layer, 150), pools(layer)
    builder = GDNMetadataBuilder("cpu")
    metadata = builder.build([130], [130], [2], checkpoint_offsets=[[64, 128]], checkpoint_slots=[[6, 8]])
    whole = layer(hidden[:130], metadata, *states)
    for slot, offset in ((6, 64), (8, 128)):
        found = one(layer, hidden[offset:130], states, slot, context=offset)
        close(found, whole[offset:])


def test_head_dims_without_a_fused_prefill_run_its_steps() -> None:
    layer, apart = layer_of(), layer_of()
    assert layer.has_fused_prefill
    apart.has_fused_prefill = False
    both = pools(layer, 1), pools(layer, 1)
    builder = GDNMetadataBuilder("cpu", num_spec=1)
    arguments = [[2, 7, 1, 70], [22, 27, 1, 90], [[0, 4], [1, 5], [2, 6], [3, 7]]]
    metadata = builder.build(*arguments, num_draft_tokens=[1, -1, -1, -1])
    hidden = inputs(layer, 80)
    close(layer(hidden, metadata, *both[0]), apart(hidden, metadata, *both[1]))
    close_pools(*both)


@pytest.mark.parametrize("kind", ["decode", "spec", "prefill", "mixed", "empty"])
def test_rows_of_padding_change_nothing(kind: str) -> None:
    layer = layer_of()
    builder = GDNMetadataBuilder("cpu", num_spec=1)
    slots = [[0, 4], [1, 5], [2, 6]]
    lengths, drafts = {
        "decode": ([1, 1, 1], None), "spec": ([2, 1, 2], [1, 0, 1]), "prefill": ([1, 9, 4], None),
        "mixed": ([2, 7, 1], [1, -1, 0]), "empty": ([0, 0, 0], None),
    }[kind]  # fmt: skip
    metadata = builder.build(lengths, [n + 20 for n in lengths], slots, num_draft_tokens=drafts)
    tokens = sum(lengths)
    hidden = torch.cat([inputs(layer, tokens), torch.full((3, layer.hidden_size), torch.nan)])
    plain, padded = pools(layer, 1), pools(layer, 1)
    wanted = layer(hidden[:tokens], metadata, *plain)
    found = layer(hidden, metadata, *padded)
    close(found[:tokens], wanted)
    close_pools(plain, padded)
    touched = [not torch.equal(old, new) for old, new in zip(pools(layer, 1)[1], plain[1], strict=True)]
    assert any(touched) == (kind != "empty") and not any(touched[7:])


@pytest.mark.parametrize("is_spec", [False, True])
def test_rows_of_a_captured_batch_are_padding_in_an_engines_convention(is_spec: bool) -> None:
    layer = layer_of(null_slot=0)
    builder = GDNMetadataBuilder("cpu", num_spec=1, null_slot=0)
    slots, lengths = [[3, 4], [1, 5]], [2, 1] if is_spec else [1, 1]
    draft: dict[str, Any] = {"num_draft_tokens": [1, 0]} if is_spec else {}
    tokens = sum(lengths)
    hidden = inputs(layer, 8 if is_spec else 4)
    states, alone = pools(layer, 1), pools(layer, 1)
    found = layer(hidden, builder.build(lengths, [9, 9], slots, pad_to=4, **draft), *states)
    wanted = layer(hidden[:tokens], builder.build(lengths, [9, 9], slots, **draft), *alone)
    close(found[:tokens], wanted)
    assert not found[tokens:].any()
    close_pools(states, alone)


def test_an_engines_metadata_needs_no_field_of_ours() -> None:
    layer = layer_of()
    fields = vars(gdn_metadata([4], [0], [False], torch.tensor([[2]], dtype=torch.int32), [1]))
    assert not {"checkpoint_offsets", "checkpoint_slots", "non_spec_lengths_host"} & set(fields)
    del fields["retrieve_parent_token"]
    layer(inputs(layer, 4), SimpleNamespace(**fields), *pools(layer))


def test_decays_stay_float32_when_the_model_is_moved() -> None:
    layer = layer_of()
    A_log, dt_bias = layer.A_log.clone(), layer.dt_bias.clone()
    layer.to(torch.bfloat16)
    assert layer.in_proj.dtype == layer.norm_weight.dtype == torch.bfloat16
    assert torch.equal(layer.A_log, A_log) and torch.equal(layer.dt_bias, dt_bias)


def test_bfloat16_is_as_near_as_its_inputs_allow() -> None:
    layer = layer_of()
    hidden = inputs(layer, 70)
    wanted = one(layer, hidden, pools(layer), 1)
    half = layer_of().to(torch.bfloat16)
    found = one(half, hidden.bfloat16(), tuple(map(Tensor.bfloat16, pools(layer))), 1).float()
    assert float((found - wanted).norm() / wanted.norm()) < 0.03
