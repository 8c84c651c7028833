"""Choosing and launching kernels imports no DSL: a process that finds its kernels compiled never waits for one."""

from tests.runtime.processes import python

# Both DSLs and what they bring cannot be imported here.
BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tilelang", "cutlass", "tvm", "nvidia_cutlass_dsl"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
"""

CHOICES = """
import importlib
from gdn.device import H100
from gdn.models import QWEN3_NEXT_80B, TINY
from gdn.runtime import registry

for operator in registry.every():
    for backend, name in operator.modules.items():
        module = importlib.import_module(name)
        served = 0
        for model in (QWEN3_NEXT_80B, TINY):
            for fp8 in (False, True):
                problem = operator.example(model, fp8=fp8)
                if module.refusal(problem) is None:
                    served += 1
                    config = module.default_config(problem, H100)
                    assert module.fits(problem, config, H100), (name, config)
                    assert module.workspace_bytes(problem, config) >= 0
                getattr(module, "note", lambda problem: None)(problem)
        assert served, name
        print(name)
"""

LAUNCHES = """
import contextlib
import importlib
from dataclasses import replace
from unittest import mock

import torch
from autotune import shapes
from benchmarks import host_cost
from benchmarks.host_cost import without_device
from gdn.runtime import registry

for operator in registry.with_kernels():
    tunable = operator.described("cases")
    for backend in operator.modules:
        launched, functions = [], contextlib.nullcontext()
        if operator.name == "gdn_prefill":  # asks for all functions but some, by name
            names = ("prefill_conv", "prefill_norm", "chunk", "chunk_pad", "chunk_unpad")
            functions = mock.patch.object(host_cost._Same, "__iter__", lambda self: iter(f"gdn_cute_{one}" for one in names))
        with functions, without_device(lambda *arguments: launched.append(arguments)):
            shape = tunable.small(tunable.shapes[0])
            if importlib.import_module(operator.modules[backend]).refusal(shape.problem):  # small ones may have other dims
                shape = replace(shape, problem=replace(shape.problem, head_dim=128))
            case = tunable.case(shape, torch.device("cpu"), 1)
            case.public_calls(backend)[0]()
        assert launched, (operator.name, backend)
        print(operator.name, backend)
"""

LOADED = """
loaded = {name.partition(".")[0] for name in sys.modules} & {"tilelang", "cutlass", "tvm"}
assert not loaded, loaded
"""


def test_kernels_are_chosen_and_launched_without_a_dsl() -> None:
    code = BLOCKED + CHOICES + LOADED + "print()" + LAUNCHES + LOADED
    ran = python(code, timeout_s=300)
    choices, launches = ran.stdout.split("\n\n")
    assert len(choices.splitlines()) >= 27 and len(launches.splitlines()) >= 25, ran.stdout
