"""The calls that stand for what people run: one list of decode, prefill, mixed steps, sparse attention, scores and selection.

    python -m benchmarks ops --points --json RUN.json --peer FlashInfer

Heads are those of one rank of the models that people serve: 16/32 is Qwen3-Next-80B whole, 8/16 to 2/4 its ranks, 16/48 and 16/64
other hybrid models. Decode by replay has a benchmark of its own (`python -m benchmarks.replay_decode`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gdn.core.tunable import Shape, heads_of, packed
from gdn.ops.attention.cases import decode_shape, prefill_shape
from gdn.ops.indexer.cases import paged_shape, selection_shape
from gdn.ops.layer_step.cases import step_shape

_SATURATED = (((16, 32), (8192,) * 8), ((16, 32), (2048,) * 32), ((16, 64), (8192,) * 4), ((4, 8), (2048,) * 32))
_PROMPTS: tuple[tuple[tuple[int, int], Sequence[int]], ...] = (
    *(((16, 32), (tokens,)) for tokens in (512, 2048, 16384, 65536, 131072)),
    *(((heads, 2 * heads), (8192,)) for heads in (8, 4, 2)),
    ((4, 8), (32768,)), ((4, 8), (131072,)),
    ((16, 32), (32,) * 256), ((16, 32), (32,) * 64),
)  # fmt: skip


def _prefill(heads: tuple[int, int], lengths: Sequence[int]) -> Shape:
    return packed("gdn_prefill", f"{heads[0]}/{heads[1]} {{}}", lengths, heads_of(*heads))


def _mixed(rows: int, prompt: int) -> Shape:
    """Rows of one token and a prompt in one call of prefill."""
    shape = packed("gdn_prefill", "", (1,) * rows + (prompt,), heads_of(16, 32))
    return replace(shape, name=f"16/32 {rows} x 1 + {prompt}")


def _points() -> Iterator[Shape]:
    for batch in (1, 2, 8, 32, 128, 512):
        yield step_shape((16, 32), batch)
    for heads in ((8, 16), (4, 8), (2, 4), (4, 16), (2, 8), (8, 24), (16, 48), (16, 64)):
        yield step_shape(heads, 64)
    yield step_shape((4, 8), 1)
    yield step_shape((16, 32), 128, "bfloat16")
    for drafts in (1, 3, 7):
        yield step_shape((16, 32), 64, drafts=drafts)
    yield step_shape((4, 8), 128, "bfloat16", 3)
    for heads, lengths in _PROMPTS:
        yield _prefill(heads, lengths)
    yield _mixed(64, 8128)
    for heads, lengths in _SATURATED:
        yield packed("chunk", f"{heads[0]}/{heads[1]} {{}}", lengths, heads_of(*heads), longest=max(lengths))  # engines know it
    for heads in ((24, 2), (12, 1), (6, 1)):
        yield decode_shape(64, heads)
    yield prefill_shape((24, 2), "90 % kept")
    yield paged_shape(64, 32768, 4)
    yield selection_shape(64, 65536)


POINTS = tuple(_points())
