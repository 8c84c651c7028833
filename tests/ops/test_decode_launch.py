"""The host path of the fused decode with a stand-in for its kernel: what is launched, and that repeated calls launch the same."""

from typing import Any

import pytest
import torch

import gdn
from gdn.ops.layer_step.problem import GdnDecodeParams, GdnDecodeProblem
from gdn.testing.compare import same_bits
from tests.ops.stand_in import StandIn
from tests.references import reference

H, HV, K, V, W = 2, 4, 32, 32, 4
DIM = 2 * H * K + HV * V
BF16 = torch.bfloat16
POOLS = ("conv_state", "ssm_state", "intermediate_states")
Arguments = dict[str, Any]


class Kernel(StandIn):
    def launch(self, problem: GdnDecodeProblem, params: GdnDecodeParams) -> None:
        (
            mixed_qkv, z, b, a, conv_state, conv_weight, conv_bias, A_log, dt_bias, norm_weight, ssm_state, state_indices,
            num_accepted_tokens, cu_seqlens, rounding_seed, kept, kept_rows, ring, state_tokens, num_computed_tokens, out,
            scale, eps, null_slot, fold_phase,
        ) = params  # fmt: skip
        tensors = {
            "z_dtype": z, "a_dtype": a, "b_dtype": b, "weight_dtype": conv_weight, "bias_dtype": conv_bias, "A_log_dtype": A_log,
            "dt_bias_dtype": dt_bias, "norm_dtype": norm_weight, "conv_dtype": conv_state, "state_dtype": ssm_state,
            "index_dtype": state_indices, "cu_seqlens_dtype": cu_seqlens, "dtype": out, "intermediate_dtype": kept,
        }  # fmt: skip
        for name, tensor in tensors.items():
            dtype = getattr(problem, name)
            assert dtype is None if tensor is None else str(tensor.dtype) == f"torch.{dtype}", name
        assert mixed_qkv.dtype == out.dtype and mixed_qkv.data_ptr() % 16 == 0 and mixed_qkv.stride(0) * 2 % 16 == 0
        assert conv_weight.is_contiguous() and out.shape == (mixed_qkv.shape[0], HV * V) and out.stride(1) == 1
        assert problem.has_accepted == (num_accepted_tokens is not None) and problem.has_columns == (state_indices.dim() == 2)
        assert num_accepted_tokens is None or num_accepted_tokens.dtype == torch.int32
        assert problem.has_rounding == (rounding_seed is not None)
        assert kept_rows is None if kept is None else kept_rows.dtype == state_indices.dtype
        assert (ring is None) == (problem.ring_rows is None) == (problem.fold_every is None) == (fold_phase is None)
        if ring is not None:
            assert ring.shape[1] == problem.ring_rows and num_computed_tokens.dtype == torch.int32
            assert ring.stride(2) == 1 and not any(number % 4 for number in (*ring.stride()[:2], ring.data_ptr() // 4))
        assert isinstance(scale, float) and isinstance(eps, float) and isinstance(null_slot, int)
        assert problem.num_sequences == (mixed_qkv.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1)
        out.copy_(
            reference.fused_gdn_decode(
                mixed_qkv, z, b, a, conv_state, conv_weight, A_log, dt_bias, norm_weight, ssm_state, state_indices,
                conv_bias=conv_bias, query_start_loc=cu_seqlens, num_accepted_tokens=num_accepted_tokens,
                num_k_heads=problem.num_k_heads, head_k_dim=problem.head_k_dim, head_v_dim=problem.head_v_dim, scale=scale,
                eps=eps, activation="silu" if problem.silu else None,
                gate_activation="sigmoid" if problem.gate_sigmoid else "silu",
                projection_layout=layout_of(problem), rounding_seed=rounding_seed, intermediate_states=kept,
                intermediate_indices=kept_rows, ring=ring, state_tokens=state_tokens, num_computed_tokens=num_computed_tokens,
                fold_every=problem.fold_every, fold_phase=fold_phase or 0,
                state_v_first=problem.state_v_first, null_slot=null_slot,
            )
        )  # fmt: skip


def layout_of(problem: GdnDecodeProblem) -> str:
    return next((one for one in ("interleaved", "merged", "concatenated") if getattr(problem, one)), "flat")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel().put(monkeypatch)


def arguments_of(rows: int, seed: int = 0, **changes: Any) -> Arguments:
    source = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(*shape, generator=source).to(dtype)

    qkvz, ba = normal(rows, DIM + HV * V), normal(rows, 2 * HV)
    return {
        "mixed_qkv": qkvz[:, :DIM], "z": qkvz[:, DIM:].unflatten(1, (HV, V)), "b": ba[:, :HV], "a": ba[:, HV:],
        "conv_state": normal(9, W + 1, DIM).mT, "conv_weight": normal(DIM, W), "A_log": normal(HV, dtype=torch.float32),
        "dt_bias": normal(HV), "norm_weight": normal(V), "ssm_state": normal(9, HV, V, K, dtype=torch.float32),
        "state_indices": torch.arange(rows, dtype=torch.int32) + 1, "num_k_heads": H, "head_k_dim": K, "head_v_dim": V,
        "state_v_first": True, **changes,
    }  # fmt: skip


def columns() -> Arguments:
    return {
        "state_indices": torch.tensor([[1, 2], [3, 4], [5, 6]]), "query_start_loc": torch.tensor([0, 2, 3, 3]),
        "num_accepted_tokens": torch.tensor([2, 1, 1]),
    }  # fmt: skip


def interleaved() -> Arguments:
    plain = arguments_of(4)
    return {
        "mixed_qkv": torch.randn(4, DIM + HV * V).to(BF16), "z": None, "b": torch.cat([plain["a"], plain["b"]], 1), "a": None,
        "projection_layout": "interleaved", "activation": None, "gate_activation": "sigmoid",
    }  # fmt: skip


def concatenated() -> Arguments:
    row = torch.randn(4, DIM + HV * V + 2 * HV + 8).to(BF16)
    return {"mixed_qkv": row, **dict.fromkeys(("z", "b", "a")), "projection_layout": "concatenated"}


def merged() -> Arguments:
    plain = arguments_of(4)
    row = torch.cat([plain["mixed_qkv"], plain["z"].flatten(1)], 1)
    return {"mixed_qkv": row, "z": None, "b": torch.cat([plain["b"], plain["a"]], 1), "a": None, "projection_layout": "merged"}


def rounded() -> Arguments:
    return {"ssm_state": arguments_of(1)["ssm_state"].to(BF16), "rounding_seed": torch.tensor([7])}


VARIANTS: dict[str, Arguments] = {
    "plain": {}, "columns": columns(), "interleaved": interleaved(), "merged": merged(),
    "concatenated": concatenated(), "rounded": rounded(),
    "kept": {
        "intermediate_states": torch.zeros(6, 2, HV, V, K, dtype=BF16), "intermediate_indices": torch.arange(1, 5),
    },
    "given": {"scale": 2, "eps": 1e-3, "null_slot": 2, "conv_bias": torch.ones(DIM), "rounding_seed": torch.tensor([7])},
    "out": {"out": torch.zeros(4, HV * V, dtype=BF16)}, "wide out": {"out": torch.zeros(4, 2 * HV * V, dtype=BF16)[:, 3:131]},
}  # fmt: skip


def copied(arguments: Arguments) -> Arguments:
    return {name: value.clone() if name in POOLS else value for name, value in arguments.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_call_and_its_repetition(name: str, kernel: Kernel) -> None:
    first, second = arguments_of(4, **VARIANTS[name]), arguments_of(4, seed=1, **VARIANTS[name])
    for number, given in enumerate((first, second, first), start=1):
        expected, found = copied(given), copied(given)
        wanted = reference.fused_gdn_decode(**expected | ({"out": None} if "out" in given else {}))
        result = gdn.fused_gdn_decode(**found)
        assert same_bits(result, wanted)
        assert "out" not in given or result is given["out"]
        assert all(same_bits(found[pool], expected[pool]) for pool in POOLS if pool in given)
        assert kernel.launches == number
    assert kernel.prepared == 1, "a repeated call took the long way"


def test_rows_are_copied_where_they_are_not_aligned(kernel: Kernel) -> None:
    given = arguments_of(4)
    wide = torch.zeros(4, DIM + 5, dtype=BF16)
    wide[:, 3:-2] = given["mixed_qkv"]
    given["mixed_qkv"], given["out"] = wide[:, 3:-2], torch.zeros(4, HV * V + 1, dtype=BF16)[:, 1:]
    wanted = reference.fused_gdn_decode(**copied(given) | {"out": None})
    for _ in range(2):
        assert same_bits(gdn.fused_gdn_decode(**copied(given)), wanted)
    assert kernel.prepared == kernel.launches == 2


@pytest.mark.parametrize("unread", range(8))
def test_concatenated_rows_of_any_length(unread: int, kernel: Kernel) -> None:
    """Rows that are not a multiple of 16 bytes long: a copy without gaps would not be aligned either."""
    row = concatenated()["mixed_qkv"][:, : DIM + HV * V + 2 * HV]
    row = torch.cat([row, torch.full((4, unread), torch.nan, dtype=BF16)], 1)
    given = arguments_of(4, **concatenated() | {"mixed_qkv": row})
    wanted = reference.fused_gdn_decode(**copied(given))
    assert same_bits(gdn.fused_gdn_decode(**copied(given)), wanted)
    assert kernel.launches == 1


@pytest.mark.parametrize("eps", ["1e-6", None, True, float("nan")])
def test_a_wrong_eps_leaves_both_pools(eps: Any) -> None:
    given = arguments_of(4)
    before = copied(given)
    with pytest.raises((TypeError, ValueError), match="^eps: expected"):
        gdn.fused_gdn_decode(**given, eps=eps)
    assert all(same_bits(given[pool], before[pool]) for pool in ("conv_state", "ssm_state"))


def test_nothing_to_do(kernel: Kernel) -> None:
    given = arguments_of(0, query_start_loc=torch.tensor([0, 0]), state_indices=torch.tensor([1]))
    assert gdn.fused_gdn_decode(**given).shape == (0, HV * V)
    given = arguments_of(3, query_start_loc=torch.tensor([0]))
    assert bool((gdn.fused_gdn_decode(**given) == 0).all())
    assert kernel.launches == 0


def test_both_slots_to_read_decide(kernel: Kernel) -> None:
    """A sequence is padding where its window's slot is null, and where its state's is; then neither pool is touched."""
    for slots, accepted in (([-1, 3], 2), ([3, -1], 2)):
        given = arguments_of(2, state_indices=torch.tensor([slots, [5, 6]]), query_start_loc=torch.tensor([0, 1, 2]))
        given["num_accepted_tokens"] = torch.tensor([accepted, 1])
        before = copied(given)
        o = gdn.fused_gdn_decode(**given)
        assert bool((o[0] == 0).all()) and bool((o[1] != 0).any())
        for pool in ("conv_state", "ssm_state"):
            assert same_bits(given[pool][3], before[pool][3]) and not same_bits(given[pool][5], before[pool][5])
