"""The calls that stand for what people run: one list of decode, prefill, mixed steps, sparse attention, scores and selection.

    python -m benchmarks ops --points --json-file RUN.json --peer FlashInfer

Heads are those of one rank of the models that people serve: 16/32 is Qwen3-Next-80B whole, 8/16 to 2/4 its ranks, 16/48 and 16/64
other hybrid models. Decode by replay has a benchmark of its own (`python -m benchmarks.replay_decode`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from gdn.core.tunable import Shape, decode_steps, example, heads_of, packed

_SATURATED = (((16, 32), (8192,) * 8), ((16, 32), (2048,) * 32), ((16, 64), (8192,) * 4), ((4, 8), (2048,) * 32))
_PROMPTS: tuple[tuple[tuple[int, int], Sequence[int]], ...] = (
    *(((16, 32), (tokens,)) for tokens in (512, 2048, 16384, 65536, 131072)),
    *(((heads, 2 * heads), (8192,)) for heads in (8, 4, 2)),
    ((4, 8), (32768,)), ((4, 8), (131072,)),
    ((16, 32), (32,) * 256), ((16, 32), (32,) * 64),
)  # fmt: skip


def _decode(heads: tuple[int, int], batch: int, drafts: int = 0, state_dtype: str = "float32") -> Shape:
    flags = {"cu_seqlens_dtype": "int32" if drafts else None, "has_columns": drafts > 0, "has_accepted": drafts > 0}
    return decode_steps("gdn_decode", heads, batch, drafts, state_dtype=state_dtype, **flags)


def _prefill(heads: tuple[int, int], lengths: Sequence[int]) -> Shape:
    return packed("gdn_prefill", f"{heads[0]}/{heads[1]} {{}}", lengths, heads_of(*heads))


def _mixed(rows: int, prompt: int) -> Shape:
    """Rows of one token and a prompt in one call of prefill."""
    shape = packed("gdn_prefill", "", (1,) * rows + (prompt,), heads_of(16, 32))
    return replace(shape, name=f"16/32 {rows} x 1 + {prompt}")


def _sparse_decode(heads: tuple[int, int]) -> Shape:
    problem = example("sparse_attention_decode", num_heads=heads[0], num_kv_heads=heads[1], num_tokens=64, num_sequences=64)
    return Shape(f"batch 64, k {problem.k}, {heads[0]}/{heads[1]} heads", problem)


def _sparse_prefill(heads: tuple[int, int]) -> Shape:
    problem = example("sparse_attention_prefill", num_heads=heads[0], num_kv_heads=heads[1])
    name = f"{problem.num_tokens} x {problem.max_context_len}, k {problem.k}, {heads[0]}/{heads[1]} heads"
    return Shape(name, problem, positions="90 % kept")


def _paged_logits(batch: int, context: int, num_heads: int) -> Shape:
    model: dict[str, Any] = {"index_num_heads": num_heads}
    problem = example("paged_mqa_logits", model, batch=batch, max_context_len=context)
    return Shape(f"batch {batch}, context {context}, {num_heads} heads", problem)


def _selection(rows: int, columns: int) -> Shape:
    problem = example("topk", num_rows=rows, num_columns=columns)
    return Shape(f"{rows} x {columns}, k {problem.k}", problem)


def _points() -> Iterator[Shape]:
    for batch in (1, 2, 8, 32, 128, 512):
        yield _decode((16, 32), batch)
    for heads in ((8, 16), (4, 8), (2, 4), (4, 16), (2, 8), (8, 24), (16, 48), (16, 64)):
        yield _decode(heads, 64)
    yield _decode((4, 8), 1)
    yield _decode((16, 32), 128, state_dtype="bfloat16")
    for drafts in (1, 3, 7):
        yield _decode((16, 32), 64, drafts)
    yield _decode((4, 8), 128, 3, "bfloat16")
    for heads, lengths in _PROMPTS:
        yield _prefill(heads, lengths)
    yield _mixed(64, 8128)
    for heads, lengths in _SATURATED:
        yield packed("chunk", f"{heads[0]}/{heads[1]} {{}}", lengths, heads_of(*heads))
    for heads in ((24, 2), (12, 1), (6, 1)):
        yield _sparse_decode(heads)
    yield _sparse_prefill((24, 2))
    yield _paged_logits(64, 32768, 4)
    yield _selection(64, 65536)


POINTS = tuple(_points())
