"""Tables of MEASURED.md, their plot, and the arguments of other libraries."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib import pyplot

from autotune import shapes
from autotune.shapes import Shape
from benchmarks import ops, peers, plot, report
from gdn.ops.delta_rule import inputs
from gdn.ops.delta_rule.problem import RecurrentProblem
from gdn.runtime import tuned
from tests.references import reference

PEERS = [
    {"op": "chunk", "shape": "a", "library": "FlashInfer", "variant": "", "norm": True, "time_us": 30.0},
    {"op": "chunk", "shape": "a", "library": "FLA", "variant": "", "norm": True, "time_us": 29.0},
    {"op": "chunk", "shape": "a", "library": "FlashInfer", "variant": "", "norm": False, "time_us": 20.0},
    {"op": "chunk", "shape": "b", "library": "FlashInfer", "variant": "", "norm": True, "time_us": 1.0},
    {"op": "recurrent", "shape": "d", "library": "FlashInfer", "variant": "", "norm": True, "time_us": 3.0},
]


def _row(op: str, shape: str, time_us: float) -> dict[str, Any]:
    numbers = {"time_us": time_us, "burst_us": 0.9 * time_us, "floor_us": 5.0, "share_of_floor": 5.0 / time_us, "error": 0.00123}
    return {"op": op, "shape": shape, "backend": "cute", **numbers}


FOUND = {
    "device": "some GPU",
    "date": "2026-01-02",
    "torch": "2.11",
    "limits": {"copy_gbps": 3000.0, "bf16_tflops": 700.0, "fp8_tflops": 1400.0},
    "rows": [_row("chunk", "a", 10.0), _row("chunk", "c", 1.5), _row("recurrent", "a", 10.0), _row("recurrent", "d", 2.5)],
    "peers": PEERS,
}


def test_a_row_shows_time_floor_error_and_the_fastest_peer() -> None:
    tables = report.markdown(FOUND)
    assert list(tables) == ["chunk", "recurrent"]
    lines = tables["chunk"].splitlines()
    assert all(text in lines[0] for text in ("**chunk**", "some GPU", "2026-01-02", "3.00 TB/s"))
    assert lines[2].count("|") == lines[3].count("|") == lines[4].count("|")
    assert lines[4] == "| a | CuTe | 10.0 | 9.0 | 5.0 | 50% | 1.2e-03 | FLA 29.0, FlashInfer 20.0 without the norm |"
    assert lines[5] == "| c | CuTe | 1.50 | 1.35 | 5.0 | 333% | 1.2e-03 |  |"
    lines = tables["recurrent"].splitlines()
    assert lines[4].startswith("| a |") and "FLA" not in lines[4]
    assert lines[5].endswith("| FlashInfer 3.0 |")


def test_a_table_replaces_the_one_between_its_marks(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    other = "<!-- measured recurrent -->\nkept\n<!-- /measured recurrent -->\nafter\n"
    path.write_text("before\n<!-- measured chunk -->\nold \\1\n<!-- /measured chunk -->\n" + other)
    report.write_into(path, {"chunk": "new \\1\n"})
    assert path.read_text() == "before\n<!-- measured chunk -->\nnew \\1\n<!-- /measured chunk -->\n" + other
    report.write_into(path, {"topk": "a table of its own\n"})
    assert path.read_text().endswith("after\n\n<!-- measured topk -->\na table of its own\n<!-- /measured topk -->\n")


@pytest.mark.parametrize("text", ["<!-- measured chunk -->\n", "<!-- measured chunk --><!-- /measured chunk -->\n" * 2])
def test_marks_without_a_partner_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(text)
    with pytest.raises(ValueError, match="expected one <!-- measured chunk --> followed by one <!-- /measured chunk -->"):
        report.write_into(path, {"recurrent": "newer\n", "chunk": "new\n"})
    assert path.read_text() == text


def test_a_table_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "h100" / "MEASURED.md"
    path.parent.mkdir()
    report.write_into(path, report.markdown(FOUND))
    found = report.read(path)
    assert list(found) == ["chunk", "recurrent"]
    first, second = found["chunk"]
    assert (first.shape, first.time_us, first.floor_us, first.peer, first.peer_us) == ("a", 10.0, 5.0, "FLA", 29.0)
    assert second.peer == "" and math.isnan(second.peer_us)


MEASURED = {path.parent.name: path for path in sorted(tuned.SHIPPED.glob("*/MEASURED.md"))}


@pytest.mark.parametrize("op", shapes.operators())
def test_every_shape_is_in_a_shipped_table(op: str) -> None:
    """Each operator's shapes are in the tables of all devices together, in order in each: a later one may be of one device."""
    known = [shape.name for shape in shapes.shapes(op)]
    tables = {device: [row.shape for row in report.read(path).get(op, [])] for device, path in MEASURED.items()}
    assert {name for rows in tables.values() for name in rows} == set(known)
    for device, rows in tables.items():
        assert rows == [name for name in known if name in rows], device


@pytest.mark.parametrize("device", list(MEASURED))
def test_the_plot_of_the_shipped_tables(device: str, tmp_path: Path) -> None:
    """The picture next to a MEASURED.md is the plot of its tables."""
    measured = MEASURED[device]
    plot.draw(measured, tmp_path / "again.png")
    first, again = (pyplot.imread(path) for path in (measured.with_suffix(".png"), tmp_path / "again.png"))
    assert first.shape[2] == again.shape[2] == 4 and abs(first.shape[0] - again.shape[0]) < 30


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("v_first", [False, True])
def test_peers_compute_the_same_thing(raw: bool, v_first: bool) -> None:
    """Operands of peers, put through the reference, give what our own arguments give."""
    problem = inputs.chunk_problem(
        use_gate=raw, use_beta_sigmoid=raw, state_v_first=v_first, index_dtype="int32", has_mask=True, num_tokens=90
    )
    arguments = inputs.chunk_inputs(problem, "cpu", 3, lengths=[50, 0, 7, 33], strided=True)
    pool = arguments["initial_state"].clone()
    expected, _ = reference.chunk_gated_delta_rule(**arguments | {"initial_state": pool})
    x = peers.operands(problem, arguments)
    assert all(tensor.is_contiguous() for tensor in (x.q, x.k, x.v, x.g, x.beta, x.state))
    found, final = reference.chunk_gated_delta_rule(
        x.q[None], x.k[None], x.v[None], x.g[None], x.beta[None], scale=x.scale, initial_state=x.state, state_v_first=True,
        output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=x.cu_seqlens,
    )  # fmt: skip
    torch.testing.assert_close(found, expected)
    assert final is not None
    after = pool[arguments["state_indices"].long()]
    live = [0, 2, 3]  # an empty sequence leaves its slot alone
    torch.testing.assert_close(final[live], (after if v_first else after.transpose(-1, -2))[live])


class _FlashInfer:
    """FlashInfer's decode module, by the reference: what its two functions are documented to read and write."""

    @staticmethod
    def gated_delta_rule_decode_pretranspose(
        q: Any, k: Any, v: Any, state: None, A_log: Any, a: Any, dt_bias: Any, b: Any, scale: float, output: Any,
        use_qk_l2norm: bool, initial_state: Any, initial_state_indices: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        assert state is None and q.shape[1] == 1
        o, pool = reference.fused_recurrent_gated_delta_rule(
            q, k, v, a, b, scale, initial_state[initial_state_indices.long()], use_qk_l2norm_in_kernel=use_qk_l2norm,
            state_v_first=True, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias, use_beta_sigmoid_in_kernel=True,
        )  # fmt: skip
        initial_state[initial_state_indices.long()] = pool.to(initial_state.dtype)
        return output.copy_(o), initial_state

    @staticmethod
    def gated_delta_rule_mtp(
        q: Any, k: Any, v: Any, a: Any, b: Any, A_log: Any, dt_bias: Any, scale: float, output: Any, use_qk_l2norm: bool,
        initial_state: Any, initial_state_indices: Any, ssm_state_indices: Any, disable_state_update: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        assert ssm_state_indices.shape == q.shape[:2] and not disable_state_update and initial_state.dtype == torch.float32
        state = initial_state[initial_state_indices.long()]
        for token in range(q.shape[1]):
            o, state = reference.fused_recurrent_gated_delta_rule(
                *(x[:, token : token + 1] for x in (q, k, v, a, b)), scale, state, use_qk_l2norm_in_kernel=use_qk_l2norm,
                state_v_first=True, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias, use_beta_sigmoid_in_kernel=True,
            )  # fmt: skip
            initial_state[ssm_state_indices[:, token].long()] = state
            output[:, token : token + 1] = o
        return output, initial_state


@pytest.mark.parametrize(("tokens", "state_dtype"), [(1, "float32"), (1, "bfloat16"), (4, "float32")])
def test_decode_peers_compute_the_same_thing(tokens: int, state_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer.gdn_decode", _FlashInfer)
    monkeypatch.setitem(sys.modules, "flashinfer", _FlashInfer)
    problem = _decode_problem(tokens, state_dtype)
    ours, theirs = (inputs.recurrent_inputs(problem, "cpu", 3) for _ in range(2))
    expected, pool = reference.fused_recurrent_gated_delta_rule(**ours)
    (way,) = peers.ways("FlashInfer", problem, theirs)
    found, after = way.call()
    torch.testing.assert_close(found.flatten(0, 1), expected[0])
    torch.testing.assert_close(after, pool, equal_nan=True)


def test_decode_peers_are_given_as_many_sets_of_inputs_as_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer.gdn_decode", _FlashInfer)
    monkeypatch.setitem(sys.modules, "flashinfer", _FlashInfer)
    shape = Shape("3 x 4", _decode_problem(4, "float32"), lengths=(4, 4, 4))
    ways_of = ops._ways(shape, 2, torch.device("cpu"))
    ((first, second),) = ways_of("FlashInfer")
    assert first.norm and first.captured and not torch.equal(first.call()[0], second.call()[0])
    assert ways_of("FLA") == []


def test_decode_peers_are_left_out_where_they_do_something_else() -> None:
    for problem in (_decode_problem(4, "bfloat16"), _decode_problem(1, "float32", use_gate=False)):
        assert peers.ways("FlashInfer", problem, {}) == []
    assert peers.ways("FLA", _decode_problem(1, "float32"), {}) == []


def _decode_problem(tokens: int, state_dtype: str, **changes: Any) -> RecurrentProblem:
    fields: dict[str, Any] = {
        "dtype": "bfloat16", "gate_dtype": "bfloat16", "beta_dtype": "bfloat16", "use_gate": True, "use_beta_sigmoid": True,
        "state_v_first": True, "index_dtype": "int32", "state_dtype": state_dtype, "num_sequences": 3, "num_tokens": 3 * tokens,
        "write_every_token": tokens > 1, "has_accepted": tokens > 1,
    }  # fmt: skip
    return inputs.recurrent_problem(**fields | changes)
