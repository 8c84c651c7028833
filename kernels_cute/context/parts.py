"""Segments of a rank's sequences: segment s of sequence n begins at cu_seqlens[n] + min(s * piece, length), where a piece is
ceil(length / (64 S)) chunks of 64 tokens.

Tensors: cu_seqlens [N + 1], state_indices [>= N] -> offsets [N S + 1], rows [N S] int32, N numbers of the message.
`gdn.ops.context.problem.ContextPartsParams` is the contract. A thread owns a segment; one more writes the last offset.
"""

from gdn.device import DeviceSpec
from gdn.ops.context.problem import ContextPartsProblem
from kernels_cute.common import choice
from kernels_cute.common.choice import INDEX_DTYPES, space, unserved
from kernels_cute.context.served import Config

launch, workspace_bytes = choice.launch, choice.no_workspace


def refusal(problem: ContextPartsProblem) -> str | None:
    if problem.sum_dtype != "float32":
        return f"requires a message of float32, got {problem.sum_dtype}"
    return unserved({INDEX_DTYPES: {"cu_seqlens": problem.cu_seqlens_dtype, "state_indices": problem.index_dtype}})


def default_config(problem: ContextPartsProblem, device: DeviceSpec) -> Config:
    return Config()


fits, configs = space(Config)


def compile(problem: ContextPartsProblem, config: Config) -> dict[str, bytes]:
    from kernels_cute.context.parts_kernel import library

    return library(problem, config)
