"""float16 in the chunk form: updates beyond 65504 are found by GDN_VALIDATE=1, by name, before anything is written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gdn
from gdn.runtime import env
from tests.ops.test_prefill_launch import prefill_arguments

F16 = torch.float16
Switch = Callable[..., env.Switches]


def tokens(size: float, dtype: torch.dtype = F16) -> dict[str, Any]:
    """Two equal keys without a norm, k . k = 100: the second update is -99 v, and the state 1.25 (v - 99 v)."""
    k = torch.full((1, 2, 1, 64), 1.25)
    return {"q": torch.zeros(1, 2, 1, 64, dtype=dtype), "k": k.to(dtype), "v": torch.full((1, 2, 1, 64), size).to(dtype)}


@pytest.mark.parametrize("function", ["chunk_gated_delta_rule", "chunk_summary"])
def test_updates_beyond_float16(function: str, switch: Switch) -> None:
    call = getattr(gdn, function)
    call(**tokens(1000.0))  # not looked for without the switch
    switch(GDN_VALIDATE="1")
    call(**tokens(400.0))
    call(**tokens(1000.0, torch.bfloat16))
    with pytest.raises(ValueError, match=r"^v: expected float16 values .* within 65504 .*, got a state or an update of 12\d{4}"):
        call(**tokens(1000.0))


def test_a_state_beyond_float16(switch: Switch) -> None:
    switch(GDN_VALIDATE="1")
    pool = torch.zeros(3, 1, 64, 64)
    pool[1] = 70_000.0
    arguments = tokens(1.0) | {"initial_state": pool, "cu_seqlens": torch.tensor([0, 2])}
    before = pool.clone()
    with pytest.raises(ValueError, match="^v: expected float16 values"):
        gdn.chunk_gated_delta_rule(**arguments, state_indices=torch.tensor([1]))
    assert torch.equal(pool, before)
    fresh = {"has_initial_state": torch.tensor([False])}
    gdn.chunk_gated_delta_rule(**arguments, state_indices=torch.tensor([1]), **fresh)
    pool[1] = 70_000.0
    gdn.chunk_gated_delta_rule(**arguments, state_indices=torch.tensor([-1]))  # padding


def test_the_prefill_step(switch: Switch) -> None:
    switch(GDN_VALIDATE="1")
    arguments = prefill_arguments(70)
    arguments |= {name: x.to(F16) for name, x in arguments.items() if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16}
    gdn.fused_gdn_prefill(**arguments)
    arguments["ssm_state"].fill_(70_000.0)
    windows = arguments["conv_states"].clone()
    with pytest.raises(ValueError, match="^mixed_qkv: expected float16 values"):
        gdn.fused_gdn_prefill(**arguments)
    assert torch.equal(windows, arguments["conv_states"])
