"""What adapters do in a repeated call besides their operator, counted: functions of this project, and operations of torch.

A function takes about 0.1 us and a view 0.6 to 1.5 us where engines run (half of that by `guards.view_of`, which is not counted);
an adapter may add 5 us to each operator. The times themselves are measured by `python3 -m tests.hosts.adapter_cost`.
"""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.hosts import adapter_paths
from tests.hosts.adapter_cost import no_kernels
from tests.hosts.adapter_counts import Counts, counts
from tests.hosts.adapter_paths import Path

# Path -> the most functions and operations.
BATCHES = {"decode": (6, 0), "drafts": (6, 0), "prompts": (6, 0), "prompts, checkpoints": (8, 0), "decode + prompts": (9, 3)}
VLLM = {f"vLLM, {layout}, {batch}": most for layout in ("flat", "interleaved") for batch, most in BATCHES.items()}
SGLANG = {
    "SGLang, decode": (4, 2),
    "SGLang, packed_decode": (1, 4),
    "SGLang, extend": (5, 0),
    "SGLang, target_verify": (4, 2),
    "SGLang, whole step of rows": (6, 1),
    "SGLang, whole step of projections": (6, 1),
}
TRANSFORMERS = {"Transformers, decode": (2, 0), "Transformers, prompts": (2, 0)}
FUNCTIONS = {
    "FLA, chunk": (8, 0),
    "FLA, recurrent": (8, 0),
    "FLA, rms_norm_gated": (4, 0),
    "FlashInfer, chunk": (9, 5),
    "FlashInfer, decode": (10, 0),
    "FlashInfer, decode, K first": (9, 0),
    "FlashInfer, mtp": (14, 0),
    "DeepGEMM, mqa": (9, 0),
    "DeepGEMM, paged mqa": (9, 0),
}


@pytest.mark.parametrize(
    ("paths", "most"),
    [
        (adapter_paths.vllm, VLLM),
        (adapter_paths.sglang, SGLANG),
        pytest.param(adapter_paths.transformers, TRANSFORMERS, marks=pytest.mark.cover),
        pytest.param(adapter_paths.functions, FUNCTIONS, marks=pytest.mark.cover),
    ],
)
def test_what_a_repeated_call_does(paths: Callable[[torch.device], Iterator[Path]], most: dict[str, tuple[int, int]]) -> None:
    if paths is adapter_paths.transformers:
        pytest.importorskip("transformers", minversion="5.20")
    with torch.inference_mode(), no_kernels():
        found = {path.what: counts(path) for path in paths(torch.device("cpu"))}
    assert found.keys() == most.keys()
    more = {what: one for what, one in found.items() if one.frames > most[what][0] or one.operations > most[what][1]}
    assert not more


def test_what_is_counted() -> None:
    """A call that makes views and asks the project, and one that calls an operator twice."""
    import gdn
    from gdn.integrations import _indices

    x, norm = torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.bfloat16)

    def step() -> None:
        rows, gate = x.split_with_sizes((2, 2))
        _indices.slots(3, x.device)
        gdn.rms_norm_gated(rows[None], gate[None], norm)

    with torch.inference_mode():
        assert counts(Path("a step", step)) == Counts(2, 3)
        with pytest.raises(ValueError, match="twice: expected 1 calls of operators, got 2"):
            counts(Path("twice", lambda: [gdn.rms_norm_gated(x, x.clone(), norm) for _ in range(2)]))
