"""The step of vLLM's layers on the GPU: after the warm-up no batch loads or compiles a kernel, whatever its sizes."""

import pytest
import torch

from gdn.integrations._vllm_warm_up import warm_up
from gdn.runtime import compiled
from tests.integrations.test_vllm_warm_up import DRAWN, LIMITS, MODELS, Engine, of_model

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device")]


@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_loaded_after_the_warm_up(model: str) -> None:
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
