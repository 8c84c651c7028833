"""The operators of gdn.distributed, and the layers with a group of context-parallel ranks, on 2, 3 and 4 processes equal one."""

import pytest

from tests.distributed import cases_layers, cases_operators
from tests.distributed.ranks import Worlds

MODULES = {module.__name__: module.CASES for module in (cases_layers, cases_operators)}
SHORT = {cases_layers.__name__: 2, cases_operators.__name__: 3}  # ranks of the tests that are no cover tests
WORLDS = [
    pytest.param(module, name, size, marks=() if size == SHORT[module] else pytest.mark.cover)
    for module, cases in MODULES.items()
    for size in (2, 3, 4)
    for name in cases
]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Worlds]:
    return {module: Worlds(module, tmp_path_factory.mktemp(module.rpartition(".")[2])) for module in MODULES}


@pytest.mark.parametrize(("module", "name", "size"), WORLDS)
def test_ranks_compute_what_one_process_does(worlds: dict[str, Worlds], module: str, name: str, size: int) -> None:
    assert not worlds[module][size][name], "\n".join(worlds[module][size][name])
