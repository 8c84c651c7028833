"""Other libraries' steps of a prefill step: what each computes, by stand-ins of the libraries; their sum; turns."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune import cases, shapes
from benchmarks import ops, peers, prefill_peers, report
from gdn.testing import timing
from tests.references import reference

CPU = torch.device("cpu")


def _conv(
    x: Any, weight: Any, bias: Any, initial_state: Any, output_final_state: bool, activation: str, cu_seqlens: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """FLA's: windows [N, D, W], of which the first column is one more than the filter looks back."""
    assert output_final_state and x.shape[0] == 1 and weight.is_contiguous() and initial_state.shape[2] == weight.shape[1]
    windows = initial_state[:, :, 1:].clone()
    rows = reference.causal_conv1d_fn(
        x[0], weight, bias, activation=activation, conv_states=windows, query_start_loc=cu_seqlens,
        cache_indices=torch.arange(len(windows)),
    )  # fmt: skip
    return rows[None], torch.nn.functional.pad(windows, (1, 0))


def _norm(x: Any, g: Any, weight: Any, bias: Any, activation: str, eps: float) -> torch.Tensor:
    assert bias is None and activation == "swish"
    return reference.rms_norm_gated(x, g, weight, eps)


def _infer(
    q: Any, k: Any, v: Any, alpha: Any, beta: Any, scale: float, pool: Any, final: bool, offsets: Any, *,
    use_qk_l2norm_in_kernel: bool, output_state: Any, use_cp: Any, state_indices: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """FlashInfer's on a pool: factors of the state, not their logarithms."""
    assert final and output_state is pool and all(x.is_contiguous() for x in (q, k, v, alpha, beta))
    if use_cp is False:
        raise ValueError("not on this device")
    o, _ = reference.chunk_gated_delta_rule(
        q[None], k[None], v[None], alpha.log()[None], beta[None], scale, pool, True, use_qk_l2norm_in_kernel, offsets,
        state_v_first=True, state_indices=state_indices,
    )  # fmt: skip
    return o[0], pool


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: dict[str, dict[str, Any]] = {
        "fla.modules.causal_conv1d": {"causal_conv1d": _conv},
        "fla.modules.norm.fused_norm_gate": {"rms_norm_gated": _norm},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": lambda *values, **named: None},
        "flashinfer.gdn_prefill": {"chunk_gated_delta_rule": _infer},
    }
    for name, functions in modules.items():
        stand_in: Any = SimpleNamespace(**functions)
        monkeypatch.setitem(sys.modules, name, stand_in)


def _given(seed: int = 3) -> tuple[Any, dict[str, Any]]:
    shape = cases.tunable("gdn_prefill").small(shapes.shapes("gdn_prefill", "8 x 1024")[0])
    arguments = cases.tunable("gdn_prefill").peer_arguments
    assert arguments is not None
    return shape.problem, arguments(shape, CPU, seed)


def _by_step(library: str, problem: Any, given: Any) -> dict[str, peers.Peer]:
    return {way.step: way for way in reversed(prefill_peers.ways(library, problem, given))}


@pytest.mark.usefixtures("libraries")
def test_the_steps_together_are_the_fused_operator() -> None:
    """Rows of the convolution, gates, chunk rule on the cleared pool and norm, each by its library, against the reference."""
    problem, given = _given()
    _, other = _given()
    expected = reference.fused_gdn_prefill(**{**other, "out": None})
    rows = prefill_peers.step_of(problem, given).rows
    convolved, windows = _by_step("FLA", problem, given)["conv"].call()
    keys = problem.num_k_heads * problem.head_k_dim
    torch.testing.assert_close(convolved[0], rows[:, :keys])
    final = other["conv_states"][other["state_indices"].long()]
    torch.testing.assert_close(windows[:, :, 1:], final[:, :keys])

    alpha, beta = _by_step("torch", problem, given)["gates"].call()
    gates = peers.operands(*prefill_peers.chunk_of(prefill_peers.step_of(problem, given)))
    torch.testing.assert_close(alpha, gates.g.exp())
    torch.testing.assert_close(beta, gates.beta)

    chunk = _by_step("FlashInfer", problem, given)["chunk"]
    initial, _ = _by_step("torch", problem, given)["pool"].call()  # clears what begins
    assert (initial[~given["has_initial_state"]] == 0).all() and (initial[given["has_initial_state"]] != 0).any()
    o, pool = chunk.call()
    torch.testing.assert_close(pool, other["ssm_state"])
    normed = reference.rms_norm_gated(o, given["z"], given["norm_weight"])
    torch.testing.assert_close(normed.flatten(1), expected, atol=0.03, rtol=0.03)  # o is rounded before the norm in both


@pytest.mark.usefixtures("libraries")
def test_the_norm_is_the_gated_one() -> None:
    problem, given = _given()
    found, _ = _by_step("FLA", problem, given)["norm"].call()
    values = prefill_peers.step_of(problem, given).rows[:, 2 * problem.num_k_heads * problem.head_k_dim :]
    o = values.unflatten(1, (problem.num_v_heads, -1))
    torch.testing.assert_close(found, reference.rms_norm_gated(o, given["z"], given["norm_weight"]))


@pytest.mark.usefixtures("libraries")
def test_every_step_has_a_library_and_a_refused_way_says_so() -> None:
    problem, given = _given()
    steps = {way.step for name in ("torch", "FLA", "FlashInfer") for way in prefill_peers.ways(name, problem, given)}
    assert steps == set(prefill_peers.STEPS)
    refused = prefill_peers.ways("FlashInfer", problem, given)[1]
    with pytest.raises(peers.Refused, match="not on this device"):
        refused.call()
    assert prefill_peers.ways("Nobody", problem, given) == []


def test_our_separate_operators_are_the_fused_one() -> None:
    problem, given = _given()
    _, other = _given()
    (way,) = prefill_peers.ways("gdn", problem, given)
    found, pool = way.call()
    expected = reference.fused_gdn_prefill(**{**other, "out": None})
    torch.testing.assert_close(found.flatten(1), expected)
    torch.testing.assert_close(pool, other["ssm_state"])
    assert torch.equal(given["conv_states"], other["conv_states"])


def _found(*rows: tuple[str, str, float]) -> dict[str, Any]:
    made = [peers.PeerRow("gdn_prefill", "a", library, "way", True, us, step) for library, step, us in rows]
    ours = peers.PeerRow("gdn_prefill", "a", "gdn", "separate operators", True, 300.0)
    return {"peers": [vars(one) for one in (*made, ours)]}


def test_the_peer_is_the_sum_of_the_fastest_steps() -> None:
    row = {"op": "gdn_prefill", "shape": "a"}
    steps = [("torch", "pool", 5.0), ("FLA", "conv", 120.0), ("torch", "gates", 10.0), ("FLA", "norm", 80.0)]
    found = _found(*steps, ("FLA", "chunk", 300.0), ("FlashInfer", "chunk", 160.0))
    assert report.best_peer(found, row, norm=True) == ("sum of steps", 375.0)
    assert report.best_peer(found, row, norm=False) is None
    assert report._peers(found, row) == (
        "sum of steps 375.0, pool: torch 5.0, conv: FLA 120.0, gates: torch 10.0, chunk: FlashInfer 160.0, norm: FLA 80.0,"
        " separate operators 300.0"
    )
    # Without one of the steps there is no sum.
    assert report.best_peer(_found(*steps), row, norm=True) is None


def test_turns() -> None:
    order: list[str] = []

    def sample(name: str, *values: float) -> Any:
        left = iter(values)

        def sampled() -> float:
            order.append(name)
            return next(left)

        return sampled

    first, second = timing.in_turns([sample("a", 1.0, 9.0, 2.0)], [sample("b", 5.0, 4.0, 6.0), sample("c", 0.0, 0.0, 1.0)])
    assert (first, second) == ([2.0], [5.0, 0.0]) and order == ["a", "b", "c"] * 3


def test_a_row_with_another_time_keeps_its_work() -> None:
    row = ops.Row("chunk", "a", "cute", {}, "table", 10.0, 9.0, 5.0, 300.0, 40.0, True, 0.0)
    found = ops.with_time(row, 20.0)
    assert (found.time_us, found.gbps, found.tflops, found.burst_us) == (20.0, 150.0, 20.0, 9.0)
