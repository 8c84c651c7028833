"""Strong decays, down to g = -inf: chunk form, recurrence and decode step against the float64 token recurrence."""

from typing import Any

import pytest
import torch

from gdn.ops.delta_rule.inputs import chunk_inputs, chunk_problem, recurrent_inputs, recurrent_problem
from gdn.ops.delta_rule.oracle import oracle_delta_rule, oracle_of
from gdn.testing.compare import error
from tests.reference.calls import copied
from tests.reference.test_delta_rule import EXACT, F64, SINGLE, check, check_pool
from tests.references import reference

STRENGTHS = [-1e3, -1e4, -1e6, -torch.inf]
PATTERNS = ["every token", "one token", "first token", "last token", "every third", "one head", "growing"]
FORMS: dict[str, tuple[dict[str, str], float]] = {
    "float64": (F64, EXACT),
    "float32": ({}, SINGLE),
}
LENGTHS = [1, 64, 65, 130]


def with_decays(g: torch.Tensor, strength: float, pattern: str) -> torch.Tensor:
    """g [1, T, heads], its ordinary decays replaced by `strength` where the pattern says."""
    g = g.clone()
    tokens = torch.arange(g.shape[1])
    if pattern == "every token":
        g[:] = strength
    elif pattern == "one token":
        g[:, tokens % 64 == 20] = strength
    elif pattern == "first token":
        g[:, tokens % 65 == 0] = strength
    elif pattern == "last token":
        g[:, tokens % 64 == 63] = strength
    elif pattern == "every third":
        g[:, tokens % 3 == 1] = strength
    elif pattern == "one head":
        g[:, 5::7, 1] = strength
    else:  # from ordinary decays to `strength`, so that sums of every size are in one chunk
        finite = max(strength, -1e30)
        g *= (tokens / len(tokens) * torch.tensor(abs(finite)).log()).exp()[:, None].to(g.dtype)
        g[:, 100:101] = strength
    return g


@pytest.mark.parametrize("dtype", FORMS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("strength", STRENGTHS)
def test_chunk_and_recurrent(strength: float, pattern: str, dtype: str) -> None:
    """Outputs and final states."""
    fields, tolerance = FORMS[dtype]
    arguments = chunk_inputs(chunk_problem(**fields), lengths=LENGTHS)
    arguments["g"] = with_decays(arguments["g"], strength, pattern)
    expected = oracle_of(arguments)
    recurrent = {name: value for name, value in arguments.items() if name != "output_final_state"}
    for o, state in (reference.chunk_gated_delta_rule(**arguments), reference.fused_recurrent_gated_delta_rule(**recurrent)):
        assert state is not None and expected.state is not None
        check(o, state, expected, tolerance)


@pytest.mark.parametrize("pattern", ["every token", "one token", "growing"])
@pytest.mark.parametrize("strength", STRENGTHS)
def test_pool_and_checkpoints(strength: float, pattern: str) -> None:
    problem = chunk_problem(index_dtype="int32", has_checkpoints=True, state_v_first=True)
    arguments = chunk_inputs(problem, lengths=[150, 64, 200])
    arguments["g"] = with_decays(arguments["g"], strength, pattern)
    before, expected = copied(arguments)["initial_state"], oracle_of(arguments)
    _, pool = reference.chunk_gated_delta_rule(**arguments)
    assert len(expected.written_slots) == 8  # three states, and the checkpoints after 64 and 128, 64, 64 and 192 tokens
    check_pool(pool, before, expected, SINGLE)


@pytest.mark.parametrize("strength", STRENGTHS)
def test_speculative_recurrent(strength: float) -> None:
    problem = recurrent_problem(index_dtype="int32", write_every_token=True, has_accepted=True)
    arguments = recurrent_inputs(problem, lengths=[4, 1, 3])
    arguments["g"] = with_decays(arguments["g"], strength, "every third")
    before, expected = copied(arguments)["initial_state"], oracle_of(arguments)
    o, pool = reference.fused_recurrent_gated_delta_rule(**arguments)
    check(o, None, expected, SINGLE)
    check_pool(pool, before, expected, SINGLE)


@pytest.mark.parametrize("strength", STRENGTHS)
def test_raw_gates(strength: float) -> None:
    """softplus(a) is a where a is large: the gate inside the operator reaches every strength, -inf with a = inf."""
    arguments = chunk_inputs(chunk_problem(use_gate=True), lengths=[130, 3])
    arguments["A_log"], arguments["dt_bias"] = torch.zeros(4), torch.zeros(4)
    raw = arguments["g"]
    raw[:, 20::50] = -strength
    expected = oracle_of(arguments)
    o, state = reference.chunk_gated_delta_rule(**arguments)
    assert state is not None and expected.state is not None
    check(o, state, expected, SINGLE)


@pytest.mark.parametrize("strength", STRENGTHS)
def test_decode_step(strength: float) -> None:
    """Every other head forgets everything; the others keep their decay. States against the token recurrence."""
    heads, value_heads, k_dim, v_dim, tokens = 2, 4, 8, 8, 3
    channels = 2 * heads * k_dim + value_heads * v_dim

    def randn(*shape: int, seed: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    a = randn(tokens, value_heads, seed=0)
    a[:, ::2] = -strength
    b, mixed = randn(tokens, value_heads, seed=1), randn(tokens, channels, seed=2)
    conv_state, weight = torch.zeros(5, channels, 1, dtype=torch.float64), torch.zeros(channels, 2, dtype=torch.float64)
    weight[:, -1] = 1.0  # the convolution passes its input on
    pool, slots = randn(5, value_heads, k_dim, v_dim, seed=3), torch.tensor([3, 0, 4])
    zeros = torch.zeros(value_heads, dtype=torch.float64)
    z = torch.full((tokens, value_heads, v_dim), 40.0, dtype=torch.float64)  # its sigmoid is 1
    q, k, v = mixed.split([heads * k_dim, heads * k_dim, value_heads * v_dim], dim=1)
    arguments: dict[str, Any] = {
        "q": q.reshape(1, tokens, heads, k_dim), "k": k.reshape(1, tokens, heads, k_dim),
        "v": v.reshape(1, tokens, value_heads, v_dim), "g": a[None], "beta": b[None], "initial_state": pool,
        "cu_seqlens": torch.arange(tokens + 1), "state_indices": slots, "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True, "A_log": zeros, "use_beta_sigmoid_in_kernel": True,
    }  # fmt: skip
    expected = oracle_delta_rule(**arguments)
    got = reference.fused_gdn_decode(
        mixed, z, b, a, conv_state, weight, zeros, zeros, torch.ones(v_dim, dtype=torch.float64), pool, slots,
        activation=None, gate_activation="sigmoid", num_k_heads=heads, head_k_dim=k_dim, head_v_dim=v_dim,
    )  # fmt: skip
    o = expected.o[0]
    normed = o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert error(got.view(tokens, value_heads, v_dim), normed, groups=2).within(1e-11)
    assert expected.state is not None
    assert error(pool, expected.state, groups=2).within(1e-11)
