"""The prefill step's reference: token by token it is the decode step's, whose formulas are tested by hand."""

from typing import Any

import pytest
import torch

from gdn.testing.compare import error, same_bits
from tests.reference.calls import Arguments
from tests.reference.step_calls import F64, HV, V, W, flat_call, in_layout
from tests.references import reference


def arguments(lengths: tuple[int, ...], slots: tuple[int, ...], padding: int = 0) -> Arguments:
    starts = torch.tensor([0, *lengths]).cumsum(0)
    rows = sum(lengths) + padding
    return flat_call(rows, "conv_states", W, state_indices=torch.tensor(slots), query_start_loc=starts)


def by_tokens(given: Arguments, n: int, pools: Arguments, is_continued: bool, checkpoint: int = 0) -> tuple[Any, Any]:
    """Rows of sequence n by decode steps, on `pools`; and its window and state after `checkpoint` tokens."""
    slot = int(given["state_indices"][n])
    if not is_continued:
        pools["conv_state"][slot, :, : W - 1] = 0
        pools["ssm_state"][slot] = 0
    names = ("conv_weight", "A_log", "dt_bias", "norm_weight", "num_k_heads", "head_k_dim", "head_v_dim")
    rows, saved = [], None
    for done, row in enumerate(range(*given["query_start_loc"][n : n + 2].tolist()), start=1):
        projections = {name: given[name][row : row + 1] for name in ("mixed_qkv", "z", "b", "a")}
        one = projections | {name: given[name] for name in names} | pools
        rows.append(reference.fused_gdn_decode(**one, state_indices=torch.tensor([slot])))
        if done == checkpoint:
            saved = pools["conv_state"][slot, :, : W - 1].clone(), pools["ssm_state"][slot].clone()
    return torch.cat(rows), saved


def test_prefill_is_decode_token_by_token() -> None:
    """Ragged sequences, one of a single token, one empty, one padding, one that starts from zero, rows after the last."""
    given = arguments((70, 1, 0, 4, 3), (5, 2, 6, -1, 7), padding=2)
    given["has_initial_state"] = torch.tensor([True, True, False, True, False])
    given["z"][71:75], given["z"][78:], given["mixed_qkv"][71:75], given["b"][78:] = (torch.nan,) * 4
    given["checkpoint_offsets"] = torch.tensor([[64, 0]] + [[0, 0]] * 4)
    given["checkpoint_slots"] = torch.tensor([[3, 0]] + [[0, 0]] * 4)
    before = {name: given[name].clone() for name in ("conv_states", "ssm_state")}
    pools = {"conv_state": before["conv_states"].clone(), "ssm_state": before["ssm_state"].clone()}
    wanted = {n: by_tokens(given, n, pools, bool(given["has_initial_state"][n]), 64 if n == 0 else 0) for n in (0, 1, 4)}
    got = reference.fused_gdn_prefill(**given)
    assert bool((got[71:75] == 0).all() and (got[78:] == 0).all())
    for n, (rows, _) in wanted.items():
        start, end = given["query_start_loc"][n : n + 2].tolist()
        assert error(got[start:end], rows, groups=1).within(1e-10)
    window, state = wanted[0][1]
    assert same_bits(given["conv_states"][3, :, : W - 1], window)
    assert error(given["ssm_state"][3], state, groups=1).within(1e-10)
    for slot in (5, 2, 7):
        assert torch.equal(given["conv_states"][slot, :, : W - 1], pools["conv_state"][slot, :, : W - 1])
        assert error(given["ssm_state"][slot], pools["ssm_state"][slot], groups=1).within(1e-10)
    for name, pool in before.items():
        assert same_bits(given[name][[0, 1, 4, 6]], pool[[0, 1, 4, 6]])


@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
@pytest.mark.parametrize(
    ("layout", "tolerance"), [("interleaved", 0.0), ("merged", 1e-14)]
)  # on views torch sums in another order
def test_layouts_agree(layout: str, tolerance: float, gate: str) -> None:
    flat = arguments((9, 3), (1, 4))
    other = in_layout(flat, layout)
    expected = reference.fused_gdn_prefill(**flat, gate_activation=gate)
    torch.testing.assert_close(reference.fused_gdn_prefill(**other, gate_activation=gate), expected, rtol=0, atol=tolerance)
    for name in ("conv_states", "ssm_state"):
        torch.testing.assert_close(other[name], flat[name], rtol=0, atol=tolerance)


def test_out() -> None:
    out = torch.full((12, HV * V), torch.nan, dtype=F64)
    result = reference.fused_gdn_prefill(**arguments((9, 3), (1, 4)), out=out)
    assert result is out and torch.equal(out, reference.fused_gdn_prefill(**arguments((9, 3), (1, 4))))
