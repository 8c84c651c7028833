"""Torch's dense attention as a peer of sparse prefill: what it computes, and what happens with backends that refuse."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from autotune import cases, shapes
from benchmarks import dense_attention, ops, peers, report
from gdn.device import H100
from tests.autotune.fake_device import FakeDevice
from tests.references import reference

CPU = torch.device("cpu")
OP = "sparse_attention_prefill"
FULL = shapes.shapes(OP)[0]


def _shape(**sizes: int) -> shapes.Shape:
    small = cases.tunable(OP).small(FULL)
    problem: Any = small.problem
    return replace(small, problem=replace(problem, num_heads=8, **sizes), positions="random")


def _arguments(shape: shapes.Shape) -> dict[str, Any]:
    make = cases.tunable(OP).peer_arguments
    assert make is not None
    return make(shape, CPU, 1)


@pytest.mark.parametrize("sequences", [1, 2])
def test_every_way_attends_to_all_positions_up_to_the_own(sequences: int) -> None:
    arguments = _arguments(_shape(num_tokens=20 * sequences, num_sequences=sequences))
    paged = (arguments["block_tables"], arguments["query_start_loc"], arguments["seq_lens"])
    exact = reference.attention(arguments["q"].double(), tuple(x.double() for x in arguments["kv_cache"]), *paged)
    ran = []
    for name, call in dense_attention.ways(arguments):
        try:
            found = call()
        except RuntimeError:
            continue
        ran.append(name)
        torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=2e-2)
    masks = ("causal_lower_right", "explicit mask")
    assert set(ran) >= {f"math, {mask}{heads}" for mask in masks for heads in ("", ", repeated heads")}


def test_keys_and_values_are_contiguous_and_made_beforehand() -> None:
    arguments = _arguments(_shape())
    q, keys, values = dense_attention.operands(arguments)
    assert q.shape == (1, 8, 20, 16) and keys.shape == values.shape == (1, 2, 64, 16)
    assert all(x.is_contiguous() for x in (q, keys, values))
    position = 37
    block = arguments["block_tables"][0, position // 16]
    assert torch.equal(keys[0, 1, position], arguments["kv_cache"][0][block, position % 16, 1])


def test_sequences_of_two_lengths_are_refused() -> None:
    arguments = _arguments(_shape(num_tokens=40, num_sequences=2))
    arguments["seq_lens"][1] -= 1
    with pytest.raises(ValueError, match="seq_lens: expected sequences of one length"):
        dense_attention.operands(arguments)


def test_backends_that_refuse_are_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals are no failures of the run; the other ways of the same library are timed."""
    device = FakeDevice(monkeypatch)
    pass_time = device.call(20_000.0)  # few samples: it runs for real each time
    true = dense_attention.scaled_dot_product_attention

    def timed(*args: Any, **kwargs: Any) -> torch.Tensor:
        pass_time()
        return true(*args, **kwargs)

    monkeypatch.setattr(dense_attention, "scaled_dot_product_attention", timed)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr(ops.torch, "device", lambda *_: CPU)
    shape = _shape()
    rows, failures, refused, _ = ops.measure_peers(shape, ["torch"], H100)
    assert not failures
    assert {row.variant.split(", ")[0] for row in rows} >= {"math"} and len(rows) + len(refused) == 16
    assert any(why.startswith("torch cudnn, explicit mask: RuntimeError: ") for why in refused)
    assert all(row.library == "torch" and row.norm and row.time_us in (20_000, 40_000) for row in rows)


def test_tables_name_the_backend() -> None:
    row = {"op": OP, "shape": "a"}
    of_torch = [
        peers.PeerRow(OP, "a", "torch", variant, True, us) for variant, us in (("flash, mask", 9.0), ("cudnn, mask", 8.0))
    ]
    found = {"peers": [vars(one) for one in of_torch]}
    assert report.best_peer(found, row, norm=True) == ("torch (cudnn mask)", 8.0)
