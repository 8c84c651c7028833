"""GPU tests need a Hopper GPU; where there is none they are skipped with that reason, and nothing else skips them."""

import functools
import gc
import importlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock, Timeout

from gdn import runtime
from gdn.ops.delta_rule.problem import ChunkProblem
from gdn.runtime import devices, env

Force = Callable[..., None]


def gpu_of(worker: str | None, num_gpus: int) -> int:
    """Index of the GPU that a worker of pytest-xdist takes ("gw3"): in turns. Without workers: 0."""
    return 0 if worker is None else int(worker.removeprefix("gw")) % num_gpus


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU of this process. It is the current device, which tests mean by "cuda"."""
    if not torch.cuda.is_available():
        pytest.skip("needs a Hopper GPU (SM90): torch sees no CUDA device")
    found = torch.device("cuda", gpu_of(os.environ.get("PYTEST_XDIST_WORKER"), torch.cuda.device_count()))
    torch.cuda.set_device(found)
    spec, name = devices.describe(found)
    if spec is None:
        pytest.skip(f"needs a Hopper GPU (SM90), got {name}")
    return found


@pytest.fixture(autouse=True)
def give_memory_back() -> Iterator[None]:
    """Many processes share the GPU: what a test took and torch keeps for later goes back after it, if it is much."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 1 << 30:
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def much_memory(device: torch.device) -> Iterator[None]:
    """Memory for tests of up to 25 GB, of which two may run at a time on a GPU: others in other processes wait here."""
    folder, gpu = Path(tempfile.gettempdir()), torch.cuda.get_device_properties(device).uuid
    for place in itertools.cycle(folder / f"gdn-tests-much-memory-{gpu}-{number}" for number in range(2)):
        try:
            with FileLock(place, timeout=0.2):
                yield
                gc.collect()
                torch.cuda.empty_cache()
                return
        except Timeout:
            continue


def force_fields(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    def prepare(problem: ChunkProblem, device: torch.device, backend: str) -> runtime.Prepared:
        spec, _ = devices.describe(device)
        assert spec is not None
        module = runtime.candidates(problem.op)[backend].module
        default = module.default_config(problem, spec)
        plain: dict[str, Any] = {}  # the form without what only one of the designs has
        if getattr(default, "num_four_sm_clusters", 0) or getattr(default, "state_heads", 1) > 1:
            plain = {"stages": 4, "num_persistent_clusters": 0, "num_four_sm_clusters": 0, "max_l2_ring_groups": 0}
            plain |= {"state_heads": 1}
        if hasattr(default, "cluster_size"):
            plain = {"cluster_size": 2}
        plain |= {"split_if_longest_exceeds": 0}
        config = replace(default, **(plain | fields))
        assert module.fits(problem, config, spec)
        return runtime.prepare(problem, device, backend, config=config)

    operator = importlib.import_module("gdn.ops.delta_rule.chunk")
    monkeypatch.setattr(operator, "prepare", prepare)
    env.reload()  # forgets calls seen before


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Force:
    """force(split_chunks=2): the chunk operator runs in its plain form with these fields, and remembers no call."""
    return functools.partial(force_fields, monkeypatch)
