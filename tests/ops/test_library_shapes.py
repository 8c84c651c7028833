"""Tensors without memory, outside of compilation: every result has the shape, dtype and strides of the eager one."""

import logging
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import gdn
from gdn.runtime import env
from tests.ops.library_calls import REGISTERED, seeded
from tests.ops.spoiling.call import Call

SEEDS = range(12)


def leaves(value: Any) -> list[Any]:
    return [leaf for entry in value for leaf in leaves(entry)] if isinstance(value, tuple) else [value]


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Strides of dims with one entry say nothing."""
    strides = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1 and tensor.numel()]
    return tuple(tensor.shape), tensor.dtype, strides


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def same_shapes(found: Any, without_memory: Call, expected: Any, call: Call) -> None:
    for have, want in zip(leaves(found), leaves(expected), strict=True):
        if want is None:
            assert have is None
            continue
        assert layout(have) == layout(want)
        given, wanted = (
            [path for path, x in one.tensors().items() if x is y] for one, y in ((without_memory, have), (call, want))
        )
        assert given == wanted, "another argument is returned"


@pytest.mark.parametrize("name", REGISTERED)
def test_on_the_meta_device(name: str) -> None:
    for seed in SEEDS:
        call = seeded(name, seed)
        meta = call.with_values({path: on_meta(x) for path, x in call.tensors().items()})
        found = meta.run()
        assert all(leaf is None or leaf.is_meta for leaf in leaves(found))
        same_shapes(found, meta, call.run(), call)


@pytest.mark.parametrize("name", REGISTERED)
def test_in_fake_mode(name: str) -> None:
    for seed in SEEDS:
        call, mode = seeded(name, seed), FakeTensorMode()
        fake = call.with_values({path: mode.from_tensor(x) for path, x in call.tensors().items()})
        with mode:
            found = fake.run()
        assert all(leaf is None or leaf.device.type == "cpu" for leaf in leaves(found))
        same_shapes(found, fake, call.run(), call)


def test_constants_of_fake_calls_do_not_stay() -> None:
    """cu_seqlens and zeros that a call makes for itself are kept between calls: not those of a fake one."""
    for seed in SEEDS:
        call, mode = seeded("chunk_gated_delta_rule", seed), FakeTensorMode()
        fake = call.with_values({path: mode.from_tensor(x) for path, x in call.tensors().items()})
        with mode:
            fake.run()
        o, _ = call.run()
        assert type(o) is torch.Tensor and bool(o.isfinite().all())


def test_shapes_alone_warn_of_no_copy(caplog: pytest.LogCaptureFixture) -> None:
    """A copy that nobody makes; and the warning of the one that is made is still to come."""
    env.reload()
    x = torch.zeros(6, 4, device="meta", dtype=torch.float16)  # rows of 8 bytes, which a kernel gets as a copy
    call = seeded("causal_conv1d_fn", 0).arguments
    with caplog.at_level(logging.WARNING, logger="gdn"):
        torch.ops.gdn.causal_conv1d_fn(x, on_meta(call["weight"][:1].expand(4, -1).contiguous()))
    assert not caplog.records


def test_an_explanation_warns_of_no_copy(caplog: pytest.LogCaptureFixture) -> None:
    """A copy that a kernel would get gives no warning, nor does that of the last dimension, which the reference gets too."""
    env.reload()
    x, weight = torch.zeros(6, 4, dtype=torch.float16), torch.zeros(4, 4, dtype=torch.float16)
    with caplog.at_level(logging.WARNING, logger="gdn"):
        gdn.explain("causal_conv1d_fn", x, weight)
        gdn.explain("causal_conv1d_fn", x.mT.contiguous().mT, weight)
        assert not caplog.records
        gdn.causal_conv1d_fn(x.mT.contiguous().mT, weight)
    assert [record.getMessage()[:10] for record in caplog.records] == ["x: copied,"]
