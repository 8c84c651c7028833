"""Gated delta rule by chunks of 64 tokens, for prefill: q [1, L, Hq, K], k [1, L, Hk, K], v [1, L, HV, V] -> o [1, L, HS, V].

Per token of a state head: S = exp(g) S; u = beta (v - S^T k); S = S + k u^T; o = S^T q.

Head dims 64 and 128: kernel.py, which has the formulas and names the files of every form. Other head dims: head_dims, which runs
that kernel on padded tensors, or the recurrent kernel. `gdn.ops.delta_rule.problem.ChunkParams` is the contract of a launch.
"""

from collections.abc import Callable, Mapping
from typing import Any

from gdn.device import DeviceSpec
from gdn.ops.delta_rule.problem import ChunkParams, ChunkProblem
from kernels_cute.chunk import kernel
from kernels_cute.chunk.kernel import Config as Config
from kernels_cute.chunk.plan import known_segment

# log2 of how far a call's sizes may be from those of a tuned entry that serves it (see gdn.runtime.tuned). For others another
# design may be faster, and the default knows which.
TUNED_WITHIN = 0.25


def _own(problem: ChunkProblem) -> Any:
    if problem.head_k_dim in kernel.HEAD_DIMS and problem.head_k_dim == problem.head_v_dim:
        return kernel
    from kernels_cute.chunk import head_dims  # a third of this family's import, for a few calls

    return head_dims


def _computed(problem: ChunkProblem) -> tuple[Any, Any]:
    """The module whose kernel runs, and the problem that it computes."""
    own = _own(problem)
    return (kernel, problem) if own is kernel else (own.kernel(problem), own.stand_in(problem))


def refusal(problem: ChunkProblem) -> str | None:
    """None where a kernel serves the problem, else why not."""
    return _own(problem).refusal(problem)


def note(problem: ChunkProblem) -> str | None:
    """Note on how the problem is served, where a user should know."""
    own = _own(problem)
    return None if own is kernel else own.note(problem)


def fits(problem: ChunkProblem, config: Any, device: DeviceSpec) -> bool:
    module, computed = _computed(problem)
    return module.fits(computed, config, device)


def default_config(problem: ChunkProblem, device: DeviceSpec) -> Any:
    """A Config, or for head dims above 128 the recurrent kernel's."""
    module, computed = _computed(problem)
    return module.default_config(computed, device)


def configs(problem: ChunkProblem, device: DeviceSpec) -> list[Any]:
    module, computed = _computed(problem)
    return module.configs(computed, device)


def is_cut(problem: ChunkProblem, device: DeviceSpec) -> bool:
    """Whether the host knows of a long sequence which the default cuts for that."""
    module, computed = _computed(problem)
    return module is kernel and known_segment(computed, device) > 0


def suits(problem: ChunkProblem, config: Any, device: DeviceSpec) -> bool:
    """Whether a tuned entry may serve these sizes. Tables hold times of equal lengths."""
    return not is_cut(problem, device)


def workspace_bytes(problem: ChunkProblem, config: Any) -> int:
    return _own(problem).workspace_bytes(problem, config)


def compile(problem: ChunkProblem, config: Any) -> dict[str, bytes]:
    return _own(problem).compile(problem, config)


def launch(compiled: Any, params: ChunkParams) -> None:
    launch_with(compiled.functions, compiled.problem, compiled.config, params)


def launch_with(functions: Mapping[str, Callable[..., Any]], problem: ChunkProblem, config: Any, params: ChunkParams) -> None:
    """Launches the entries of `compile`, for an operator that has them among its own. Of `problem` the static fields count."""
    _own(problem).launch_with(functions, problem, config, params)
