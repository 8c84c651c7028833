"""Adapters of host libraries on the GPU: the kernels behind the hosts' signatures, against the float64 oracles."""

from typing import Any

import pytest
import torch

from gdn.integrations import Refused, deepgemm, fla, flashinfer
from gdn.ops.delta_rule.oracle import oracle_delta_rule
from gdn.ops.indexer.inputs import make_mqa_inputs
from gdn.ops.indexer.oracle import exact_mqa_logits, logits_error
from gdn.ops.indexer.problem import MqaLogitsProblem

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device")]

HEADS, DIM, TOKENS = 4, 128, 200
TOLERANCE = 2e-2  # of the largest value, bfloat16 tokens


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    expected = expected.reshape(got.shape)
    assert (got.double() - expected).abs().max() <= TOLERANCE * expected.abs().max()


def rows(batch: int, tokens: int) -> dict[str, Any]:
    """q, k, v, log decay, write strength and K-first states, bfloat16 tokens."""
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    q, k, v = (randn(batch, tokens, heads, DIM).bfloat16() for heads in (HEADS // 2, HEADS // 2, HEADS))
    g, beta = -randn(batch, tokens, HEADS).abs() * 0.1, randn(batch, tokens, HEADS).sigmoid()
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": randn(batch, HEADS, DIM, DIM)}


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_fla(name: str) -> None:
    given = rows(2, TOKENS if name.startswith("chunk") else 3)
    expected = oracle_delta_rule(**given, use_qk_l2norm_in_kernel=True)
    o, state = getattr(fla, name)(**given, output_final_state=True, use_qk_l2norm_in_kernel=True)
    close(o, expected.o)
    close(state, expected.state)


def test_flashinfer_prefill_with_a_decay_of_zero() -> None:
    given = rows(1, TOKENS)
    given["g"][0, 70] = -torch.inf
    offsets = torch.tensor([0, 130, TOKENS], device="cuda", dtype=torch.int32)
    pool = torch.randn(5, HEADS, DIM, DIM, device="cuda")
    slots = torch.tensor([3, 1], device="cuda")
    form = {**given, "initial_state": pool, "cu_seqlens": offsets}
    expected = oracle_delta_rule(**form, state_indices=slots, state_v_first=True, use_qk_l2norm_in_kernel=True)
    heads = {name: given[name][0] for name in ("q", "k", "v", "beta")} | {"g": given["g"][0].exp()}
    more = {"initial_state": pool, "output_state": pool, "cu_seqlens": offsets, "state_indices": slots}
    o, state = flashinfer.chunk_gated_delta_rule(**heads, **more, output_final_state=True, use_qk_l2norm_in_kernel=True)
    close(o, expected.o)
    assert state is pool
    close(pool, expected.state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flashinfer_checkpoints(dtype: torch.dtype) -> None:
    """After every 64 tokens of two sequences, into rows from 1 on."""
    given, lengths = rows(1, TOKENS), (130, TOKENS - 130)
    offsets = torch.tensor([0, lengths[0], TOKENS], device="cuda", dtype=torch.int32)
    states, starts = torch.randn(2, HEADS, DIM, DIM, device="cuda"), torch.tensor([1, 3, 4], device="cuda", dtype=torch.int32)
    asked = {
        "checkpoint_offsets": torch.tensor([[64, 128], [64, 0]], device="cuda"),
        "checkpoint_slots": torch.tensor([[3, 4], [5, -1]], device="cuda"),
    }
    form = {**given, **asked, "initial_state": torch.cat([states, torch.zeros(4, HEADS, DIM, DIM, device="cuda")])}
    slots = torch.tensor([0, 1], device="cuda")
    more = {"cu_seqlens": offsets, "state_v_first": True, "use_qk_l2norm_in_kernel": True}
    expected = oracle_delta_rule(**form, **more, state_indices=slots)
    kept = torch.full((5, HEADS, DIM, DIM), 7.0, device="cuda", dtype=dtype)
    heads = {name: given[name][0] for name in ("q", "k", "v", "beta")} | {"g": given["g"][0].exp()}
    o, final = flashinfer.chunk_gated_delta_rule(
        **heads, initial_state=states, output_final_state=True, cu_seqlens=offsets, use_qk_l2norm_in_kernel=True,
        state_checkpoints=kept, checkpoint_cu_starts=starts, checkpoint_every_n_tokens=64,
    )  # fmt: skip
    close(o, expected.o)
    close(final, expected.state[:2])
    close(kept[1:4], expected.state[3:])
    assert (kept[[0, 4]] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flashinfer_buffer_of_states(dtype: torch.dtype) -> None:
    given, pool = rows(3, 4), torch.randn(8, HEADS, DIM, DIM, device="cuda")
    gates = {"A_log": torch.randn(HEADS, device="cuda"), "dt_bias": torch.randn(HEADS, device="cuda")}
    a, b = torch.randn(2, 3, 4, HEADS, device="cuda").bfloat16().unbind()
    read, before = torch.tensor([5, -1, 2], device="cuda"), pool.clone()
    tokens = {name: given[name] for name in ("q", "k", "v")}
    expected = oracle_delta_rule(
        **tokens, **gates, g=a, beta=b, initial_state=torch.cat([pool, torch.zeros(12, HEADS, DIM, DIM, device="cuda")]),
        state_v_first=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True,
        ssm_state_indices=read[:, None].expand(-1, 4), final_state_indices=8 + torch.arange(12, device="cuda").view(3, 4),
    )  # fmt: skip
    buffer = torch.full((3, 4, HEADS, DIM, DIM), 7.0, device="cuda", dtype=dtype)
    more = {"initial_state": pool, "initial_state_indices": read, "disable_state_update": True}
    o, _ = flashinfer.gated_delta_rule_mtp(**tokens, **gates, a=a, b=b, **more, intermediate_states_buffer=buffer)
    close(o, expected.o)
    assert torch.equal(pool, before) and (buffer[1] == 7).all()
    close(buffer[[0, 2]], expected.state[8:].unflatten(0, (3, 4))[[0, 2]])


def test_flashinfer_drafts() -> None:
    given = rows(3, 4)
    pool = torch.randn(16, HEADS, DIM, DIM, device="cuda")
    gates = {"A_log": torch.randn(HEADS, device="cuda"), "dt_bias": torch.randn(HEADS, device="cuda")}
    a, b = torch.randn(2, 3, 4, HEADS, device="cuda").bfloat16().unbind()
    read, written = torch.tensor([5, -1, 2], device="cuda"), torch.arange(4, 16, device="cuda", dtype=torch.int32).view(3, 4)
    tokens = {name: given[name] for name in ("q", "k", "v")}
    expected = oracle_delta_rule(
        **tokens, **gates, g=a, beta=b, initial_state=pool, state_v_first=True, use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True, ssm_state_indices=read[:, None].expand(-1, 4),
        final_state_indices=written,
    )  # fmt: skip
    more = {"initial_state": pool, "initial_state_indices": read, "ssm_state_indices": written, "disable_state_update": False}
    o, _ = flashinfer.gated_delta_rule_mtp(**tokens, **gates, a=a, b=b, **more)
    close(o, expected.o)
    close(pool, expected.state)


def test_deepgemm() -> None:
    problem = MqaLogitsProblem(
        num_heads=16, num_kv_heads=1, head_dim=128, dtype="float8_e4m3fn", has_k_scale=True, weights_dtype="float32", relu=True,
        clean=True, out_dtype="float32", packed=False, num_queries=130, num_keys=300, num_columns=300,
    )  # fmt: skip
    inputs = make_mqa_inputs(problem, "cuda")
    assert inputs.k_scale is not None and inputs.weights is not None
    ends = {"cu_seq_len_k_start": inputs.cu_seqlen_ks, "cu_seq_len_k_end": inputs.cu_seqlen_ke}
    kv = (inputs.k[:, 0], inputs.k_scale[:, 0])
    got = deepgemm.fp8_fp4_mqa_logits(q=(inputs.q, None), kv=kv, weights=inputs.weights, **ends)
    assert logits_error(got, exact_mqa_logits(inputs), fp8=True) is None


def test_wide_tokens_are_refused() -> None:
    given = {name: value.float() for name, value in rows(1, 3).items()}
    with pytest.raises(Refused, match="the tokens are float32, which has no kernel"):
        fla.chunk_gated_delta_rule(**given)
