"""The measurement of mixed steps, without a device: all ways are the same step, and the table says which one is faster."""

import pytest
import torch

from benchmarks import mixed_step
from gdn.device import H100
from gdn.layers import GatedDeltaNet, HybridConfig
from gdn.layers.named import NAMED
from gdn.testing import timing

CPU = torch.device("cpu")


def step_of(decodes: int, prompt: int) -> mixed_step.MixedStep:
    return mixed_step.make_step(decodes, prompt, CPU, NAMED["tiny"], torch.float32)


@torch.inference_mode()
def outcome(way: str, decodes: int, prompt: int) -> list[torch.Tensor]:
    """Result, windows and states of a new step."""
    step = step_of(decodes, prompt)
    result = mixed_step.ways(step)[way]()
    return [torch.cat(result) if isinstance(result, tuple) else result, *step.pools]


@pytest.mark.parametrize(("decodes", "prompt"), [(3, 70), (1, 64)])
def test_all_ways_are_the_same_step(decodes: int, prompt: int) -> None:
    whole, *others = (outcome(way, decodes, prompt) for way in ("whole", "rule", "dealt"))
    before = step_of(decodes, prompt).pools
    assert all(not torch.equal(one, old) for one, old in zip(whole[1:], before, strict=True))
    for other in others:
        for one, expected in zip(other, whole, strict=True):
            torch.testing.assert_close(one, expected, rtol=2e-4, atol=2e-5)


@torch.inference_mode()
def test_whole_is_what_the_layer_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole lies between the layer's projections, which are left out here."""
    step = step_of(3, 70)
    monkeypatch.setattr("gdn.layers.gated_delta_net.linear", lambda x, weight: x)
    found = GatedDeltaNet.forward(step.layer, step.projected, step.metadata, *step.pools)
    assert torch.equal(found, outcome("whole", 3, 70)[0])
    assert (step.metadata.num_decodes, step.metadata.num_prefills, step.prompt_metadata.num_decodes) == (3, 1, 0)


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make = mixed_step.make_step

    def small(decodes: int, prompt: int, device: torch.device, config: HybridConfig) -> mixed_step.MixedStep:
        assert str(device) == "cuda:0" and config == NAMED["qwen3-next-80b"].per_rank(2)
        return make(decodes, prompt, CPU, NAMED["tiny"], torch.float32)

    monkeypatch.setattr(mixed_step, "device_spec", lambda: H100)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "some device")
    monkeypatch.setattr(mixed_step, "make_step", small)
    monkeypatch.setattr(mixed_step, "SHAPES", ((2, 8),))
    monkeypatch.setattr(timing, "interleaved_us", lambda calls: [100.0, 90.0, 80.0, 30.0, 50.0])
    mixed_step.main(2)
    told = capsys.readouterr().out
    assert "some device" in told
    (row,) = [line.replace("│", " ").split() for line in told.splitlines() if "2 + 8" in line]
    assert row == ["2", "+", "8", "100.0", "90.0", "80.0", "30.0", "50.0", "0.80"]


def test_the_command_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="needs a Hopper"):
        mixed_step.main()
