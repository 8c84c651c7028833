"""Context parallel on 2 and 4 GPUs with NCCL, next to one GPU."""

from pathlib import Path

import pytest
import torch

from tests.gpu import distributed_cases

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[2, 4])
def errors(
    request: pytest.FixtureRequest, device: torch.device, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    count = torch.cuda.device_count()
    if count < request.param:
        pytest.skip(f"needs {request.param} GPUs of one host, got {count}")
    folder: Path = tmp_path_factory.mktemp("ranks")
    return distributed_cases.run(request.param, folder)


@pytest.mark.parametrize("name", list(distributed_cases.CASES))
def test_ranks_compute_what_one_gpu_does(errors: dict[str, list[str]], name: str) -> None:
    assert not errors[name], "\n".join(errors[name])
