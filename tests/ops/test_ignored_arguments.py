"""Arguments that a call would ignore, or that mean something else than the caller thinks, are refused by name."""

from typing import Any

import pytest
import torch

import gdn

Arguments = dict[str, Any]
H, D = 2, 8


def tokens(batch: int = 1, length: int = 4) -> Arguments:
    source = torch.Generator().manual_seed(1)
    names = {"q": D, "k": D, "v": D}
    drawn = {name: torch.randn(batch, length, H, dim, generator=source) for name, dim in names.items()}
    return drawn | {"g": -torch.rand(batch, length, H, generator=source), "use_qk_l2norm_in_kernel": True}


def call(function: str, **changes: Any) -> Any:
    arguments = tokens()
    if function == "gated_delta_rule":
        arguments["cu_seqlens"] = torch.tensor([0, 4])
    return getattr(gdn, function)(**arguments | changes)


DELTA_RULES = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "gated_delta_rule", "chunk_summary"]


@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
@pytest.mark.parametrize("function", DELTA_RULES)
def test_parameters_of_the_gate_without_the_gate(function: str, name: str) -> None:
    with pytest.raises(TypeError, match="^A_log, dt_bias: expected None without use_gate_in_kernel=True, got a tensor"):
        call(function, **{name: torch.zeros(H)})


@pytest.mark.parametrize("function", DELTA_RULES)
def test_a_positive_log_decay(function: str) -> None:
    g = tokens()["g"]
    g[0, 2, 1] = 1e-3
    with pytest.raises(ValueError, match=r"^g: expected logarithms of decays, at most 0, got 0.00\d* at \[0, 2, 1\]"):
        call(function, g=g)
    g[0, 2, 1] = 0.0
    call(function, g=g)


@pytest.mark.parametrize("function", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_padding_may_have_any_decay(function: str) -> None:
    """Rows after the last sequence, and those of a sequence whose slot is null."""
    g = tokens()["g"]
    g[0, 1:] = 5.0
    pool, name = torch.zeros(3, H, D, D), "state_indices" if function.startswith("chunk") else "ssm_state_indices"
    o, _ = call(function, g=g, cu_seqlens=torch.tensor([0, 1, 3]), initial_state=pool, **{name: torch.tensor([2, -1])})
    assert bool(o[0, 0].any()) and not o[0, 1:].any()


def _pooled(function: str, rows: int, columns: int | None = None) -> Arguments:
    shape = (rows,) if columns is None else (rows, columns)
    slots = torch.arange(torch.Size(shape).numel()).view(shape)
    name = "state_indices" if function.startswith("chunk") else "ssm_state_indices"
    return tokens(batch=2) | {"initial_state": torch.zeros(20, H, D, D), name: slots}


@pytest.mark.parametrize("columns", [None, 4])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("function", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_slots_of_another_number_of_sequences(function: str, rows: int, columns: int | None) -> None:
    if columns is not None and function.startswith("chunk"):
        return
    arguments = _pooled(function, rows, columns)
    pool = arguments["initial_state"]
    with pytest.raises(ValueError, match=rf"state_indices: expected shape \[N.* with N = 2, got shape \[{rows}"):
        getattr(gdn, function)(**arguments)
    assert not pool.any()
    getattr(gdn, function)(**_pooled(function, 2, columns))
    flat = {name: x.flatten(0, 1)[None] for name, x in arguments.items() if name in ("q", "k", "v", "g")}
    if rows == 3:  # with offsets the extra rows are ignored
        getattr(gdn, function)(**arguments | flat | {"cu_seqlens": torch.tensor([0, 4, 8])})


def test_slots_of_the_convolutions_and_of_the_fused_step() -> None:
    x, weight, pool = torch.randn(2, 8), torch.randn(8, 4), torch.zeros(9, 8, 3)
    three, message = torch.arange(3), r"indices: expected shape \[N\].* with N = \d, got shape \[3\]"
    with pytest.raises(ValueError, match=f"^cache_{message}"):
        gdn.causal_conv1d_fn(x, weight, conv_states=pool, cache_indices=three)
    with pytest.raises(ValueError, match=r"^conv_state_indices: expected shape \[N\] or \[N, .* with N = 2, got shape \[3\]"):
        gdn.causal_conv1d_update(x, pool, weight, conv_state_indices=three)
    gdn.causal_conv1d_update(x, pool, weight, conv_state_indices=three, query_start_loc=torch.tensor([0, 1, 2]))
