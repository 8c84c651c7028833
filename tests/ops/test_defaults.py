"""A default device and a default dtype of the caller change nothing: what is made for the host, or in a fixed dtype, says so.

The device is "meta" here, on which a tensor has no values: one that is made without a device fails, or the result differs.
`tests/gpu/test_defaults.py` runs the kernels and a model with "cuda" as the default.
"""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

import gdn
from autotune import cases, shapes
from gdn.cli.demo import run as demo_run
from gdn.device import H100
from gdn.layers.named import NAMED, first_layers
from gdn.ops.delta_rule import inputs
from gdn.testing import timing
from gdn.testing.compare import same_bits
from tests.ops.defaults import defaults
from tests.ops.spoiling.calls import OPERATORS, good_call
from tests.reference.calls import CALLS

pytestmark = pytest.mark.usefixtures("one_thread")

Arguments = dict[str, Any]
DTYPES = (torch.bfloat16, torch.float64)
SEEDS = 4


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Tensors of arguments or results, in order."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        return [tensor for one in value for tensor in tensors_in(one)]
    return [value] if isinstance(value, torch.Tensor) else []


def assert_unmoved(name: str, arguments: Arguments, dtype: torch.dtype) -> None:
    """The same bits, in the same dtypes on the same device, from the call and in what it wrote."""
    copies = [copy.deepcopy(arguments) for _ in range(3)]  # with their strides, and the storages that they share
    wanted = tensors_in((getattr(gdn, name)(**copies[0]), copies[0]))
    with defaults("meta", dtype):
        for own in copies[1:]:  # the second call takes the plan of the first
            found = tensors_in((getattr(gdn, name)(**own), own))
            assert len(found) == len(wanted) and all(map(same_bits, found, wanted))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_operators(name: str, dtype: torch.dtype) -> None:
    assert_unmoved(name, CALLS[name](), dtype)


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_in_drawn_forms(name: str) -> None:
    for seed in range(SEEDS):
        assert_unmoved(name, good_call(name, seed).arguments, DTYPES[seed % 2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_and_its_demo(dtype: torch.dtype) -> None:
    """Prompts, drafts, decode steps, fixed batches, and the demo's own checks of all that."""
    config = replace(first_layers(NAMED["tiny"], 2), layer_types=("linear_attention", "full_attention"))
    if dtype == torch.float64:
        config = replace(config, index_ratio=4, residual="hyper", hc_count=2, hc_lowrank=8)
    plan = demo_run.Plan("small", config, (5, 66), 1, 2, torch.device("cpu"))
    wanted = demo_run.run(plan, None)
    with defaults("meta", dtype):
        found = demo_run.run(plan, None)
    assert found.passed and found.tokens == wanted.tokens
    assert [one.error for one in found.deviations] == [one.error for one in wanted.deviations]


@pytest.mark.parametrize("dtype", DTYPES)
def test_drawn_inputs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tests and the tuner."""
    monkeypatch.setattr(timing, "copies_beyond_l2", lambda bytes_each, l2_bytes: 1)
    flags = {"index_dtype": "int32", "has_final_indices": True}
    chunk = inputs.chunk_problem(**flags, has_mask=True, has_checkpoints=True)
    gated = inputs.chunk_problem(**flags, use_gate=True, use_beta_sigmoid=True)
    recurrent = inputs.recurrent_problem(**flags, write_every_token=True, has_accepted=True, has_parent=True, has_rounding=True)

    def drawn() -> list[torch.Tensor]:
        found: list[Any] = [inputs.chunk_inputs(chunk, case=case, padded_tokens=3, strided=True) for case in inputs.CASES]
        found += [inputs.chunk_inputs(gated, case=case) for case in ("random", "total_decay", "no_decay")]
        found.append(inputs.recurrent_inputs(recurrent, lengths=[3, 2]))
        for op in shapes.operators():
            for shape in shapes.shapes(op, measured=True)[:2]:
                case = cases.make(cases.tunable(op).small(shape), torch.device("cpu"), H100)
                found += [call.keywords for call in case.public_calls(None)]
        return tensors_in(found)

    wanted = drawn()
    with defaults("meta", dtype):
        found = drawn()
    assert len(found) == len(wanted) > 250
    assert [place for place, pair in enumerate(zip(found, wanted, strict=True)) if not same_bits(*pair)] == []
