"""Every entry of every shipped table names a kernel, a problem and a configuration that compile and fit the device; every entry
is of the kernel as it is, and says what the default does not."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune import tables, tuning
from autotune.shapes import shapes
from gdn import runtime
from gdn.device import H100, H200, DeviceSpec
from gdn.problem import Problem
from gdn.runtime import env, registry, select, tuned
from tests.compile import checks

TABLES = sorted(tuned.SHIPPED.glob("**/*.json"))
DEVICES: dict[str, DeviceSpec] = {spec.key: spec for spec in (H100, H200)}
every_table = pytest.mark.parametrize("path", TABLES, ids=lambda path: f"{path.parent.name}-{path.stem}")


def test_a_table_ships() -> None:
    assert TABLES


def _kernel(path: Path) -> tuning.Kernel:
    header = tuned.read(path).header
    (kernel,) = tuning.kernels(header.op, header.backend)
    return kernel


def _rows(path: Path) -> list[tables.Row]:
    table = tuned.read(path)
    found = list(tables.rows(_kernel(path), table))
    assert len(found) == table.num_entries(), "an entry has other fields than the operator's problem"
    return found


def _entries(path: Path) -> list[tuple[Problem, Any]]:
    """The problem and the configuration of every entry, None where that has other fields than the kernel's."""
    config_type = _kernel(path).module.Config
    return [(row.problem, tuned.build_config(config_type, row.entry.config)) for row in _rows(path)]


def _module_name(path: Path) -> str:
    header = tuned.read(path).header
    return registry.operator(header.op).modules[header.backend]


@checks.compiles(lambda path: checks.tasks_of(_module_name(path), _entries(path)))
@every_table
def test_entries_compile(path: Path) -> None:
    header = tuned.read(path).header
    assert path == tuned.table_path(tuned.SHIPPED, header.device, header.op, header.backend)
    device, module_name = DEVICES[header.device], _module_name(path)
    module, entries = importlib.import_module(module_name), _entries(path)
    for problem, config in entries:
        assert config is not None, f"an entry for {problem} has other fields than {module_name}.Config"
        assert module.refusal(problem) is None
        assert module.fits(problem, config, device), f"{config} does not fit {problem}"
    checks.check(module_name, header.backend, entries, device)


@every_table
def test_entries_are_of_the_kernel_as_it_is(path: Path) -> None:
    """Fix after an edit of a kernel: `python -m autotune tune --restamp`, without a GPU where the machine code is the same."""
    table, source = tuned.read(path), _kernel(path).source
    assert table.num_stale(source) == 0
    for row in _rows(path):
        assert row.entry.machine_code is not None and row.entry.date in table.header.runs


@every_table
def test_no_entry_repeats_the_default(path: Path) -> None:
    """Fix after an edit of a default: `python -m autotune tune --prune`."""
    kernel, table = _kernel(path), tuned.read(path)
    assert tables.pruned(kernel, table, DEVICES[table.header.device])[1] == 0


@every_table
def test_an_entry_serves_its_own_problem_first(path: Path) -> None:
    header = tuned.read(path).header
    candidate = runtime.candidates(header.op)[header.backend]
    for row in _rows(path):
        first = candidate.tuned(row.problem, DEVICES[header.device])[0]
        assert (first.config, dict(first.sizes), first.others) == (row.config, row.entry.sizes, ())
        assert (first.distance, first.is_stale) == (0.0, False)


@every_table
def test_an_entry_serves_no_sizes_far_from_its_own(path: Path) -> None:
    """Another design may be the choice there, which the default knows: one more sequence for the chunk kernels."""
    header = tuned.read(path).header
    candidate = runtime.candidates(header.op)[header.backend]
    within = getattr(candidate.module, "TUNED_WITHIN", tuned.WITHIN)
    assert within <= 1.5
    for row in _rows(path):
        for factor in (5, 0.19):  # of one size alone: log2(5) is 2.3
            for name, value in row.entry.sizes.items():
                problem: Problem = replace(row.problem, **{name: max(1, round(value * factor))})  # type: ignore[type-var]
                for found in candidate.tuned(problem, DEVICES[header.device]):
                    assert tuned.distance(dict(found.sizes), problem.sizes()) <= within


# Operator, shape, sizes at which its table is tuned, sizes that it would serve, and sizes that it would not, each in the kernel's
# own bound. Sizes in the order of the problem's: num_tokens, num_sequences but for the last two.
REACH: list[tuple[str, str, tuple[int, ...], list[tuple[int, ...]], list[tuple[int, ...]]]] = [
    ("chunk", "16/32 8192", (8192, 1), [(8000, 1)], [(8192, 2), (8192, 3), (4000, 1), (70000, 1)]),
    ("chunk", "16/32 8 x 1024", (8192, 8), [(8192, 9)], [(8192, 1)]),
    ("gdn_decode", "16/32 batch 128 f32, 4 tokens each", (512, 128), [(640, 160)], [(4, 1), (32, 8)]),
    ("conv1d", "16/32 8192", (8192, 1), [(8000, 1)], [(4096, 1), (64, 1)]),
    ("conv1d_update", "16/32 batch 128, 4 tokens each", (512, 128), [(600, 150)], [(4, 1), (64, 16)]),
    ("recurrent", "16/32 batch 128 f32, 4 tokens each", (512, 128), [(600, 150)], [(4, 1), (8, 2)]),
    # k, rows, columns: as many columns as the entry's bitmap has; more would be selected without one.
    ("topk", "64 x 131072", (2048, 64, 131072), [(2048, 64, 100000)], [(2048, 64, 131073)]),
    # Queries, keys, columns: tiles for many queries; few would leave most of them empty.
    ("mqa_logits", "4096 x 32768, 16 heads, fp8", (4096, 32768, 32768), [(3000, 32768, 32768)], [(8, 32768, 32768)]),
]


@pytest.mark.parametrize(("op", "shape", "tuned_at", "near", "far"), REACH, ids=[f"{row[0]}-{row[1]}" for row in REACH])
def test_how_far_an_entry_reaches(
    op: str,
    shape: str,
    tuned_at: tuple[int, ...],
    near: list[tuple[int, ...]],
    far: list[tuple[int, ...]],
    tmp_path: Path,
    switch: Callable[..., env.Switches],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The table is the test's own and holds the default: the shipped ones change with every measurement."""
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "none")
    switch(GDN_TUNED_DIR=str(tmp_path))
    kernel = tuning.Kernel(op, "cute", registry.operator(op).modules["cute"])
    first = shapes(op, shape, tuned=True)[0].problem

    def at(sizes: tuple[int, ...]) -> Problem:
        return replace(first, **dict(zip(first.sizes(), sizes, strict=True)))  # type: ignore[type-var]

    problem = at(tuned_at)
    entry = tuned.Entry(
        sizes=problem.sizes(),
        config=vars(kernel.module.default_config(problem, H100)),
        time_us=1.0,
        date="2026-11-20",
        kernel_source=kernel.source,
    )
    header = tuned.Header(device="h100", op=op, backend="cute", runs={"2026-11-20": {}})
    group = tuned.Group(static=problem.static_fields(), entries=[entry])
    tuned.write(tuned.table_path(tmp_path, "h100", op, "cute"), tuned.Table(header=header, groups=[group]))
    candidate = runtime.KernelCandidate(op, "cute", kernel.module_name)

    def serves(sizes: tuple[int, ...]) -> bool:
        return bool(candidate.tuned(at(sizes), H100))

    assert serves(tuned_at) and all(map(serves, near)) and not any(map(serves, far))


# What a problem of the same tune key may have instead; a field that its operator lacks, or that is part of the key, is left out.
OTHER_FIELDS: tuple[dict[str, Any], ...] = (
    {
        "cu_seqlens_dtype": "int64", "index_dtype": "int64", "gate_dtype": "float32", "beta_dtype": "float32",
        "use_qk_l2norm": False, "use_gate": False, "use_beta_sigmoid": False, "has_final_indices": True, "has_mask": True,
        "has_checkpoints": True, "has_rounding": True, "clean": False, "packed": True, "weights_dtype": "bfloat16",
        "per_draft_lengths": True, "weight_dtype": "float32", "bias_dtype": "float32", "checkpoint_dtype": "int64",
        "A_log_dtype": "bfloat16", "dt_bias_dtype": "bfloat16", "ba_dtype": "float32", "sigmoid": True, "z_dtype": "float32",
        "a_dtype": "float32", "b_dtype": "float32", "norm_dtype": "float32", "conv_dtype": "float32", "gate_sigmoid": True,
        "slot_dtype": "int32", "zero_centred": False, "position_dtype": "int32", "cos_sin_dtype": "bfloat16",
        "k_norm_dtype": "float32", "q_norm_dtype": "float32", "ring_slot_dtype": "int64", "starts_dtype": "int64",
    },
    {
        "gate_dtype": None, "beta_dtype": None, "use_gate": False, "use_beta_sigmoid": False, "has_final_state": False,
        "has_mask": False, "weights_dtype": None, "clean": False, "bias_dtype": "bfloat16", "has_accepted": False,
        "starts_dtype": None, "ends_dtype": None, "packed": True,
    },
    {
        "cu_seqlens_dtype": "int64", "gate_dtype": "float32", "beta_dtype": "float32", "has_final_indices": True, "silu": False,
        "has_rounding": True, "weights_dtype": "float32", "slot_dtype": "int32", "position_dtype": "int32",
    },
)  # fmt: skip


def _with_others(problem: Problem, others: dict[str, Any]) -> Problem:
    fields = vars(problem)
    changes = {name: value for name, value in others.items() if name in fields and name not in problem.tune_names()}
    if fields.get("state_dtype") == "float32":
        changes.pop("has_rounding", None)  # of bf16 states
    if fields.get("cu_seqlens_dtype", "") is None:
        changes.pop("cu_seqlens_dtype", None)  # another form of call, one token a sequence
    return replace(problem, **changes)  # type: ignore[type-var]


def _borrowed(path: Path, every: bool) -> list[tuple[Problem, Any]]:
    """Each configuration of a table with a problem that it was not measured on and that it fits; every: with all of them."""
    kernel, device = _kernel(path), DEVICES[tuned.read(path).header.device]
    found: dict[Any, tuple[Problem, Any]] = {}
    distinct = {(row.problem.static_key(), row.config): row for row in _rows(path)}
    for number, row in enumerate(distinct.values()):
        for others in OTHER_FIELDS if every else (OTHER_FIELDS[number % len(OTHER_FIELDS)],):
            problem = _with_others(row.problem, others)
            if kernel.module.refusal(problem) is None and kernel.module.fits(problem, row.config, device):
                found[problem.static_key(), row.config] = (problem, row.config)
    return list(found.values())


@checks.compiles(lambda path: checks.tasks_of(_module_name(path), _borrowed(path, every=False)))
@every_table
def test_tiles_serve_problems_that_they_were_not_measured_on(path: Path) -> None:
    """Configurations that `fits` takes compile without spills, whatever the fields that are not part of the tune key."""
    header = tuned.read(path).header
    checks.check(_module_name(path), header.backend, _borrowed(path, every=False), DEVICES[header.device])


@pytest.mark.full
@every_table
def test_tiles_serve_every_problem_that_they_were_not_measured_on(path: Path) -> None:
    header = tuned.read(path).header
    checks.check(_module_name(path), header.backend, _borrowed(path, every=True), DEVICES[header.device])


@pytest.mark.parametrize("path", [path for path in TABLES if path.stem == "gating.cute"], ids=lambda path: path.parent.name)
def test_restamp_compares_machine_code(path: Path, tmp_path: Path) -> None:
    """The machine code that a table records is what its entries compile to; another one is distinguished from it."""
    kernel, table = _kernel(path), tuned.read(path)
    entries = [entry for group in table.groups for entry in group.entries]
    for entry in entries:
        entry.kernel_source = "of another day"
    entries[0].machine_code = "of another kernel"
    copy = tuned.table_path(tmp_path, "h100", "gating", "cute")
    tuned.write(copy, table)
    found = tables.restamp(copy, kernel, num_workers=1, timeout_s=300)
    assert found.stamped == len(entries) - 1
    assert len(found.left) == 1 and "its machine code has changed" in found.left[0]
    assert tuned.read(copy).num_stale(kernel.source) == 1


WITHOUT_TABLES = {"attention_prefill", "topk", "write_indexer_cache"}


def _names(path: Path) -> tuple[str, str]:
    """Device and operator of a table."""
    return path.parent.name, path.stem.split(".")[0]


@pytest.mark.parametrize(("device", "op"), sorted({_names(path) for path in TABLES} | {("h100", op) for op in WITHOUT_TABLES}))
def test_batch_invariance_with_the_shipped_tables(device: str, op: str) -> None:
    """One backend and one configuration, legal for whatever else is in the batch; without the switch there are several."""
    spec, switches = DEVICES[device], env.Switches(batch_invariant=True)
    module_of = registry.operator(op).modules
    of_tables = [row.problem for path in TABLES if _names(path) == (device, op) for row in _rows(path)]
    of_shapes = [shape.problem for shape in shapes(op, tuned=True)]
    several = 0
    for problem in {one.static_key(): one for one in (*of_tables, *of_shapes)}.values():
        problems = [problem, *_other_sizes(problem)]
        choices = [select.choose(one, spec, runtime.candidates(op), switches) for one in problems]
        assert {(choice.backend, choice.config, choice.config_source) for choice in choices} == {
            (choices[0].backend, choices[0].config, choices[0].config_source)
        }
        assert choices[0].backend != "reference"
        module = importlib.import_module(module_of[choices[0].backend])
        assert all(module.fits(one, choices[0].config, spec) for one in problems)
        free = {select.choose(one, spec, runtime.candidates(op), env.Switches()).config for one in problems}
        several = max(several, len(free))
    assert several > 1


def _other_sizes(problem: Problem) -> list[Problem]:
    sizes = problem.sizes()
    scaled = [{name: max(1, round(value * factor)) for name, value in sizes.items()} for factor in (1 / 512, 1 / 37, 0.3, 1.7, 3)]
    return [replace(problem, **one) for one in scaled]  # type: ignore[type-var]
