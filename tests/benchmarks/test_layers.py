"""Times of whole layers: what a layer launches, and what is subtracted from what, on a device whose kernels only pass time."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from benchmarks import cli, host_cost, launches, layers, report, stacks
from gdn.device import H100
from gdn.layers.named import NAMED
from gdn.testing import timing
from gdn.testing.timing import Limits
from tests.autotune.fake_device import FakeDevice

RUNNER = CliRunner()
CPU = torch.device("cpu")
LIMITS = Limits(copy_gbps=3000.0, bf16_tflops=700.0, fp8_tflops=1250.0)
# Eight heads of the indexer: rows of its projection start at multiples of 16 bytes, as those of the large model do.
TINY = dataclasses.replace(NAMED["tiny"], max_position_embeddings=256, index_n_heads=8)
SIZES: dict[str, Any] = {"config": TINY, "layers": 3, "batch": 2, "context": 256}
KERNEL_US, PROJECTION_US = 5.0, 20.0
NORM = "add_rms_norm"
ATTENTION = [NORM, "prepare_indexer", "prepare_indexer", "paged_mqa_logits", "topk", "sparse_attention_decode", NORM]
COMPRESSED = [
    NORM, "prepare_indexer", "prepare_indexer", "compress_indexer_keys", "paged_mqa_logits", "topk",
    "sparse_attention_decode", NORM,
]  # fmt: skip
LAUNCHED = {
    "Gated DeltaNet": [NORM, "gdn_decode", NORM],
    "attention, bf16 indexer": ATTENTION,
    "attention, FP8 indexer": ATTENTION,
    "attention, compressed indexer": COMPRESSED,
    "attention, compressed FP8 indexer": COMPRESSED,
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """A device on which every kernel and projection takes its time, and nothing is computed by kernels."""
    fake = FakeDevice(monkeypatch)
    kernel = fake.call(KERNEL_US)
    monkeypatch.setattr(_Timed, "linear", staticmethod(fake.call(PROJECTION_US)))
    with host_cost.without_device(lambda *params: kernel()), _Timed():
        yield fake


class _Timed(TorchDispatchMode):
    """Passes the time of torch's own kernels."""

    linear = staticmethod(lambda: None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().partition("::")[2].partition(".")[0] == "linear":
            self.linear()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.cover) if "compressed" in one or "FP8" in one else one for one in LAUNCHED]
)
def test_a_captured_layer_is_compared_with_its_kernels(name: str, device: FakeDevice) -> None:
    found = layers.measure(name, LIMITS, CPU, **SIZES)
    assert isinstance(found, layers.Captured)
    expected = LAUNCHED[name]
    assert [part.name for part in found.parts] == expected
    rest = KERNEL_US * len(expected)
    projections = PROJECTION_US * (3 if "topk" in expected else 2)
    assert found.projections_us == pytest.approx(projections)
    assert found.wall_us == pytest.approx(rest + projections)
    assert [part.alone_us for part in found.parts] == [KERNEL_US for _ in expected]
    floors = sum(part.floor_us for part in found.parts)
    assert floors > 0 and all(part.floor_us > 0 for part in found.parts)
    assert found.found == pytest.approx(1.0 if found.against == "kernels" else rest / floors)


def test_layers_that_launch_different_things_are_refused(device: FakeDevice) -> None:
    form = layers.FORMS[0]
    stack = stacks.make_stack(stacks.shaped(TINY, form.kind, 2), 2, 256, CPU)
    stack.layers[1].linear_attn.forward = lambda hidden, *_: hidden  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="Gated DeltaNet: layer 1 launches .'add_rms_norm', 'add_rms_norm'"):
        layers.captured(form, stack, LIMITS)


def test_what_cannot_be_captured_is_refused(device: FakeDevice) -> None:
    device.capturable = False
    with pytest.raises(RuntimeError, match="Gated DeltaNet: a call cannot be captured"):
        layers.measure("Gated DeltaNet", LIMITS, CPU, **SIZES)


def test_a_reference_is_no_launch() -> None:
    stack = stacks.make_stack(stacks.shaped(TINY, "linear_attention", 1), 2, 256, CPU)
    with pytest.raises(ValueError, match="add_rms_norm: no kernel serves it here"):
        launches.record(stack.run)


def test_recording_leaves_nothing_behind() -> None:
    """Plans of repeated calls that were made while recording would go on telling."""
    stack = stacks.make_stack(stacks.shaped(TINY, "linear_attention", 1), 2, 256, CPU)
    with host_cost.without_device():
        found = launches.record(stack.run)
        count = len(found)
        stack.run()
        assert len(found) == count == 5
        assert [one.is_projection for one in found] == [False, True, False, True, False]
        linear = found[1]  # two tokens of 128, and the weights
        weights = stack.layers[0].linear_attn.in_proj
        assert linear.num_bytes == 2 * (2 * 128 + weights.numel() + 2 * weights.shape[0])


def test_only_operations_on_tensors_count() -> None:
    """Operations of torch: no types, no views, no new tensors; every tensor of an operation is moved."""
    x, y = torch.randn(4, 6), torch.randn(6)

    def call() -> None:
        torch.promote_types(x.dtype, torch.float64)
        torch.empty_like(x.unflatten(0, (2, 2)).transpose(0, 1))
        torch.add(x, other=y)

    (found,) = launches.record(call)
    assert (found.name, found.backend, found.num_bytes) == ("add", "torch", 4 * (24 + 6 + 24))


def test_time_on_the_host() -> None:
    stack = stacks.make_stack(stacks.shaped(TINY, "linear_attention", 1), 2, 256, CPU)
    with host_cost.without_device():
        found = layers.on_host(stack, loops=3, calls=20)
    assert 0 < found.least_us <= found.median_us and found.cpu
    assert layers.as_dict(found)["passed"] == (found.median_us <= 60)


_HOST_WORDS = "51.5 us, least 48.2 (at most 60, aim 40); the projections alone 30.0; on some CPU"


def _captured(wall_us: float) -> layers.Captured:
    parts = [layers.Part("topk", "cute", 20.0, 30.0), layers.Part("glu", "torch", 10.0, 15.0)]
    return layers.Captured("some layer", wall_us, 30.0, parts, "floors", must=1.7, aim=1.5)


@pytest.mark.parametrize(("wall_us", "exit_code", "ratio"), [(81.0, 0, "1.70"), (84.0, 1, "1.80")])
def test_the_command_prints_every_part_and_fails_where_a_limit_is_missed(
    wall_us: float, exit_code: int, ratio: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cli, "device_spec", lambda: H100)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "some device")
    monkeypatch.setattr(timing, "measure_limits", lambda: LIMITS)
    host = layers.OnHost(layers.HOST, 51.5, 48.25, 30.0, "some CPU", 60.0, 40.0)
    rows = {layers.HOST: host, "Gated DeltaNet": _captured(wall_us)}
    monkeypatch.setattr(layers, "measure", lambda name, *_: rows[name])
    path = tmp_path / "layers.json"
    done = RUNNER.invoke(cli.app, ["layers", "--only", "DeltaNet", "--json", str(path)])
    assert done.exit_code == exit_code, done.output
    line = next(one.split() for one in done.output.splitlines() if "some layer" in one)
    assert line == ["some", "layer", f"{wall_us}", "30.0", f"{wall_us - 30:.1f}", "30.0", "45.0", "floors", ratio, "1.70", "1.50"]
    assert "topk, cute" in done.output and _HOST_WORDS in " ".join(done.output.split())
    found = json.loads(path.read_text())
    assert [row["passed"] for row in found["rows"]] == [not exit_code, True]
    assert found["rows"][0]["parts"][1] == {"name": "glu", "backend": "torch", "floor_us": 10.0, "alone_us": 15.0}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--only", "mixture"], "only: expected part of one of ['Gated DeltaNet'"),
        (["--only", "DeltaNet", "--write"], "write: expected without --only"),
        (["--out", "somewhere"], "out: expected with --write"),
        (["--json", "nowhere/layers.json"], "json: expected a file in a folder that exists"),
    ],
)
def test_the_command_refuses(options: list[str], told: str) -> None:
    done = RUNNER.invoke(cli.app, ["layers", *options])
    assert done.exit_code == 2
    assert told in " ".join(done.output.split())


def test_the_command_writes_its_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All rows, next to the tables of the operators; a row beyond its limit is written too."""
    monkeypatch.setattr(cli, "device_spec", lambda: H100)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "some device")
    monkeypatch.setattr(timing, "measure_limits", lambda: LIMITS)
    rows: dict[str, Any] = {form.name: dataclasses.replace(_captured(84.0), name=form.name) for form in layers.FORMS}
    rows[layers.HOST] = layers.OnHost(layers.HOST, 51.5, 48.25, 30.0, "some CPU", 60.0, 40.0)
    monkeypatch.setattr(layers, "measure", lambda name, *_: rows[name])
    path = tmp_path / "h100" / "MEASURED.md"
    path.parent.mkdir()
    path.write_text("before\n<!-- measured whole layers -->\nold\n<!-- /measured whole layers -->\nafter\n")
    done = RUNNER.invoke(cli.app, ["layers", "--write", "--out", str(tmp_path)])
    assert done.exit_code == 1, done.output
    text = path.read_text()
    assert text.startswith("before\n<!-- measured whole layers -->\n**whole layers**") and "old" not in text
    assert text.endswith("<!-- /measured whole layers -->\nafter\n")
    lines = text.splitlines()
    assert "batch 32, context 32768" in lines[2] and "some device" in lines[2] and "copy 3.00 TB/s" in lines[2]
    columns = lines[4].count("|")
    table = [line for line in lines if line.startswith("| ")]
    assert len(table) == 1 + len(layers.FORMS) and all(line.count("|") == columns for line in table)
    assert table[1] == "| Gated DeltaNet | 84.0 | 30.0 | 54.0 | 30.0 | 45.0 | floors | 1.80 | 1.70 | 1.50 |"
    assert "- attention, FP8 indexer: topk (CuTe) 20.0 30.0, glu (torch) 10.0 15.0" in lines
    assert any(line.startswith(layers.HOST) and _HOST_WORDS in line for line in lines)
    assert report.read(path) == {}, "a table of no operator is read as one"
