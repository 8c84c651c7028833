"""The adapter of SGLang on a stand-in of its modules: the switch, the choice, what a dispatcher gets, `disable`, the report."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gdn.integrations import sglang
from gdn.runtime import env
from tests.integrations import fake_sglang
from tests.integrations.fake_sglang import GDNKernelDispatcher, HostKernel, choose, dispatch

PHASES = ("decode_kernel", "extend_kernel", "verify_kernel", "tree_verify_kernel")


@pytest.fixture(autouse=True)
def choices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.delenv("GDN_SGLANG", raising=False)
    monkeypatch.setattr(sglang, "_hooks", {})
    env.reload()
    yield fake_sglang.install(monkeypatch)
    os.environ.pop("GDN_SGLANG", None)
    env.reload()


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


def test_import_loads_no_host() -> None:
    code = "import sys, gdn.integrations.sglang; assert not {'sglang', 'tilelang', 'cutlass'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


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
    handle.disable()
    handle.disable()
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
        (point,) = handle.report().points
        assert not point.replaced and point.why is not None and "applied another hook" in point.why
        assert "gdn" not in choices


def test_another_signature_is_left_alone(monkeypatch: pytest.MonkeyPatch, choices: list[str]) -> None:
    monkeypatch.setattr(GDNKernelDispatcher, "extend", lambda self, q: None)
    with sglang.enable(allow_reference=True) as handle:
        (point,) = handle.report().points
        assert not point.replaced and point.why is not None and "its signature is not the recorded one" in point.why
    with pytest.raises(RuntimeError, match="strict"):
        sglang.enable(allow_reference=True, strict=True)
    assert choices == ["triton", "flashinfer"]
    assert os.environ["GDN_SGLANG"] == "1"  # as the enable before the failed one left it
