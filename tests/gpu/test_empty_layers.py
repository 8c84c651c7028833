"""Empty batches of every layer on a Hopper GPU: at sizes that kernels serve, and captured."""

import pytest
import torch

from gdn.testing.compare import same_bits
from tests.layers.empty_steps import CASES, VARIANTS, Idle, steps, tensors

pytestmark = pytest.mark.gpu

SIZES = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "index_head_dim": 128,
    "index_n_heads": 8, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.mark.parametrize(("variant", "use_fp8", "has_pages"), CASES)
def test_nothing_happens(variant: str, use_fp8: bool, has_pages: bool, device: torch.device) -> None:
    idle = Idle(variant, device, torch.bfloat16, use_fp8=use_fp8, **SIZES)
    for name, step in steps(idle.config, device).items():
        if step.rows and not has_pages and idle.config.index_ratio > 1:
            continue  # refused, see tests.layers.test_empty
        try:
            idle.check(step, idle.caches(has_pages=has_pages))
            torch.cuda.synchronize()
        except Exception as error:
            error.add_note(name)
            raise


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_captured_step_of_nobody(variant: str, device: torch.device) -> None:
    idle = Idle(variant, device, torch.bfloat16, use_fp8=False, **SIZES)
    step, caches = steps(idle.config, device)["captured, nobody"], idle.caches(has_pages=True)
    before = [x.clone() for x in tensors(caches)]
    ids = torch.zeros(step.rows, dtype=torch.int64, device=device)
    with torch.inference_mode():
        expected = idle.model(ids, ids, step.metadata, caches)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = idle.model(ids, ids, step.metadata, caches)
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output, expected)
    assert all(same_bits(one, other) for one, other in zip(tensors(caches), before, strict=True))
