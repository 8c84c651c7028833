"""The step of vLLM's layers on the GPU: after the warm-up no batch loads or compiles a kernel, whatever its sizes."""

import pytest
import torch

from gdn.integrations import vllm_qsa
from gdn.integrations._vllm_warm_up import warm_up
from gdn.runtime import compiled
from tests.integrations.test_vllm_warm_up import DRAWN, FOLDS, LIMITS, MODELS, Engine, of_model

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device")]


@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_loaded_after_the_warm_up(model: str) -> None:
    if MODELS[model].get("replays") and not FOLDS:
        pytest.skip("fold_states has no kernel, so that no layer replays on a GPU")
    with torch.device("cuda"), torch.inference_mode():
        engine = Engine(of_model(**MODELS[model]))
        for given in (engine.qkvz, engine.ba):
            given.normal_()
        warm_up(engine.layer, engine.step, engine.qkvz, engine.ba, LIMITS)
        loaded = (compiled.compilations(), len(compiled._functions))
        for _ in range(DRAWN):
            metadata = engine.draw()
            tokens = metadata.num_actual_tokens
            engine.core.fill_(torch.nan)
            engine.step(engine.qkvz[:tokens], engine.ba[:tokens], engine.core[:tokens], metadata, engine.pages)
            assert not engine.core[:tokens].isnan().any(), vars(metadata)
        torch.cuda.synchronize()
        assert (compiled.compilations(), len(compiled._functions)) == loaded


def test_sparse_attention_of_decode_rows() -> None:
    """Selection and attention of Qwen4Exp as on the CPU, from the same bfloat16 values."""
    heads, kv_heads, dim, page, pages, rows = 16, 2, 256, 64, 6, 5
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    table = torch.randperm(20, generator=generator)[: 3 * pages].view(3, pages).int()
    index_q, keys = randn(2 * 3, 4, 128), randn(20, page, 1, 128)
    visible, found = torch.tensor([0, 5, 60, 61, 384, 200], dtype=torch.int32), torch.zeros(6, 24, dtype=torch.int32)
    on_gpu = [x.cuda() for x in (index_q, keys, table, visible)]
    found_there = found.cuda()
    vllm_qsa.select(*(index_q.float(), keys.float(), table, visible), 96, 4, 2, found)
    vllm_qsa.select(*on_gpu, 96, 4, 2, found_there)
    assert torch.equal(found_there.cpu(), found)

    cache, owner = randn(20, kv_heads, page, 2 * dim), torch.tensor([0, 0, 2, 1, 1], dtype=torch.int32)
    q, gate = randn(rows, heads, dim), randn(rows, heads * dim)
    picked = torch.stack([torch.randperm(page * pages, generator=generator)[:99] for _ in range(rows)]).int()
    packed = torch.cat([picked, torch.tensor([[99], [3], [0], [98], [1]], dtype=torch.int32)], dim=1)

    def attended(device: str, dtype: torch.dtype) -> torch.Tensor:
        k, v = cache.to(device, dtype).transpose(1, 2).split(dim, dim=-1)
        rest = (x.to(device) for x in (packed, table, owner))
        return vllm_qsa.attend(q.to(device, dtype), k, v, *rest, False, output_gate=gate.to(device, dtype)).float().cpu()

    assert (attended("cuda", torch.bfloat16) - attended("cpu", torch.float32)).abs().max() < 2e-2
