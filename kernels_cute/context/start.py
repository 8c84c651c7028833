"""States before a rank's segments, and after the last rank's part: from h of the first rank's message on, X <- P X + h with the
messages of the ranks before, then with the summaries of the segments; the final state goes on with the messages instead.

Tensors: messages [R, numbers], h [N S, HS, K, V] (or V first), P [N S, HS, K, K] (V first transposed) -> states [N S, HS, K, V],
final_state [slots or N, HS, K, V], all float32 but a pool. `gdn.ops.context.problem.ContextStartParams` is the contract. A block
owns 32 columns of a head's states.
"""

from gdn.device import DeviceSpec
from gdn.ops.context.problem import ContextStartProblem
from kernels_cute.common import choice
from kernels_cute.common.choice import space
from kernels_cute.context.served import Config, refusal

__all__ = ["Config", "compile", "configs", "default_config", "fits", "launch", "refusal", "workspace_bytes"]

launch, workspace_bytes = choice.launch, choice.no_workspace


def default_config(problem: ContextStartProblem, device: DeviceSpec) -> Config:
    return Config()


fits, configs = space(Config)


def compile(problem: ContextStartProblem, config: Config) -> dict[str, bytes]:
    from kernels_cute.context.start_kernel import library

    return library(problem, config)
