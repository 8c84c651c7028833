"""float16 in the chunk form: updates beyond 65504 are found by GDN_VALIDATE=1, by name, before anything is written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gdn
from gdn.runtime import env
from tests.described.plain import call as plain_call

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
    with pytest.raises(ValueError, match=r"k, v: expected float16 values .* within 65504 .*, got a state of 12\d{4}$"):
        call(**tokens(1000.0))


def test_a_state_beyond_float16(switch: Switch) -> None:
    switch(GDN_VALIDATE="1")
    pool = torch.zeros(3, 1, 64, 64)
    pool[1] = 70_000.0
    arguments = tokens(1.0) | {"initial_state": pool, "cu_seqlens": torch.tensor([0, 2])}
    before = pool.clone()
    with pytest.raises(ValueError, match="^q, k, v: expected float16 values .*, got a state of "):
        gdn.chunk_gated_delta_rule(**arguments, state_indices=torch.tensor([1]))
    assert torch.equal(pool, before)
    fresh = {"has_initial_state": torch.tensor([False])}
    gdn.chunk_gated_delta_rule(**arguments, state_indices=torch.tensor([1]), **fresh)
    pool[1] = 70_000.0
    gdn.chunk_gated_delta_rule(**arguments, state_indices=torch.tensor([-1]))  # padding


def test_the_prefill_step(switch: Switch) -> None:
    switch(GDN_VALIDATE="1")
    arguments = plain_call("fused_gdn_prefill", 70, torch.bfloat16)
    arguments |= {name: x.to(F16) for name, x in arguments.items() if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16}
    gdn.fused_gdn_prefill(**arguments)
    arguments["ssm_state"].fill_(70_000.0)
    windows = arguments["conv_states"].clone()
    with pytest.raises(ValueError, match="^mixed_qkv: expected float16 values"):
        gdn.fused_gdn_prefill(**arguments)
    assert torch.equal(windows, arguments["conv_states"])


def three(k: float, v: tuple[float, float, float], q: float = 1.0, **options: Any) -> dict[str, Any]:
    """Three tokens of equal keys and queries."""
    rows = {"q": torch.full((1, 3, 1, 64), q), "k": torch.full((1, 3, 1, 64), k)}
    rows["v"] = torch.tensor(v)[None, :, None, None].expand(1, 3, 1, 64)
    return {name: x.to(F16) for name, x in rows.items()} | options


WEAK = torch.full((1, 3, 1), 1e-3)
FINITE = {  # results fit, by the float32 reference
    "short keys": (r"u / \|k\| of", three(1e-3, (0.0, 900.0, 0.0), use_qk_l2norm_in_kernel=True)),
    "a key of zeros": (r"u / \|k\| of 900000", three(0.0, (0.0, 900.0, 0.0), use_qk_l2norm_in_kernel=True)),
    "long queries": ("a product of keys or queries of", three(0.1, (0.0, 0.01, 0.0), 30000.0, scale=1.0)),
    "weak writes": (r"v - S\^T k of 9\d{4}", three(2.8, (0.0, -60000.0, 60000.0), beta=WEAK)),
}


@pytest.mark.parametrize("case", FINITE)
def test_operands_beyond_float16_of_finite_results(case: str, switch: Switch) -> None:
    what, arguments = FINITE[case]
    o, state = gdn.chunk_gated_delta_rule(**arguments, output_final_state=True)
    assert o.isfinite().all() and state.isfinite().all() and float(state.abs().max()) < 65504
    switch(GDN_VALIDATE="1")
    with pytest.raises(ValueError, match=f"^q, k, v: expected float16 values .*, got {what}"):
        gdn.chunk_gated_delta_rule(**arguments)


def test_ordinary_calls_are_served(switch: Switch) -> None:
    """Several chunks with gates, strong and weak; NaN in an argument is for the result to show."""
    switch(GDN_VALIDATE="1")
    source = torch.Generator().manual_seed(0)
    for decay in (1e-3, 1.0, 100.0):
        q, k, v = (10 * torch.randn(1, 150, 2, 64, generator=source) for _ in range(3))
        g, beta = -decay * torch.rand(1, 150, 2, generator=source), torch.rand(1, 150, 2, generator=source)
        k[:, 20:40] = k[:, :1]  # the same key again and again
        v[:, 3, 0, 0] = torch.nan
        gdn.chunk_gated_delta_rule(q.half(), k.half(), v.half(), g, beta, use_qk_l2norm_in_kernel=True)
        gdn.chunk_summary(q.half(), k.half(), v.half(), g, beta, use_qk_l2norm_in_kernel=True)
    wide = {name: x.expand(1, 2, 1, 256) for name, x in (("q", q[:, :2, :1, :1]), ("k", k[:, :2, :1, :1]))}
    gdn.chunk_gated_delta_rule(wide["q"].half(), wide["k"].half(), torch.full((1, 2, 1, 256), 6e4, dtype=F16))


def test_outputs_before_the_norm(switch: Switch) -> None:
    """The prefill step's norm would divide infinities by each other."""
    arguments = plain_call("fused_gdn_prefill", 70, torch.bfloat16) | {"scale": 1e6}
    arguments |= {name: x.to(F16) for name, x in arguments.items() if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16}
    switch(GDN_VALIDATE="1")
    with pytest.raises(ValueError, match="^mixed_qkv: expected float16 values .*, got "):
        gdn.fused_gdn_prefill(**arguments)
