"""Entries and inputs of an accepted path, next to each other: of all layers in one launch.

Rows (p + nodes[i]) mod R of a ring [R, W] go to (p + i) mod R, columns w - 2 + nodes[i] of a window [dim, columns] to w - 2 + i.
`gdn.ops.delta_rule.problem.AcceptDraftTreeProblem` has the rule, AcceptDraftTreeParams the contract of each tensor. A thread
moves the same parts of the ring's rows, and the same channels of the window, along the whole path. The i-th node of a path is
i or later, so a move never overwrites what a later one reads.
"""

from dataclasses import dataclass

from gdn.device import DeviceSpec
from gdn.ops.delta_rule.problem import AcceptDraftTreeProblem
from kernels_cute.common import choice
from kernels_cute.common.choice import FLOAT_DTYPES, space, unserved
from kernels_cute.replay.shape import MOST_NODES

__all__ = ["Config", "compile", "configs", "default_config", "fits", "launch", "refusal", "workspace_bytes"]

launch, workspace_bytes = choice.launch, choice.no_workspace


@dataclass(frozen=True)
class Config:
    threads: int  # threads of a block


def refusal(problem: AcceptDraftTreeProblem) -> str | None:
    if problem.ring_rows > 2 * MOST_NODES:  # a call may have half as many tokens
        return f"requires rings of up to {2 * MOST_NODES} rows, got {problem.ring_rows}"
    if problem.ring_width % 4:
        return f"requires rows of whole 16 bytes, got {problem.ring_width} elements"
    return unserved({FLOAT_DTYPES: {"conv_state": problem.conv_dtype}})


fits, configs = space(Config, threads=(64, 128, 256))


def default_config(problem: AcceptDraftTreeProblem, device: DeviceSpec) -> Config:
    return Config(256)


def compile(problem: AcceptDraftTreeProblem, config: Config) -> dict[str, bytes]:
    from kernels_cute.replay.accept_draft_tree_kernel import library

    return library(problem, config)
