"""torch.export: a saved program of several operators runs in a process that only did `import gdn, torch`."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gdn.testing.compare import same_bits
from tests.ops.export_program import Step, inputs

LOADER = """
import gdn, sys, torch
program, given, results = sys.argv[1:]
loaded = torch.load(given)
torch.save((torch.export.load(program).module()(*loaded), loaded), results)
"""


@pytest.mark.parametrize("strict", [True, pytest.param(False, marks=pytest.mark.cover)])
def test_in_a_fresh_process(strict: bool, tmp_path: Path) -> None:
    step, program, given, results = Step(), tmp_path / "step.pt2", tmp_path / "inputs.pt", tmp_path / "results.pt"
    torch.export.save(torch.export.export(step, inputs(), strict=strict), program)
    torch.save(inputs(), given)
    subprocess.run([sys.executable, "-c", LOADER, program, given, results], check=True)
    arguments = inputs()
    with torch.no_grad():
        expected = step(*arguments)
    for found, want in zip(torch.load(results), (expected, arguments), strict=True):
        assert all(same_bits(have, one) for have, one in zip(found, want, strict=True))
    assert not all(same_bits(x, y) for x, y in zip(arguments, inputs(), strict=True)), "no pool was written"
