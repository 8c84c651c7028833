"""Plot of the measured tables: each call's share of its floor, next to the fastest other library's."""

import importlib
import math
from pathlib import Path
from typing import Any

from benchmarks import report

# Grey text and two hues that are readable on a white and on a black page; the background is transparent.
_TEXT, _OURS, _PEER = "#808080", "#2f81f7", "#e0762f"
_COMPARED = ("chunk", "recurrent")  # a panel each; the other operators share one, with their slowest shape


def pyplot() -> Any:
    """matplotlib's pyplot, without a screen; ImportError with the extra's name where it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        message = "The plot needs matplotlib, which is not installed: python3 -m pip install 'gdn-kernels[plots]'"
        raise ImportError(message) from error

    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def draw(measured: Path, picture: Path) -> None:
    """Draws the tables of a MEASURED.md into a PNG."""
    plt = pyplot()
    rows = report.read(measured)
    panels = {f"{op}: {_TITLES[op]}": [(row.shape, row) for row in rows[op]] for op in _COMPARED if op in rows}
    others = [(op, max(found, key=lambda row: row.time_us)) for op, found in rows.items() if op not in _COMPARED]
    if others:
        panels["other operators, longest shape"] = others
    with plt.rc_context({"text.color": _TEXT, "axes.labelcolor": _TEXT, "xtick.color": _TEXT, "ytick.color": _TEXT}):
        height = 1.2 + 0.24 * max((len(found) for found in panels.values()), default=1)
        figure, axes = plt.subplots(1, max(1, len(panels)), figsize=(5.2 * max(1, len(panels)), height), squeeze=False)
        for axis, (title, found) in zip(axes[0], panels.items(), strict=False):
            _panel(axis, title, found)
        figure.tight_layout(rect=(0, 0.06, 1, 1))
        entries = dict(zip(*axes[0][0].get_legend_handles_labels()[::-1], strict=True))
        figure.legend(entries.values(), entries, loc="lower center", ncols=2, fontsize=8, labelcolor=_TEXT, framealpha=0.0)
        # Without the time and the version of matplotlib: the same tables give the same file.
        figure.savefig(picture, dpi=110, transparent=True, metadata={"Software": None})
        plt.close(figure)


_TITLES = {"chunk": "prefill", "recurrent": "decode"}


def _panel(axis: Any, title: str, found: list[tuple[str, report.Shown]]) -> None:
    names = [name for name, _ in found]
    places = range(len(found))
    shares = [100 * row.floor_us / row.time_us for _, row in found]
    axis.barh(places, shares, height=0.6, color=_OURS, label="gdn-kernels")
    peers = [(place, row) for place, (_, row) in zip(places, found, strict=True) if not math.isnan(row.peer_us)]
    if peers:
        values = [100 * row.floor_us / row.peer_us for _, row in peers]
        where, label = [place for place, _ in peers], "fastest other library"
        axis.scatter(values, where, marker="D", s=30, color=_PEER, zorder=3, label=label)
    for place, (_, row), share in zip(places, found, shares, strict=True):
        axis.text(max(share, 100) + 3, place, f"{row.time_us:.4g} us", va="center", fontsize=8)
    axis.set_yticks(places, names, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 135)
    axis.set_xticks(range(0, 101, 20))
    axis.axvline(100, color=_TEXT, linewidth=0.8)
    axis.set_xlabel("share of the floor (bytes or arithmetic), %", fontsize=8)
    axis.set_title(title, fontsize=10)
    for spine in axis.spines.values():
        spine.set_color(_TEXT)
