"""The adapter of SGLang on a stand-in of its modules: the switch, the choice, what a dispatcher gets, `disable`, the report."""

import os
import sys
from typing import Any

import pytest
import torch

from gdn.integrations import _sglang_backend, sglang
from gdn.integrations import _sglang_warm_up as warm
from gdn.runtime import env
from tests.integrations import fake_sglang, sglang_backend, stand_in
from tests.integrations.fake_sglang import GDNAttnBackend, GDNKernelDispatcher, HostKernel, choose, dispatch
from tests.integrations.sglang_engine import HV, Engine

PHASES = ("decode_kernel", "extend_kernel", "verify_kernel", "tree_verify_kernel")


@pytest.fixture(autouse=True)
def choices(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(sglang, "_hooks", {})
    monkeypatch.setattr(_sglang_backend, "phases", set())
    return fake_sglang.install(monkeypatch)


def ours(dispatcher: Any) -> list[str]:
    return [name for name in PHASES if not isinstance(getattr(dispatcher, name), HostKernel)]


def test_off_unless_the_switch_says_so(monkeypatch: pytest.MonkeyPatch, choices: list[str]) -> None:
    sglang.plugin()
    assert choices == ["triton", "flashinfer"]
    with pytest.raises(ValueError, match="Unsupported GDN backend"):
        dispatch()
    seen: list[Any] = []
    monkeypatch.setattr(sglang, "_enable", lambda *given, **options: seen.append((*given, options)))
    for value in ("0", "1", "strict"):
        monkeypatch.setenv("GDN_SGLANG", value)
        env.reload()
        sglang.plugin()
    assert seen == [(False, False, {"apply_hooks": False}), (True, False, {"apply_hooks": False})]


CHOSEN = {
    "everything": (("gdn", {}), list(PHASES)),
    "nothing": (("triton", {}), []),
    "decode": (("triton", {"decode": "gdn"}), ["decode_kernel", "verify_kernel", "tree_verify_kernel"]),
    "prefill": (("flashinfer", {"prefill": "gdn"}), ["extend_kernel"]),
    "verify": (("triton", {"verify": "gdn"}), ["verify_kernel", "tree_verify_kernel"]),
    "verify is the host's": (("gdn", {"verify": "triton"}), ["decode_kernel", "extend_kernel"]),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_a_dispatcher_gets_what_the_command_line_chose(name: str, choices: list[str]) -> None:
    (base, phases), expected = CHOSEN[name]
    with sglang.enable(allow_reference=True) as handle:
        assert os.environ["GDN_SGLANG"] == "1" and sglang.enable(allow_reference=True) is handle
        assert choices == ["triton", "flashinfer", "gdn"] and handle.report().points[0].replaced
        choose(base, **phases)
        dispatcher = dispatch()
        assert ours(dispatcher) == expected
        assert dispatcher.supports_packed_decode == ("decode_kernel" in expected)
        assert not dispatcher.verify_kernel_is_flashinfer
        host = sys.modules[fake_sglang.BASE].LinearAttnKernelBase  # type: ignore[attr-defined]
        for kernel in (getattr(dispatcher, one) for one in expected):
            assert isinstance(kernel, host) and kernel.supports_track_state_snapshot and not kernel.uses_state_checkpoints
    assert choices == ["triton", "flashinfer"]


def test_another_name_stays_unknown() -> None:
    with sglang.enable(allow_reference=True):
        choose("another")
        with pytest.raises(ValueError, match="Unsupported GDN backend"):
            dispatch()


def test_disabled_the_hook_hands_on_and_enabled_again_it_acts() -> None:
    handle = sglang.enable(allow_reference=True)
    kept = dispatch()
    assert os.environ["GDN_SGLANG"] == "1"
    handle.disable()
    handle.disable()
    assert "GDN_SGLANG" not in os.environ
    q, states = torch.ones(1, 1, 2, 32), torch.ones(3, 2, 32, 32)
    with pytest.raises(ValueError, match="Unsupported GDN backend"):
        dispatch()
    # Built before: the host's kernels from now on.
    assert kept.decode_kernel.decode(q, q, q, None, None, ssm_states=states, query_start_loc=None) == "host"
    with sglang.enable(allow_reference=True):
        assert ours(dispatch()) == list(PHASES)


def test_deterministic_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_sglang.deterministic.enable_deterministic_inference = True
    reason = "deterministic inference is on, and GDN_BATCH_INVARIANT is not"
    with sglang.enable(allow_reference=True) as handle:
        assert ours(dispatch()) == [] and dict(handle.report().points[0].left) == {reason: 1}
        monkeypatch.setenv("GDN_BATCH_INVARIANT", "1")
        env.reload()
        assert ours(dispatch()) == list(PHASES)
        monkeypatch.delenv("GDN_BATCH_INVARIANT")
        env.reload()
    with sglang.enable(allow_reference=True, strict=True):
        with pytest.raises(RuntimeError, match=reason):
            dispatch()
        assert not _sglang_backend.phases
        with pytest.raises(ValueError, match="enable: expected the options"):
            sglang.enable(allow_reference=True)


def test_hooks_of_others(choices: list[str]) -> None:
    """One that was applied before ours: the host applies no second one, which is reported."""
    hooks = sys.modules[fake_sglang.REGISTRY]
    hooks.HookRegistry.register(  # type: ignore[attr-defined]
        f"{sglang._DISPATCHER}.__init__",
        lambda original, *args: original(*args),
        hooks.HookType.AROUND,  # type: ignore[attr-defined]
    )
    hooks.HookRegistry.apply_hooks()  # type: ignore[attr-defined]
    with sglang.enable(allow_reference=True) as handle:
        point = handle.report().points[0]
        assert not point.replaced and point.why is not None and "applied another hook" in point.why
        assert "gdn" not in choices


def test_another_signature_is_left_alone(monkeypatch: pytest.MonkeyPatch, choices: list[str]) -> None:
    monkeypatch.setattr(GDNKernelDispatcher, "extend", lambda self, q: None)
    with sglang.enable(allow_reference=True) as handle:
        point = handle.report().points[0]
        assert not point.replaced and point.why is not None and "its signature is not the recorded one" in point.why
    with pytest.raises(RuntimeError, match="strict"):
        sglang.enable(allow_reference=True, strict=True)
    assert choices == ["triton", "flashinfer"] and "GDN_SGLANG" not in os.environ


# --- the backend around the kernel objects -------------------------------------------------------------------------------------


class Runner:
    """The host's model runner, with one layer and its pools."""

    def __init__(self) -> None:
        self.conv = sglang_backend.Convolution(Engine(4))
        self.layer, self.dtype = torch.nn.Module(), torch.float32
        vars(self.layer).update(vars(sglang_backend.layer_of(self.conv)))
        self.model = torch.nn.Sequential(self.layer)
        self.req_to_token_pool: Any = fake_sglang.HybridReqToTokenPool()
        self.req_to_token_pool.layer_cache = cache = sglang_backend.cache_of(self.conv)
        every = type(cache)(conv=[cache.conv[0][None]], temporal=cache.temporal[None])
        self.req_to_token_pool.mamba_pool = type(cache)(mamba_cache=every)

    def backend(self, **metadata: Any) -> Any:
        backend: Any = GDNAttnBackend(self)
        slots = self.conv.engine.int32([3, 1])
        backend.forward_metadata = type(self.req_to_token_pool.layer_cache)(mamba_cache_indices=slots)
        return backend

    def step(self, backend: Any, **changes: Any) -> Any:
        rows, gate = self.conv.engine.normal(2, self.conv.channels), self.conv.engine.normal(2, HV)
        layer = sglang_backend.layer_of(self.conv, **changes)
        return backend.forward_decode(layer, "batch", mixed_qkv=rows, a=gate, b=gate)


def counts(handle: Any) -> dict[str, tuple[int, dict[str, int]]]:
    return {one.path.rpartition(".")[2]: (one.served, dict(one.left)) for one in handle.report().points[1:]}


def test_a_step_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, asked = Runner(), []
    monkeypatch.setattr(warm, "warm_up", lambda forms, phases: asked.append((len(forms), phases)) or 0)
    with sglang.enable(allow_reference=True, strict=True) as handle:
        backend = runner.backend()
        assert asked == [(1, ("decode", "extend", "verify"))] and not backend.requires_contiguous_prefill_state
        o = runner.step(backend)
        assert o.shape == (1, 2, HV, 32)
        batch, windows, states, slots, layer_id = backend.tracked
        assert (batch, layer_id) == ("batch", 3) and windows is runner.conv.windows and states is runner.conv.engine.states
        assert slots is backend.forward_metadata.mamba_cache_indices
        assert runner.step(backend, activation="gelu")[0] == stand_in.HOST  # to the kernel object, which may serve it
        assert counts(handle)["forward_decode"] == (1, {"the activation is gelu": 1}) and counts(handle)["__init__"] == (1, {})
    assert runner.step(backend)[0] == stand_in.HOST and backend.requires_contiguous_prefill_state
    with sglang.enable(allow_reference=True) as handle:
        choose("triton", prefill="gdn")
        backend = runner.backend()
        assert runner.step(backend)[0] == stand_in.HOST and counts(handle)["forward_decode"] == (0, {})
        assert asked[1:] == [(1, ("extend",))]
        assert not backend.requires_contiguous_prefill_state
        monkeypatch.setattr(fake_sglang, "enable_mis", True)  # the rule of such prompts is the host's
        assert runner.backend().requires_contiguous_prefill_state
        choose("triton")
        assert runner.backend().requires_contiguous_prefill_state and len(asked) == 3


def test_convolutions_are_ours_where_the_phase_is() -> None:
    module: Any = sys.modules[fake_sglang.BACKEND]
    originals = module.causal_conv1d_fn, module.causal_conv1d_update
    conv = sglang_backend.Convolution(Engine(4))
    rows, slots = conv.engine.normal(2, conv.channels), conv.engine.int32([2, 5])
    given = {"activation": "silu", "conv_states": conv.windows, "query_start_loc": conv.engine.int32([0, 1, 2])}

    def prompts(**more: Any) -> Any:
        return module.causal_conv1d_fn(rows.T, conv.weight, None, cache_indices=slots, **given, **more)

    def update(x: Any = rows, **more: Any) -> Any:
        return module.causal_conv1d_update(x, conv.windows, conv.weight, None, "silu", conv_state_indices=slots, **more)

    with sglang.enable(allow_reference=True, strict=True) as handle:
        assert prompts()[0] == update()[0] == stand_in.HOST  # no engine chose ours
        choose("triton", prefill="gdn")
        dispatch()
        assert isinstance(prompts(), torch.Tensor) and update()[0] == stand_in.HOST
        choose("gdn")
        dispatch()
        assert isinstance(update(), torch.Tensor)
        tree = update(rows[None].transpose(1, 2), retrieve_next_token=slots)
        assert tree[0] == stand_in.HOST and tree[2]["retrieve_next_token"] is slots
        with pytest.raises(RuntimeError, match="strict: causal_conv1d_fn would be left to the host: padding is slot 0"):
            prompts(pad_slot_id=0)
        found = counts(handle)
        assert found["causal_conv1d_fn"] == (1, {})
        assert found["causal_conv1d_update"] == (1, {"a tree of drafts, whose parents the host's convolution finds": 1})
    assert (module.causal_conv1d_fn, module.causal_conv1d_update) == originals
    assert prompts()[0] == stand_in.HOST


def test_patches_of_others_on_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: a convolution that is not the recorded one is left alone. On top: it stays, and reaches the host's own code."""
    module: Any = sys.modules[fake_sglang.BACKEND]
    runner, other = Runner(), stand_in.function("sglang", "sglang.srt.layers.attention.mamba.causal_conv1d.causal_conv1d_fn")
    monkeypatch.setattr(module, "causal_conv1d_fn", other)
    monkeypatch.setattr(warm, "warm_up", lambda forms, phases: 0)
    handle = sglang.enable(allow_reference=True)
    point = handle.report().points[1]
    assert not point.replaced and "it is not sglang.srt.layers.attention.mamba" in str(point.why)
    assert module.causal_conv1d_fn is other
    ours = GDNAttnBackend.forward_decode
    monkeypatch.setattr(GDNAttnBackend, "forward_decode", lambda self, *given, **named: ("patched", ours(self, *given, **named)))
    backend = runner.backend()
    assert backend.requires_contiguous_prefill_state  # which the other convolution may need
    assert runner.step(backend)[1].shape == (1, 2, HV, 32)
    handle.disable()
    why = next(one.why for one in handle.report().points if one.path.endswith("forward_decode"))
    assert why is not None and "patched since by someone else" in why
    assert runner.step(backend)[1][0] == stand_in.HOST
