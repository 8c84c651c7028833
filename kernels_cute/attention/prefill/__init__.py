"""Sparse attention of many query tokens on the tensor cores: neighbouring queries walk the union of their positions.

    o[t, h] = softmax(scale * q[t, h] k[j, g]) v[j, g] over the positions j that query t selected, g the key head of h
              with a gate times sigmoid(gate[t, h])

q, gate, out [tokens, heads, D] bfloat16 | float16    caches [num_blocks, block_size, kv_heads, D]
topk_indices [tokens, k] int32 | int64

Two launches: `unions.py` lists the positions of each tile of queries in the workspace, `kernel.py` attends. Data flow,
registers, shared memory and barriers: DESIGN.md.
"""

from dataclasses import dataclass, replace
from typing import Any

from gdn.device import DeviceSpec
from gdn.ops.attention.problem import SparsePrefillParams, SparsePrefillProblem
from kernels_cute.attention.prefill import shape as tiles_of
from kernels_cute.attention.prefill.shape import ROWS
from kernels_cute.common.choice import HALF_DTYPES, INDEX_DTYPES, unserved

UNIONS, ATTEND = "gdn_cute_sparse_prefill_unions", "gdn_cute_sparse_prefill"
HEAD_DIMS = (128, 256)
MOST_GROUP = 16  # query heads of a key head
MOST_BYTES = 256 * 2**20  # of the workspace: what needs more is done in passes
WINDOW_BYTES = (98304, 49152, 196608)  # tables of two blocks, of four, of one on a multiprocessor
UNION_THREADS = (512, 1024)
STAGES = ((2, 2), (3, 2), (2, 3), (4, 4), (5, 5), (6, 5))  # of keys and values
TABLE_BYTES = 2048  # at most, of shared memory: barriers, records, masks


@dataclass(frozen=True)
class Config:
    key_stages: int  # steps of 64 positions whose keys are in shared memory, in use or on their way
    value_stages: int  # the same of values
    window: int  # positions of the table that a block of the first launch holds; longer sequences take several
    union_threads: int  # of such a block
    num_blocks: int  # persistent blocks of the second launch: the device's SMs


def refusal(problem: SparsePrefillProblem) -> str | None:
    heads, kv_heads = problem.num_heads, problem.num_kv_heads
    if reason := unserved({HALF_DTYPES: {"q": problem.dtype}, INDEX_DTYPES: {"topk_indices": problem.index_dtype}}):
        return reason
    if problem.head_dim not in HEAD_DIMS:
        return f"requires head_dim 128 or 256, got {problem.head_dim}"
    if kv_heads < 1 or heads % kv_heads or not 1 <= heads // kv_heads <= MOST_GROUP:
        return f"requires 1 to {MOST_GROUP} query heads for each key head, got {heads} and {kv_heads}"
    if not problem.rows_aligned:
        return "requires cache rows at multiples of 16 bytes"
    return None


def _group(problem: SparsePrefillProblem) -> int:
    return problem.num_heads // problem.num_kv_heads


def fits(problem: SparsePrefillProblem, config: Config, device: DeviceSpec) -> bool:
    table = config.window * tiles_of.mask_bytes(_group(problem))
    if config.union_threads not in UNION_THREADS or table not in WINDOW_BYTES or config.num_blocks < 1:
        return False
    rows = ROWS + (config.key_stages + config.value_stages) * tiles_of.STEP
    shared = TABLE_BYTES + rows * 2 * problem.head_dim
    return min(config.key_stages, config.value_stages) >= 2 and shared <= device.shared_bytes_per_block


def default_config(problem: SparsePrefillProblem, device: DeviceSpec) -> Config:
    window = WINDOW_BYTES[0] // tiles_of.mask_bytes(_group(problem))
    stages = (3, 2) if problem.head_dim == 256 else (5, 5)
    return Config(*stages, window, UNION_THREADS[0], device.num_sms)


def configs(problem: SparsePrefillProblem, device: DeviceSpec) -> list[Config]:
    default = default_config(problem, device)
    space = [default, *(replace(default, key_stages=keys, value_stages=values) for keys, values in STAGES)]
    for threads in UNION_THREADS:
        space += [
            replace(default, union_threads=threads, window=size // tiles_of.mask_bytes(_group(problem))) for size in WINDOW_BYTES
        ]
    return [config for config in dict.fromkeys(space) if fits(problem, config, device)]


def compile(problem: SparsePrefillProblem, config: Config) -> dict[str, bytes]:
    from kernels_cute.attention.prefill.library import libraries

    return libraries(problem, config, UNIONS, ATTEND)


def _tiles_of_pass(group: int, k: int, context: int, tiles: int) -> int:
    """Tiles whose lists the workspace holds at a time."""
    return max(1, min(tiles, (MOST_BYTES - tiles_of.HEADER_BYTES) // tiles_of.tile_bytes(group, k, context)))


def workspace_bytes(problem: SparsePrefillProblem, config: Config) -> int:
    sizes = (_group(problem), problem.k, problem.max_context_len)
    tiles = tiles_of.num_tiles(sizes[0], problem.num_tokens, problem.num_sequences)
    return tiles_of.HEADER_BYTES + _tiles_of_pass(*sizes, tiles) * tiles_of.tile_bytes(*sizes)


def launch(compiled: Any, params: SparsePrefillParams) -> None:
    group = params.q.shape[1] // params.k_cache.shape[2]
    tiles = tiles_of.num_tiles(group, params.q.shape[0], params.seq_lens.shape[0])
    context = params.block_tables.shape[1] * params.k_cache.shape[1]
    most = _tiles_of_pass(group, params.topk_indices.shape[1], context, tiles)
    for first in range(0, tiles, most):
        for entry in (UNIONS, ATTEND):
            compiled.functions[entry](*params, first, min(most, tiles - first))
