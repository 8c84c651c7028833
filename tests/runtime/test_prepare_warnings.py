"""Warnings of what runs otherwise than asked, and of a Hopper GPU that runs the reference: once each, with GDN_LOG=off too."""

import dataclasses
import logging
from collections.abc import Callable

import pytest

from gdn import runtime
from gdn.runtime import devices, env, registry
from tests.runtime.fake_kernel import FakeProblem
from tests.runtime.processes import python
from tests.runtime.test_prepare import CPU, a_hopper, problem

__all__ = ["a_hopper", "problem"]  # fixtures

Switch = Callable[..., env.Switches]


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert all(record.name == "gdn" for record in caplog.records)
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def test_a_preference_that_falls_through_warns_once(problem: FakeProblem, switch: Switch, caplog: pytest.LogCaptureFixture):
    switch(GDN_BACKEND="cute", GDN_BACKEND_RECURRENT="auto")
    odd = dataclasses.replace(problem, head_dim=96)
    for num_tokens in (1, 2, 3):
        runtime.prepare(odd.sizes_only(num_tokens), CPU, None)
    fell, slow = _warnings(caplog)
    assert fell == ("recurrent: GDN_BACKEND=cute prefers cute, which requires head_dim 64 or 128, got 96; reference runs instead")
    assert slow.startswith("recurrent: the reference runs on NVIDIA H100 (SM90), which is slow: no kernel serves this; ")
    assert "; cute requires head_dim 64 or 128, got 96" in slow and "; tilelang requires head_dim 64 or 128, got 96" in slow
    runtime.prepare(dataclasses.replace(problem, head_dim=32), CPU, None)  # another reason
    assert len(_warnings(caplog)) == 4
    runtime.prepare(problem, CPU, None)  # served
    assert len(_warnings(caplog)) == 4


def test_a_preference_for_a_backend_without_a_kernel_warns(
    problem: FakeProblem, switch: Switch, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(registry.OPERATORS, "recurrent", dataclasses.replace(registry.OPERATORS["recurrent"], modules={}))
    runtime.candidates.cache_clear()
    switch(VLLM_GDN_USE_BLADNN="1")
    for num_tokens in (1, 2):
        runtime.prepare(problem.sizes_only(num_tokens), CPU, None)
    (of_call, of_reference) = _warnings(caplog)
    assert of_call.startswith("recurrent: VLLM_GDN_USE_BLADNN=1 prefers cute, which has no kernel of recurrent")
    slow = "recurrent: the reference runs on NVIDIA H100 (SM90), which is slow: no kernel serves this; cute has no kernel"
    assert of_reference.startswith(slow)


@pytest.mark.parametrize("asked", ["argument", "GDN_BACKEND", "GDN_BACKEND_RECURRENT"])
def test_a_reference_that_was_asked_for_warns_of_nothing(
    asked: str, problem: FakeProblem, switch: Switch, caplog: pytest.LogCaptureFixture
):
    switch(**({} if asked == "argument" else {asked: "reference"}))
    backend = "reference" if asked == "argument" else None
    assert runtime.prepare(dataclasses.replace(problem, head_dim=96), CPU, backend).backend == "reference"
    assert _warnings(caplog) == []


def test_without_a_hopper_the_reference_warns_of_nothing(
    problem: FakeProblem, switch: Switch, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(devices, "describe", lambda device: (None, "device cpu"))
    switch()
    assert runtime.prepare(problem, CPU, None).backend == "reference"
    assert _warnings(caplog) == []


def test_a_decision_is_logged_once_and_a_conflict_once_for_all(
    problem: FakeProblem, switch: Switch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "gdn")
    switch(GDN_LOG="info", VLLM_GDN_USE_BLADNN="1", GDN_BACKEND="tilelang")
    for dtype in ("bfloat16", "float16", "float8_e4m3fn"):
        for num_tokens in (64, 65, 66):  # the same decision
            runtime.prepare(dataclasses.replace(problem, dtype=dtype, num_tokens=num_tokens), CPU, None)
    told = [record.message for record in caplog.records]
    assert [message for message in told if "overrides" in message] == [
        "VLLM_GDN_USE_BLADNN=1 (cute) overrides GDN_BACKEND=tilelang (tilelang)"
    ]
    assert sum(message.startswith("recurrent: cute, decided by: VLLM_GDN_USE_BLADNN=1") for message in told) == 3
    assert _warnings(caplog) == []


def test_warnings_reach_stderr_where_nobody_set_up_logging():
    """GDN_LOG is off, and the process has no handler at all."""
    code = (
        "import torch\n"
        "from gdn import models, runtime\n"
        "from gdn.ops.attention import examples\n"
        "problem = examples.sparse_attention_prefill(models.TINY)\n"
        "for _ in range(2):\n"
        "    runtime.prepare(problem, torch.device('cpu'))\n"
    )
    done = python(code, VLLM_QSA_PREFILL_ATTN_BACKEND="tilelang", GDN_LOG="off")
    assert done.stderr.count("prefers tilelang, which has no kernel of sparse_attention_prefill") == 1
