"""Values of real vLLM with the adapter off and on, as files for `judge_values`.

usage: python3 -m tests.hosts.vllm_values --models NAME... --scratch FOLDER --out FOLDER [--variants NAME...] [--judge]

For each model of $VLLM_MODELS writes a seeded checkpoint into the scratch folder, and runs one process with the adapter off and
one with it on, all at once. A process goes through the variants, an engine each: eager; compiled, with piecewise and full graphs;
the prefix cache, each request twice; 3 drafts by n-grams; chunked prefill of 512 tokens; two tensor parallel ranks (not by
default). Writes OUT/values_MODEL_PLUG.json.gz.
"""

import argparse
import os
import sys
import time
import traceback
from pathlib import Path

from tests.hosts import engines, sides
from tests.hosts.requests import Answers, Side, prompts
from tests.hosts.vllm_checkpoint import DIGEST, write

DEFAULT = ("eager", "compiled", "prefix", "spec", "chunked")


def answers(variant: str, folder: Path, asked: list[list[int]], *, state: str, backend: str) -> Answers:
    """Of one engine."""
    engine, seconds = engines.start(engines.common(folder, state=state, backend=backend) | engines.VARIANTS[variant])
    try:
        drafts = engines.count_drafts(engines.scheduler_of(engine)) if variant == "spec" else {}
        before = engines.kernels()
        found = engines.ask(engine, asked)
        found.facts |= {"started in": round(seconds, 1), **drafts}
        if variant != "tp":  # whose caches are in other processes
            found.facts |= engines.memory(engine)
        if variant == "prefix":
            again = engines.ask(engine, asked, prompt_logprobs=False)
            found.again = {"tokens": again.tokens, "logprobs": again.logprobs, "cached": again.cached}
            found.facts["cached"] = sum(again.cached)
        if variant != "tp":  # whose kernels are in other processes
            found.facts["kernels while serving"] = engines.growth(before)
        return found
    finally:
        engines.stop(engine)


def worker(options: argparse.Namespace) -> None:
    """One side of one model; a variant that fails is noted, and the others go on."""
    folder = options.scratch / options.worker
    side = Side(options.worker, options.plug, (folder / DIGEST).read_text(), prompts(options.vocabulary, count=options.count))
    path = options.out / f"values_{options.worker}_{options.plug}.json.gz"
    for variant in options.variants:
        began = time.time()
        try:
            side.variants[variant] = answers(variant, folder, side.prompts, state=options.state, backend=options.backend)
        except Exception as error:  # noqa: BLE001 - whatever the host raises
            traceback.print_exc()
            side.failed[variant] = f"{type(error).__name__}: {error!s:.300}"
        side.save(path)
        if variant in side.variants:
            print(f"## {variant}: {side.variants[variant].facts}", flush=True)
        print(f"## {variant}: {time.time() - began:.0f} s, {side.failed.get(variant, 'done')}", flush=True)
    if (handle := engines.plug()) is not None:
        print("\n".join(f"## {line}" for line in str(handle.report()).splitlines()), flush=True)
    sys.exit(bool(side.failed))


def jobs(options: argparse.Namespace) -> list[sides.Job]:
    """Both sides of every model."""
    found = []
    gpus = options.gpus.split("/")
    for place, model in enumerate(options.models):
        for plug in ("off", "on"):
            arguments = [
                "--worker", model, "--plug", plug, "--scratch", str(options.scratch), "--out", str(options.out),
                "--state", options.state, "--backend", options.backend, "--vocabulary", str(options.vocabulary),
                "--count", str(options.count), "--variants", *options.variants,
            ]  # fmt: skip
            environment = sides.environment(plug, gpus[place % len(gpus)], replay=options.replay)
            log = options.scratch / f"values_{model}_{plug}.log"
            found.append(sides.Job(f"{model} {plug}", "tests.hosts.vllm_values", arguments, environment, log))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["qwen3_next_tiny", "qwen3_5_tiny"])
    parser.add_argument("--variants", nargs="+", choices=list(engines.VARIANTS), default=list(DEFAULT))
    parser.add_argument("--scratch", type=Path, required=True, help="checkpoints and logs")
    parser.add_argument("--out", type=Path, required=True, help="results")
    parser.add_argument("--gpus", default="0", help="devices of a model's processes; 0/1 = the models in turn, 0,1 = both")
    parser.add_argument("--state", default="float32")
    parser.add_argument("--backend", default="flashinfer", help="the host's own prefill: flashinfer or triton")
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--count", type=int, default=64, help="requests")
    parser.add_argument("--limit", type=float, default=480, help="seconds after which processes are ended")
    parser.add_argument("--replay", action="store_true", help="decode by replay with the adapter on; fails where no layer does")
    parser.add_argument("--judge", action="store_true", help="judge on the spot")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--plug", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
    options.out.mkdir(parents=True, exist_ok=True)
    for model in options.models:
        if not (options.scratch / model / DIGEST).exists():
            write(Path(os.environ["VLLM_MODELS"], model), options.scratch / model)
    wanted = jobs(options)
    codes = sides.run(wanted, options.limit)
    for job in wanted:
        sides.tell_marked(job)
    failed = bool(sides.unserved(wanted) or sides.unreplayed(wanted))
    if options.judge:
        judges = _judges(options)
        judged = sides.run(judges, options.limit)
        codes |= judged
        for job in judges:
            if not judged[job.name]:  # of the others it is printed already
                print(job.log.read_text(errors="replace"))
    sys.exit(failed or any(codes.values()))


def _judges(options: argparse.Namespace) -> list[sides.Job]:
    found = []
    for model in options.models:
        files = [str(options.out / f"values_{model}_{plug}.json.gz") for plug in ("off", "on")]
        arguments = [*files, "--checkpoint", str(options.scratch / model)]
        environment = sides.environment("off", options.gpus.split("/")[0])
        log = options.scratch / f"judge_{model}.log"
        found.append(sides.Job(f"judge {model}", "tests.hosts.judge_values", arguments, environment, log))
    return found


if __name__ == "__main__":
    main()
