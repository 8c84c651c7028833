"""The benchmark of dense attention of prefill, on a machine without a GPU."""

import pytest
import torch

from benchmarks import attention_prefill
from gdn.core.tunable import example
from tests.references import reference

CPU = torch.device("cpu")


def test_flops_count_visible_pairs() -> None:
    problem = example("attention_prefill", num_tokens=3, num_sequences=1, max_context_len=5)
    assert problem.flops() == 4 * 256 * 16 * (3 + 4 + 5)


def test_every_way_computes_the_same_attention() -> None:
    """Those that run on the CPU: the public call, and torch's where it does not refuse."""
    problem = example("attention_prefill", num_heads=4, num_kv_heads=2, head_dim=16, num_tokens=20, max_context_len=64)
    params = attention_prefill.arguments_of(problem, CPU)
    paged = (params.block_tables, params.query_start_loc, params.seq_lens)
    exact = reference.attention(params.q.double(), (params.k_cache.double(), params.v_cache.double()), *paged)
    named, ran = [], []
    for name, call in attention_prefill.ways(problem, params):
        named.append(name)
        try:
            out = call()
        except RuntimeError:
            continue
        torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)  # type: ignore[attr-defined]
        ran.append(name)
    torchs = [f"torch, {name}, causal_lower_right" for name in ("flash", "cudnn")]
    assert named == ["gdn.attention", "the kernel of decode", *torchs] and ran[:2] == named[:2]


def test_a_way_that_does_not_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise RuntimeError("no kernel\nand more")

    monkeypatch.setattr(attention_prefill, "ways", lambda *_: [("a", refused), ("b", lambda: None)])
    monkeypatch.setattr("gdn.testing.timing.time_us", lambda call: 2.0)
    first, second = attention_prefill.measure(CPU, ((20, 64),))
    assert first == "20 of 64, a: no kernel"
    assert isinstance(second, attention_prefill.Time) and (second.way, second.us) == ("b", 2.0)
