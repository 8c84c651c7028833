"""The adapter of vLLM on a stand-in of its modules: the switch, the class that is built, what is left to the host, the report."""

import importlib
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gdn
from gdn.integrations import vllm
from gdn.runtime import env
from tests.integrations import fake_vllm
from tests.integrations.fake_vllm import HIDDEN, QwenGatedDeltaNetAttention, config, context, op_registry_oot
from tests.integrations.vllm_engine import HV, Host, Sequence, V, int32, metadata_of

NAME = "QwenGatedDeltaNetAttention"


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch, switch: Callable[..., env.Switches]) -> None:
    switch(GDN_REPLAY="0")  # test_vllm_replay_layer.py has the other form
    fake_vllm.install(monkeypatch)


def build(prefix: str = "model.layers.0", *, interleaved: bool = False, num_spec: int = 0, **changes: Any) -> Any:
    host = Host(5, num_spec=num_spec, interleaved=interleaved, dim_first=False)
    layer = QwenGatedDeltaNetAttention(SimpleNamespace(host=host), config(**changes), prefix, interleaved)
    layer.host = host  # type: ignore[attr-defined]
    return layer


def decode(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """One decode step of a fresh sequence by the layer; its result, and that of the float64 loop."""
    hidden = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(9))
    own = Sequence([layer.host.free.pop()])
    windows, states = layer.kv_cache
    windows[own.blocks[0]], states[own.blocks[0]] = 0, 0
    known = {"num_decodes": 1, "num_decode_tokens": 1, "non_spec_state_indices_tensor": int32(own.blocks)}
    context.attn_metadata = {layer.prefix: metadata_of(num_actual_tokens=1, **known)}
    found = layer.forward_cuda(hidden)
    own.qkvz, own.ba = layer.in_proj_qkvz(hidden)[0], layer.in_proj_ba(hidden)[0]
    core = layer.host.expected(own, 1)[0]
    return found, layer.out_proj(core.view(1, HV * V).float())[0]


def test_off_unless_the_switch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm.plugin()
    assert op_registry_oot == {} and type(build()) is QwenGatedDeltaNetAttention
    seen: list[Any] = []
    monkeypatch.setattr(vllm, "enable", lambda **given: seen.append(given))
    for value in ("0", "1", "strict"):
        monkeypatch.setenv("GDN_VLLM", value)
        env.reload()
        vllm.plugin()
    assert seen == [{"strict": False}, {"strict": True}]


def test_a_switch_that_was_set_before_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_VLLM", "1")
    handle = vllm.enable(allow_reference=True)
    handle.disable()
    assert os.environ["GDN_VLLM"] == "1"
    assert handle.report().notes[-1] == "disabled, but GDN_VLLM was set by others: the host's next start enables it again"
    for before, is_on in (("0", False), ("", False), ("true", True), ("strict", True)):
        monkeypatch.setenv("GDN_VLLM", before)
        handle = vllm.enable(allow_reference=True)
        assert os.environ["GDN_VLLM"] == "1"
        handle.disable()
        assert os.environ["GDN_VLLM"] == before and (env.current().vllm != "0") == is_on
        assert any("set by others" in note for note in handle.report().notes) == is_on
    handle = vllm.enable(allow_reference=True)
    monkeypatch.setenv("GDN_VLLM", "0")  # by others, since
    handle.disable()
    assert os.environ["GDN_VLLM"] == "0" and not any("set by others" in note for note in handle.report().notes)


@pytest.mark.parametrize("quantised", [False, True])
def test_a_layer_of_an_engine_runs_on_gdn(quantised: bool) -> None:
    with vllm.enable(allow_reference=True) as handle:
        assert os.environ["GDN_VLLM"] == "1" and vllm.enable(allow_reference=True) is handle
        layer = build(quantised=quantised)
        assert type(layer) is op_registry_oot[NAME] and isinstance(layer, QwenGatedDeltaNetAttention)
        found, expected = decode(layer)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        point = handle.report().points[0]
        assert (point.replaced, point.served, dict(point.left)) == (True, 1, {})
    vllm.plugin()  # of the next engine
    assert type(build()) is QwenGatedDeltaNetAttention and "GDN_VLLM" not in os.environ
    again, _ = decode(layer)  # built before: it keeps its class
    assert not (again == 7).any()


def test_the_profile_run_compiles_once_and_says_what_is_served(caplog: pytest.LogCaptureFixture) -> None:
    with vllm.enable(allow_reference=True) as handle, caplog.at_level("INFO", "gdn"):
        layers = [build(f"model.layers.{n}", num_spec=2, mode="align") for n in range(3)]
        build("model.layers.3", activation="gelu")
        context.attn_metadata = None
        for layer in layers:
            assert layer._checkpoint_alignment == 64
            before = [pages.clone() for pages in layer.kv_cache]
            assert not layer.forward_cuda(torch.ones(5, HIDDEN)).any()
            assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, layer.kv_cache, strict=True))
    (said,) = [record.message for record in caplog.records if "Gated DeltaNet layers" in record.message]
    assert said.startswith("vllm: 3 Gated DeltaNet layers run on gdn's kernels, ready in ")
    assert said.endswith(" s; decode without replay: GDN_REPLAY=0; 1 left to the host: its activation is gelu (model.layers.3)")
    enabled, started = handle.report().notes
    assert enabled.startswith("enabled in ") and f"vllm: {started}" == said


def test_layers_that_are_all_left_to_the_host_are_told_too(caplog: pytest.LogCaptureFixture) -> None:
    with vllm.enable(allow_reference=True), caplog.at_level("INFO", "gdn"):
        layers = [build(f"model.layers.{n}", activation="gelu") for n in range(6)]
        context.attn_metadata = None
        for layer in layers:
            layer._forward_core_fused_norm_packed(torch.zeros(2, 1), torch.zeros(2, 1), torch.zeros(2, HV, V))
            assert layer.is_warm
    (said,) = [record.message for record in caplog.records if "Gated DeltaNet layers" in record.message]
    names = ", ".join(f"model.layers.{n}" for n in range(4))
    assert said == (
        f"vllm: 0 Gated DeltaNet layers run on gdn's kernels; 6 left to the host: its activation is gelu ({names} and 2 more)"
    )


REFUSED = {
    "its tokens are float64": {"dtype": torch.float64},
    "its windows are bfloat16, its tokens float32": {"dtypes": (torch.bfloat16, torch.float32)},
    "its states are float16": {"dtypes": (torch.float32, torch.float16)},
    "its 3 value heads are no multiple of 2 key heads": {"num_v_heads": 3},
    "its head dims are 32 and 48, served are key dims in multiples of 4 up to 256, value dims in multiples of theirs": {
        "head_v_dim": 48
    },
    "its head dims are 256 and 256, with prefix caching served are key dims up to 128": {
        "head_k_dim": 256,
        "head_v_dim": 256,
        "mode": "align",
    },
    "its convolution has 36 channels, served are multiples of 8": {
        "head_k_dim": 4,
        "head_v_dim": 4,
        "num_v_heads": 7,
        "num_k_heads": 1,
    },
    "its activation is gelu": {"activation": "gelu"},
    "the activation of its gate is tanh": {"norm": SimpleNamespace(activation="tanh", group_size=None, norm_before_gate=True)},
    "its norm is in groups": {"norm": SimpleNamespace(activation="silu", group_size=16, norm_before_gate=True)},
    "its norm comes after the gate": {"norm": SimpleNamespace(activation="silu", group_size=None, norm_before_gate=False)},
    "LoRA parts its projections": {"lora_config": "given"},
    "the host fuses its norm with the quantisation of the output projection": {"fuse_norm_quant": True, "quantised": True},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_left_to_the_host(reason: str) -> None:
    with vllm.enable(allow_reference=True) as handle:
        layer = build(**REFUSED[reason])
        assert (layer.forward_cuda(torch.ones(2, HIDDEN)) == 7).all()
        core, context.attn_metadata = torch.zeros(2, HV, V), {}
        layer._forward_core_fused_norm_packed(torch.zeros(2, 1), torch.zeros(2, 1), core)
        assert (core == 7).all() and layer._checkpoint_alignment is None
        assert dict(handle.report().points[0].left) == {reason: 1}
    with vllm.enable(allow_reference=True, strict=True):
        assert os.environ["GDN_VLLM"] == "strict"
        with pytest.raises(RuntimeError, match=f"model.layers.0 would be left to the host: {reason}"):
            build(**REFUSED[reason])


def test_a_layer_on_another_device_is_left_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has an SM90 GPU, but the engine does not run on it."""
    monkeypatch.setattr("gdn.integrations._calls._capabilities", lambda: [(9, 0)])
    monkeypatch.setattr("gdn.integrations._handle.unusable", lambda: None)
    with vllm.enable() as handle:
        layer = build()
        assert (layer.forward_cuda(torch.ones(2, HIDDEN)) == 7).all()
        assert dict(handle.report().points[0].left) == {"its parameters are on cpu": 1}


def test_the_norm_may_be_fused_where_nothing_is_quantised() -> None:
    with vllm.enable(allow_reference=True):
        assert build(fuse_norm_quant=True)._gdn_refusal is None


def test_another_registration_stays() -> None:
    op_registry_oot[NAME] = foreign = type("Foreign", (QwenGatedDeltaNetAttention,), {})
    with pytest.raises(RuntimeError, match="strict: .*Foreign is registered in its place already"):
        vllm.enable(allow_reference=True, strict=True)
    assert op_registry_oot == {NAME: foreign} and "GDN_VLLM" not in os.environ
    with vllm.enable(allow_reference=True) as handle:  # an engine starts all the same
        point = handle.report().points[0]
        assert not point.replaced and point.why is not None and point.why.endswith("Foreign is registered in its place already")
    assert op_registry_oot == {NAME: foreign}
    op_registry_oot.clear()
    handle = vllm.enable(allow_reference=True)
    op_registry_oot[NAME] = foreign
    handle.disable()
    assert op_registry_oot == {NAME: foreign}
    assert handle.report().points[0].why == "registered since by someone else, left alone"


def test_compiled_graphs_with_and_without_the_adapter_are_kept_apart() -> None:
    """The host keeps graphs by these factors; a graph of the other side calls another operator on other projections."""
    envs = importlib.import_module("vllm.envs")
    without = envs.compile_factors()
    with vllm.enable(allow_reference=True):
        assert envs.compile_factors() == without | {"GDN_VLLM": gdn.__version__}
    assert envs.compile_factors() == without
    op_registry_oot[NAME] = type("Foreign", (QwenGatedDeltaNetAttention,), {})
    with vllm.enable(allow_reference=True):  # the layers are not ours
        assert envs.compile_factors() == without


def test_a_host_whose_graphs_cannot_be_kept_apart_keeps_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("vllm.envs.compile_factors")
    with vllm.enable(allow_reference=True) as handle:
        point = handle.report().points[0]
        assert op_registry_oot == {} and not point.replaced and point.why is not None and "compile_factors" in point.why


def test_another_machine_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gdn.integrations._calls._capabilities", lambda: [(10, 0)])
    with vllm.enable() as handle:
        assert op_registry_oot == {}
        assert handle.report().points[0].why == "this machine has no SM90 GPU"
