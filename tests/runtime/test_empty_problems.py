"""Problems without tokens, rows, sequences or positions: every kernel module chooses tiles for them like for others.

Operators choose a kernel before they see that nothing is left to launch.
"""

import importlib
from dataclasses import replace

import pytest

from gdn.device import H100
from gdn.runtime import registry
from tests.compile.variants.base import example

KERNELS = [(one.name, backend) for one in registry.with_kernels() for backend in one.modules]


@pytest.mark.parametrize(("op", "backend"), KERNELS)
def test_a_kernel_has_tiles_for_nothing(op: str, backend: str) -> None:
    problem = example(op)
    module = importlib.import_module(registry.operator(op).modules[backend])
    sizes = list(problem.sizes())
    assert sizes
    for empty in (*[{name: 0} for name in sizes], dict.fromkeys(sizes, 0)):
        one = replace(problem, **empty)
        if module.refusal(one) is None:
            config = module.default_config(one, H100)
            assert module.fits(one, config, H100), empty
            assert module.workspace_bytes(one, config) >= 0
