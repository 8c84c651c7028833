"""The operators of gdn.distributed on 2, 3 and 4 processes equal those of one process."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.distributed import ranks
from tests.distributed.cases_operators import CASES

MODULE = "tests.distributed.cases_operators"
Errors = Mapping[int, dict[str, list[str]]]
WORLDS = [pytest.param(2, marks=pytest.mark.cover), 3, pytest.param(4, marks=pytest.mark.cover)]


class _Lazy(dict[int, dict[str, list[str]]]):
    """Errors by number of ranks, each run at the first question."""

    def __init__(self, run: Callable[[int], dict[str, list[str]]]) -> None:
        super().__init__()
        self.run = run

    def __missing__(self, world: int) -> dict[str, list[str]]:
        return self.setdefault(world, self.run(world))


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> Errors:
    folder: Path = tmp_path_factory.mktemp("stores")
    return _Lazy(lambda world: ranks.start(MODULE, list(CASES), world, folder))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", list(CASES))
def test_ranks_compute_what_one_process_does(errors: Errors, name: str, world: int) -> None:
    assert not errors[world][name], "\n".join(errors[world][name])
