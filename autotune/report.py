"""The figures of a benchmark as the README's tables, one for each operator."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_KERNEL = {"tilelang": "TileLang", "cute": "CuTe"}


def markdown(found: Mapping[str, Any]) -> dict[str, str]:
    """For each operator the device and its limits, then a row for each shape. found: what bench.Bench.found holds."""
    limits = found["limits"]
    heading = (
        f"{found['device']}, {found['date']}, torch {found['torch']}; copy {limits['copy_gbps'] / 1e3:.2f} TB/s, bf16 "
        f"{limits['bf16_tflops']:.0f} and fp8 {limits['fp8_tflops']:.0f} TFLOP/s (8192^3) in the same run."
    )
    tables = {}
    for op, rows in by_operator(found).items():
        lines = [
            f"**{op}**: {heading}",
            "",
            "| shape | kernel | us | in bursts | floor, us | share of floor | error | peers, us |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in rows:
            cells = [
                row["shape"], _KERNEL[row["backend"]], *(_time(row[field]) for field in ("time_us", "burst_us", "floor_us")),
                f"{row['share_of_floor']:.0%}", f"{row['error']:.1e}", _peers(found, row),
            ]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
        tables[op] = "\n".join(lines) + "\n"
    return tables


def by_operator(found: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of each operator, in the order they were measured in."""
    grouped: dict[str, list[Mapping[str, Any]]] = {}
    for row in found["rows"]:
        grouped.setdefault(row["op"], []).append(row)
    return grouped


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


def write_into(path: Path, tables: Mapping[str, str]) -> None:
    """Put each operator's table between its two marks; those of other operators stay. ValueError where one has no marks."""
    text = path.read_text(encoding="utf-8")
    for op, table in tables.items():
        begin, end = f"<!-- measured {op} -->", f"<!-- /measured {op} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        text, count = pattern.subn(lambda _, new=f"{begin}\n{table}{end}": new, text)  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"{path}: expected one {begin} followed by {end}, got {count}")
    path.write_text(text, encoding="utf-8")
