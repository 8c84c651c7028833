"""Convolutions and decode step of SGLang's backend: values against a float64 loop, reasons, and the kernels they reach."""

import dataclasses
from typing import Any

import pytest
import torch

from benchmarks import host_cost
from gdn import served
from gdn.core import call as _call
from gdn.integrations import _sglang_backend as backend
from gdn.integrations import _sglang_step as step
from gdn.integrations import _sglang_warm_up as warm
from gdn.integrations import sglang_convolution as convolution
from tests.integrations import sglang_backend as batches
from tests.integrations.sglang_backend import Convolution
from tests.integrations.sglang_engine import HV, LAYOUTS, Engine, H, check_decode, check_extend, check_snapshots, check_verify

CLOSE = 2e-5
STORED = {torch.float32: CLOSE, torch.bfloat16: 5e-3}  # states, by the dtype of the pool


def conv_of(layout: str = "pool", **options: Any) -> Convolution:
    return Convolution(Engine(3, **LAYOUTS[layout]), strided=layout == "page-major", **options)


@pytest.mark.parametrize("layout", ["pool", "page-major"])
def test_convolution_of_prompts(layout: str) -> None:
    batches.check_prompts(conv_of(layout, has_bias=layout == "pool"), CLOSE)


@pytest.mark.parametrize("layout", ["pool", "page-major"])
def test_convolution_of_one_token(layout: str) -> None:
    batches.check_update(conv_of(layout, has_bias=layout == "pool"), CLOSE)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("layout", ["pool", "page-major"])
def test_convolution_of_drafts(layout: str, overlap: bool) -> None:
    batches.check_drafts(conv_of(layout), CLOSE, overlap)


@pytest.mark.parametrize("is_pair", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_decode_step(layout: str, is_pair: bool) -> None:
    conv = conv_of(layout, has_bias=layout == "pool")
    batches.check_step(conv, CLOSE, STORED[conv.engine.states.dtype], is_pair)


def test_reasons_of_convolutions() -> None:
    conv = conv_of()
    rows = conv.engine.normal(4, conv.channels)
    offsets, windows = conv.engine.int32([0, 4]), batches.windows_of_drafts(conv, 4, True)
    drafts, slots = rows[None].transpose(1, 2), conv.engine.int32([0])

    def prompts(x: Any = rows.T, starts: Any = offsets, allowed: bool = True, **more: Any) -> str | None:
        return batches.ask_prompts(x, conv.weight, None, starts, allow_reference=allowed, **more)

    def update(x: Any = rows, allowed: bool = True, **more: Any) -> str | None:
        return batches.ask_update(x, conv.windows, conv.weight, None, allow_reference=allowed, **more)

    assert prompts() is None and update() is None and update(drafts) is None
    assert prompts(allowed=False) == update(allowed=False) == "the tokens are on cpu"
    assert prompts(x=rows[None]) == prompts(starts=None) == "the prompts are not packed"
    assert prompts(initial_states_idx=3) == "the keyword initial_states_idx"
    assert prompts(activation="gelu") == update(activation="gelu") == "the activation is gelu"
    assert prompts(pad_slot_id=0) == update(pad_slot_id=0) == "padding is slot 0"
    assert prompts(x=rows.clone().requires_grad_().T) == "autograd needs gradients, which this project does not record"
    assert update(cache_seqlens=slots) == "the windows are rings"
    assert update(num_accept_tokens=slots) == "accepted tokens are given"
    assert update(drafts, retrieve_next_token=slots) == convolution.TREE
    assert update(drafts, intermediate_conv_window=windows) == "windows of drafts without their slots"
    known = {"conv_state_indices": slots, "intermediate_state_indices": slots}
    for other in (windows[:, :2], windows[..., :2], batches.windows_of_drafts(conv, 4, False)[::2]):
        assert str(update(drafts, intermediate_conv_window=other, **known)).startswith("windows of drafts with shape")
    assert update(drafts, intermediate_conv_window=windows, **known) is None


def test_a_filter_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gdn.integrations._calls._is_sm90", lambda index: True)
    with torch._subclasses.FakeTensorMode():
        x, weight = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in ((12, 4), (12, 4)))
        offsets = torch.empty(2, dtype=torch.int32, device="cuda")
        assert batches.ask_prompts(x, weight, None, offsets) == "no kernel for 12 channels and a filter of 4"


def test_reasons_of_a_step() -> None:
    conv = conv_of()
    rows, cache = conv.engine.normal(2, conv.channels), batches.cache_of(conv)

    def reason(allowed: bool = True, **changes: Any) -> str | None:
        return step.refusal(batches.layer_of(conv, **changes), cache, rows, allow_reference=allowed)

    assert reason() is None and reason(False) == "the tokens are on cpu"
    assert reason(head_v_dim=48) == "the head dims are 32, 32 and 48, served are multiples of 32 up to 256"
    assert reason(head_q_dim=64) == "the head dims are 64, 32 and 32, served are multiples of 32 up to 256"
    assert (
        reason(num_q_heads=3) == f"there are 3, {H} and {HV} heads" and reason(num_v_heads=3) == f"there are {H}, {H} and 3 heads"
    )
    assert (
        reason(conv_weights=(conv.weight,)) == reason(conv_weights=conv.weight[:, :1]) == "the filter is not one of width 2 to 4"
    )
    assert reason(activation="gelu") == "the activation is gelu"
    wanted = conv.engine.A_log.clone().requires_grad_()
    assert reason(A_log=wanted) == "autograd needs gradients, which this project does not record"
    pool, cache.temporal = cache.temporal, cache.temporal.mT
    assert str(reason()).startswith("the states have strides")
    cache.temporal = pool.half()
    assert reason() == "the states are float16"
    cache.replayssm_d = rows
    assert reason() == "ReplaySSM keeps the states"


# --- kernels that are loaded before serving ------------------------------------------------------------------------------------


def form_of(conv: Convolution, **changes: Any) -> warm.Form:
    engine = conv.engine
    known: dict[str, Any] = {
        "num_k_heads": H, "num_v_heads": HV, "head_k_dim": engine.dim, "head_v_dim": engine.dim, "width": 4,
        "has_bias": conv.bias is not None, "activation": "silu", "token_dtype": engine.token_dtype,
        "weight_dtype": conv.weight.dtype, "A_log_dtype": torch.float32, "dt_bias_dtype": torch.float32,
        "window_dtype": conv.windows.dtype, "state_dtype": engine.states.dtype,
    }  # fmt: skip
    return warm.Form(**known | changes)


@pytest.mark.cover  # runs every batch again
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_problem_of_the_batches_is_known_before(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[Any, str] = {}
    prepare = _call.runtime.prepare

    def recorded(problem: Any, device: Any, backend: Any) -> Any:
        asked[(type(problem), problem.static_key())] = type(problem).__name__
        return prepare(problem, device, backend)

    monkeypatch.setattr(_call.runtime, "prepare", recorded)
    known = {
        (type(problem), problem.static_key())
        for overlap in (True, False)
        for form in [form_of(conv_of(layout), drafts=5, buffer_dtype=conv_of(layout).engine.states.dtype, overlap=overlap)]
        for problem in served.of_calls(warm.calls(form, warm.PHASES))
    }
    for overlap in (True, False):
        batches.check_drafts(conv_of(layout), CLOSE, overlap)
    for check in (batches.check_prompts, batches.check_update):
        check(conv_of(layout), CLOSE)
    for is_pair in (True, False):
        batches.check_step(conv_of(layout), CLOSE, 5e-3, is_pair)
    for flag in (True, False):
        check_decode(Engine(1, **LAYOUTS[layout]), CLOSE, 5e-3, packed=flag)
        check_extend(Engine(1, **LAYOUTS[layout]), CLOSE, 5e-3, is_given=flag)
        check_verify(Engine(1, **LAYOUTS[layout]), 2e-2, 5e-3, is_tree=flag)
    check_snapshots(Engine(1, **LAYOUTS[layout]), CLOSE, 5e-3)
    assert len(asked) >= 7
    assert {name for key, name in asked.items() if key not in known} == set()


@pytest.mark.parametrize("changes", [{"state_dtype": torch.float16}, {"head_v_dim": 48}])
def test_what_is_refused_is_not_loaded(changes: dict[str, Any]) -> None:
    """Such layers are the host's but for their convolutions."""
    form = form_of(conv_of(), drafts=5, buffer_dtype=torch.float32, **changes)
    found = {type(problem).__name__ for problem in served.of_calls(warm.calls(form, warm.PHASES))}
    assert found == {"Conv1dProblem", "Conv1dUpdateProblem"}
    assert warm.calls(dataclasses.replace(form, activation="gelu"), warm.PHASES) == []


def test_a_repeated_step_is_one_planned_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the operator's plan and views: no check and no choice."""
    with host_cost.without_device(), torch.inference_mode():
        conv = conv_of()
        layer, cache, slots = batches.layer_of(conv), batches.cache_of(conv), conv.engine.int32([1, 2])
        rows = conv.engine.normal(2, conv.channels).bfloat16()
        a, b = torch.zeros(2, 2, HV, dtype=torch.bfloat16).unbind()
        packed = {"A_log": conv.engine.A_log, "dt_bias": conv.engine.dt_bias, "scale": 1.0, "num_v_heads": HV, "head_v_dim": 32}
        packed |= {"ssm_states": conv.engine.states, "cache_indices": slots}
        calls = (
            lambda: step.step(layer, cache, rows, a, b, slots),
            lambda: conv.engine.kernel.packed_decode(rows, a, b, **packed),
        )
        for call in calls:
            call()
        monkeypatch.setattr("gdn.runtime.prepare", None)
        for call in calls:
            call()


def test_forms_of_a_model() -> None:
    conv = conv_of(has_bias=True)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = torch.nn.Module(), torch.nn.Module(), torch.nn.Module()
            for layer in (self.first, self.second):
                for name, value in vars(batches.layer_of(conv)).items():
                    setattr(layer, name, value)
            self.third.conv_weights = (conv.weight,)  # type: ignore[assignment]  # another kind of linear attention

    cache: Any = batches.cache_of(conv)
    cache.conv, cache.temporal = [conv.windows[None]], conv.engine.states[None]
    (form,) = warm.forms(Model(), cache, torch.float32)
    assert form == form_of(conv)
    cache.intermediate_ssm = torch.zeros(1, 3, 5, *conv.engine.state_shape, dtype=torch.bfloat16)
    for overlap in (True, False):
        cache.intermediate_conv_window = [batches.windows_of_drafts(conv, 3, overlap)[None]]
        (form,) = warm.forms(Model(), cache, torch.float32)
        assert form == form_of(conv, drafts=5, buffer_dtype=torch.bfloat16, overlap=overlap)


def test_pools_whose_slots_are_apart_need_no_copy() -> None:
    conv = conv_of("page-major")
    cache: Any = batches.cache_of(conv)
    cache.temporal = conv.engine.states[None]
    form = form_of(conv)
    assert backend.takes_strided(form, cache, True) and not backend.takes_strided(form, cache, False)
    for changes in ({"head_v_dim": 64}, {"width": 5}, {"head_k_dim": 132, "head_v_dim": 132}):
        assert not backend.takes_strided(dataclasses.replace(form, **changes), cache, True)
    cache.temporal = cache.temporal.half()
    assert not backend.takes_strided(form, cache, True)
