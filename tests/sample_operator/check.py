"""Runs in a copy of the project that has a family with the sample operator; every assertion is about that operator."""

import importlib
import sys
from pathlib import Path

import torch

from autotune import cases, shapes, tables, tuning
from benchmarks import ops, report
from gdn.device import H100
from gdn.models import QWEN3_NEXT_80B
from gdn.runtime import Prepared, env, explain_problem, registry, tuned
from tests.compile import expectations, test_pairwise, test_variants, variants
from tests.sample_operator import kernel
from tests.sample_operator.problem import SampleScaleProblem

OP = "sample_scale"


def main(folder: Path) -> None:
    # The switch.
    assert registry.operator(OP).switch in env.DECLARATIONS
    assert env.parse({"GDN_BACKEND_SAMPLE_SCALE": "reference"}).backend_of == {OP: "reference"}
    # The example, and the runtime's choice for it.
    problem = registry.operator(OP).example(QWEN3_NEXT_80B, fp8=False)
    assert isinstance(problem, SampleScaleProblem)
    chosen = explain_problem(problem, H100)
    assert (chosen.backend, chosen.config, chosen.config_source) == ("cute", kernel.Config(1), "default")
    # The tuner's kernel, shapes and plan; a table at its path, with the tiles that the runtime then takes.
    (found,) = tuning.kernels(OP, None)
    assert OP in shapes.operators() and len(shapes.shapes(OP)) == 2
    made = tuning.plan(found, shapes.shapes(OP), H100)
    assert {name: len(configs) for name, configs in made.configs.items()} == {"128 rows": 3, "8192 rows": 3}
    winner = tuning.Winner(shapes.shapes(OP, "8192")[0], kernel.Config(4), time_us=1.0, error=0.0, default_us=2.0)
    path = tables.write_winners(folder, H100, found, [winner], {})
    assert path == tuned.table_path(folder, "h100", OP, "cute") and path.name == "sample_scale.cute.json"
    assert [row.problem for row in tables.rows(found, tuned.read(path))] == [winner.shape.problem]
    # The case that tuner and benchmark run, and the benchmark's rows.
    small = cases.tunable(OP).small(shapes.shapes(OP)[0])
    launch = lambda params: kernel.launch(None, params)  # noqa: E731
    case = cases.make(small, torch.device("cpu"), H100)
    assert case.check(Prepared("cute", kernel.Config(1), 0, launch, chosen)) == 0.0
    assert ops.backends(OP, None, every=True) == ["cute"] and cases.tunable(OP).useful_flops(small) == 0
    row = {"op": OP, "shape": "128 rows", "backend": "cute", "time_us": 2.0, "burst_us": 2.0, "floor_us": 1.0}
    row |= {"share_of_floor": 0.5, "error": 0.0}
    limits = {"copy_gbps": 3000.0, "bf16_tflops": 700.0, "fp8_tflops": 1400.0}
    assert OP in report.markdown({"device": "", "date": "", "torch": "", "limits": limits, "rows": [row], "peers": []})
    # The compile tests, their cover and their expectation.
    module = importlib.import_module("tests.sample_operator.kernel")
    assert [OP, "cute", module.__name__] in [list(parameter.values) for parameter in test_variants.KERNELS]
    assert len(variants.cover(OP, module)) >= 6
    test_pairwise.test_cover_of_an_operator_holds_every_value(OP)
    assert expectations.expectation(problem, "cute", []).at_least == {"LDG": 1}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
