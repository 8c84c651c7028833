"""Figures of a benchmark as tables of MEASURED.md, one per operator."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import prefill_peers

_NEW_FILE = "# Measured times\n\nWritten by `python -m benchmarks ops --write`. Sustained microseconds of a call by itself.\n"
_STEPS, _OURS = prefill_peers.STEPS, prefill_peers.OURS
KERNEL = {"tilelang": "TileLang", "cute": "CuTe", "torch": "torch"}


def markdown(found: Mapping[str, Any]) -> dict[str, str]:
    """Table of each operator: the device with its limits, then a row per shape. found: `ops.Bench.found`."""
    about = heading(found)
    tables = {}
    for op, rows in by_operator(found).items():
        lines = [
            f"**{op}**: {about}", "",
            "| shape | kernel | us | in bursts | floor, us | share of floor | error | peers, us |",
            "|---|---|---|---|---|---|---|---|",
        ]  # fmt: skip
        for row in rows:
            cells = [
                row["shape"], KERNEL[row["backend"]], *(time_text(row[field]) for field in ("time_us", "burst_us", "floor_us")),
                f"{row['share_of_floor']:.0%}", f"{row['error']:.1e}", _peers(found, row),
            ]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
        tables[op] = "\n".join(lines) + "\n"
    return tables


def heading(found: Mapping[str, Any]) -> str:
    return f"{found['device']}, {found['date']}, torch {found['torch']}; {limits_in_words(found)} in the same run."


def limits_in_words(found: Mapping[str, Any]) -> str:
    limits = found["limits"]
    copy = f"copy {limits['copy_gbps'] / 1e3:.2f} TB/s"
    return f"{copy}, bf16 {limits['bf16_tflops']:.0f} and fp8 {limits['fp8_tflops']:.0f} TFLOP/s (8192^3)"


def by_operator(found: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Rows of each operator, in the order of measurement."""
    grouped: dict[str, list[Mapping[str, Any]]] = {}
    for row in found["rows"]:
        grouped.setdefault(row["op"], []).append(row)
    return grouped


def best_peer(found: Mapping[str, Any], row: Mapping[str, Any], norm: bool) -> tuple[str, float] | None:
    """Fastest library on a row's shape, and its time. norm: with the L2 norm of q and k.

    Torch's name comes with its backend, which has a kernel of its own. Where libraries have single steps of the operator, their
    sum with the fastest one for each step.
    """
    same = [peer for peer in _peers_of(found, row) if peer["library"] != _OURS and not peer.get("step")]
    steps = best_steps(found, row)
    if steps:
        return ("sum of steps", sum(time_us for _, _, time_us in steps)) if norm else None
    times = [(peer["time_us"], _named(peer)) for peer in same if peer["norm"] == norm]
    return (min(times)[1], min(times)[0]) if times else None


def _peers_of(found: Mapping[str, Any], row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [peer for peer in found["peers"] if all(peer[field] == row[field] for field in ("op", "shape"))]


def best_steps(found: Mapping[str, Any], row: Mapping[str, Any]) -> list[tuple[str, str, float]]:
    """(step, fastest library, its time) where libraries have single steps; empty unless every step was measured."""
    best = {}
    for peer in sorted(_peers_of(found, row), key=lambda peer: -peer["time_us"]):
        if peer.get("step"):
            best[peer["step"]] = (peer["step"], str(peer["library"]), float(peer["time_us"]))
    return [best[step] for step in _STEPS] if set(best) == set(_STEPS) else []


def _named(peer: Mapping[str, Any]) -> str:
    return f"torch ({peer['variant'].replace(', ', ' ')})" if peer["library"] == "torch" else str(peer["library"])


def _peers(found: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    both = ((best_peer(found, row, norm), remark) for norm, remark in ((True, ""), (False, " without the norm")))
    cells = [f"{best[0]} {time_text(best[1])}{remark}" for best, remark in both if best is not None]
    cells += [f"{step}: {library} {time_text(time_us)}" for step, library, time_us in best_steps(found, row)]
    cells += [f"{peer['variant']} {time_text(peer['time_us'])}" for peer in _peers_of(found, row) if peer["library"] == _OURS]
    return ", ".join(cells)


def time_text(value: float) -> str:
    return f"{value:.2f}" if value < 2 else f"{value:.1f}"


def write_into(path: Path, tables: Mapping[str, str]) -> None:
    """Puts each operator's table between its two marks, or at the end where the file has none; other operators' tables stay.

    ValueError for marks that occur twice or have no partner; nothing is written then.
    """
    text = path.read_text(encoding="utf-8") if path.is_file() else _NEW_FILE
    for op, table in tables.items():
        begin, end = f"<!-- measured {op} -->", f"<!-- /measured {op} -->"
        section = f"{begin}\n{table}{end}"
        if begin not in text and end not in text:
            text = f"{text.rstrip()}\n\n{section}\n"
            continue
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        text, count = pattern.subn(lambda _, section=section: section, text)  # type: ignore[misc]
        if count != 1 or text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"{path}: expected one {begin} followed by one {end}")
    path.write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class Shown:
    """A row of a table, read back from its file."""

    shape: str
    time_us: float
    floor_us: float
    peer: str  # the fastest library that does the same work, "" = none
    peer_us: float


def read(path: Path) -> dict[str, list[Shown]]:
    """The rows of every table in a file, by operator."""
    found: dict[str, list[Shown]] = {}
    marked = re.compile(r"<!-- measured (\w+) -->\n(.*?)<!-- /measured \1 -->", re.DOTALL)
    for op, table in marked.findall(path.read_text(encoding="utf-8")):
        for line in table.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if len(cells) != 8 or cells[0] in ("shape", "---"):
                continue
            peer = re.match(r"(.+?) ([\d.]+)(?:,|$)", cells[7])  # with the norm; one without it alone does other work
            name, peer_us = (peer[1], float(peer[2])) if peer else ("", math.nan)
            found.setdefault(op, []).append(Shown(cells[0], float(cells[2]), float(cells[4]), name, peer_us))
    return found
