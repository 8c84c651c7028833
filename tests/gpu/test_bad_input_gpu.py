"""Bad calls on the GPU: the same errors as on the CPU, before anything is launched or written."""

from collections.abc import Callable

import pytest
import torch

from gdn.ops.delta_rule.inputs import chunk_inputs, chunk_problem
from tests.gpu.delta_rule import backends
from tests.ops.bad_calls import CHUNK, RECURRENT, Bad, check, good_chunk, good_recurrent

pytestmark = pytest.mark.gpu

GPU = [  # what can only be wrong where there are two devices, or a kernel
    Bad("g_on_cpu", lambda a: {"g": a["g"].cpu()}, ValueError, r"^g: expected a tensor on cuda:\d+, got a tensor on cpu"),
    Bad("pool_on_cpu", lambda a: {"initial_state": a["initial_state"].cpu()}, ValueError, r"^initial_state: .*on cpu"),
]


@pytest.mark.parametrize("bad", [*CHUNK, *GPU], ids=lambda bad: bad.name)
def test_chunk(bad: Bad, device: torch.device) -> None:
    check("chunk_gated_delta_rule", good_chunk(str(device)), bad)


@pytest.mark.parametrize("bad", [*RECURRENT, *GPU], ids=lambda bad: bad.name)
def test_recurrent(bad: Bad, device: torch.device) -> None:
    check("fused_recurrent_gated_delta_rule", good_recurrent(str(device)), bad)


@pytest.mark.parametrize("backend", backends("chunk"))
def test_head_dim_that_an_ordered_backend_does_not_serve(backend: str, device: torch.device) -> None:
    arguments = chunk_inputs(chunk_problem(dtype="bfloat16", head_k_dim=18, head_v_dim=18), device, lengths=[5])
    bad = Bad("head_dim", lambda a: {"backend": backend}, ValueError, rf"{backend}.*requires .*got K=18, V=18")
    check("chunk_gated_delta_rule", arguments, bad)


@pytest.mark.parametrize("function", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_values_on_the_device_are_checked_where_asked_for(
    function: str, device: torch.device, switch: Callable[..., object]
) -> None:
    switch(GDN_VALIDATE="1")
    is_chunk = function == "chunk_gated_delta_rule"
    good = good_chunk(str(device)) if is_chunk else good_recurrent(str(device))
    decreasing = torch.tensor([0, 4, 3, 6], dtype=torch.int32, device=device)
    check(function, good, Bad("decreasing", lambda a: {"cu_seqlens": decreasing}, ValueError, r"^cu_seqlens: .*never decrease"))
    name = "state_indices" if is_chunk else "ssm_state_indices"
    beyond = torch.tensor([0, 1, 99], dtype=torch.int32, device=device)
    check(function, good, Bad("slot", lambda a: {name: beyond}, ValueError, rf"^{name}: expected slots below .*got 99"))
