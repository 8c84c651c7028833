"""Key rows into the indexer's cache, in the cache's form: e4m3 with a scale per row, plain e4m3, or bfloat16.

Tensors: k [L, kv_heads, D] bfloat16 | float16, slot_mapping [L], cache [pages, elements of a page].
`gdn.ops.indexer.problem.WriteIndexerCacheParams` is the contract. A group of lanes owns a row; `rows.py` describes it in
registers and in a page. The results are bit for bit the reference's.
"""

from dataclasses import dataclass

from gdn.device import DeviceSpec
from gdn.ops.indexer.problem import WriteIndexerCacheProblem
from kernels_cute.common import choice
from kernels_cute.common.choice import space
from kernels_cute.indexer import forms

launch, workspace_bytes = choice.launch, choice.no_workspace


@dataclass(frozen=True)
class Config:
    threads: int  # threads of a block


def refusal(problem: WriteIndexerCacheProblem) -> str | None:
    indices = {"slot_mapping": problem.slot_dtype}
    return forms.refusal(problem.head_dim, {"k": problem.dtype}, problem.cache_dtype, indices)


def default_config(problem: WriteIndexerCacheProblem, device: DeviceSpec) -> Config:
    """Blocks small enough to reach every SM."""
    threads_wanted = problem.num_tokens * problem.num_kv_heads * forms.lanes_of(problem.head_dim)
    return Config(128 if threads_wanted >= 256 * device.num_sms else 32)


fits, configs = space(Config, threads=(32, 64, 128, 256))


def compile(problem: WriteIndexerCacheProblem, config: Config) -> dict[str, bytes]:
    from kernels_cute.indexer.write_indexer_cache_kernel import library

    return library(problem, config)
