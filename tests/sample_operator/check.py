"""Runs in a copy of the project that has the sample operator; every assertion is about that operator."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gdn
from autotune import shapes, tables, tuning
from benchmarks import ops, report
from gdn.device import H100
from gdn.models import QWEN3_NEXT_80B
from gdn.runtime import env, explain_problem, registry, tuned
from tests.fuzz import families, worker
from tests.gpu import calls
from tests.ops.spoiling.judge import Wrong, check, spoilt
from tests.ops.spoiling.table import rows

OP = "sample_scale"
CPU = torch.device("cpu")


def the_switch_the_example_and_the_choice(kernel: Any) -> None:
    assert registry.operator(OP).switch in env.DECLARATIONS
    assert env.parse({"GDN_BACKEND_SAMPLE_SCALE": "reference"}).backend_of == {OP: "reference"}
    problem: Any = registry.operator(OP).example(QWEN3_NEXT_80B, fp8=False)
    chosen = explain_problem(problem, H100)
    assert (chosen.backend, chosen.config, chosen.config_source) == ("cute", kernel.Config(256), "default")
    assert explain_problem(replace(problem, dim=12), H100).backend == "reference"
    x = torch.ones(2, 8)
    assert torch.equal(gdn.sample_scale(x, x[0], 3.0), gdn.sample_scale(x, x[0], 3.0, backend="reference"))
    assert gdn.explain(OP, x, x[0]).backend == "reference"


def the_tuner_and_its_table(folder: Path, kernel: Any) -> None:
    """A table at its path, with the tiles that the runtime then takes."""
    (found,) = tuning.kernels(OP, None)
    assert OP in shapes.operators() and len(shapes.shapes(OP)) == 2
    made = tuning.plan(found, shapes.shapes(OP), H100)
    assert {name: len(configs) for name, configs in made.configs.items()} == {"128 rows": 3, "8192 rows": 3}
    winner = tuning.Winner(shapes.shapes(OP, "8192")[0], kernel.Config(128), time_us=1.0, error=0.0, default_us=2.0)
    path = tables.write_winners(folder, H100, found, [winner], {})
    assert path == tuned.table_path(folder, "h100", OP, "cute") and path.name == "sample_scale.cute.json"
    assert [row.problem for row in tables.rows(found, tuned.read(path))] == [winner.shape.problem]


def the_benchmarks_rows() -> None:
    assert ops.backends(OP, None, every=True) == ["cute"]
    row = {"op": OP, "shape": "128 rows", "backend": "cute", "time_us": 2.0, "burst_us": 2.0, "floor_us": 1.0}
    row |= {"share_of_floor": 0.5, "error": 0.0}
    limits = {"copy_gbps": 3000.0, "bf16_tflops": 700.0, "fp8_tflops": 1400.0}
    assert OP in report.markdown({"device": "", "date": "", "torch": "", "limits": limits, "rows": [row], "peers": []})


def the_spoilings() -> None:
    """Rows of the signature and of its description; a row that does not hold is found out."""
    found = {row.argument for row in rows(OP)}
    assert found == {"*", "x", "weight", "factor", "backend"}
    row = next(row for row in rows(OP, "weight") if row.spoiling == "dtype int32")
    wrong = replace(row, spoiling="dtype float16")
    seed = next(seed for seed in range(100) if spoilt(row, seed) and spoilt(wrong, seed))
    assert check(row, seed)
    with pytest.raises(Wrong, match="accepted"):
        check(wrong, seed)


def the_calls_of_the_gpu_tests() -> None:
    """Made on the CPU, where the reference runs them."""
    call = calls.CALLS[OP]
    assert (call.function, call.op, call.pools, call.backends) == (OP, OP, (), ["cute", "reference"])
    arguments = call.make(CPU)
    assert gdn.sample_scale(**arguments).shape == arguments["x"].shape == (9, 64)
    assert families.FAMILIES[OP].op == OP
    drawn = worker.Worker(worker.Options(device="cpu", only=(OP,), cases=2))
    drawn.run(0, 4)
    assert drawn.report.wrong == [] and drawn.report.calls.total() == 4


def main(folder: Path) -> None:
    kernel = importlib.import_module("kernels_cute.sample")
    the_switch_the_example_and_the_choice(kernel)
    the_tuner_and_its_table(folder, kernel)
    the_benchmarks_rows()
    the_spoilings()
    the_calls_of_the_gpu_tests()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
