"""The live entries of sequences go into their states, in all layers at once; then the counts of the slots follow.

A state [K, V] with entries (k_j [K], u_j [V], g_j) of positions c..p becomes

    exp(sum of all g_j) S + sum_j exp(sum of g_m over m > j) k_j u_j^T

`gdn.ops.delta_rule.problem.FoldStatesProblem` says which entries these are, FoldStatesParams the contract of each tensor. A block
holds columns of V of one state head in registers, as the decode kernels do; blocks stay and take work items in turn, so that the
number of layers costs nothing where rings are empty.
"""

from gdn.device import H100, DeviceSpec
from gdn.ops.delta_rule.problem import FoldStatesProblem
from gdn.ops.delta_rule.tiles import TUNED_WITHIN, Tiles, k_vector
from kernels_cute.common import choice
from kernels_cute.common.choice import long_ring, unserved

__all__ = ["TUNED_WITHIN", "Config", "compile", "configs", "default_config", "fits", "launch", "refusal", "workspace_bytes"]

Config = Tiles
launch, workspace_bytes = choice.launch, choice.no_workspace

_SHAPES = ((128, 8, 4), (256, 8, 4), (128, 16, 4), (64, 8, 4))  # threads, threads a column, columns a thread
_MIN_THREADS_PER_SM = 512
_MAX_STATE_REGISTERS = 64  # state values a thread may hold


def refusal(problem: FoldStatesProblem) -> str | None:
    k, v = problem.head_k_dim, problem.head_v_dim
    if k % 4 or v % 4 or not 4 <= k <= 256 or not 4 <= v <= 256:
        return f"requires head dims that are multiples of 4 up to 256, got K={k}, V={v}"
    if (reason := unserved({("float32", "bfloat16"): {"ssm_state": problem.state_dtype}})) is not None:
        return reason
    if not configs(problem, H100):
        return long_ring(problem.ring_rows, H100)
    return None


def _values(problem: FoldStatesProblem, config: Config) -> int:
    """Values of a state that a thread holds, some of which may lie beyond the last."""
    vector = k_vector(problem.state_v_first, problem.state_dtype, problem.head_k_dim)
    return -(-problem.head_k_dim // (config.threads_per_column * vector)) * vector * config.v_per_thread


def fits(problem: FoldStatesProblem, config: Config, device: DeviceSpec) -> bool:
    """Whether the configuration can be compiled, without spills, and launched."""
    shape = (config.threads, config.threads_per_column, config.v_per_thread)
    if shape not in _SHAPES or config.min_threads_per_sm != _MIN_THREADS_PER_SM:
        return False
    if _shared_bytes(problem, config) > device.shared_bytes_per_block:
        return False
    return _values(problem, config) <= _MAX_STATE_REGISTERS


def _shared_bytes(problem: FoldStatesProblem, config: Config) -> int:
    """Of a block, at most: keys, updates, weights and decays of all entries, the list of sequences, counts of warps."""
    entries = problem.ring_rows * (problem.head_k_dim + config.block_v + 3) + 8
    return 4 * (entries + 4 * config.threads + config.threads // 32 + 8)


def configs(problem: FoldStatesProblem, device: DeviceSpec) -> list[Config]:
    every = [Config(*shape, _MIN_THREADS_PER_SM) for shape in _SHAPES]
    return [config for config in every if fits(problem, config, device)]


def default_config(problem: FoldStatesProblem, device: DeviceSpec) -> Config:
    """At most 32 values of a state a thread, if any tiles have so few: 6 % faster than 64, measured (DESIGN.md)."""
    space = configs(problem, device)
    few = [config for config in space if _values(problem, config) <= _MAX_STATE_REGISTERS // 2]
    return (few or space)[0]


def compile(problem: FoldStatesProblem, config: Config) -> dict[str, bytes]:
    from kernels_cute.replay.fold_states_kernel import library

    return library(problem, config)
