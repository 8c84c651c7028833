"""The measurement of mixed steps, without a device: all ways are the same step, and the table says which one is faster."""

import json
from pathlib import Path

import pytest
import torch

from autotune import mixed_step
from gdn.layers import GatedDeltaNet
from gdn.layers.named import NAMED
from gdn.testing import timing

CPU = torch.device("cpu")
WAYS = ["whole", "dealt", "rule"]


def step_of(decodes: int, prompt: int) -> mixed_step.MixedStep:
    return mixed_step.make_step(decodes, prompt, CPU, NAMED["tiny"], torch.float32)


@torch.inference_mode()
def outcome(way: str, decodes: int, prompt: int) -> list[torch.Tensor]:
    """Result, windows and states of a new step."""
    step = step_of(decodes, prompt)
    result = step.ways()[way]()
    parts = result if isinstance(result, tuple) else (result,)
    return [torch.cat(parts), *step.pools]


@pytest.mark.parametrize(("decodes", "prompt"), [(3, 70), (1, 64)])
def test_all_ways_are_the_same_step(decodes: int, prompt: int) -> None:
    whole, *others = (outcome(way, decodes, prompt) for way in WAYS)
    before = step_of(decodes, prompt).pools
    assert all(not torch.equal(one, old) for one, old in zip(whole[1:], before, strict=True))
    for other in others:
        for one, expected in zip(other, whole, strict=True):
            torch.testing.assert_close(one, expected, rtol=2e-4, atol=2e-5)


@torch.inference_mode()
def test_whole_is_what_the_layer_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its projections, which are left out here."""
    step = step_of(3, 70)
    monkeypatch.setattr("gdn.layers.gated_delta_net.linear", lambda x, weight: x)
    found = GatedDeltaNet.forward(step.layer, step.projected, step.whole_step, *step.pools)
    assert torch.equal(found, outcome("whole", 3, 70)[0])
    assert step.whole_step.num_decodes == 3 and step.whole_step.num_prefills == 1


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "some device")
    make = mixed_step.make_step
    monkeypatch.setattr(mixed_step, "make_step", lambda a, b, _, config: make(a, b, CPU, config, torch.float32))
    monkeypatch.setattr(mixed_step, "SHAPES", ((2, 8),))
    monkeypatch.setattr(timing, "interleaved_us", lambda calls: [100.0, 80.0, 90.0, 30.0, 50.0])
    path = tmp_path / "mixed.json"
    mixed_step.main("tiny", 1, path)
    assert "2 + 8" in (told := capsys.readouterr().out) and "0.80" in told and "some device" in told
    (row,) = json.loads(path.read_text())["rows"]
    assert row["us"] == {"whole": 100.0, "dealt": 80.0, "rule": 90.0, "decode rows": 30.0, "prompt": 50.0}


@pytest.mark.parametrize(("model", "told"), [("nope", "model: expected one of"), ("tiny", "needs a Hopper")])
def test_the_command_refuses(model: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        mixed_step.main(model, 1, None)
