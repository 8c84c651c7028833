"""The host path in front of a kernel, with a stand-in that checks the launch contract."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gdn
from gdn.ops.delta_rule.inputs import chunk_inputs, chunk_problem, recurrent_inputs, recurrent_problem
from gdn.ops.delta_rule.oracle import oracle_of
from gdn.testing.compare import error, same_bits, token_error
from tests.ops.contract_kernel import ContractKernel

HALF = 2**-7  # bfloat16 results against the float64 oracle


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> ContractKernel:
    return ContractKernel().put(monkeypatch)


def test_in_place_without_indices_is_a_pool_of_sequences(kernel: ContractKernel) -> None:
    arguments = recurrent_inputs(recurrent_problem(dtype="bfloat16"), lengths=[2, 0, 3])
    expected = oracle_of(arguments)
    _, state = gdn.fused_recurrent_gated_delta_rule(**arguments, inplace_final_state=True, null_slot=0)
    assert state is arguments["initial_state"] and kernel.problem.index_dtype == "int32"
    assert error(state, expected.state, groups=2).within(1e-4)  # type: ignore[arg-type]


@pytest.mark.parametrize("has_out", [False, True])
def test_batch_rows_are_packed(kernel: ContractKernel, has_out: bool) -> None:
    q, k, v = (torch.randn(3, 5, 2, 16).bfloat16() for _ in range(3))
    arguments: dict[str, Any] = {"q": q, "k": k, "v": v, "use_qk_l2norm_in_kernel": True}
    out = torch.full((3, 5, 2, 16), torch.nan, dtype=torch.bfloat16) if has_out else None
    expected = oracle_of(arguments)
    for function in (gdn.chunk_gated_delta_rule, gdn.fused_recurrent_gated_delta_rule):
        o, _ = function(**arguments, out=out)
        assert o.shape == (3, 5, 2, 16) and (out is None or o is out)
        assert token_error(o, expected.o, expected.offsets).within(HALF)
        assert kernel.tensors["q"].data_ptr() == q.data_ptr()
        assert kernel.tensors["cu_seqlens"].tolist() == [0, 5, 10, 15]
    assert kernel.launches == 2


def misaligned(x: torch.Tensor) -> torch.Tensor:
    buffer = torch.empty(x.numel() + 8, dtype=x.dtype)
    start = next(i for i in range(8) if (buffer.data_ptr() + i * x.element_size()) % 16)
    return buffer[start : start + x.numel()].view(x.shape).copy_(x)


@pytest.mark.parametrize("how", ["address", "token_stride", "batch_stride"])
def test_what_kernels_cannot_read_is_copied_once_and_logged(
    kernel: ContractKernel, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    q, k, v = (torch.randn(2, 5, 2, 16).bfloat16() for _ in range(3))
    views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "address": misaligned,
        "token_stride": lambda x: torch.cat([x.flatten(2), torch.zeros(2, 5, 3).bfloat16()], 2)[:, :, :32].unflatten(2, (2, 16)),
        "batch_stride": lambda x: torch.cat([x, x], dim=1)[:, :5],
    }
    arguments: dict[str, Any] = {"q": views[how](q), "k": k, "v": v, "use_qk_l2norm_in_kernel": True}
    expected = oracle_of(arguments)
    for _ in range(2):
        o, _ = gdn.chunk_gated_delta_rule(**arguments)
        assert token_error(o, expected.o, expected.offsets).within(HALF)
    copies = [record.getMessage() for record in caplog.records if "copied" in record.getMessage()]
    assert len(copies) == 1 and copies[0].startswith("q:")
    assert kernel.tensors["k"].data_ptr() == k.data_ptr()


def test_out_that_kernels_cannot_write(kernel: ContractKernel) -> None:
    q, k, v = (torch.randn(1, 5, 2, 16).bfloat16() for _ in range(3))
    out = misaligned(torch.zeros(1, 5, 2, 16).bfloat16())
    o, _ = gdn.chunk_gated_delta_rule(q, k, v, out=out)
    assert o is out and kernel.tensors["out"].data_ptr() != out.data_ptr()
    assert torch.equal(o, gdn.chunk_gated_delta_rule(q, k, v)[0])


def test_indices_of_another_dtype_and_parameters_in_bfloat16(kernel: ContractKernel) -> None:
    problem = chunk_problem(dtype="bfloat16", index_dtype="int32", has_final_indices=True, has_checkpoints=True, use_gate=True)
    arguments = chunk_inputs(problem, lengths=[70, 2])
    for name in ("final_state_indices", "checkpoint_offsets", "checkpoint_slots"):
        arguments[name] = arguments[name].long()
    arguments["A_log"], arguments["dt_bias"] = arguments["A_log"].bfloat16(), None
    before = arguments["initial_state"].clone()
    expected = oracle_of(arguments)
    o, pool = gdn.chunk_gated_delta_rule(**arguments)
    assert token_error(o, expected.o, expected.offsets).within(HALF)
    written = sorted(expected.written_slots)
    assert error(pool[written], expected.state[written], groups=2).within(1e-3)  # type: ignore[index]
    others = [slot for slot in range(len(before)) if slot not in expected.written_slots]
    assert same_bits(pool[others], before[others])  # type: ignore[index]


def test_backend_order_that_cannot_run_raises() -> None:
    arguments = chunk_inputs(chunk_problem(dtype="bfloat16"), lengths=[3])
    with pytest.raises(ValueError, match="SM90"):
        gdn.chunk_gated_delta_rule(**arguments, backend="tilelang")
    o, _ = gdn.chunk_gated_delta_rule(**arguments, backend="reference")
    assert o.shape == (1, 3, 4, 16)
