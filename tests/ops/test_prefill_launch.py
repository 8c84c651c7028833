"""The fused prefill step: bad calls; and its host path with a stand-in for the kernel: what it is launched with."""

from typing import Any

import pytest
import torch

import gdn
from gdn.ops.layer_step.problem import GdnPrefillParams, GdnPrefillProblem
from gdn.testing.compare import error, same_bits
from tests.described.plain import call as plain_call
from tests.ops.bad_calls import Bad, check
from tests.ops.stand_in import StandIn
from tests.references import reference

BF16 = torch.bfloat16
POOLS = ("conv_states", "ssm_state")
Arguments = dict[str, Any]


class Kernel(StandIn):
    workspace_bytes = 512

    def launch(self, problem: GdnPrefillProblem, p: GdnPrefillParams) -> None:
        tensors = {
            "z_dtype": p.z, "a_dtype": p.a, "b_dtype": p.b, "weight_dtype": p.conv_weight, "bias_dtype": p.conv_bias,
            "norm_dtype": p.norm_weight, "conv_dtype": p.conv_states, "state_dtype": p.ssm_state, "index_dtype": p.state_indices,
            "cu_seqlens_dtype": p.cu_seqlens, "dtype": p.out, "checkpoint_state_dtype": p.checkpoint_states,
            "checkpoint_window_dtype": p.checkpoint_windows, "A_log_dtype": p.A_log, "dt_bias_dtype": p.dt_bias,
        }  # fmt: skip
        for name, tensor in tensors.items():
            dtype = getattr(problem, name)
            assert dtype is None if tensor is None else str(tensor.dtype) == f"torch.{dtype}", name
        rows = p.mixed_qkv.shape[0]
        optional = [x for x in (p.z, p.conv_bias, p.norm_weight) if x is not None]
        for x in (p.mixed_qkv, p.conv_weight, p.out, *optional):
            assert x.data_ptr() % 16 == 0 and x.stride(-1) == 1
        assert all(len(x) == 1 or x.stride(0) * x.element_size() % 16 == 0 for x in (p.mixed_qkv, p.out))
        assert p.out.shape == (rows, problem.num_v_heads, problem.head_v_dim) and p.out.stride(1) == problem.head_v_dim
        assert p.A_log.is_contiguous() and p.dt_bias.is_contiguous()
        assert p.workspace.dtype == torch.uint8 and p.workspace.shape == (512,)
        assert problem.has_mask == (p.has_initial_state is not None)
        assert problem.has_checkpoints == (p.checkpoint_offsets is not None) == (p.checkpoint_slots is not None)
        if p.checkpoint_offsets is not None:
            assert p.checkpoint_offsets.dtype == torch.int32 and p.checkpoint_offsets.is_contiguous()
            assert p.checkpoint_slots.dtype == p.state_indices.dtype and p.checkpoint_slots.is_contiguous()
        assert isinstance(p.scale, float) and isinstance(p.eps, float) and isinstance(p.null_slot, int)
        assert (problem.num_tokens, problem.num_sequences) == (rows, p.cu_seqlens.shape[0] - 1)
        o = reference.fused_gdn_prefill(
            p.mixed_qkv, p.z, p.b, p.a, p.conv_states, p.conv_weight, p.A_log, p.dt_bias, p.norm_weight, p.ssm_state,
            p.state_indices, query_start_loc=p.cu_seqlens, has_initial_state=p.has_initial_state, conv_bias=p.conv_bias,
            num_k_heads=problem.num_k_heads, head_k_dim=problem.head_k_dim, head_v_dim=problem.head_v_dim, scale=p.scale,
            eps=p.eps, activation="silu" if problem.silu else None,
            gate_activation="sigmoid" if problem.gate_sigmoid else "silu",
            projection_layout="interleaved" if problem.interleaved else "merged" if problem.merged else "flat",
            checkpoint_offsets=p.checkpoint_offsets,
            checkpoint_slots=p.checkpoint_slots, checkpoint_states=p.checkpoint_states,
            checkpoint_windows=p.checkpoint_windows, state_v_first=problem.state_v_first, null_slot=p.null_slot,
        )  # fmt: skip
        p.out.copy_(o.view(p.out.shape))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel().put(monkeypatch)


def copied(arguments: Arguments) -> Arguments:
    return {name: value.clone() if name in POOLS else value for name, value in arguments.items()}


def test_padding_is_zero_whatever_it_holds() -> None:
    """Padding on the CPU, where the reference runs: rows of a null slot and rows after the last sequence."""
    given = plain_call("fused_gdn_prefill", 70, BF16) | {"state_indices": torch.tensor([-1, 3])}
    given["query_start_loc"] = torch.tensor([0, 5, 60])
    for name in ("mixed_qkv", "z", "b", "a"):
        given[name][:5], given[name][60:] = torch.nan, torch.nan
    before = copied(given)
    o = gdn.fused_gdn_prefill(**given)
    assert bool((o[:5] == 0).all() and (o[60:] == 0).all()) and not bool(o.isnan().any())
    others = torch.arange(27) != 3
    assert all(same_bits(given[pool][others], before[pool][others]) for pool in POOLS)


BAD = [
    Bad("width", lambda a: {"mixed_qkv": a["mixed_qkv"][:, 1:]}, ValueError, r"^mixed_qkv: expected sh"),
    Bad("z", lambda a: {"z": None}, TypeError, r"^z: expected a torch.Tensor, got NoneType"),
    Bad("heads", lambda a: {"num_k_heads": 3}, ValueError, r"^A_log: .*multiple of num_k_heads = 3"),
    Bad("windows", lambda a: {"conv_states": a["conv_states"][:, :, :2]}, ValueError, r"^conv_states: .*columns >= 3"),
    Bad("2-D", lambda a: {"state_indices": a["state_indices"][:, None]}, ValueError, r"^state_indices: expected shape \[>= N\] "),
    Bad("checkpoint", lambda a: {"checkpoint_slots": a["state_indices"][:, None]}, ValueError, r"^checkpoint_offsets: expected"),
    Bad(
        "multiple", lambda a: {"checkpoint_offsets": torch.tensor([[0], [65]]), "checkpoint_slots": torch.tensor([[1], [3]])},
        ValueError, r"^checkpoint_offsets: expected .*64",
    ),
    Bad("overlap", lambda a: {"out": a["mixed_qkv"][:, : a["z"][0].numel()]}, ValueError, r"^out: expected memory of its own"),
    Bad("backend", lambda a: {"backend": "tilelang"}, ValueError, r"tilelang"),
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=[bad.name for bad in BAD])
def test_bad_calls(bad: Bad) -> None:
    check("fused_gdn_prefill", plain_call("fused_gdn_prefill", 70, BF16), bad)


def test_the_composition_of_the_public_operators_agrees() -> None:
    """Conv, chunk and gated norm, one after the other, as a layer would call them."""
    given = plain_call("fused_gdn_prefill", 70, BF16, is_served=True)
    apart = copied(given)
    x = gdn.causal_conv1d_fn(
        given["mixed_qkv"], given["conv_weight"], given["conv_bias"], conv_states=apart["conv_states"],
        cache_indices=given["state_indices"], query_start_loc=given["query_start_loc"],
    )  # fmt: skip
    q, k, v = (part.unflatten(1, (-1, 64))[None] for part in x.split([2 * 64, 2 * 64, 4 * 64], 1))
    o, _ = gdn.chunk_gated_delta_rule(
        q, k, v, given["a"][None], given["b"][None], use_gate_in_kernel=True, A_log=given["A_log"], dt_bias=given["dt_bias"],
        use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True, initial_state=apart["ssm_state"],
        state_indices=given["state_indices"], cu_seqlens=given["query_start_loc"], state_v_first=True,
    )  # fmt: skip
    wanted = gdn.rms_norm_gated(o[0], given["z"], given["norm_weight"]).flatten(1)
    assert error(gdn.fused_gdn_prefill(**given), wanted, groups=1).within(4e-3)
    assert same_bits(given["conv_states"], apart["conv_states"])
    assert error(given["ssm_state"], apart["ssm_state"], groups=2).within(1e-5)
