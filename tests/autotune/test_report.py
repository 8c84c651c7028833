"""The README's table, and what other libraries are called with."""

from pathlib import Path
from typing import Any

import pytest
import torch

from autotune import peers, report
from gdn import reference
from gdn.testing import inputs

PEERS = [
    {"shape": "a", "library": "FlashInfer", "variant": "", "norm": True, "time_us": 30.0},
    {"shape": "a", "library": "FLA", "variant": "", "norm": True, "time_us": 29.0},
    {"shape": "a", "library": "FlashInfer", "variant": "", "norm": False, "time_us": 20.0},
    {"shape": "b", "library": "FlashInfer", "variant": "", "norm": True, "time_us": 1.0},
]


def _row(op: str, shape: str, time_us: float) -> dict[str, Any]:
    numbers = {"time_us": time_us, "floor_us": 5.0, "share_of_floor": 5.0 / time_us, "error": 0.00123}
    return {"op": op, "shape": shape, "backend": "cute", **numbers}


FOUND = {
    "device": "some GPU",
    "date": "2026-01-02",
    "torch": "2.11",
    "limits": {"copy_gbps": 3000.0, "bf16_tflops": 700.0, "fp8_tflops": 1400.0},
    "rows": [_row("chunk", "a", 10.0), _row("chunk", "c", 1.5), _row("recurrent", "a", 10.0)],
    "peers": PEERS,
}


def test_a_row_shows_time_floor_error_and_the_fastest_peer() -> None:
    lines = report.markdown(FOUND).splitlines()
    assert "some GPU" in lines[0] and "2026-01-02" in lines[0] and "3.00 TB/s" in lines[0]
    assert lines[4] == "| chunk | a | CuTe | 10.0 | 5.0 | 50% | 1.2e-03 | FLA 29.0, FlashInfer 20.0 without the norm |"
    assert lines[5] == "|  | c | CuTe | 1.50 | 5.0 | 333% | 1.2e-03 |  |"
    assert lines[6].startswith("| recurrent | a |") and "FLA" not in lines[6]


def test_the_table_replaces_what_stands_between_the_marks(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("before\n<!-- measured -->\nold \\1\n<!-- /measured -->\nafter\n")
    report.write_into(path, "new \\1\n")
    assert path.read_text() == "before\n<!-- measured -->\nnew \\1\n<!-- /measured -->\nafter\n"
    path.write_text("no marks")
    with pytest.raises(ValueError, match="expected one <!-- measured -->"):
        report.write_into(path, "new")
    assert path.read_text() == "no marks"


def test_the_readme_has_the_marks(tmp_path: Path) -> None:
    copy = tmp_path / "README.md"
    copy.write_text((Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8"), encoding="utf-8")
    report.write_into(copy, report.markdown(FOUND))
    assert "some GPU" in copy.read_text(encoding="utf-8")


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("v_first", [False, True])
def test_peers_compute_the_same_thing(raw: bool, v_first: bool) -> None:
    """Their operands, put through the reference, give what our own arguments give."""
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
