"""`python -m benchmarks.crossing`: from how many tokens a sequence on the chunk form beats the recurrent form, on this GPU.

`RECURRENT_TOKENS` (`gdn.ops.delta_rule.crossing`) holds the answer that `gdn.gated_delta_rule` uses: the smallest over the
batches that a step has.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import gdn
from autotune.console import device_spec
from gdn.cli.plain import run_alone
from gdn.models import MODELS
from gdn.ops.delta_rule import inputs
from gdn.ops.delta_rule.crossing import RECURRENT_TOKENS
from gdn.runtime import registry
from gdn.testing import timing

SEQUENCES = (1, 8, 32, 128)
TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)  # of each sequence

Call = Callable[[], object]


def calls(sequences: int, tokens: int, device: torch.device, tp: int = 1) -> tuple[Call, Call]:
    """The same step through the recurrent and through the chunk form."""
    example: Any = registry.operator("chunk").example(MODELS["qwen3-next-80b"].per_rank(tp), fp8=False)
    problem = replace(example, num_tokens=sequences * tokens, num_sequences=sequences, has_mask=False, has_checkpoints=False)
    chunk = inputs.chunk_inputs(problem, device, lengths=[tokens] * sequences, strided=True)
    recurrent = {name: value for name, value in chunk.items() if name != "state_indices"}
    recurrent["ssm_state_indices"] = chunk["state_indices"]
    return partial(gdn.fused_recurrent_gated_delta_rule, **recurrent), partial(gdn.chunk_gated_delta_rule, **chunk)


def crossing(times: dict[int, tuple[float, float]]) -> int:
    """Most tokens up to which the recurrent form is faster, at all lengths measured. times: tokens -> (recurrent, chunk)."""
    last = 0
    for tokens, (recurrent, chunk) in sorted(times.items()):
        if recurrent >= chunk:
            break
        last = tokens
    return last


def main(tp: Annotated[int, typer.Option(help="Tensor parallel ranks; the shapes of one rank are taken.")] = 1) -> None:
    """Time both forms of the delta rule on short sequences."""
    device_spec()
    device = torch.device("cuda", torch.cuda.current_device())
    table = Table("sequences", *(f"{tokens} tokens" for tokens in TOKENS), "recurrent up to", title=torch.cuda.get_device_name())
    found = []
    for sequences in SEQUENCES:
        times = {}
        for tokens in TOKENS:
            recurrent, chunk = timing.interleaved_us([[call] for call in calls(sequences, tokens, device, tp)])
            times[tokens] = (recurrent, chunk)
        found.append(crossing(times))
        table.add_row(str(sequences), *(f"{one:.1f} / {other:.1f}" for one, other in times.values()), str(found[-1]))
    console = Console()
    console.print(table)
    console.print(f"the smallest is {min(found)} tokens; gdn.ops.delta_rule.crossing.RECURRENT_TOKENS is {RECURRENT_TOKENS}")


if __name__ == "__main__":
    run_alone(main, "python -m benchmarks.crossing")
