"""Builds the libraries of a prefill step; config: of the family."""

from typing import Any

import cutlass

from gdn.ops.layer_step.problem import GdnPrefillProblem
from kernels_cute.chunk import kernel as chunk
from kernels_cute.common import build
from kernels_cute.gdn_prefill import plan, steps
from kernels_cute.gdn_prefill.in_turn import InTurn
from kernels_cute.gdn_prefill.normed import Normed
from kernels_cute.gdn_prefill.side_by_side import SideBySide, fakes


def side_by_side(entry: str, problem: GdnPrefillProblem, config: Any) -> bytes:
    host = SideBySide(problem, config.conv, config.num_persistent_clusters > 0, config.max_short_tokens).launch
    return build.library(entry, host, *fakes(problem), cutlass.Int32(2), cutlass.Int32(1))


def normed(entry: str, problem: GdnPrefillProblem, config: Any) -> bytes:
    host = Normed(problem, config.conv, config.num_persistent_clusters > 0, config.max_short_tokens).launch
    return build.library(entry, host, *fakes(problem), cutlass.Int32(2))


def in_turn(entry: str, problem: GdnPrefillProblem, config: Any) -> bytes:
    scalars = [one for variant in chunk.variants(plan.bounded(config)) for one in chunk.scalars(variant, 1, 1, 1)]
    return build.library(entry, InTurn(problem, config).launch, *fakes(problem), *map(cutlass.Int32, scalars))


def conv(entry: str, problem: GdnPrefillProblem, config: Any) -> dict[str, bytes]:
    return build.one_entry(entry, steps.PrefillConv(problem, config.conv), steps.conv_fakes(problem))


def norm(entry: str, problem: GdnPrefillProblem, config: Any) -> dict[str, bytes]:
    return build.one_entry(entry, steps.PrefillNorm(problem, config.norm), steps.norm_fakes(problem))
