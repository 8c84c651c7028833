"""SGLang's kernel object on an H100: SGLang's layouts, bfloat16 tokens and heads of 128 against a float64 loop."""

import pytest

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
