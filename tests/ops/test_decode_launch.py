"""The host path of the fused decode with a stand-in for its kernel: what it is launched with."""

from typing import Any

import pytest
import torch

import gdn
from gdn.ops.layer_step.problem import GdnDecodeParams, GdnDecodeProblem
from gdn.testing.compare import same_bits
from tests.described.plain import call as plain_call
from tests.ops.stand_in import StandIn
from tests.references import reference

BF16 = torch.bfloat16
POOLS = ("conv_state", "ssm_state")
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
        assert mixed_qkv.dtype == out.dtype and mixed_qkv.data_ptr() % 16 == 0
        assert len(mixed_qkv) == 1 or mixed_qkv.stride(0) * mixed_qkv.element_size() % 16 == 0
        width = problem.num_v_heads * problem.head_v_dim
        assert conv_weight.is_contiguous() and out.shape == (mixed_qkv.shape[0], width) and out.stride(1) == 1
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


def copied(arguments: Arguments) -> Arguments:
    return {name: value.clone() if name in POOLS else value for name, value in arguments.items()}


@pytest.mark.parametrize("unread", range(8))
def test_concatenated_rows_of_any_length(unread: int, kernel: Kernel) -> None:
    """Rows that are not a multiple of 16 bytes long: a copy without gaps would not be aligned either."""
    given = plain_call("fused_gdn_decode", 4, BF16) | {"projection_layout": "concatenated"}
    parts = [given.pop(name).flatten(1) for name in ("mixed_qkv", "z", "b", "a")]
    given["mixed_qkv"] = torch.cat([*parts, torch.full((4, unread), torch.nan, dtype=BF16)], 1)
    given |= dict.fromkeys(("z", "b", "a"))
    wanted = reference.fused_gdn_decode(**copied(given))
    assert same_bits(gdn.fused_gdn_decode(**copied(given)), wanted)
    assert kernel.launches == 1


def test_both_slots_to_read_decide(kernel: Kernel) -> None:
    """A sequence is padding where its window's slot is null, and where its state's is; then neither pool is touched."""
    for slots, accepted in (([-1, 3], 2), ([3, -1], 2)):
        given = plain_call("fused_gdn_decode", 4, BF16) | {"state_indices": torch.tensor([slots, [5, 6]])}
        given |= {"query_start_loc": torch.tensor([0, 1, 2]), "num_accepted_tokens": torch.tensor([accepted, 1])}
        given["conv_state"] = torch.randn(9, *given["conv_state"].shape[1:-1], 4).to(BF16)
        before = copied(given)
        o = gdn.fused_gdn_decode(**given)
        assert bool((o[0] == 0).all()) and bool((o[1] != 0).any())
        for pool in ("conv_state", "ssm_state"):
            assert same_bits(given[pool][3], before[pool][3]) and not same_bits(given[pool][5], before[pool][5])
