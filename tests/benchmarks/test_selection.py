"""The share of a selection that other scores find, on a machine without a GPU."""

import pytest
import torch
from typer.testing import CliRunner

import gdn
from benchmarks import cli, selection
from benchmarks.selection import BF16, BF16_OUT, FP8, FP8_EXACT

CPU = torch.device("cpu")
SMALL = ["selection", "--keys", "512", "--topk", "256", "--rows", "24"]


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_share_counts_the_expected_entries_in_any_order() -> None:
    expected = torch.tensor([[0, 3, 4, 7], [1, 2, -1, -1]])
    found = torch.tensor([[7, 0, 1, 2], [5, 2, -1, -1]], dtype=torch.int32)
    assert selection.share(expected, expected, keys=8) == 1.0
    assert selection.share(found, expected, keys=8) == pytest.approx(3 / 6)
    assert selection.share(torch.full_like(found, -1), expected, keys=8) == 0.0


def test_finer_scores_find_more() -> None:
    shares = selection.measure(512, rows=48, topk=128, device=CPU).shares
    assert 0.99 < shares[BF16] < 1.0 and 0.99 < shares[BF16_OUT] < 1.0
    assert 0.95 < shares[FP8] < shares[BF16]
    assert shares[FP8] == pytest.approx(shares[FP8_EXACT], abs=1e-3)  # the reference sums in float32 too


def test_the_precision_of_products_is_put_back() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        selection.measure(64, rows=2, topk=16, device=CPU)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_command_prints_the_shares_by_length() -> None:
    done = CliRunner().invoke(cli.app, [*SMALL, "--keys", "640"])
    assert done.exit_code == 0, done.output
    rows = {line.split()[0]: line.split()[1:] for line in done.output.splitlines() if "%" in line}
    assert rows["at"] == ["least", "99.5%", "97.0%"]
    assert len(rows["512"]) == len(rows["640"]) == 4 and rows["512"] != rows["640"]


@pytest.mark.parametrize("spoiled", [torch.bfloat16, torch.float8_e4m3fn])
def test_the_command_fails_below_the_demanded_share(spoiled: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = gdn.mqa_logits

    def wrong(q: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        scores = logits(q, *args, **options)  # type: ignore[arg-type]
        return scores.roll(1, dims=-1) if q.dtype == spoiled else scores

    monkeypatch.setattr(gdn, "mqa_logits", wrong)
    done = CliRunner().invoke(cli.app, SMALL)
    assert done.exit_code == 1 and "512" in done.output
