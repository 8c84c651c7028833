"""Selected groups of `ratio` tokens as token positions, then the causal tail, then -1.

Tensors: group_indices [L, k], -1 = none; positions [L] -> out [L, k * ratio + ratio - 1] int32. The tail is the query's own
unfinished group: (pos + 1) // ratio * ratio up to and including pos. `gdn.ops.indexer.problem.ExpandTopkGroupsParams` is the
contract.

A block owns a row and takes its groups `threads * groups` at a time: they are packed in order into a list in shared memory
(ballots inside a warp, counts across warps), and the list is written member by member, so that neighbouring lanes write
neighbouring words. A row is k * ratio + ratio - 1 words long and may start at any word, so wider stores would not be aligned.
"""

from dataclasses import dataclass

from gdn.device import DeviceSpec
from gdn.ops.indexer.problem import ExpandTopkGroupsProblem
from kernels_cute.common import choice
from kernels_cute.common.choice import INDEX_DTYPES, space, unserved

launch, workspace_bytes = choice.launch, choice.no_workspace


@dataclass(frozen=True)
class Config:
    threads: int  # threads of a block
    groups: int  # groups that a thread reads at once: more bytes in flight, a longer list


def refusal(problem: ExpandTopkGroupsProblem) -> str | None:
    few = f"requires a ratio of at least 1, got {problem.ratio}" if problem.ratio < 1 else None
    return unserved({INDEX_DTYPES: {"group_indices": problem.group_dtype, "positions": problem.position_dtype}}) or few


def default_config(problem: ExpandTopkGroupsProblem, device: DeviceSpec) -> Config:
    """A row in one step where 512 threads hold it; more threads a row where there are few rows."""
    threads = 128 if problem.num_tokens >= 4 * device.num_sms else 512
    for groups in (1, 2, 4):
        if threads * groups >= problem.k:
            return Config(threads, groups)
    return Config(threads, 8)


fits, configs = space(Config, threads=(32, 64, 128, 256, 512), groups=(1, 2, 4, 8))


def compile(problem: ExpandTopkGroupsProblem, config: Config) -> dict[str, bytes]:
    from kernels_cute.indexer.expand_topk_groups_kernel import library

    return library(problem, config)
