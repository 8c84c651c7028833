"""One step of the indexer between its projection and its logits, in one kernel:

    q = rope(rms_norm(q)), k = rope(rms_norm(k))      float32, rounded once to the input's dtype
    q to e4m3 with a scale per head, weights_out = weights * q_scale / sqrt(D); k into the cache, in the cache's form
    v, if there is one, into its own cache as it is, in the same form

Tensors: q [L, H, D], k, v [L, kv_heads, D] bfloat16 | float16, weights [L, H], positions, slot_mapping [L], cos_sin
[max_positions, rotary_dim], cache, v_cache [pages, elements of a page] -> q_out [L, H, D], weights_out [L, H] float32.
`gdn.ops.indexer.problem.PrepareIndexerParams` is the contract; `rows.py` describes a row in registers.

The first blocks write keys, one row per group of lanes, and the row of values next to it: they wait longest, for slots and pages.
The others prepare queries:
a group of lanes takes `rows` heads of one token, loads them all, and reads the token's angles once. Heads are dealt so that
the groups of a warp load neighbouring ones.
"""

from dataclasses import dataclass

from gdn.device import DeviceSpec
from gdn.ops.indexer.problem import PrepareIndexerProblem
from kernels_cute.common import choice
from kernels_cute.common.choice import by_load, space
from kernels_cute.indexer import forms

launch, workspace_bytes = choice.launch, choice.no_workspace


@dataclass(frozen=True)
class Config:
    threads: int  # threads of a block
    rows: int  # heads per group of lanes: more bytes in flight, more registers, fewer blocks


def refusal(problem: PrepareIndexerProblem) -> str | None:
    indices = {"positions": problem.position_dtype, "slot_mapping": problem.slot_dtype}
    others = {"weights": problem.weights_dtype, "cos_sin": problem.cos_sin_dtype}
    others |= {"q_norm": problem.q_norm_dtype, "k_norm": problem.k_norm_dtype}
    rows = {"q": problem.dtype, "k": problem.k_dtype}
    refused = forms.refusal(problem.head_dim, rows, problem.cache_dtype, indices, others)
    if refused is not None:
        return refused
    if problem.num_heads < 1:
        return f"requires at least one head, got {problem.num_heads}"
    return forms.rotation_refusal(problem.rotary_dim, problem.head_dim)


def default_config(problem: PrepareIndexerProblem, device: DeviceSpec) -> Config:
    """The most heads per group that leave every SM a full load of threads, then blocks small enough to reach every SM."""
    lanes = forms.lanes_of(problem.head_dim)
    threads_wanted = problem.num_tokens * problem.num_heads * lanes
    return by_load(Config, threads_wanted, device, [rows for rows in (4, 2) if problem.num_heads % rows == 0])


fits, configs = space(Config, lambda p, config: p.num_heads % config.rows == 0, threads=(32, 64, 128, 256), rows=(1, 2, 4))


def compile(problem: PrepareIndexerProblem, config: Config) -> dict[str, bytes]:
    from kernels_cute.indexer.prepare_indexer_kernel import library

    return library(problem, config)
