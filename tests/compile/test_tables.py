"""Every entry of every shipped table names a kernel, a problem and a configuration that compile and fit the device."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from gdn import problems
from gdn.device import H100, H200, DeviceSpec
from gdn.problems import Problem
from gdn.runtime import compiled, registry, tuned
from tests.compile import checks

TABLES = sorted(tuned.SHIPPED.glob("**/*.json"))
DEVICES: dict[str, DeviceSpec] = {spec.key: spec for spec in (H100, H200)}
PROBLEMS: dict[str, Any] = {
    cls.op: cls
    for cls in (
        problems.ChunkProblem,
        problems.RecurrentProblem,
        problems.Conv1dProblem,
        problems.Conv1dUpdateProblem,
        problems.SplitProblem,
        problems.GatingProblem,
        problems.RmsNormGatedProblem,
        problems.MqaLogitsProblem,
        problems.PagedMqaLogitsProblem,
        problems.TopkProblem,
        problems.QuantizeFp8Problem,
        problems.WriteIndexerCacheProblem,
        problems.PrepareIndexerProblem,
        problems.CompressIndexerKeysProblem,
        problems.GatherIndexerCacheProblem,
        problems.ExpandTopkGroupsProblem,
    )
}


def test_a_table_ships() -> None:
    assert TABLES


@pytest.mark.parametrize("path", TABLES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_entries_compile(path: Path) -> None:
    table = tuned.read(path)
    header = table.header
    assert path == tuned.table_path(tuned.SHIPPED, header.device, header.op, header.backend)
    device = DEVICES[header.device]
    module_name = registry.operator(header.op).modules[header.backend]
    module = importlib.import_module(module_name)
    variants: dict[tuple[Any, ...], tuple[Problem, Any]] = {}  # one per compiled kernel
    for group in table.groups:
        for entry in group.entries:
            problem = PROBLEMS[header.op](**group.static, **entry.sizes)
            config = tuned.build_config(module.Config, entry.config)
            assert config is not None, f"{entry.config} has other fields than {module_name}.Config"
            assert module.refusal(problem) is None
            assert module.fits(problem, config, device), f"{config} does not fit {problem}"
            code = (problem.static_key(), *compiled.compiled_fields(config).items())
            variants[code] = (problem, config)
    failed = checks.failures(module_name, header.backend, list(variants.values()), device)
    assert not failed, "\n".join(failed)
