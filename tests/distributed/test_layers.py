"""The layers with a group of context-parallel ranks on 2, 3 and 4 processes equal one process."""

import pytest

from tests.distributed.cases_layers import CASES
from tests.distributed.ranks import Worlds

WORLDS = [2, pytest.param(3, marks=pytest.mark.cover), pytest.param(4, marks=pytest.mark.cover)]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds("tests.distributed.cases_layers", tmp_path_factory.mktemp("layers"))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", list(CASES))
def test_ranks_compute_what_one_process_does(worlds: Worlds, name: str, world: int) -> None:
    assert not worlds[world][name], "\n".join(worlds[world][name])
