"""A shape as work on a device: inputs, the exact answer, a verdict on a kernel's result, and calls to time.

Inputs rotate: as many sets as it takes that none is found in the L2 cache. The set that is checked is never timed, so
that timing, which updates states in place, cannot change what is checked.
"""

import torch

from autotune.cases import indexer, steps
from autotune.cases.base import Call, Case, WrongResult, launch_of
from autotune.cases.decode import DecodeCase
from autotune.cases.delta_rule import DeltaRuleCase
from autotune.cases.logits import LogitsCase
from autotune.cases.topk import TopkCase
from autotune.shapes import Shape
from gdn.device import DeviceSpec
from gdn.problems import (
    ChunkProblem,
    GdnDecodeProblem,
    MqaLogitsProblem,
    PagedMqaLogitsProblem,
    RecurrentProblem,
    TopkProblem,
)
from gdn.testing import timing

__all__ = ["Call", "Case", "WrongResult", "launch_of", "make"]


def make(shape: Shape, device: torch.device, spec: DeviceSpec) -> Case:
    copies = timing.copies_beyond_l2(shape.problem.bytes_moved(), spec.l2_bytes)
    problem = shape.problem
    if isinstance(problem, ChunkProblem | RecurrentProblem):
        return DeltaRuleCase(shape, problem, device, copies)
    if isinstance(problem, MqaLogitsProblem | PagedMqaLogitsProblem):
        return LogitsCase(shape, problem, device, copies)
    if isinstance(problem, TopkProblem):
        return TopkCase(problem, device, copies)
    if isinstance(problem, GdnDecodeProblem):
        return DecodeCase(problem, shape.lengths, device, copies)
    if isinstance(problem, steps.PROBLEMS):
        return steps.StepCase(problem, shape.lengths, device, copies)
    if isinstance(problem, indexer.PROBLEMS):
        return indexer.IndexerCase(problem, shape.lengths, device, copies)
    raise TypeError(f"shape.problem: expected one of an operator with a case, got {type(problem).__name__}")
