"""The figures of a benchmark as the README's table."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_BEGIN, _END = "<!-- measured -->", "<!-- /measured -->"
_KERNEL = {"tilelang": "TileLang", "cute": "CuTe"}


def markdown(found: Mapping[str, Any]) -> str:
    """The device and its limits, then a row for each shape. found: what bench.run returns."""
    limits = found["limits"]
    lines = [
        f"{found['device']}, {found['date']}, torch {found['torch']}; copy {limits['copy_gbps'] / 1e3:.2f} TB/s, bf16 "
        f"{limits['bf16_tflops']:.0f} and fp8 {limits['fp8_tflops']:.0f} TFLOP/s (8192^3) in the same run.",
        "",
        "| operator | shape | kernel | us | floor, us | share of floor | error | peers, us |",
        "|---|---|---|---|---|---|---|---|",
    ]
    operator = None
    for row in found["rows"]:
        first = "" if row["op"] == operator else row["op"]
        operator = row["op"]
        cells = [
            first, row["shape"], _KERNEL[row["backend"]], _time(row["time_us"]), _time(row["floor_us"]),
            f"{row['share_of_floor']:.0%}", f"{row['error']:.1e}", _peers(found, row),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def best_peer(found: Mapping[str, Any], row: Mapping[str, Any], norm: bool) -> tuple[str, float] | None:
    """The fastest library on a row's shape and its time. norm: with the L2 norm of q and k."""
    same = [peer for peer in found["peers"] if all(peer[field] == row[field] for field in ("op", "shape"))]
    times = [(peer["time_us"], peer["library"]) for peer in same if peer["norm"] == norm]
    return (min(times)[1], min(times)[0]) if times else None


def _peers(found: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    told = []
    for norm, remark in ((True, ""), (False, " without the norm")):
        best = best_peer(found, row, norm)
        if best is not None:
            told.append(f"{best[0]} {_time(best[1])}{remark}")
    return ", ".join(told)


def _time(value: float) -> str:
    return f"{value:.2f}" if value < 2 else f"{value:.1f}"


def write_into(path: Path, text: str) -> None:
    """Put text between the two markers of a file. ValueError where it lacks them."""
    old = path.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}", re.DOTALL)
    if len(pattern.findall(old)) != 1:
        raise ValueError(f"{path}: expected one {_BEGIN} followed by {_END}")
    path.write_text(pattern.sub(lambda _: f"{_BEGIN}\n{text}{_END}", old), encoding="utf-8")
