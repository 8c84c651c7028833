"""Adapters that replace functions of a module: enabled twice, other options, a patch of someone else on top, disabled twice.

Those of vLLM, SGLang and of Transformers' layers replace other things; their own tests do the same with them.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from gdn.integrations import Handle, _hosts, _records, deepgemm, fla, flashinfer
from gdn.integrations._points import resolve
from tests.integrations import stand_in
from tests.integrations.test_fla import RULE, stand_in_fla

GATED = "torch_chunk_gated_delta_rule"


def of_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_fla(monkeypatch)


def of_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in.install(monkeypatch, _hosts.FLASHINFER)


def of_deepgemm(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in.install(monkeypatch, _hosts.DEEPGEMM)


def of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    __import__("transformers.models.qwen3_next.modeling_qwen3_next")


def enable_transformers(**options: Any) -> Handle:
    from gdn.integrations.transformers import enable

    return enable(**options)


Enable = Callable[..., Handle]
ADAPTERS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Enable, str, str]] = {
    "fla": (of_fla, lambda **options: fla.enable(patch_recurrent=True, **options), RULE, "fused_recurrent_gated_delta_rule"),
    "flashinfer": (of_flashinfer, flashinfer.enable, "flashinfer.gdn_prefill", "chunk_gated_delta_rule"),
    "deepgemm": (of_deepgemm, deepgemm.enable, "deep_gemm", "fp8_mqa_logits"),
    "transformers": (of_transformers, enable_transformers, "transformers.models.qwen3_next.modeling_qwen3_next", GATED),
}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_enable_twice_disable_and_foreign_patches(adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install, enable, module_name, name = ADAPTERS[adapter]
    install(monkeypatch)
    module: Any = sys.modules[module_name]
    monkeypatch.setattr(module, name, original := getattr(module, name))  # put back whatever happens
    handle = enable(allow_reference=True, strict=True)
    try:
        assert enable(allow_reference=True, strict=True) is handle
        with pytest.raises(ValueError, match="enable: expected the options of the enabled handle"):
            enable(allow_reference=True)
        ours = getattr(module, name)
        assert ours is not original
    finally:
        handle.disable()
    assert getattr(module, name) is original

    handle, asked = enable(allow_reference=True), []
    ours = getattr(module, name)
    foreign = lambda *args, **kwargs: (asked.append(args), ours(*args, **kwargs))[1]  # noqa: E731
    setattr(module, name, foreign)
    handle.disable()
    handle.disable()
    assert getattr(module, name) is foreign and not any(one.replaced for one in handle.report().points)
    told = [str(one.why) for one in handle.report().points if one.path.endswith(f".{name}")]
    assert len([why for why in told if "patched since by someone else, left alone" in why]) == 1
    monkeypatch.setattr("gdn.integrations._calls.Calls.serves", None)  # what still reaches ours asks and counts nothing
    with pytest.raises(TypeError, match="argument"):
        foreign("of the host's own")
    assert asked == [("of the host's own",)]


@pytest.mark.parametrize(
    ("host", "names"),
    [
        (_hosts.FLA, (*_hosts.FLA.functions, *_hosts.FLA.classes)),
        (_hosts.FLASHINFER, _hosts.FLASHINFER.functions),
        (_hosts.VLLM, _hosts.VLLM_REPLAY),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_records_are_those_of_the_installed_version(host: _hosts.Host, names: Iterable[str]) -> None:
    pytest.importorskip(host.package, reason=f"{host.package} is not installed")
    for name in names:
        assert _records.judge(host, name, resolve(name)[2]) == _records.Verdict(), name
