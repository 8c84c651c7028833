"""A rank's message from the summaries of its segments, P = P_S ... P_1 and h = P_S (... (P_2 h_1 + h_2) ...) + h_S, and on the
first rank the states before the segments, from its pool on, and the one after the last as h.

Tensors: h [N S, HS, K, V] (or V first), P [N S, HS, K, K] (V first transposed), a pool -> message, states [N S, HS, K, V], all
float32 but the pool. `gdn.ops.context.problem.ContextTotalParams` is the contract. A block owns 32 columns of h, or of P, of a
head.
"""

from gdn.device import DeviceSpec
from gdn.ops.context.problem import ContextTotalProblem
from kernels_cute.common import choice
from kernels_cute.common.choice import space
from kernels_cute.context.served import Config, refusal

__all__ = ["Config", "compile", "configs", "default_config", "fits", "launch", "refusal", "workspace_bytes"]

launch, workspace_bytes = choice.launch, choice.no_workspace


def default_config(problem: ContextTotalProblem, device: DeviceSpec) -> Config:
    return Config()


fits, configs = space(Config)


def compile(problem: ContextTotalProblem, config: Config) -> dict[str, bytes]:
    from kernels_cute.context.total_kernel import library

    return library(problem, config)
