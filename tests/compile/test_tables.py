"""Every entry of every shipped table names a kernel, a problem and a configuration that compile and fit the device."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.shapes import shapes
from gdn import problems, runtime
from gdn.device import H100, H200, DeviceSpec
from gdn.problems import Problem
from gdn.runtime import registry, tuned
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
        problems.GdnDecodeProblem,
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


def _entries(path: Path) -> list[tuple[Problem, Any]]:
    """The problem and the configuration of every entry, None where that has other fields than the kernel's."""
    table = tuned.read(path)
    module = importlib.import_module(_module_name(path))
    return [
        (PROBLEMS[table.header.op](**group.static, **entry.sizes), tuned.build_config(module.Config, entry.config))
        for group in table.groups
        for entry in group.entries
    ]


def _module_name(path: Path) -> str:
    header = tuned.read(path).header
    return registry.operator(header.op).modules[header.backend]


@checks.compiles(lambda path: checks.tasks_of(_module_name(path), _entries(path)))
@pytest.mark.parametrize("path", TABLES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_entries_compile(path: Path) -> None:
    header = tuned.read(path).header
    assert path == tuned.table_path(tuned.SHIPPED, header.device, header.op, header.backend)
    device, module_name = DEVICES[header.device], _module_name(path)
    module, entries = importlib.import_module(module_name), _entries(path)
    for problem, config in entries:
        assert config is not None, f"an entry for {problem} has other fields than {module_name}.Config"
        assert module.refusal(problem) is None
        assert module.fits(problem, config, device), f"{config} does not fit {problem}"
    failed = checks.failures(module_name, header.backend, entries, device)
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("path", [path for path in TABLES if path.stem.startswith("chunk.")], ids=lambda path: path.stem)
def test_a_chunk_entry_serves_sizes_near_its_own(path: Path) -> None:
    """One more sequence may ask for another design (segments, four SMs a head), which the default knows."""
    candidate = runtime.candidates("chunk")[tuned.read(path).header.backend]
    if candidate.refusal(one := _problem(16, 32, 8192, 1)) is not None:
        pytest.skip("needs the DSL")
    assert candidate.tuned(one, H100)[0].sizes == (("num_sequences", 1), ("num_tokens", 8192))
    assert candidate.tuned(_problem(16, 32, 8000, 1), H100) and candidate.tuned(_problem(16, 32, 8192, 9), H100)
    for tokens, sequences in ((8192, 2), (8192, 3), (4000, 4), (100, 1), (70000, 1)):
        assert not candidate.tuned(_problem(16, 32, tokens, sequences), H100)


# op, sizes with an entry near enough, sizes without one: of the groups that hold an entry of the first.
REACH: list[tuple[str, dict[str, int], list[dict[str, int]], list[dict[str, int]]]] = [
    (
        "gdn_decode",  # drafts: large batches alone are tuned
        {"num_tokens": 128, "num_sequences": 32},
        [{"num_tokens": 96, "num_sequences": 24}, {"num_tokens": 640, "num_sequences": 160}],
        [{"num_tokens": 4, "num_sequences": 1}, {"num_tokens": 32, "num_sequences": 8}],
    ),
    (
        "conv1d",
        {"num_tokens": 8192, "num_sequences": 128},
        [{"num_tokens": 8000, "num_sequences": 1}, {"num_tokens": 9000, "num_sequences": 8}],
        [{"num_tokens": 4096, "num_sequences": 1}, {"num_tokens": 64, "num_sequences": 1}],
    ),
    (
        "conv1d_update",
        {"num_tokens": 512, "num_sequences": 128},
        [{"num_tokens": 600, "num_sequences": 150}],
        [{"num_tokens": 4, "num_sequences": 1}, {"num_tokens": 64, "num_sequences": 16}],
    ),
    (
        "recurrent",
        {"num_tokens": 512, "num_sequences": 128},
        [{"num_tokens": 600, "num_sequences": 150}],
        [{"num_tokens": 4, "num_sequences": 1}, {"num_tokens": 8, "num_sequences": 2}],
    ),
    (
        "topk",  # as many columns as the entry's bitmap has; more would be selected without one
        {"num_rows": 64, "num_columns": 131072, "k": 2048},
        [{"num_rows": 64, "num_columns": 100000, "k": 2048}],
        [{"num_rows": 64, "num_columns": 131073, "k": 2048}],
    ),
    (
        "mqa_logits",
        {"num_queries": 8192, "num_keys": 8192, "num_columns": 8192},
        [
            {"num_queries": 7000, "num_keys": 8192, "num_columns": 8192},
            {"num_queries": 8192, "num_keys": 9000, "num_columns": 9000},
        ],
        [
            {"num_queries": 2048, "num_keys": 8192, "num_columns": 8192},
            {"num_queries": 4096, "num_keys": 32768, "num_columns": 32768},
        ],
    ),
    (
        "paged_mqa_logits",  # long calls alone are tuned
        {"batch": 64, "max_context_len": 32768},
        [{"batch": 60, "max_context_len": 32768}, {"batch": 64, "max_context_len": 40000}],
        [
            {"batch": 1, "max_context_len": 131072},
            {"batch": 32, "max_context_len": 8192},
            {"batch": 256, "max_context_len": 4096},
        ],
    ),
]


@pytest.mark.parametrize(("op", "tuned_at", "near", "far"), REACH, ids=[row[0] for row in REACH])
def test_an_entry_serves_sizes_near_its_own(
    op: str, tuned_at: dict[str, int], near: list[dict[str, int]], far: list[dict[str, int]]
) -> None:
    candidate = runtime.candidates(op)["cute"]
    table = tuned.read(tuned.table_path(tuned.SHIPPED, "h100", op, "cute"))
    group = next(group for group in table.groups if any(entry.sizes == tuned_at for entry in group.entries))

    def problem(sizes: dict[str, int]) -> Problem:
        made: Problem = PROBLEMS[op](**group.static, **sizes)
        return made

    if candidate.refusal(problem(tuned_at)) is not None:
        pytest.skip("needs the DSL")
    assert candidate.tuned(problem(tuned_at), H100)[0].sizes == tuple(sorted(tuned_at.items()))
    assert all(candidate.tuned(problem(sizes), H100) for sizes in near)
    assert not any(candidate.tuned(problem(sizes), H100) for sizes in far)


def _problem(num_k_heads: int, num_v_heads: int, num_tokens: int, num_sequences: int) -> Problem:
    shape = next(one for one in shapes("chunk") if one.name == f"{num_k_heads}/{num_v_heads} 8192")
    return replace(shape.problem, num_tokens=num_tokens, num_sequences=num_sequences)  # type: ignore[call-arg]
