"""Where the errors of a tensor-parallel run come from: the rows of prefill and decode of four layers of the 80B model.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.gpu.rank_rows 2 [--rows]

The same tokens go through three runs: captured kernels; captured kernels with products that add up in float32 alone; the steps
one by one on the reference. Each is compared with one pass in float32, next to one pass of the reference in bfloat16. If the
third run is as far off as the first, what differs from the pass are torch's products of few rows, not the kernels.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from gdn.cli.demo.calls import on_reference
from gdn.cli.demo.drafts import random_drafts
from gdn.cli.demo.engine import Engine
from gdn.cli.demo.ranks import joined, own_device
from gdn.cli.demo.reference import Deviation, RowErrors, Trace, deviations
from gdn.cli.demo.routes import Routes
from gdn.cli.demo.run import Plan, make_model
from gdn.layers import HybridModel
from gdn.layers.named import NAMED, first_layers

LENGTHS, STEPS = (37, 4000, 511, 2048, 2, 64, 1530), 16


@contextmanager
def sums_in_float32() -> Iterator[None]:
    """No product of torch adds parts that were rounded to bfloat16."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False
    yield
    matmul.allow_bf16_reduced_precision_reduction = before


def compared(
    plan: Plan, model: HybridModel, prompts: list[list[int]], forced: list[list[int]], *, use_graphs: bool
) -> list[Deviation]:
    """One run of the given tokens, and its comparison."""
    engine = Engine(model, plan.sizes, use_graphs=use_graphs)
    routes = Routes(model, sum(plan.lengths))
    trace = Trace(routes)
    engine.on_logits = trace.record
    trace.phase = "prefill"
    engine.prefill(prompts)
    for stream, tokens in zip(engine.streams, forced, strict=True):
        stream.tokens[-1] = tokens[0]
    trace.phase = "decode"
    engine.decode(plan.steps, forced=[[*tokens[1:], 0] for tokens in forced])
    engine.on_logits = None
    engine.finish()
    engine.drop_graphs()
    routes.stop()
    return deviations(trace, engine)


def described(rows: tuple[RowErrors, ...]) -> str:
    """Medians of both kinds of rows, of the run and of the reference."""
    lines = []
    for name, pairs in (
        ("run", [(row.error, row.rerouted) for row in rows]),
        ("reference", [(row.same_dtype, row.same_rerouted) for row in rows]),
    ):
        kinds = [torch.tensor([error for error, layers in pairs if (layers > 0) == is_other]) for is_other in (False, True)]
        medians = [f"{float(kind.median()):.4f}" if kind.numel() else "none" for kind in kinds]
        counts = f"{kinds[0].numel()} rows with float32's experts: {medians[0]}; {kinds[1].numel()} with others: {medians[1]}"
        errors = torch.cat(kinds)
        lines.append(
            f"    {name:9} median {float(errors.median()):.4f}, mean {float(errors.mean()):.4f}, "
            f"largest {float(errors.max()):.4f}; {counts}"
        )
    return "\n".join(lines)


def explained(found: list[Deviation], *, with_rows: bool) -> str:
    """The phases of a run, and its rows."""
    lines = []
    for one in found:
        medians = f"levelled median {one.error.median:.4f}, of the reference {one.same_dtype.median:.4f}"
        judged = f"{'ok' if one.passed else 'WRONG'}; {medians}, limit {one.limit.median:.4f}"
        lines += [f"  {one.phase}: {judged}", described(one.rows)]
        if with_rows:
            lines.append("    row: error, reference's; layers with other experts, reference's")
            lines += [
                f"    {n:3}: {row.error:.4f} {row.same_dtype:.4f} {row.rerouted} {row.same_rerouted}"
                for n, row in enumerate(one.rows)
            ]
    return "\n".join(lines)


def main() -> None:
    size, with_rows = int(sys.argv[1]), "--rows" in sys.argv
    device = own_device(torch.device("cuda"))
    plan = Plan("80b", first_layers(NAMED["qwen3-next-80b"], 4), LENGTHS, STEPS, 3, device, size)
    draw = random.Random(0)
    prompts, forced = (
        [random_drafts(draw, plan.config.vocab_size, length) for length in lengths]
        for lengths in (LENGTHS, [STEPS] * len(LENGTHS))
    )
    with joined(size, device) as group:
        assert group is not None
        model = make_model(plan, group)
        for name, setting, use_graphs in (
            ("captured kernels", nullcontext(), True),
            ("captured kernels, products that add up in float32", sums_in_float32(), True),
            ("the same steps on the reference", on_reference(), False),
        ):
            with setting:
                found = compared(plan, model, prompts, forced, use_graphs=use_graphs)
            if group.rank() == 0:
                print(f"{name}\n{explained(found, with_rows=with_rows)}", flush=True)


if __name__ == "__main__":
    main()
