"""Rules that every reference function keeps: signature, fresh contiguous results, no autograd, no autocast, index widths."""

import inspect
from typing import Any

import pytest
import torch

import gdn
from gdn.testing.compare import same_bits
from tests.reference.calls import CALLS, Arguments, copied, randn, tensors_of
from tests.references import reference

NAMES = sorted(CALLS)


def run(name: str, arguments: Arguments) -> Any:
    return getattr(reference, name)(**arguments)


def bits(name: str, arguments: Arguments) -> list[torch.Tensor]:
    """Every result of the call, and every tensor argument after it (pools and caches among them)."""
    results = tensors_of(run(name, arguments))
    return [x.detach().contiguous() for x in (*results, *(x for x in arguments.values() if isinstance(x, torch.Tensor)))]


def test_the_table_holds_every_reference() -> None:
    public = {name for name, value in vars(reference).items() if inspect.isfunction(value)}
    assert public == set(CALLS)


@pytest.mark.parametrize("name", NAMES)
def test_signature_is_that_of_the_operator_less_hints(name: str) -> None:
    def parameters(function: Any) -> list[Any]:
        found = inspect.signature(function).parameters.values()
        return [(p.name, p.kind, p.default) for p in found if p.name not in HINTS]

    assert parameters(getattr(reference, name)) == parameters(getattr(gdn, name))


# What says how a call is to run and does not change its result, where that is specified.
HINTS = ("backend", "skip_rows_up_to", "max_seqlen", "max_query_len", "max_seq_len", "seq_lens_host", "query_lens_host")


def transposed(x: torch.Tensor) -> torch.Tensor:
    """A copy whose memory order is the reverse of its dimensions."""
    order = tuple(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


# Taken in place or by pages: their layout is the caller's.
POOLS = ("cache", "v_cache", "conv_states", "conv_state", "initial_state", "ssm_state", "ring", "kv_cache")
PER_TOKEN = ("fused_qkvzba_split_reshape_cat", "fused_gdn_gating", "add_rms_norm", "rms_norm_gated", "quantize_fp8")
WITH_RESULTS = [name for name in NAMES if tensors_of(run(name, CALLS[name]()))]


def check_fresh(name: str, arguments: Arguments) -> None:
    inputs = [x for x in arguments.values() if isinstance(x, torch.Tensor)]
    owned = {x.untyped_storage().data_ptr() for x in inputs}
    for result in tensors_of(run(name, arguments)):
        if any(result is x for x in inputs):  # a pool, or weights that were not folded
            continue
        assert result.is_contiguous(), result.stride()
        assert result.untyped_storage().data_ptr() not in owned


@pytest.mark.parametrize("name", WITH_RESULTS)
def test_results_of_transposed_inputs_are_new_and_contiguous(name: str) -> None:
    arguments = CALLS[name]()
    free = [key for key, x in arguments.items() if isinstance(x, torch.Tensor) and x.dim() > 1 and key not in POOLS]
    check_fresh(name, arguments | {key: transposed(arguments[key]) for key in free})

    want = bits(name, CALLS[name]())
    got = bits(name, CALLS[name]() | {key: transposed(arguments[key]) for key in free})
    for x, y in zip(got, want, strict=True):  # the order of a product's sums may depend on the strides
        assert torch.allclose(x.double(), y.double(), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", PER_TOKEN)
@pytest.mark.parametrize("change", [lambda x: x, transposed])
def test_results_of_one_token_are_new_and_contiguous(name: str, change: Any) -> None:
    """A slice of one token is contiguous whatever it is a slice of."""
    arguments = CALLS[name]()
    per_token = [key for key, x in arguments.items() if isinstance(x, torch.Tensor) and x.shape[0] == 3]
    check_fresh(name, arguments | {key: change(arguments[key])[:1] for key in per_token})


def test_quantized_rows_of_a_transposed_view() -> None:
    x = randn(4, 3, 64)
    values, scale = reference.quantize_fp8(x.transpose(0, 1), 32)
    want, want_scale = reference.quantize_fp8(x.transpose(0, 1).contiguous(), 32)
    assert values.stride() == (4 * 64, 64, 1) and scale.stride() == (4 * 2, 2, 1)
    assert same_bits(values, want) and same_bits(scale, want_scale)


def test_folded_weights_are_contiguous() -> None:
    arguments = CALLS["prepare_indexer"]()
    want = reference.prepare_indexer(**copied(arguments))[1]
    _, folded = reference.prepare_indexer(**arguments | {"weights": transposed(arguments["weights"])})
    assert folded is not None and want is not None
    assert folded.stride() == (want.shape[1], 1) and same_bits(folded, want)


def test_split_of_one_group_is_a_copy() -> None:
    """z, b and a of one key head are contiguous slices of their row: they must not be views of it."""
    mixed, ba = randn(1, 2 * 6 + 2 * 16), randn(1, 4)
    for part in reference.fused_qkvzba_split_reshape_cat(mixed, ba, 1, 2, 6, 8):
        part.fill_(7.0)
    assert not bool((mixed == 7).any()) and not bool((ba == 7).any())


def with_gradients(arguments: Arguments) -> Arguments:
    return {
        key: x.requires_grad_() if isinstance(x, torch.Tensor) and x.dtype in (torch.float32, torch.bfloat16) else x
        for key, x in arguments.items()
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference"])
def test_inputs_that_require_grad_change_nothing(name: str, mode: str) -> None:
    want = bits(name, CALLS[name]())
    arguments = with_gradients(CALLS[name]())
    inputs = [x for x in arguments.values() if isinstance(x, torch.Tensor)]
    context = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]
    with context():
        results = tensors_of(run(name, arguments))
    for result in results:
        assert result.grad_fn is None
        assert not result.requires_grad or any(result is x for x in inputs)
    assert all(x.grad_fn is None for x in inputs)
    got = [x.detach().contiguous() for x in (*results, *inputs)]
    assert len(got) == len(want) and all(same_bits(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(name: str, dtype: torch.dtype) -> None:
    want = bits(name, CALLS[name]())
    with torch.autocast("cpu", dtype=dtype):
        got = bits(name, CALLS[name]())
        assert torch.is_autocast_enabled("cpu")
    assert len(got) == len(want) and all(same_bits(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("form", ["packed", "batch", "batch_time"])
def test_convolution_in_place(form: str) -> None:
    """out=x: every row of x is read before it is overwritten."""
    if form == "packed":
        name, arguments = "causal_conv1d_fn", CALLS["causal_conv1d_fn"]()
    else:
        name, arguments = "causal_conv1d_update", CALLS["causal_conv1d_update"]()
        if form == "batch":
            arguments["x"] = arguments["x"][:, :, 0].contiguous()
    want = bits(name, copied(arguments))[0]
    got = run(name, arguments | {"out": arguments["x"]})
    assert got is arguments["x"] and same_bits(got, want)


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_delta_rule_into_v(name: str) -> None:
    arguments = CALLS[name]()
    want = bits(name, copied(arguments))[0]
    got = run(name, arguments | {"out": arguments["v"]})[0]
    assert got is arguments["v"] and same_bits(got, want)
