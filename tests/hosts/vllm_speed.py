"""Times of real vLLM's steps with the adapter off and on, in one table with what must hold.

usage: python3 -m tests.hosts.vllm_speed run --script FILE --cases NAME... --out FOLDER --scratch FOLDER [--gpu N]
       python3 -m tests.hosts.vllm_speed table FOLDER

FILE is the program that profiles vLLM's steps. It takes a name and --state, --backend, --compiled, --spec, --model and --e2e; it
prints, per phase, the time of the GDN part of a layer, and writes all kernels of all phases to $OUT/NAME.json.gz. `run` starts it
off and on per case, one after another, and keeps what it printed and the GPU time of a step; `table` reads that of all runs.
"""

import argparse
import gzip
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.hosts import sides
from tests.hosts.vllm_checkpoint import write_heads

HEADS = "qwen3_5_heads"  # the folder of `vllm_checkpoint heads`, made beside its source
_MODEL, _DRAFTS = "qwen3_next_4l", ("--spec", "3")


@dataclass(frozen=True)
class Case:
    """One pair of runs: arguments of the script, and phase -> how many times as fast it must be with the adapter on."""

    arguments: tuple[str, ...]
    musts: dict[str, float] = field(default_factory=dict)
    replay: bool = False  # decode by replay with the adapter on


_STEPS = {"prefill": 2.8, "short prompts": 3.4, "mixed": 2.8, "decode64": 1.1}
_END_TO_END = {"prefill 16 x 8192": 1.08, "decode64 GPU time of a step": 1.0, "decode256 GPU time of a step": 1.0}
_REPLAY = {"decode64": 2.5, "decode128": 2.5}
CASES = {
    "next-bf16": Case(
        ("--model", _MODEL, "--state", "bfloat16", "--compiled", "--e2e"), _STEPS | _END_TO_END | {"decode256": 1.04}
    ),
    "next-f32": Case(("--model", _MODEL, "--state", "float32", "--compiled"), _STEPS | {"decode256": 1.02}),
    "next-drafts-bf16": Case(("--model", _MODEL, "--state", "bfloat16", *_DRAFTS), {"decode64": 1.25, "decode128": 1.25}),
    "next-drafts-f32": Case(("--model", _MODEL, "--state", "float32", *_DRAFTS), {"decode64": 1.05, "decode128": 1.05}),
    "next-replay-bf16": Case(("--model", _MODEL, "--state", "bfloat16", *_DRAFTS), _REPLAY, replay=True),
    "next-replay-f32": Case(("--model", _MODEL, "--state", "float32", *_DRAFTS), _REPLAY, replay=True),
    "flat-replay-f32": Case(("--model", HEADS, "--state", "float32", *_DRAFTS), replay=True),
    "flat-drafts-bf16": Case(("--model", HEADS, "--state", "bfloat16", *_DRAFTS), {"decode64": 1.0, "decode128": 1.0}),
    "flat-drafts-f32": Case(("--model", HEADS, "--state", "float32", *_DRAFTS), {"decode64": 1.0, "decode128": 1.0}),
}  # fmt: skip

_LAYER = re.compile(r"^-- (\S+) (.+): GDN part of a layer ([\d.]+|nan) us \(median of (\d+)")
_SECONDS = re.compile(r"end to end, (\S+), (.+): ([\d.]+) s ")
_STARTED = re.compile(r"^## \S+: started in (\d+) s")
_READY = re.compile(sides.SERVED.pattern + r", ready in ([\d.]+) s")
MOST_WARM_UP = 10.0  # seconds, with a filled cache
_SIZES = re.compile("attention block size to|mamba page size|GPU KV cache size|Maximum concurrency")  # of the host's start
_PRODUCT = re.compile("nvjet|gemm|cublas", re.I)
_GDN = re.compile("_causal_conv1d|packed_decode|fused_recurrent|fused_sigmoid|gdn_|kernels_(cute|tl)", re.I)


def printed(text: str) -> dict[str, float]:
    """What the script printed: phase -> microseconds of a layer, run -> seconds end to end; "start" and "warm-up" -> seconds."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if match := _LAYER.match(line):
            found[match[2]] = float(match[3])
        elif match := _SECONDS.search(line):
            found[match[2]] = float(match[3])
        elif match := _STARTED.match(line):
            found["start"] = float(match[1])
        elif match := _READY.search(line):
            found["warm-up"] = float(match[2])
    return found


def step_time(events: Sequence[Sequence[Any]], layers: int = 3) -> float:
    """Median GPU time of a step, in microseconds: the kernels from the first GDN layer of a step to that of the next.

    events: [name, start, duration] of all kernels of a phase, in order of time. layers: GDN layers of the model.
    """
    starts = _layer_starts(events)
    firsts = starts[::layers]
    steps = [sum(duration for _, _, duration in events[begin:end]) for begin, end in zip(firsts, firsts[1:], strict=False)]
    return statistics.median(steps) if steps else float("nan")


def _layer_starts(events: Sequence[Sequence[Any]]) -> list[int]:
    """Index of the matrix product before each run of kernels between two products that holds a GDN kernel."""
    found, start, has_gdn = [], None, False
    for index, (name, _, _) in enumerate(events):
        if _PRODUCT.search(name):
            if start is not None and has_gdn:
                found.append(start)
            start, has_gdn = index, False
        elif _GDN.search(name):
            has_gdn = True
    return found


def rows(case: str, off: dict[str, float], on: dict[str, float]) -> list[tuple[str, float, float, float | None, str]]:
    """(what, off, on, must, verdict) of a case: all that both printed, and all that must hold."""
    musts, found = CASES[case].musts, []
    for what in dict.fromkeys((*off, *on, *musts, "warm-up")):
        one, other, must = off.get(what, float("nan")), on.get(what, float("nan")), musts.get(what)
        if what == "warm-up":  # the adapter's own; where it is not there, no layer ran on gdn
            found.append((what, one, other, None, "ok" if other <= MOST_WARM_UP else "FAILS"))
            continue
        holds = must is None or one >= must * other  # false where one is not a number
        found.append((what, one, other, must, "" if must is None else "ok" if holds else "FAILS"))
    return found


def table(results: dict[str, dict[str, dict[str, float]]]) -> tuple[str, bool]:
    """Text of all cases, case -> side -> figures; and whether all that must hold does."""
    lines, holds = [f"{'case':18} {'what':28} {'off':>10} {'on':>10} {'times':>7} {'must':>6}"], True
    for case in sorted(results, key=list(CASES).index):
        for what, off, on, must, verdict in rows(case, results[case].get("off", {}), results[case].get("on", {})):
            wanted = "" if must is None else f"{must:.2f}"
            lines.append(f"{case:18} {what:28} {off:10.4g} {on:10.4g} {off / on:7.3f} {wanted:>6} {verdict}")
            holds = holds and verdict != "FAILS"
    return "\n".join(lines), holds


def measure(script: Path, case: str, plug: str, options: argparse.Namespace) -> dict[str, float]:
    """One run of the script; its figures, none where it failed."""
    name = f"{case}_{plug}"
    command = [sys.executable, str(script), name, *CASES[case].arguments, "--backend", options.backend]
    if options.compile_all and "--compiled" not in command:
        command.append("--compiled")
    environment = sides.environment(plug, options.gpu, replay=CASES[case].replay) | {"OUT": str(options.scratch)}
    log = options.scratch / f"{name}.log"
    began = time.monotonic()
    with log.open("wb") as file:
        code = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT).returncode
    text = log.read_text(errors="replace")
    print(f"## {name}: exit {code}, {time.monotonic() - began:.0f} s", flush=True)
    found = printed(text)
    for line in text.splitlines():
        if sides.SERVED.search(line) or _SIZES.search(line):
            print(f"## {name}: {line.strip()}", flush=True)
    if plug == "on" and CASES[case].replay and sides.REPLAYED not in text:
        print(f"## {name}: no layer decodes by replay, its figures are left out", flush=True)
        return {}
    if code:
        print("\n".join(text.splitlines()[-40:]), flush=True)
    kernels = options.scratch / f"{name}.json.gz"
    if kernels.exists():
        with gzip.open(kernels, "rt") as file:
            phases = json.load(file)
        found |= {
            f"{phase} GPU time of a step": step_time(events) for phase, events in phases.items() if phase.startswith("decode")
        }
    return found


def run(options: argparse.Namespace) -> None:
    """Both sides of all cases; what is there so far is kept after each run."""
    for folder in (options.out, options.scratch):
        folder.mkdir(parents=True, exist_ok=True)
    models, path = Path(os.environ["VLLM_MODELS"]), options.out / f"speed_{options.cases[0]}.json"
    if any(HEADS in CASES[case].arguments for case in options.cases) and not (models / HEADS / "config.json").exists():
        write_heads(models / "qwen3_5_tiny", models / HEADS)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for case in options.cases:
        for plug in sides.SWITCHES:
            results.setdefault(case, {})[plug] = measure(options.script, case, plug, options)
            path.write_text(json.dumps(results, indent=1))
        print(table({case: results[case]})[0], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--script", type=Path, required=True)
    runs.add_argument("--cases", nargs="+", choices=list(CASES), required=True)
    runs.add_argument("--out", type=Path, required=True, help="results")
    runs.add_argument("--scratch", type=Path, required=True, help="logs and lists of kernels")
    runs.add_argument("--gpu", help="its number; default: what the process sees")
    runs.add_argument("--backend", default="flashinfer")
    runs.add_argument("--compile-all", action="store_true", help="the host's compilation in the cases with drafts too")
    tables = commands.add_parser("table")
    tables.add_argument("folder", type=Path)
    options = parser.parse_args()
    if options.command == "run":
        run(options)
        return
    found: dict[str, dict[str, dict[str, float]]] = {}
    for path in sorted(options.folder.glob("speed_*.json")):
        found |= json.loads(path.read_text())
    text, holds = table(found)
    print(text)
    sys.exit(not holds)


if __name__ == "__main__":
    main()
