"""Candidates compile in processes, each bad one alone; meanwhile others go on."""

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from autotune import compiling, tuning
from autotune.compiling import Compiler
from autotune.tuning import Candidate
from gdn.device import H100
from gdn.testing import machine_code
from gdn.testing.machine_code import MachineCode
from tests.autotune import fake_kernel
from tests.autotune.fake_gpu import KERNEL, SHAPE
from tests.autotune.fake_kernel import Config


def _candidates(*configs: Any) -> list[Candidate]:
    return [Candidate(SHAPE.problem, config) for config in configs]


def _compiled(candidates: list[Candidate], timeout_s: float = 10, **options: Any) -> None:
    with Compiler([(KERNEL, one) for one in candidates], 2, timeout_s, **options) as compiler:
        compiler.wait_for_all(time.monotonic() + 300)  # a slow machine must not decide


@pytest.mark.cover  # one of them hangs for as long as it may
def test_bad_compilations_lose_only_themselves(cache: Path) -> None:
    made = list(tuning.plan(KERNEL, [SHAPE], H100).candidates.values())
    _compiled(made)
    failures = {one.config.tile: one.failure for one in made}
    assert failures[fake_kernel.CRASHES] == "worker process died (SIGSEGV)"
    assert failures[fake_kernel.HANGS] == "took longer than 10 s"
    assert "tile does not divide" in str(failures[fake_kernel.RAISES])
    good = (fake_kernel.WRONG, fake_kernel.FAST, fake_kernel.FASTEST, fake_kernel.DEFAULT)
    assert all(failures[tile] is None for tile in good) and all(one.is_done for one in made)
    assert len(list(cache.glob("chunk.tilelang/*/manifest.json"))) == len(good)


@dataclass(frozen=True)
class LaunchConfig(Config):
    steps: int = field(default=0, metadata={"compiled": bool})  # a scalar of the launch


@pytest.mark.cover
def test_scalars_of_the_launch_are_not_compiled_for(cache: Path) -> None:
    configs = [LaunchConfig(tile, False, steps) for tile in (fake_kernel.RAISES, fake_kernel.FAST) for steps in (0, 3, 4, 5)]
    made, done = _candidates(*configs), list[Any]()
    _compiled(made, on_done=lambda candidate: done.append(candidate.config))
    assert len(done) == len(configs) and set(done) == set(configs)
    assert [one.failure is None for one in made] == [False] * 4 + [True] * 4
    assert len(list(cache.glob("chunk.tilelang/*/manifest.json"))) == 2


@pytest.mark.cover
def test_it_is_left_at_once_while_a_compiler_hangs(cache: Path) -> None:
    """What compiled until then says so; what hangs is ended with its process."""
    fast, hangs = made = _candidates(Config(fake_kernel.FAST, False), Config(fake_kernel.HANGS, False))
    begin = time.monotonic()
    with Compiler([(KERNEL, one) for one in made], 2, 600) as compiler:
        while not fast.is_done:
            assert compiler.wait(60)
    assert time.monotonic() - begin < 60
    assert (fast.failure, hangs.is_done, hangs.failure) == (None, False, None)


@pytest.mark.parametrize(
    ("spills", "said"), [((0, 0), None), ((3, 8), "kernel spills: 3 local loads and stores, 8 bytes of stack")]
)
def test_what_spills_compiles_and_says_so(
    cache: Path, monkeypatch: pytest.MonkeyPatch, spills: tuple[int, int], said: str | None
) -> None:
    code = MachineCode("kernel", "sm_90a", 128, 128, spills[1], 0, Counter({"LDL": spills[0]}))
    monkeypatch.setattr(machine_code, "kernels", lambda library: [code])
    assert tuning.compile_one(KERNEL, SHAPE.problem, Config(fake_kernel.FAST, False)) == said
    assert len(list(cache.glob("chunk.tilelang/*/manifest.json"))) == 1


def test_a_process_that_does_not_start_is_no_failure_of_the_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.workers.START_S", 0.0)
    (one,) = made = _candidates(Config(fake_kernel.FAST, False))
    _compiled(made)
    assert not one.is_done and "did not start" in str(one.failure)


def test_a_fault_of_the_pool_reaches_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no more processes")

    monkeypatch.setattr(compiling.workers, "run", run)
    with pytest.raises(RuntimeError, match="no more processes"):
        _compiled(_candidates(Config(fake_kernel.FAST, False)))
