"""One rank under torchrun: logits of a prefill and of captured decode steps of four layers of the 80B model, into a folder.

python -m torch.distributed.run --nproc-per-node RANKS -m tests.gpu.rank_decode RANKS FOLDER
"""

import random
import sys
from pathlib import Path

import torch
from torch import Tensor

from gdn.cli.demo.calls import on_reference
from gdn.cli.demo.engine import Engine
from gdn.cli.demo.ranks import joined, own_device
from gdn.cli.demo.reference import ExpertByExpert, Trace, in_float32
from gdn.cli.demo.routes import Routes, recording
from gdn.cli.demo.run import Plan, make_model
from gdn.layers.named import NAMED, first_layers

LENGTHS, STEPS = (37, 700, 64, 2100), 16


def run(engine: Engine, routes: Routes, prompts: list[list[int]], forced: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Logits [sequences * (1 + steps), vocab] after the prompts and after every given token, sequence by sequence; experts."""
    trace = Trace(routes)
    engine.on_logits = trace.record
    engine.prefill(prompts)
    for stream, tokens in zip(engine.streams, forced, strict=True):
        stream.tokens[-1] = tokens[0]
    engine.decode(STEPS, forced=[[*tokens[1:], 0] for tokens in forced])
    engine.finish()
    engine.on_logits = None
    found = [torch.stack([torch.cat([getattr(one, name) for one in step]) for step in trace.steps], 1).flatten(0, 1)
             for name in ("logits", "experts")]  # fmt: skip
    return found[0].float().cpu(), found[1].cpu()


def main() -> None:
    size, folder = int(sys.argv[1]), Path(sys.argv[2])
    device = own_device(torch.device("cuda"))
    plan = Plan("80b", first_layers(NAMED["qwen3-next-80b"], 4), LENGTHS, STEPS, 3, device, size)
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(plan.config.vocab_size) for _ in range(count)]

    prompts, forced = [tokens(length) for length in LENGTHS], [tokens(STEPS) for _ in LENGTHS]
    with joined(size, device) as group:
        assert group is not None
        engine = Engine(make_model(plan, group), plan.sizes, use_graphs=True)
        routes = Routes(engine.model, sum(LENGTHS))
        logits, experts = run(engine, routes, prompts, forced)
        repeats = torch.equal(logits, run(engine, routes, prompts, forced)[0])
        torch.save({"logits": logits, "experts": experts, "repeats": repeats}, folder / f"{group.rank()}.pt")
        engine.drop_graphs()
        routes.stop()
        if size == 1:
            sequences = [prompt + given for prompt, given in zip(prompts, forced, strict=True)]
            with on_reference():
                wide = Engine(in_float32(engine.model), plan.sizes, use_graphs=False)
                with recording(wide.model, sum(map(len, sequences)), ExpertByExpert) as routes:
                    exact = wide.score(sequences, [length - 1 for length in LENGTHS])
                    stops = torch.tensor([len(one) for one in sequences]).cumsum(0).tolist()
                    experts = routes.of([row for stop in stops for row in range(stop - STEPS - 1, stop)])
            torch.save({"logits": torch.cat(exact).cpu(), "experts": experts.cpu()}, folder / "exact.pt")


if __name__ == "__main__":
    main()
