"""SGLang's kernel object and backend on an H100: its layouts, bfloat16 tokens and heads of 128 against a float64 loop."""

import pytest
import torch

from gdn.integrations import _sglang_warm_up as warm
from gdn.runtime import compiled
from tests.integrations import sglang_backend as batches
from tests.integrations.sglang_engine import LAYOUTS, Engine, check_decode, check_extend, check_snapshots, check_verify

pytestmark = pytest.mark.gpu
CLOSE = 2e-2  # of the largest value: bfloat16 inside of a chunk, and between a tree's tokens where the pool is bfloat16


@pytest.fixture(params=LAYOUTS)
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(1, dim=128, device="cuda", **LAYOUTS[request.param])


@pytest.mark.parametrize("packed", [False, True])
def test_decode(engine: Engine, packed: bool) -> None:
    check_decode(engine, CLOSE, CLOSE, packed)


@pytest.mark.parametrize("is_given", [False, True])
def test_extend(engine: Engine, is_given: bool) -> None:
    check_extend(engine, CLOSE, CLOSE, is_given)


def test_snapshots(engine: Engine) -> None:
    check_snapshots(engine, CLOSE, CLOSE)


@pytest.mark.parametrize("is_tree", [False, True])
def test_verify(engine: Engine, is_tree: bool) -> None:
    check_verify(engine, CLOSE, CLOSE, is_tree)


@pytest.fixture
def conv(engine: Engine) -> batches.Convolution:
    return batches.Convolution(engine, strided=engine.pool.shape[1] > 1, has_bias=engine.pool.shape[1] == 1)


def test_convolution_of_prompts(conv: batches.Convolution) -> None:
    batches.check_prompts(conv, CLOSE)


def test_convolution_of_one_token(conv: batches.Convolution) -> None:
    batches.check_update(conv, CLOSE)


@pytest.mark.parametrize("overlap", [True, False])
def test_convolution_of_drafts(conv: batches.Convolution, overlap: bool) -> None:
    batches.check_drafts(conv, CLOSE, overlap)


@pytest.mark.parametrize("is_pair", [False, True])
def test_a_decode_step(conv: batches.Convolution, is_pair: bool) -> None:
    batches.check_step(conv, CLOSE, CLOSE, is_pair)


def test_nothing_is_compiled_after_the_warm_up(engine: Engine) -> None:
    conv = batches.Convolution(engine, strided=engine.pool.shape[1] > 1)
    for overlap in (True, False):
        form = warm.Form(
            2, 4, 128, 128, 4, False, "silu", torch.bfloat16, torch.bfloat16, torch.float32, torch.float32, torch.bfloat16,
            engine.states.dtype, drafts=5, buffer_dtype=engine.states.dtype, overlap=overlap,
        )  # fmt: skip
        warm.warm_up([form], warm.PHASES)
    before = compiled.compilations()
    batches.check_step(conv, CLOSE, CLOSE, False)
    for check in (batches.check_prompts, batches.check_update):
        check(batches.Convolution(engine), CLOSE)
    for overlap in (True, False):
        batches.check_drafts(batches.Convolution(engine), CLOSE, overlap)
    check_verify(Engine(1, dim=128, device="cuda", dtype=engine.states.dtype), CLOSE, CLOSE, False)
    check_snapshots(Engine(1, dim=128, device="cuda", dtype=engine.states.dtype), CLOSE, CLOSE)
    assert compiled.compilations() == before
