"""Transformers plain, enabled, and with FLA: errors and times of four layers with the shapes of Qwen3-Next-80B, in one table.

usage: python3 -m tests.hosts.transformers_speed --out FOLDER --scratch FOLDER [--skip-sparse]

Runs one process without FLA, and one with it where it is installed. Each measures the host's own code and the enabled model: the
error against float32 of prefill and decode, tokens per second in a prefill of 8192 tokens, decode at batch 32 (one GDN layer, the
whole model), and Qwen4Exp's prefill of 32768 tokens (without FLA alone, and the host's own once: it may take minutes).
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.hosts import sides

Figures = dict[str, dict[str, float]]  # what -> "plain" and "enabled"
FASTER = {"prefill 8192, tokens/s": 1.5, "decode 32, GDN layer, ms": 1.5, "decode 32, model, ms": 1.0}
WORST = 1.1  # of errors


def measure(with_sparse: bool) -> Figures:
    """All figures of this process, in which FLA is installed or not."""
    import torch

    device = torch.device("cuda")
    found = {"error": _errors(device)} | _times(device)
    if with_sparse:
        torch.cuda.empty_cache()
        found["qwen4_exp prefill 32768, ms"] = _sparse(device)
    return found


def _errors(device: Any) -> dict[str, float]:
    """Of prefill and decode steps against float32, without experts: which of them rounding selects is not the layers' doing."""
    from gdn.integrations.transformers import enable
    from tests.gpu import test_transformers as small

    model, ids = small.build(device, 0), small.tokens(device, 3, 700)
    plain = small.logits(model, ids)
    with enable(model, strict=True):
        enabled = small.logits(model, ids)
    exact = small.logits(model.float(), ids)
    return {"plain": small.relative_error(plain, exact), "enabled": small.relative_error(enabled, exact)}


def _times(device: Any) -> Figures:
    import torch

    from gdn.integrations.transformers import enable
    from tests.gpu import test_transformers as small

    model, ids, batch = small.build(device, 512), small.tokens(device, 1, 8192), 32
    linear, prompts = model.model.layers[1].linear_attn, small.tokens(device, batch, 64)
    name, of_layer = small.cache_name(model), small.cache_name(linear)
    hidden = torch.randn(batch, 1, small.SHAPES["hidden_size"], device=device, dtype=torch.bfloat16)

    def times() -> dict[str, float]:
        prefill = small.milliseconds(lambda: model(ids, use_cache=True, logits_to_keep=1))
        cache = small.static(model, 2048)
        model(prompts, **{name: cache})
        layer = small.milliseconds(lambda: [linear(hidden, **{of_layer: cache}) for _ in range(20)]) / 20
        step = small.milliseconds(lambda: model(prompts[:, :1], **{name: cache}))
        return dict(zip(FASTER, (ids.shape[1] / prefill * 1e3, layer, step), strict=True))

    with torch.inference_mode():
        plain = times()
        with enable(model, strict=True):
            enabled = times()
    return {what: {"plain": plain[what], "enabled": enabled[what]} for what in FASTER}


def _sparse(device: Any) -> dict[str, float]:
    import torch

    from gdn.integrations.transformers import enable
    from tests.gpu import test_transformers as small

    model, ids = small.build_sparse(device), small.tokens(device, 1, 32768)
    with torch.inference_mode():
        with enable(model, strict=True):
            ours = small.milliseconds(lambda: model(ids, use_cache=True, logits_to_keep=1))
        print(f"## qwen4_exp enabled {ours:.1f} ms", flush=True)  # the host's own may not end in time
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        model(ids, use_cache=True, logits_to_keep=1)
        end.record()
        torch.cuda.synchronize()
    return {"plain": start.elapsed_time(end), "enabled": ours}


def is_faster(what: str, enabled: float, other: float) -> float:
    """How many times as fast: rates grow, times fall."""
    return enabled / other if what.endswith("/s") else other / enabled


def table(without: Figures, with_fla: Figures | None) -> tuple[str, bool]:
    """Text, and whether everything that must hold does: enabled never slower than plain, with FLA or without."""
    lines, holds = [f"{'what':30} {'plain':>10} {'enabled':>10} {'with FLA':>10} {'enabled':>10}  verdict"], True
    for what, figures in without.items():
        other = (with_fla or {}).get(what)
        complaints = _complaints(what, figures, other)
        more = f"{other['plain']:10.4g} {other['enabled']:10.4g}" if other else f"{'':10} {'':10}"
        ratio = is_faster(what, figures["enabled"], figures["plain"])
        verdict = "; ".join(complaints) or "ok"
        lines.append(f"{what:30} {figures['plain']:10.4g} {figures['enabled']:10.4g} {more}  {ratio:.2f} times, {verdict}")
        holds = holds and not complaints
    return "\n".join(lines), holds


def _complaints(what: str, figures: Mapping[str, float], with_fla: Mapping[str, float] | None) -> list[str]:
    found = []
    if what == "error":
        if not figures["enabled"] <= WORST * figures["plain"]:
            found.append(f"error {figures['enabled'] / figures['plain']:.3f} times plain's, at most {WORST}")
        return found
    must = FASTER.get(what, 1.0)
    if not is_faster(what, figures["enabled"], figures["plain"]) >= must:
        found.append(f"less than {must} times plain")
    if with_fla and not is_faster(what, with_fla["enabled"], with_fla["plain"]) >= 1:
        found.append("slower than with FLA")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="results")
    parser.add_argument("--scratch", type=Path, required=True, help="logs")
    parser.add_argument("--skip-sparse", action="store_true", help="leave Qwen4Exp out")
    parser.add_argument("--limit", type=float, default=400)
    parser.add_argument("--side", choices=["without", "with"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        if options.side == "without":
            for name in ("fla", "causal_conv1d"):
                sys.modules[name] = None  # type: ignore[assignment]  # as if they were not installed
        found = measure(options.side == "without" and not options.skip_sparse)
        (options.out / f"transformers_{options.side}.json").write_text(json.dumps(found))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = ["without", *(["with"] if importlib.util.find_spec("fla") else [])]
    results: dict[str, Figures] = {}
    failed = False
    for side in chosen:  # one after another: they are timed
        arguments = ["--side", side, "--out", str(options.out), "--scratch", str(options.scratch)]
        arguments += ["--skip-sparse"] if options.skip_sparse else []
        log = options.scratch / f"transformers_{side}.log"
        job = sides.Job(f"{side} FLA", "tests.hosts.transformers_speed", arguments, sides.environment("off"), log)
        failed |= any(sides.run([job], options.limit).values())
        sides.tell_marked(job)
        path = options.out / f"transformers_{side}.json"
        if path.exists():
            results[side] = json.loads(path.read_text())
    if "without" in results:
        text, holds = table(results["without"], results.get("with"))
        print(text)
        failed |= not holds
    sys.exit(failed)


if __name__ == "__main__":
    main()
