"""The prefill step's reference: token by token it is the decode step's, whose formulas are tested by hand."""

from typing import Any

import pytest
import torch

from gdn.testing.compare import error, same_bits
from tests.reference.calls import randn
from tests.references import reference

H, HV, K, V, W = 2, 4, 6, 8, 4
CHANNELS, SLOTS = 2 * H * K + HV * V, 8
F64 = torch.float64
Arguments = dict[str, Any]


def arguments(lengths: tuple[int, ...], slots: tuple[int, ...], padding: int = 0) -> Arguments:
    rows = sum(lengths) + padding
    starts = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    given = {
        "mixed_qkv": randn(rows, CHANNELS), "z": randn(rows, HV, V, seed=1), "b": randn(rows, HV, seed=2),
        "a": randn(rows, HV, seed=3), "conv_states": randn(SLOTS, CHANNELS, W, seed=4),
        "conv_weight": randn(CHANNELS, W, seed=5), "A_log": randn(HV, seed=6), "dt_bias": randn(HV, seed=7),
        "norm_weight": randn(V, seed=8), "ssm_state": randn(SLOTS, HV, K, V, seed=9),
    }  # fmt: skip
    indices = {"state_indices": torch.tensor(slots), "query_start_loc": torch.tensor(starts)}
    return {name: x.to(F64) for name, x in given.items()} | indices | {"num_k_heads": H, "head_k_dim": K, "head_v_dim": V}


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
def test_layouts_agree(gate: str) -> None:
    flat, ratio = arguments((9, 3), (1, 4)), HV // H
    q, k, v = flat["mixed_qkv"].split([H * K, H * K, HV * V], dim=1)
    parts = [part.reshape(12, H, -1) for part in (q, k, v, flat["z"])]
    ba = torch.cat([flat[name].view(12, H, ratio) for name in ("b", "a")], dim=2).flatten(1)
    mixed = {**flat, "mixed_qkv": torch.cat(parts, dim=2).flatten(1), "z": None, "b": ba, "a": None}
    mixed |= {"projection_layout": "interleaved"} | {name: flat[name].clone() for name in ("conv_states", "ssm_state")}
    merged = {**flat, "mixed_qkv": torch.cat([flat["mixed_qkv"], flat["z"].flatten(1)], 1), "z": None, "a": None}
    merged |= {"b": torch.cat([flat["b"], flat["a"]], 1), "projection_layout": "merged"}
    merged |= {name: flat[name].clone() for name in ("conv_states", "ssm_state")}
    expected = reference.fused_gdn_prefill(**flat, gate_activation=gate)
    assert torch.equal(reference.fused_gdn_prefill(**mixed, gate_activation=gate), expected)
    assert all(torch.equal(flat[name], mixed[name]) for name in ("conv_states", "ssm_state"))
    # On views torch sums in another order.
    torch.testing.assert_close(reference.fused_gdn_prefill(**merged, gate_activation=gate), expected, rtol=0, atol=1e-14)
    for name in ("conv_states", "ssm_state"):
        torch.testing.assert_close(merged[name], flat[name], rtol=0, atol=1e-14)


def test_out() -> None:
    out = torch.full((12, HV * V), torch.nan, dtype=F64)
    result = reference.fused_gdn_prefill(**arguments((9, 3), (1, 4)), out=out)
    assert result is out and torch.equal(out, reference.fused_gdn_prefill(**arguments((9, 3), (1, 4))))
