"""Judges what `vllm_values` saved, by a float32 pass of the same checkpoint over the prompts and the hosts' texts.

usage: python3 -m tests.hosts.judge_values OFF.json.gz ON.json.gz --checkpoint FOLDER [--device cuda|cpu]

Per variant: the error of the log-probabilities of prompt tokens with the adapter off and on (on at most 1.1 times off), and where
the texts part (only where both tokens are within twice the host's largest error of the best float32 logit).
Exits with 1 where one does not hold.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from tests.hosts import float32
from tests.hosts.judgement import Verdict, differences, errors
from tests.hosts.requests import Answers, Side
from tests.hosts.vllm_checkpoint import DIGEST

Logits = Callable[[list[list[int]]], Tensor]


class ExactTexts:
    """Exact log-probabilities of the prompts, and logits of every text that a side gave, one pass a request.

    Attributes
    ----------
    prompts : list of list of float
        Log-probability of every prompt token but the first.
    texts : list of dict
        Per request, new tokens -> logits [new tokens, vocabulary].
    """

    def __init__(self, sides: list[Side], logits: Logits) -> None:
        self.prompts: list[list[float]] = []
        self.texts: list[dict[tuple[int, ...], Tensor]] = []
        for request, prompt in enumerate(sides[0].prompts):
            texts = sorted({text for side in sides for one in side.variants.values() for text in _texts(one, request)})
            found = logits([[*prompt, *text] for text in texts])
            rows = torch.log_softmax(found[0, : len(prompt) - 1].double(), dim=-1)
            self.prompts.append(rows.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist())
            self.texts.append({text: found[place, len(prompt) - 1 : -1].clone() for place, text in enumerate(texts)})

    def logprobs(self, tokens: list[list[int]]) -> list[list[float]]:
        """Of new tokens, per request, each over its own text."""
        found = []
        for request, text in enumerate(tokens):
            rows = torch.log_softmax(self.texts[request][tuple(text)].double(), dim=-1)
            found.append(rows.gather(1, torch.tensor(text)[:, None])[:, 0].tolist())
        return found


def _texts(answers: Answers, request: int) -> list[tuple[int, ...]]:
    rounds = [answers.tokens] if answers.again is None else [answers.tokens, answers.again["tokens"]]
    return [tuple(tokens[request]) for tokens in rounds]


def judge(variant: str, off: Answers, on: Answers, exact: ExactTexts) -> Verdict:
    """Verdict on a variant."""
    prompt_off = errors(off.prompt_logprobs, exact.prompts)
    output_off = errors(off.logprobs, exact.logprobs(off.tokens))
    parted = differences(off.tokens, on.tokens, exact.texts)
    missing = []
    if on.again is not None:
        parted += differences(on.tokens, on.again["tokens"], exact.texts)
        if not sum(on.again["cached"]):
            missing.append("no prompt was found in the prefix cache")
    if variant == "spec" and not on.facts.get("accepted"):
        missing.append("no draft was accepted")
    return Verdict(
        prompt_off,
        errors(on.prompt_logprobs, exact.prompts),
        output_off,
        errors(on.logprobs, exact.logprobs(on.tokens)),
        parted,
        2 * max(prompt_off.largest, output_off.largest),
        missing,
    )


def line(variant: str, verdict: Verdict) -> str:
    one, output = verdict, verdict.output_on.rms / verdict.output_off.rms
    widest = max((found.gap for found in one.parted), default=0.0)
    return (
        f"  {variant:9} prompts: off {one.prompt_off.rms:.5f} on {one.prompt_on.rms:.5f} ratio {one.ratio:.3f} "
        f"(largest {one.prompt_off.largest:.4f}, {one.prompt_on.largest:.4f}; {one.prompt_on.count} tokens)  "
        f"new tokens: ratio {output:.3f}  texts part {len(one.parted)} times, {widest:.4f} at most, allowed {one.allowed:.4f}  "
        + ("; ".join(one.complaints) or "ok")
    )


def judge_sides(off: Side, on: Side, logits: Logits, tell: Callable[[str], None] = print) -> bool:
    """Judges all variants that both sides have; whether all hold and none is missing."""
    for what in ("model", "digest", "prompts"):
        if getattr(off, what) != getattr(on, what):
            raise ValueError(f"{what}: expected the same on both sides, got others")
    exact, holds = ExactTexts([off, on], logits), True
    tell(f"{on.model}: errors of log-probabilities against float32, root mean squares")
    for side in (off, on):
        for variant, error in side.failed.items():
            tell(f"  {variant:9} {side.plug} failed: {error}")
            holds = False
    for variant, answers in on.variants.items():
        if variant not in off.variants:
            continue
        verdict = judge(variant, off.variants[variant], answers, exact)
        tell(line(variant, verdict))
        tell(f"{'':12}off {off.variants[variant].facts}\n{'':12}on {answers.facts}")
        holds = holds and not verdict.complaints
    return holds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("off", type=Path)
    parser.add_argument("on", type=Path)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    began = time.time()
    off, on = Side.load(options.off), Side.load(options.on)
    written = (options.checkpoint / DIGEST).read_text()
    if written != on.digest:
        raise ValueError(f"checkpoint: expected the one that the host served ({on.digest[:12]}), got {written[:12]}")
    float32.forbid_kernels()
    holds = judge_sides(off, on, float32.Exact(options.checkpoint, options.device).logits)
    print(f"judged in {time.time() - began:.0f} s on {options.device}")
    sys.exit(not holds)


if __name__ == "__main__":
    main()
