"""The measurement of decode with a ring, without a device: counts that follow from each other, calls that are the same step."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import replay_decode, replay_peers
from benchmarks.replay_decode import Form, form_of, period
from gdn.core import tunable as base
from gdn.device import H100
from gdn.ops.delta_rule.problem import state_position
from gdn.testing import timing

CPU = torch.device("cpu")


@pytest.mark.parametrize(("tokens", "fold_every"), [(1, 15), (1, 11), (4, 15), (4, 12)])
def test_a_period_is_one_run_of_each_sequence(tokens: int, fold_every: int) -> None:
    counts = period(fold_every, tokens, fold_every, CPU)
    for before, after in zip(counts, counts[1:], strict=False):
        assert torch.equal(after.computed - after.accepted, before.computed)
    accepted = torch.stack([one.accepted for one in counts]).float()
    assert accepted.min() >= 1 and accepted.max() <= tokens
    assert abs(accepted.mean() - (1 + 0.6 * (tokens - 1))) < 0.03
    folds = torch.tensor([[_folds(p, a, fold_every) for p, a in _rows(one)] for one in counts]).float()
    # A fold in fold_every tokens, as many in one call as in another.
    assert abs(folds.mean() * fold_every - accepted.mean()) < 0.25
    assert folds.mean(1).max() - folds.mean(1).min() <= 0.2


def _rows(counts: replay_decode.Counts) -> list[list[int]]:
    return torch.stack([counts.computed, counts.accepted], 1).tolist()


def _folds(computed: int, accepted: int, fold_every: int) -> bool:
    return state_position(0, computed, fold_every, 0) > state_position(0, computed - accepted, fold_every, 0)


@pytest.mark.parametrize("tokens", [1, 4])
def test_all_sequences_fold_in_the_first_call(tokens: int) -> None:
    first = period(7, tokens, 15, CPU, spread=False)[0]
    assert all(_folds(p, a, 15) for p, a in _rows(first))


def test_cursors_are_what_the_cache_allows() -> None:
    for (base_row, length), (next_row, next_length) in zip(cursors := replay_peers.cursors(40, 15), cursors[1:], strict=False):
        assert int(length.max()) <= 16 and int(length.min()) >= 0
        writes = length >= replay_peers._FLUSH
        assert torch.equal(next_row, torch.where(writes, (base_row + length) % 32, base_row))
        accepted = next_length - torch.where(writes, 0, length)
        assert int(accepted.min()) >= 1 and int(accepted.max()) <= 4


def small(op: str, drafts: int) -> Form:
    form = form_of(op, (2, 4), 3, "float32", drafts)
    heads = {"num_q_heads": 2} if op == "recurrent" else {}
    sizes = {"num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 16, "head_v_dim": 16}
    return dataclasses.replace(form, shape=base.resized(form.shape, form.shape.lengths, **sizes, **heads))


@pytest.mark.parametrize("op", ["gdn_decode", "recurrent"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_calls_with_a_ring_start_from_the_same_inputs(op: str, drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "copies_beyond_l2", lambda *_: 2)
    form = small(op, drafts)
    plain, ring = replay_decode.calls_of(form, "reference", CPU, H100)
    assert (len(plain), len(ring)) == (2, 2 * form.fold_every)
    given: Any = ring[0]
    assert given.keywords["ring"].shape[1] == form.rows and given.keywords["ring"] is ring[2].keywords["ring"]
    for call in ring:
        call()
    assert all(bool(torch.isfinite(call.keywords["ring"]).all()) for call in ring[:2])
    assert int((given.keywords["ring"] != 0).any(-1).sum()) >= 3 * (form.fold_every if drafts == 0 else form.rows - 4)
    assert len(replay_decode.calls_of(form, "reference", CPU, H100, spread=False)[1]) == 2


def test_the_bytes_are_those_of_the_contract() -> None:
    """The table of bytes for 16/32 heads, in MB of a sequence, filters apart."""
    for dtype, drafts, expected in (("float32", 0, 2.59), ("float32", 3, 3.11), ("bfloat16", 0, 1.45), ("bfloat16", 3, 1.88)):
        form = form_of("gdn_decode", (16, 32), 128, dtype, drafts)
        assert form.problem.bytes_moved() / 128 / 1e6 == pytest.approx(expected, abs=0.012)


def test_states_of_all_layers() -> None:
    calls = replay_decode.state_calls(2, 2, CPU)
    for call, num_bytes in calls.values():
        call()
        assert num_bytes >= 0
    assert calls["accept_draft_tree"][0].args[6].tolist() == [3, 3]  # the path has three nodes


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("gdn.runtime.devices.describe", lambda device: (H100, "some device"))
    monkeypatch.setattr(timing, "measure_limits", lambda: timing.Limits(3000.0, 700.0, 1300.0))
    monkeypatch.setattr(replay_decode, "calls_of", lambda *_, **__: ([], []))

    class Timed:
        captured = True
        times = iter([200.0, 112.0] * 10)

        def __init__(self, calls: list[Any]) -> None:
            pass

        def sustained_us(self) -> float:
            return next(self.times)

    monkeypatch.setattr(timing, "Timed", Timed)
    monkeypatch.setattr(timing, "in_turns", lambda groups: [[sample() for sample in groups]])
    path = tmp_path / "found.json"
    replay_decode.main(["folds"], 128, False, path)
    told = capsys.readouterr().out
    assert "copy 3.00 TB/s" in told and "1.79" in told and "16/32 batch 128 f32" in told
    found = json.loads(path.read_text())
    assert [row["plain_us"] for row in found] == [200.0] * 3 and [row["ring_us"] for row in found] == [112.0] * 3
    with pytest.raises(ValueError, match="part: expected some of"):
        replay_decode.main(["nonsense"], 128, False, None)


def test_limits() -> None:
    row = replay_decode.Row("step", "", "cute", 190.0, 120.0, 109.5)
    assert (round(row.must_us), round(row.aim_us)) == (129, 115)
    assert replay_decode.Row("step", "", "cute", 4.0, 4.2, 0.9).must_us == pytest.approx(4.4)
