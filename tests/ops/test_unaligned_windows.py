"""A cache of w columns, newest last: the view [..., 1:] of it is the pool, whose address is no multiple of 16 bytes and whose
columns are contiguous. Kernels serve it, and are launched on the view itself."""

import importlib
import logging
from typing import Any

import pytest
import torch

import gdn
from gdn.testing.compare import same_bits
from tests.described.plain import call as plain_call
from tests.ops.stand_in import Recorder
from tests.references import reference

DIM, WIDTH = 64, 4
Arguments = dict[str, Any]


def conv_fn() -> Arguments:
    x, weight = torch.randn(9, DIM).bfloat16(), torch.randn(DIM, WIDTH).bfloat16()
    return {"x": x, "weight": weight, "query_start_loc": torch.tensor([0, 5, 9]), "cache_indices": torch.tensor([3, 1])}


def conv_update() -> Arguments:
    return {"x": torch.randn(2, DIM).bfloat16(), "weight": torch.randn(DIM, WIDTH), "conv_state_indices": torch.tensor([3, 1])}


# Operator: the name of its pool, the module of its kernel, a call without the pool.
CALLS: dict[str, tuple[str, str, Any]] = {
    "causal_conv1d_fn": ("conv_states", "conv1d.prefill", conv_fn),
    "causal_conv1d_update": ("conv_state", "conv1d.update", conv_update),
    "fused_gdn_prefill": (
        "conv_states",
        "gdn_prefill",
        lambda: plain_call("fused_gdn_prefill", 70, torch.bfloat16, is_served=True),
    ),
    "fused_gdn_decode": ("conv_state", "gdn_decode", lambda: plain_call("fused_gdn_decode", 4, torch.bfloat16, is_served=True)),
}


@pytest.mark.parametrize("operator", CALLS)
def test_kernels_take_the_view(operator: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    pool, kernel, make = CALLS[operator]
    arguments = make()
    channels = arguments[pool].shape[1] if pool in arguments else DIM
    cache = torch.randn(9, channels, WIDTH).bfloat16()
    view = cache[..., 1:]
    assert view.data_ptr() % 16 == 2 and view.stride() == (channels * WIDTH, WIDTH, 1)
    recorder = Recorder().put(monkeypatch)
    with caplog.at_level(logging.WARNING, "gdn"):
        getattr(gdn, operator)(**arguments | {pool: view})
    ((problem, params),) = recorder.launched
    given = getattr(params, pool)
    assert given.data_ptr() == view.data_ptr() and given.stride() == view.stride()
    assert not any(pool in record.getMessage() for record in caplog.records)
    assert importlib.import_module(f"kernels_cute.{kernel}").refusal(problem) is None


@pytest.mark.parametrize("operator", CALLS)
def test_the_view_is_updated_in_place(operator: str) -> None:
    pool, _, make = CALLS[operator]
    arguments = make()
    arguments = {name: x.clone() if name == "ssm_state" else x for name, x in arguments.items()}
    channels = arguments[pool].shape[1] if pool in arguments else DIM
    cache = torch.randn(9, channels, WIDTH).bfloat16()
    before, plain = cache.clone(), cache[..., 1:].clone()
    state = {"ssm_state": arguments["ssm_state"].clone()} if "ssm_state" in arguments else {}
    expected = getattr(reference, operator)(**arguments | state | {pool: plain})
    assert same_bits(getattr(gdn, operator)(**arguments | {pool: cache[..., 1:]}), expected)
    assert same_bits(cache[..., 1:], plain) and same_bits(cache[..., 0], before[..., 0])
    assert not same_bits(cache, before)
