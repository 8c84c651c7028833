"""Layers of vLLM that decode by replay: what they tell the host of their blocks, what the report says, and why others do not."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gdn.integrations import _vllm_replay, vllm
from gdn.integrations._vllm_replay import ReplayFacts, fold_phase, refusal
from gdn.ops.delta_rule import crossing
from gdn.runtime import env
from tests.integrations import fake_vllm
from tests.integrations.fake_vllm import HIDDEN, CudaPlatform, Model, ModelOfKinds, QwenGatedDeltaNetAttention, config, context
from tests.integrations.vllm_engine import CHANNELS, HV, WIDTH, Host, K, V, common, int32, metadata_of

FACTS = ReplayFacts(num_v_heads=4, head_k_dim=128, head_v_dim=128, window_bytes=64, num_sequences=32, num_spec=0)


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch, switch: Callable[..., env.Switches]) -> None:
    switch(GDN_REPLAY="1")
    fake_vllm.install(monkeypatch)


def build(prefix: str = "model.layers.17.linear_attn", *, num_spec: int = 3, **changes: Any) -> tuple[Any, Any]:
    chosen = config(**changes)
    chosen.num_spec = num_spec
    made = Host(5, num_spec=num_spec, interleaved=False, dim_first=False)
    return QwenGatedDeltaNetAttention(SimpleNamespace(host=made), chosen, prefix, False), chosen


def test_a_block_holds_a_ring_and_a_sequence_takes_one() -> None:
    with vllm.enable(allow_reference=True) as handle:
        layer, chosen = build()
        window, rest = layer.get_state_shape()
        rows, width = 14 + 2 * 4, 2 * K + HV * V + HV
        assert window == (WIDTH - 1 + 3, CHANNELS)
        assert rest == (HV * V * K + rows * width + 4,) and layer.get_state_dtype() == (torch.float32, torch.float32)
        spec = layer.get_kv_cache_spec(chosen)
        assert (spec.shapes, spec.num_speculative_blocks) == ((window, rest), 0)
        plain = fake_vllm.MambaSpec(chosen.shapes, chosen.dtypes).page_size_bytes
        assert spec.page_size_bytes == plain + 4 * (rows * width + 4)
        assert layer._gdn_step._folds == {"fold_every": 15, "fold_phase": 2}
        (one, other) = handle.report().points
        assert (one.served, one.left, other.replaced) == (1, {}, True)


@pytest.mark.parametrize("model", [Model, ModelOfKinds])
def test_the_host_sizes_its_blocks_by_those_of_the_layers(model: Any) -> None:
    told = dict(vars(model))
    with vllm.enable(allow_reference=True) as handle:
        layer, chosen = build(model=model)
        CudaPlatform._align_hybrid_block_size(chosen, None)
        assert chosen.page_size == layer.get_kv_cache_spec(chosen).page_size_bytes
        assert dict(vars(model)) == told  # as before, for other engines
        other, plain = build("model.layers.1.linear_attn", activation="gelu", model=model)
        CudaPlatform._align_hybrid_block_size(plain, None)
        assert plain.page_size == other.get_kv_cache_spec(plain).page_size_bytes < chosen.page_size
        assert other.get_kv_cache_spec(plain).num_speculative_blocks == 3
        assert other.get_attn_backend() is fake_vllm.GDNAttentionBackend
        assert handle.report().points[1].served == 1
    CudaPlatform._align_hybrid_block_size(chosen, None)
    assert chosen.page_size == plain.page_size


def test_a_model_that_tells_other_shapes_keeps_them() -> None:
    """Its layers of another kind are as large as it says."""
    with vllm.enable(allow_reference=True):
        _, chosen = build()
        chosen.shapes = ((7, 5), (4, 4, 4))
        CudaPlatform._align_hybrid_block_size(chosen, None)
        assert chosen.page_size == fake_vllm.MambaSpec(chosen.shapes, chosen.dtypes).page_size_bytes


def test_the_dry_run_warms_the_forms_of_replay_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with vllm.enable(allow_reference=True) as handle, caplog.at_level("INFO", "gdn"):
        layers = [build(f"model.layers.{n}.linear_attn")[0] for n in range(3)]
        context.attn_metadata = None
        for layer in layers:
            assert not layer.forward_cuda(torch.ones(5, HIDDEN)).any()
    (said,) = [record.message for record in caplog.records if "Gated DeltaNet layers" in record.message]
    assert said.startswith("vllm: 3 Gated DeltaNet layers run on gdn's kernels, ready in ")
    plain, ring = 4 * (6 * CHANNELS + HV * V * K), 22 * 4 * (2 * K + HV * V + HV) + 16
    assert said.endswith(
        " s; decode by replay: a ring of 22 rows, a fold in 15 tokens, one block of "
        f"{(plain + ring) / 1e6:.2f} MB a sequence and layer instead of 4 blocks of {plain / 1e6:.2f} MB"
    )
    assert f"vllm: {handle.report().notes[1]}" == said
    logged = "\n".join(record.getMessage() for record in caplog.records)
    assert "ring_rows=22,fold_every=15" in logged and "fold_states: reference" in logged


def test_layers_of_two_kinds_are_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    with vllm.enable(allow_reference=True), caplog.at_level("INFO", "gdn"):
        first, _ = build("model.layers.0")
        build("model.layers.1", num_spec=2, mode="align")
        context.attn_metadata = None
        first.forward_cuda(torch.ones(2, HIDDEN))
    (said,) = [record.message for record in caplog.records if "Gated DeltaNet layers" in record.message]
    assert "; 1: decode by replay: a ring of 22 rows" in said
    assert said.endswith("; 1: decode without replay: with prefix caching the host copies the state of an accepted draft, "
                         "which replay does not keep")  # fmt: skip


def test_a_step_on_the_pages_that_the_host_binds() -> None:
    """A prompt and decode steps by the layer, on blocks that are longer than what they hold."""
    with vllm.enable(allow_reference=True):
        layer, chosen = build(num_spec=0)
        size = layer.get_kv_cache_spec(chosen).page_size_bytes + 512
        layer.bind_kv_cache(torch.full((4, 1, 1, size), -1, dtype=torch.int8))
        assert layer.kv_cache[1].shape[1:] == layer.get_state_shape()[1]
        builder = layer.get_attn_backend().get_builder_cls()(None, [layer.prefix], chosen, torch.device("cpu"))
        assert isinstance(builder, fake_vllm.GDNAttentionMetadataBuilder)
        hidden = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1))
        bounds, known = int32([0, 5]), {"num_prefills": 1, "prefill_state_indices": int32([2])}
        known |= {"prefill_query_start_loc": bounds, "prefill_has_initial_state": torch.tensor([False])}
        found = [forward(builder, layer, hidden[:5], known, before=0)]
        block = {"num_decodes": 1, "num_decode_tokens": 1, "non_spec_state_indices_tensor": int32([2])}
        found.append(forward(builder, layer, hidden[5:], block, before=5))
        qkvz, ba = layer.in_proj_qkvz(hidden)[0], layer.in_proj_ba(hidden)[0]
        own = SimpleNamespace(qkvz=qkvz, ba=ba)
        core = Host(5, num_spec=0, interleaved=False, dim_first=False).expected(own, 6)[0]  # type: ignore[arg-type]
        expected = layer.out_proj(core.view(6, HV * V).float())[0]
        torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-5)


def forward(builder: Any, layer: Any, hidden: torch.Tensor, known: dict[str, Any], before: int) -> torch.Tensor:
    """One step of one sequence by a layer."""
    tokens = len(hidden)
    batch = common([before], [tokens])
    batch.described = metadata_of(num_actual_tokens=tokens, **known)
    context.attn_metadata = {layer.prefix: builder.build(0, batch)}
    result: torch.Tensor = layer.forward_cuda(hidden)
    return result


def test_another_cache_group_has_other_blocks() -> None:
    """The host changes the blocks of metadata that it made for another group; the tokens stay, and where graphs read them."""
    with vllm.enable(allow_reference=True):
        layer, chosen = build(num_spec=0)
        make = layer.get_attn_backend().get_builder_cls()
        builders = [make(None, [layer.prefix], chosen, torch.device("cpu")) for _ in range(2)]
        assert not builders[0].supports_update_block_table  # on a GPU
        told = [
            metadata_of(
                num_prefills=2, prefill_state_indices=int32(blocks), prefill_has_initial_state=torch.tensor([True, False])
            )
            for blocks in ([3, 4], [8, 9])
        ]
        batch = common([5, 0], [2, 5])
        batch.described = told[0]
        first = builders[0].build(0, batch)
        second = builders[1].update_block_table(first, told[1], None)
        for found, blocks in ((first, [3, 4]), (second, [8, 9])):
            prompts = found.gdn_replay.prompts
            assert prompts.written.tolist() == blocks and prompts.tokens.tolist() == [7, 5]
            assert prompts.fold.slots.tolist() == [blocks[0], 0] and prompts.fold.computed.tolist() == [5, 0]
        assert first.gdn_replay.computed is second.gdn_replay.computed


def test_graphs_read_the_counts_in_the_same_place() -> None:
    with vllm.enable(allow_reference=True):
        layer, chosen = build(num_spec=0)
        builder = layer.get_attn_backend().get_builder_cls()(None, [layer.prefix], chosen, torch.device("cpu"))
        places = set()
        for counts in ([5, 9], [6, 10, 0]):
            described = SimpleNamespace(spec_sequence_masks=None, num_prefills=0)
            batch = SimpleNamespace(described=described, compute_num_computed_tokens=lambda counts=counts: int32(counts))
            rows = builder.build_for_cudagraph_capture(batch).gdn_replay
            assert rows.computed.tolist() == counts and rows.prompts is None
            places.add(rows.computed.data_ptr())
        assert len(places) == 1
        many = int32(list(range(60)))  # more than any graph holds
        batch = SimpleNamespace(described=described, compute_num_computed_tokens=lambda: many)
        assert builder.build(0, batch).gdn_replay.computed is many


REASONS = {
    "the host's functions about pages are not the recorded ones": {"has_host": False},
    "the fused step has no kernel for head dims 40 and 40": {"head_k_dim": 40, "head_v_dim": 40},
    "the host's cache mode is all": {"cache_mode": "all"},
    "with prefix caching the host copies the state of an accepted draft, which replay does not keep": {
        "cache_mode": "align",
        "num_spec": 2,
    },
    "a KV connector moves the parts of a block that it knows": {"has_connector": True},
    "the ranks of a pipeline size their blocks apart": {"pipeline_ranks": 2},
    "its windows take 24 bytes, no multiple of 16": {"window_bytes": 24},
}


def test_why_a_layer_does_not_replay(monkeypatch: pytest.MonkeyPatch, switch: Callable[..., env.Switches]) -> None:
    assert refusal(FACTS) is None and refusal(replace(FACTS, cache_mode="align")) is None
    assert refusal(replace(FACTS, num_spec=3)) is None
    for reason, changes in REASONS.items():
        assert refusal(replace(FACTS, **changes)) == reason
    switch(GDN_REPLAY="0")
    assert refusal(FACTS) == "GDN_REPLAY=0"
    switch(GDN_REPLAY="auto")
    monkeypatch.setattr(crossing, "REPLAY_HEADS", 128)
    assert refusal(FACTS) is None and refusal(replace(FACTS, num_sequences=1, num_spec=1)) is None
    few = "GDN_REPLAY=auto wants 128 value heads over all sequences or drafts, here are 124"
    assert refusal(replace(FACTS, num_sequences=31)) == few
    other = "GDN_REPLAY=auto wants head dims of 64 or 128, here are 96 and 128"
    assert refusal(replace(FACTS, head_k_dim=96, head_v_dim=128)) == other


def test_what_a_layer_says_of_itself() -> None:
    layer, chosen = build(kv_transfer_config="given", pipeline_ranks=2, mode="align")
    facts = _vllm_replay.replay_facts(layer, chosen, has_host=True)
    assert facts == ReplayFacts(HV, K, V, 4 * (WIDTH - 1 + 3) * CHANNELS, 32, 3, "align", True, 2, True)
    phases = [fold_phase(f"language_model.model.layers.{n}.linear_attn", 15) for n in (0, 1, 14, 15, 47)]
    assert phases == [0, 1, 14, 0, 2] and fold_phase("mixer.3", 15) == 0


def test_the_page_of_a_rank() -> None:
    """Of the heads of one of two ranks, as the host tells the shapes."""
    layer = SimpleNamespace(
        tp_size=2, num_k_heads=16, num_spec=3, get_state_shape=lambda: ((6, 4096), (16, 128, 128)),
        get_state_dtype=lambda: (torch.bfloat16, torch.bfloat16),
    )  # fmt: skip
    page = _vllm_replay.page_of_layer(layer)
    assert (page.rows, page.width, page.fold_every) == (19, 8 * 128 + 16 * 129, 12)
    window, (elements,) = page.shapes
    assert window == (6, 4096) and 2 * elements == 2 * 16 * 128 * 128 + 4 * 19 * page.width + 16


def test_a_host_whose_pages_changed_is_served_without_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    def build_of_another_version(self: Any, common_attn_metadata: Any) -> Any:
        return None

    monkeypatch.setattr(fake_vllm.GDNAttentionMetadataBuilder, "build", build_of_another_version)
    with vllm.enable(allow_reference=True) as handle:
        layer, _ = build()
        assert layer._gdn_refusal is None and layer._gdn_page is None and len(layer.get_state_shape()[1]) == 3
        one, other = handle.report().points
        assert one.replaced and not other.replaced and "GDNAttentionMetadataBuilder.build: its signature" in str(other.why)
    with pytest.raises(RuntimeError, match=r"GDNAttentionMetadataBuilder\.build: its signature is not the recorded one"):
        vllm.enable(allow_reference=True, strict=True)
