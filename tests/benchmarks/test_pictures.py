"""The page of a run: its pictures in both colours, what has changed since an earlier run, and files that are none."""

import json
import re
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import cli, pictures

RUNNER = CliRunner()


def row(op: str, shape: str, time_us: float, tflops: float = 100.0) -> dict[str, Any]:
    return {
        "op": op, "shape": shape, "backend": "cute", "config": {"threads": 128}, "config_source": "table", "time_us": time_us,
        "burst_us": time_us, "floor_us": 5.0, "gbps": 2000.0, "tflops": tflops, "captured": True, "error": 1e-3,
        "share_of_floor": 5.0 / time_us,
    }  # fmt: skip


def run(*rows: dict[str, Any], date: str = "2026-01-02") -> dict[str, Any]:
    limits = {"copy_gbps": 3000.0, "bf16_tflops": 700.0, "fp8_tflops": 1400.0}
    about = {"date": date, "device": "some GPU", "torch": "2.11", "gdn": "1", "limits": limits}
    return about | {"rows": list(rows), "peers": [], "failures": [], "left_out": []}


def saved(path: Path, found: dict[str, Any]) -> str:
    path.write_text(json.dumps(found))
    return str(path)


def test_a_page_of_two_runs(tmp_path: Path) -> None:
    before = saved(
        tmp_path / "a.json",
        run(row("chunk", "long", 20.0), row("topk", "wide", 10.0), row("norm", "gone", 1.0), date="2026-01-01"),
    )
    after = saved(tmp_path / "b.json", run(row("chunk", "long", 10.0), row("topk", "wide", 12.5), row("conv", "new", 3.0, 0.0)))
    out = tmp_path / "out"
    done = RUNNER.invoke(cli.app, ["report", after, "--before", before, "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert {path.name for path in out.iterdir()} == {
        "report.md", "roofline-light.svg", "roofline-dark.svg", "changes-light.svg", "changes-dark.svg"
    }  # fmt: skip
    page = (out / "report.md").read_text()
    assert "| chunk | long | 20.0 | 10.0 | 2.00 |" in page and "| topk | wide | 10.0 | 12.5 | 0.80 |" in page
    assert "gone" not in page and "3. conv, new: 0.0 TFLOP/s" in page
    assert 'srcset="roofline-dark.svg"><img src="roofline-light.svg"' in page
    for path in out.glob("*.svg"):
        xml.parse(path)  # well formed
    again = tmp_path / "again"
    RUNNER.invoke(cli.app, ["report", after, "--before", before, "-o", str(again)])
    assert all(path.read_bytes() == (again / path.name).read_bytes() for path in out.iterdir())


def test_pictures_of_the_two_colours_differ_in_colours_alone(tmp_path: Path) -> None:
    found = pictures.Run.model_validate(run(row("chunk", "long", 10.0)))
    pictures.write(found, None, tmp_path)
    texts = [(tmp_path / f"roofline-{theme.name}.svg").read_text() for theme in pictures.THEMES]
    light, dark = (re.sub(r"\b[mp][0-9a-f]{10}\b", "", text) for text in texts)  # names that follow from colours
    for one, other in zip(*(vars(theme).values() for theme in pictures.THEMES), strict=True):
        light = light.replace(one, other)
    assert light == dark


def test_what_has_changed_is_told_from_noise() -> None:
    before = pictures.Run.model_validate(run(*(row("chunk", name, 10.0) for name in "abc"), row("topk", "a", 1.0)))
    after = pictures.Run.model_validate(run(row("chunk", "a", 9.0), row("chunk", "b", 10.1), row("chunk", "c", 11.0)))
    assert [(one.row.shape, one.word) for one in pictures.changes(after, before)] == [
        ("a", "faster"),
        ("b", "same"),
        ("c", "slower"),
    ]


@pytest.mark.parametrize("theme", pictures.THEMES, ids=lambda theme: theme.name)
def test_colours_are_readable(theme: pictures.Theme) -> None:
    """Contrast as WCAG counts it, with white, and with GitHub's dark page."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    page = luminance({"light": "#ffffff", "dark": "#0d1117"}[theme.name])
    for name in ("text", "faster", "slower", "same"):
        own = luminance(getattr(theme, name))
        assert (max(own, page) + 0.05) / (min(own, page) + 0.05) >= 4.5, name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "expected a file of `python -m benchmarks ops --json-file`"),
        ("[]", "expected a file of `python -m benchmarks ops --json-file`"),
        (json.dumps(run(row("chunk", "a", 1.0)) | {"limits": {}}), "limits.copy_gbps: Field required"),
        (json.dumps(run()), "expected at least one row, got none"),
        (None, "No such file"),
    ],
)
def test_another_file_is_refused_by_name(text: str | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    done = RUNNER.invoke(cli.app, ["report", str(path), "-o", str(tmp_path / "out")])
    told = " ".join(done.output.split())
    assert done.exit_code == 2 and words in told and "run.json" in told.replace(" ", "")
    assert not (tmp_path / "out").exists()


def test_runs_without_a_common_call(tmp_path: Path) -> None:
    before = saved(tmp_path / "a.json", run(row("topk", "a", 1.0)))
    after = saved(tmp_path / "b.json", run(row("chunk", "a", 1.0)))
    done = RUNNER.invoke(cli.app, ["report", after, "--before", before, "-o", str(tmp_path / "out")])
    assert done.exit_code == 0 and "nothing is compared" in done.output
    assert not list((tmp_path / "out").glob("changes*"))
