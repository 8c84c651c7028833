"""Life in real vLLM with the prefix cache, aborts and preemptions: no error, no leak of blocks, no compilation while serving.

usage: python3 -m tests.hosts.vllm_life --model FOLDER --scratch FOLDER --out FOLDER [--blocks N] [--spec] [--replay]

FOLDER is a checkpoint of `vllm_checkpoint`. One process with the adapter off and one with it on, at once, each with few blocks of
cache. Before and after the requests the same prompts are asked from an empty prefix cache, and must give the same tokens.
Complaints: an error, blocks that are not free at the end, no preemption, compilations that the side without the adapter has not,
and kernels of gdn that are compiled or loaded after the start.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.hosts import engines, sides
from tests.hosts.requests import prompts

REQUESTS, ABORTED, AT_ONCE = 200, 40, 60


def requests(vocabulary: int, seed: int = 1) -> list[tuple[list[int], int]]:
    """Prompts of 10 to 3000 tokens, many of which go on from one shortly before; and how many new tokens each is to give."""
    drawn = random.Random(seed)
    found: list[tuple[list[int], int]] = []
    for prompt in prompts(vocabulary, seed, REQUESTS):
        earlier = [other for other, _ in found[-12:] if 600 <= len(other) <= 2600]
        if earlier and drawn.random() < 0.5:
            prompt = (drawn.choice(earlier) + prompt)[:3000]
        found.append((prompt, drawn.randint(1, 400)))
    return found


def live(engine: Any, wanted: Sequence[tuple[list[int], int]], seed: int = 2) -> dict[str, Any]:
    """Adds requests while others run, aborts some at random moments, until none is left. What was counted."""
    from vllm import SamplingParams

    inner, drawn = engine.llm_engine, random.Random(seed)
    doomed = set(drawn.sample(range(len(wanted)), ABORTED))
    names: dict[str, int] = {}  # the host's name of a request that is not done -> its place
    waiting = list(range(len(wanted)))
    done, wrong, aborted, cached, steps = 0, 0, 0, 0, 0
    while waiting or inner.has_unfinished_requests():
        while waiting and len(names) < AT_ONCE:
            place = waiting.pop(0)
            prompt, new = wanted[place]
            params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False)
            names[str(place)] = place
            inner.add_request(str(place), {"prompt_token_ids": prompt}, params)
        for name in [name for name, place in names.items() if place in doomed and drawn.random() < 0.05]:
            inner.abort_request([name])
            del names[name]
            aborted += 1
        for output in inner.step():
            if output.finished and output.request_id in names:
                place = names.pop(output.request_id)
                done += 1
                wrong += len(output.outputs[0].token_ids) != wanted[place][1]
                cached += output.num_cached_tokens or 0
        steps += 1
    for _ in range(4):  # what the host still has in flight
        inner.step()
    return {"done": done, "wrong lengths": wrong, "aborted": aborted, "cached tokens": cached, "steps": steps}


def complaints(facts: dict[str, Any], other_jit: Sequence[str] = (), *, has_cache: bool = True) -> list[str]:
    """What does not hold on a side. other_jit: compilations of the side without the adapter. has_cache: of prefixes."""
    found = []
    if facts["done"] + facts["aborted"] != REQUESTS:
        found.append(f"{facts['done']} requests done and {facts['aborted']} aborted of {REQUESTS}")
    if facts["wrong lengths"]:
        found.append(f"{facts['wrong lengths']} answers of another length")
    for what in ("aborted", "cached tokens") if has_cache else ("aborted",):
        if not facts[what]:
            found.append(f"no {what}")
    if not facts["preemptions"]:
        found.append("nothing was preempted: take fewer blocks")
    if facts["free blocks"][0] != facts["free blocks"][1]:
        found.append(f"free blocks {facts['free blocks'][0]} at the start, {facts['free blocks'][1]} at the end")
    if facts["same texts"][0] != facts["same texts"][1]:
        found.append(f"{facts['same texts'][0]} of {facts['same texts'][1]} prompts give the same tokens afterwards")
    for what, number in facts["kernels while serving"].items():
        if number:
            found.append(f"kernels of gdn {what} while serving: {number}")
    found += [f"compiled while serving: {line}" for line in facts["jit"] if line not in other_jit]
    return found


def worker(options: argparse.Namespace) -> None:
    """One side."""
    choices = engines.common(options.model, state=options.state, backend=options.backend) | {
        "enable_prefix_caching": not options.spec, "num_gpu_blocks_override": options.blocks,
        "compilation_config": {"cudagraph_capture_sizes": [1, 8, 32, 64]},
    }  # fmt: skip
    if options.spec:
        choices |= engines.VARIANTS["spec"]
    engine, started = engines.start(choices)
    monitor, scheduler = engines.JitMonitor(), engines.scheduler_of(engine)
    pool = scheduler.kv_cache_manager.block_pool
    preemptions, before = engines.count_preemptions(scheduler), engines.kernels()
    same = prompts(options.vocabulary, seed=3, count=16)
    first = engines.ask(engine, same, prompt_logprobs=False)
    free, began = pool.get_num_free_blocks(), time.perf_counter()
    facts = live(engine, requests(options.vocabulary))
    facts |= {"seconds": round(time.perf_counter() - began, 1), "started in": round(started, 1), "preemptions": preemptions[0]}
    facts["free blocks"] = (free, pool.get_num_free_blocks())
    engine.reset_prefix_cache()
    second = engines.ask(engine, same, prompt_logprobs=False)
    facts["same texts"] = (sum(a == b for a, b in zip(first.tokens, second.tokens, strict=True)), len(same))
    facts |= {"kernels while serving": engines.growth(before), "jit": sorted(set(monitor.lines))}
    facts |= engines.memory(engine)
    handle = engines.plug()
    facts["report"] = None if handle is None else str(handle.report())
    (options.out / f"life_{options.plug}.json").write_text(json.dumps(facts, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True, help="logs")
    parser.add_argument("--out", type=Path, required=True, help="results")
    parser.add_argument("--blocks", type=int, default=200)
    parser.add_argument("--gpu", default="0")
    parser.add_argument("--state", default="float32")
    parser.add_argument("--backend", default="flashinfer")
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--limit", type=float, default=300)
    parser.add_argument("--spec", action="store_true", help="3 drafts by n-grams, without the prefix cache")
    parser.add_argument("--replay", action="store_true", help="decode by replay with the adapter on; fails where no layer does")
    parser.add_argument("--plug", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plug:
        worker(options)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    names = ("model", "scratch", "out", "blocks", "state", "backend", "vocabulary")
    shared = [word for name in names for word in (f"--{name}", str(getattr(options, name)))]
    shared += ["--spec"] if options.spec else []
    wanted = [
        sides.Job(
            f"life {plug}", "tests.hosts.vllm_life", [*shared, "--plug", plug],
            sides.environment(plug, options.gpu, replay=options.replay), options.scratch / f"life_{plug}.log",
        )
        for plug in sides.SWITCHES
    ]  # fmt: skip
    codes = sides.run(wanted, options.limit)
    failed = bool(sides.unserved(wanted) or sides.unreplayed(wanted)) or any(codes.values())
    sys.exit(failed or not tell(options.out, has_cache=not options.spec))


def tell(folder: Path, *, has_cache: bool = True) -> bool:
    """Prints both sides; whether nothing is wrong with the adapter on."""
    found = {plug: json.loads((folder / f"life_{plug}.json").read_text()) for plug in sides.SWITCHES}
    for plug, facts in found.items():
        print(f"{plug}: { ({name: value for name, value in facts.items() if name not in ('jit', 'report')}) }")
        for one in complaints(facts, [] if plug == "off" else found["off"]["jit"], has_cache=has_cache):
            print(f"  {plug}: {one}")
    print(found["on"]["report"])
    return not complaints(found["on"], found["off"]["jit"], has_cache=has_cache)


if __name__ == "__main__":
    main()
