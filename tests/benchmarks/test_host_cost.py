"""The host cost of eager calls, measured without a device."""

import pytest
import torch

from benchmarks import host_cost
from gdn.runtime import prepare

CPU = torch.device("cpu")


@pytest.mark.parametrize("op", host_cost.OPERATORS)
def test_measures_every_operator(op: str) -> None:
    with host_cost.without_device():
        row = host_cost.measure(op, CPU, "tilelang", repeats=20, news=2)
    assert (row.op, row.backend) == (op, "tilelang")
    assert 0 < row.repeated_least_us <= row.repeated_us and row.first_us > 0 and row.launch_us > 0
    assert prepare(host_cost.problem_of(op), CPU).launch is None  # the empty kernels are gone


def test_needs_a_kernel() -> None:
    with pytest.raises(ValueError, match="no kernel serves it here"):
        host_cost.measure("recurrent", CPU)


def test_repeated_calls_do_not_come_to_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    with host_cost.without_device():
        for op in host_cost.OPERATORS:
            call = host_cost.call_of(op, CPU, None)
            call()
            with monkeypatch.context() as patched:
                patched.setattr("gdn.runtime.prepare", None)
                call()
