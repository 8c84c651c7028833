"""The fused prefill step: bad calls; and its host path with a stand-in for the kernel: what is launched, and that repeated calls
launch the same."""

from typing import Any

import pytest
import torch

import gdn
from gdn.ops.layer_step.problem import GdnPrefillParams, GdnPrefillProblem
from gdn.testing.compare import error, same_bits
from tests.ops.bad_calls import Bad, check
from tests.ops.stand_in import StandIn
from tests.references import reference

H, HV, K, V, W = 2, 4, 16, 16, 4
DIM = 2 * H * K + HV * V
BF16 = torch.bfloat16
POOLS = ("conv_states", "ssm_state")
KEPT = ("checkpoint_states", "checkpoint_windows")
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
        for x in (p.mixed_qkv, p.conv_weight, p.norm_weight, p.out, *[x for x in (p.z, p.conv_bias) if x is not None]):
            assert x.data_ptr() % 16 == 0 and x.stride(-1) == 1
        assert all(x.stride(0) * 2 % 16 == 0 for x in (p.mixed_qkv, p.out))
        assert p.out.shape == (rows, HV, V) and p.out.stride(1) == V
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


def prefill_arguments(rows: int, seed: int = 0, **changes: Any) -> Arguments:
    """Two sequences, the second with all rows but two."""
    source = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(*shape, generator=source).to(dtype)

    qkvz, ba = normal(rows, DIM + HV * V), normal(rows, 2 * HV)
    return {
        "mixed_qkv": qkvz[:, :DIM], "z": qkvz[:, DIM:].unflatten(1, (HV, V)), "b": ba[:, :HV], "a": ba[:, HV:],
        "conv_states": normal(9, W, DIM).mT, "conv_weight": normal(DIM, W), "A_log": normal(HV, dtype=torch.float32),
        "dt_bias": normal(HV), "norm_weight": normal(V), "ssm_state": normal(9, HV, V, K, dtype=torch.float32),
        "state_indices": torch.tensor([5, 2], dtype=torch.int32), "query_start_loc": torch.tensor([0, 2, rows]),
        "num_k_heads": H, "head_k_dim": K, "head_v_dim": V, "state_v_first": True, **changes,
    }  # fmt: skip


def interleaved() -> Arguments:
    plain = prefill_arguments(70)
    return {
        "mixed_qkv": torch.randn(70, DIM + HV * V).to(BF16), "z": None, "b": torch.cat([plain["a"], plain["b"]], 1), "a": None,
        "projection_layout": "interleaved", "activation": None, "gate_activation": "sigmoid",
    }  # fmt: skip


def merged() -> Arguments:
    plain = prefill_arguments(70)
    row = torch.cat([plain["mixed_qkv"], plain["z"].flatten(1)], 1)
    return {"mixed_qkv": row, "z": None, "b": torch.cat([plain["b"], plain["a"]], 1), "a": None, "projection_layout": "merged"}


VARIANTS: dict[str, Arguments] = {
    "plain": {}, "interleaved": interleaved(), "merged": merged(),
    "mask": {"has_initial_state": torch.tensor([True, False, True])[::2]},
    "given": {"scale": 2, "eps": 1e-3, "null_slot": 2, "conv_bias": torch.ones(DIM)},
    "checkpoints": {
        "checkpoint_offsets": torch.tensor([[0, 0], [64, 0]]), "checkpoint_slots": torch.tensor([[1, 3], [4, 6]]),
    },
    "kept": {
        "checkpoint_offsets": torch.tensor([[0, 0], [64, 0]]), "checkpoint_slots": torch.tensor([[0, 1], [2, 2]]),
        "checkpoint_states": torch.zeros(3, HV, V, K, dtype=BF16), "checkpoint_windows": torch.zeros(3, W, DIM, dtype=BF16).mT,
    },
    "out": {"out": torch.zeros(70, HV * V, dtype=BF16)}, "wide out": {"out": torch.zeros(70, 2 * HV * V, dtype=BF16)[:, 8:72]},
    "padding": {"state_indices": torch.tensor([-1, 3]), "query_start_loc": torch.tensor([0, 3, 60])},
}  # fmt: skip


def copied(arguments: Arguments) -> Arguments:
    return {name: value.clone() if name in POOLS + KEPT else value for name, value in arguments.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_call_and_its_repetition(name: str, kernel: Kernel) -> None:
    first, second = prefill_arguments(70, **VARIANTS[name]), prefill_arguments(70, seed=1, **VARIANTS[name])
    for number, given in enumerate((first, second, first), start=1):
        expected, found = copied(given), copied(given)
        wanted = reference.fused_gdn_prefill(**expected | ({"out": None} if "out" in given else {}))
        result = gdn.fused_gdn_prefill(**found)
        assert same_bits(result, wanted)
        assert "out" not in given or result is given["out"]
        assert all(same_bits(found[pool], expected[pool]) for pool in POOLS + KEPT if pool in given)
        assert kernel.launches == number
    assert kernel.prepared == 1 or name == "mask", "a repeated call took the long way"


def test_rows_are_copied_where_they_are_not_aligned(kernel: Kernel) -> None:
    given = prefill_arguments(70)
    wide = torch.zeros(70, DIM + 5, dtype=BF16)
    wide[:, 3:-2] = given["mixed_qkv"]
    given["mixed_qkv"], given["out"] = wide[:, 3:-2], torch.zeros(70, HV * V + 1, dtype=BF16)[:, 1:]
    wanted = reference.fused_gdn_prefill(**copied(given) | {"out": None})
    for _ in range(2):
        assert same_bits(gdn.fused_gdn_prefill(**copied(given)), wanted)
    assert kernel.prepared == kernel.launches == 2


def test_nothing_to_do(kernel: Kernel) -> None:
    given = prefill_arguments(0, query_start_loc=torch.tensor([0, 0, 0]))
    assert gdn.fused_gdn_prefill(**given).shape == (0, HV * V)
    given = prefill_arguments(3, query_start_loc=torch.tensor([0]))
    assert bool((gdn.fused_gdn_prefill(**given) == 0).all())
    assert kernel.launches == 0


def test_padding_is_zero_whatever_it_holds() -> None:
    """Padding on the CPU, where the reference runs: rows of a null slot and rows after the last sequence."""
    given = prefill_arguments(70, state_indices=torch.tensor([-1, 3]), query_start_loc=torch.tensor([0, 5, 60]))
    for name in ("mixed_qkv", "z", "b", "a"):
        given[name][:5], given[name][60:] = torch.nan, torch.nan
    before = copied(given)
    o = gdn.fused_gdn_prefill(**given)
    assert bool((o[:5] == 0).all() and (o[60:] == 0).all()) and not bool(o.isnan().any())
    others = [0, 1, 2, 4, 5, 6, 7, 8]
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
    Bad("overlap", lambda a: {"out": a["mixed_qkv"][:, : HV * V]}, ValueError, r"^out: expected memory of its own"),
    Bad("backend", lambda a: {"backend": "tilelang"}, ValueError, r"tilelang"),
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=[bad.name for bad in BAD])
def test_bad_calls(bad: Bad) -> None:
    check("fused_gdn_prefill", prefill_arguments(70), bad)


def test_the_composition_of_the_public_operators_agrees() -> None:
    """Conv, chunk and gated norm, one after the other, as a layer would call them."""
    given: Arguments = prefill_arguments(70)
    apart = copied(given)
    x = gdn.causal_conv1d_fn(
        given["mixed_qkv"], given["conv_weight"], conv_states=apart["conv_states"], cache_indices=given["state_indices"],
        query_start_loc=given["query_start_loc"],
    )  # fmt: skip
    q, k, v = (part.unflatten(1, (-1, K))[None] for part in x.split([H * K, H * K, HV * V], 1))
    o, _ = gdn.chunk_gated_delta_rule(
        q, k, v, given["a"][None], given["b"][None], use_gate_in_kernel=True, A_log=given["A_log"], dt_bias=given["dt_bias"],
        use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True, initial_state=apart["ssm_state"],
        state_indices=given["state_indices"], cu_seqlens=given["query_start_loc"], state_v_first=True,
    )  # fmt: skip
    wanted = gdn.rms_norm_gated(o[0], given["z"], given["norm_weight"]).flatten(1)
    assert error(gdn.fused_gdn_prefill(**given), wanted, groups=1).within(4e-3)
    assert same_bits(given["conv_states"], apart["conv_states"])
    assert error(given["ssm_state"], apart["ssm_state"], groups=2).within(1e-5)
