"""Indexer top-k without most of the scores: a sample bounds each row's answer, and only scores from the bound on are listed.

    out[i] = the k largest of  scale * k_scale[j] * sum_h w[i, h] * relu(q[i, h] . k[j]),  ks[i] <= j < ke[i], as `topk_indices`

    q [M, H, D] e4m3    k [Nk, 1, D] e4m3    k_scale [Nk, 1] float32    weights [M, H]    ks, ke [M] int32    out [M, k] int32

The steps and their arguments: IndexerSiftProblem. The logits kernel that lists: _sift_logits.py; a row of the workspace:
_sift_rows.py; sample: _sift_sample.py; bound: _sift_bound.py; selection: _sift_select.py.
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from gdn.device import DeviceSpec
from gdn.problems import IndexerSiftProblem, MqaLogitsProblem
from kernels_cute import mqa_logits
from kernels_cute._build import library
from kernels_cute._sift_bound import SiftBound
from kernels_cute._sift_logits import SiftLogits
from kernels_cute._sift_sample import SiftSample
from kernels_cute._sift_select import SelectAgain, SelectListed

MOST_KEYS, LIST_ENTRIES = IndexerSiftProblem.most_keys, IndexerSiftProblem.list_entries
HEADS = (8, 16, 32)
MARK_BYTES = 16  # of shared memory a query and stage


@dataclass(frozen=True)
class Config:
    query_stages: int  # query tiles in shared memory
    key_stages: int  # key tiles of 64 rows in flight
    handoff: int  # 1 = both halves of the products may be running when the other warpgroup issues its own, 0 = the second
    relu_sum: bool  # relu as x + |x|
    tiles_per_item: int  # most key tiles of one work item
    num_blocks: int  # persistent blocks of the logits: the device's SMs
    max_columns: int  # keys that the selection has bits for: less shared memory, more blocks of it at a time


def refusal(problem: IndexerSiftProblem) -> str | None:
    if problem.dtype != "float8_e4m3fn" or problem.head_dim != 128 or problem.num_kv_heads != 1:
        kind = f"{problem.dtype}, {problem.head_dim} and {problem.num_kv_heads}"
        return f"requires float8_e4m3fn, head_dim 128 and one key head, got {kind}"
    if problem.num_heads not in HEADS:
        return f"requires 8, 16 or 32 heads, got {problem.num_heads}"
    if problem.num_keys > MOST_KEYS:
        return f"requires at most {MOST_KEYS} keys, got {problem.num_keys}"
    return mqa_logits.refusal(_logits(problem))


def _logits(problem: IndexerSiftProblem) -> MqaLogitsProblem:
    return MqaLogitsProblem(
        num_heads=problem.num_heads,
        num_kv_heads=problem.num_kv_heads,
        head_dim=problem.head_dim,
        dtype=problem.dtype,
        has_k_scale=problem.has_k_scale,
        weights_dtype=problem.weights_dtype,
        relu=problem.relu,
        clean=False,
        out_dtype="float32",
        packed=False,
        num_queries=4096,  # the widest tiles
        num_keys=problem.num_keys,
        num_columns=problem.num_keys,
    )


def _logits_config(problem: IndexerSiftProblem, config: Config) -> mqa_logits.Config:
    return mqa_logits.Config(
        columns=mqa_logits.MAX_COLUMNS,
        query_stages=config.query_stages,
        key_stages=config.key_stages,
        handoff=config.handoff,
        halves=2,
        relu_sum=config.relu_sum,
        even=8,
        segment=8,
        rows_first=False,
        tiles_per_item=config.tiles_per_item,
        num_blocks=config.num_blocks,
    )


def fits(problem: IndexerSiftProblem, config: Config, device: DeviceSpec) -> bool:
    slots = 2 * mqa_logits.MAX_COLUMNS // problem.num_heads * config.query_stages
    room = replace(device, shared_bytes_per_block=device.shared_bytes_per_block - MARK_BYTES * slots - 1024)
    return config.max_columns in (32768, MOST_KEYS) and mqa_logits.fits(_logits(problem), _logits_config(problem, config), room)


def default_config(problem: IndexerSiftProblem, device: DeviceSpec) -> Config:
    for query_stages, key_stages in ((2, 8), (2, 6), (2, 5), (2, 4)):
        config = Config(
            query_stages=query_stages,
            key_stages=key_stages,
            handoff=1,
            relu_sum=problem.relu,
            tiles_per_item=mqa_logits._cached_tiles(_logits(problem), device),
            num_blocks=device.num_sms,
            max_columns=32768 if problem.num_keys <= 32768 else MOST_KEYS,
        )
        if fits(problem, config, device):
            return config
    raise ValueError(f"no configuration of the sifting logits kernel fits {problem}")


def configs(problem: IndexerSiftProblem, device: DeviceSpec) -> list[Config]:
    default = default_config(problem, device)
    changed = [replace(default, query_stages=1, key_stages=8), replace(default, handoff=0)]
    return [default] + [config for config in changed if fits(problem, config, device)]


def suits(problem: IndexerSiftProblem, config: Config) -> bool:
    """Whether tiles tuned at other sizes are a choice here."""
    return problem.num_keys <= config.max_columns


def workspace_bytes(problem: IndexerSiftProblem, config: Config) -> int:
    return 0


def compile(problem: IndexerSiftProblem, config: Config) -> dict[str, bytes]:
    logits = SiftLogits(
        num_heads=problem.num_heads,
        num_kv_heads=1,
        head_dim=problem.head_dim,
        fp8=True,
        has_k_scale=problem.has_k_scale,
        has_weights=problem.weights_dtype is not None,
        relu=problem.relu,
        columns=mqa_logits.MAX_COLUMNS,
        query_stages=config.query_stages,
        key_stages=config.key_stages,
        handoff=config.handoff,
        relu_sum=config.relu_sum,
        tiles_per_item=config.tiles_per_item,
        num_blocks=config.num_blocks,
    )
    logits_arguments = mqa_logits._arguments(_logits(problem))
    logits_arguments[6] = _matrix(cutlass.Int32)
    row_words = problem.head_dim // 4

    def keys() -> list[Any]:
        words = make_fake_tensor(cutlass.Int32, (cute.sym_int(), 1, row_words), stride=(cute.sym_int64(), cute.sym_int64(), 1))
        return [words, _matrix(cutlass.Float32, 1) if problem.has_k_scale else _vector(), _vector(), _vector()]

    rows, zero = _matrix(cutlass.Int32), cutlass.Int32(0)
    four = 4 if config.max_columns == 32768 else 3
    kernels: dict[str, tuple[Any, list[Any]]] = {
        "sample": (
            SiftSample(problem.has_k_scale, row_words),
            [*keys(), *keys(), zero],
        ),
        "bound": (SiftBound(1 if config.max_columns == 32768 else 4), [rows, _vector(), _vector(), zero]),
        "sift": (logits, logits_arguments),
        "select": (
            SelectListed(256, four, LIST_ENTRIES, config.max_columns),
            [rows, _vector(), _vector(), _matrix(cutlass.Int32), _vector(), _vector(), zero],
        ),
        "again": (
            SelectAgain(512, 8, 2, LIST_ENTRIES, config.max_columns, config.num_blocks),
            [_matrix(cutlass.Float32), _vector(), _vector(), _matrix(cutlass.Int32)],
        ),
    }
    return {_entry(step): library(_entry(step), kernel.launch, *arguments) for step, (kernel, arguments) in kernels.items()}


def _entry(step: str) -> str:
    return f"gdn_cute_sift_{step}"


def _matrix(dtype: Any, columns: Any = None) -> Any:
    columns = cute.sym_int() if columns is None else columns
    return make_fake_tensor(dtype, (cute.sym_int(), columns), stride=(cute.sym_int64(), 1))


def _vector() -> Any:
    return make_fake_tensor(cutlass.Int32, (cute.sym_int(),), stride=(cute.sym_int64(),))


def launch(compiled: Any, step: str, *arguments: Any) -> None:
    run = compiled.functions[_entry(step)]
    if step == "sample":
        k, k_scale, starts, ends, sampled_k, sampled_scale, sampled_starts, sampled_ends, least = arguments
        words = [keys.view(sampled_starts.dtype) for keys in (k, sampled_k)]
        scales = (starts, starts) if k_scale is None else (k_scale, sampled_scale)
        run(words[0], scales[0], starts, ends, words[1], scales[1], sampled_starts, sampled_ends, least)
    elif step == "sift":
        q, k, k_scale, weights, starts, ends, rows, scale, least = arguments
        k_scale, weights = starts if k_scale is None else k_scale, starts if weights is None else weights
        run(q, k, k_scale, weights, starts, ends, rows, k.shape[0], least, scale)
    else:
        run(*arguments)
