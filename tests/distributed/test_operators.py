"""The operators of gdn.distributed on 2, 3 and 4 processes equal those of one process."""

import pytest

from tests.distributed.cases_operators import CASES
from tests.distributed.ranks import Worlds

WORLDS = [pytest.param(2, marks=pytest.mark.cover), 3, pytest.param(4, marks=pytest.mark.cover)]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds("tests.distributed.cases_operators", tmp_path_factory.mktemp("operators"))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", list(CASES))
def test_ranks_compute_what_one_process_does(worlds: Worlds, name: str, world: int) -> None:
    assert not worlds[world][name], "\n".join(worlds[world][name])
