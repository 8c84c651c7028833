"""Problems of attention in `gdn.layers`: the cache writes, the indexer, the selection, and attention over it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gdn.models import ModelShape
from gdn.ops.attention import examples as attention_examples
from gdn.ops.indexer import examples as indexer_examples
from gdn.ops.layer_step import examples as layer_step_examples
from gdn.served import sizes
from gdn.served.sizes import LENGTHS, PROMPTS, ROWS, SEQUENCES, Group

_MOST_DECODE_TOKENS = 8  # of a sequence whose rows read pages (gdn.ops.attention.sparse_attention)


def attention(model: ModelShape, rotary_dim: int, *, block_size: int, has_gate: bool, ratio: int) -> Iterator[Group]:
    """Norm, rotation and cache writes; dense decode and prefill; and with an indexer attention over what it selects.

    rotary_dim: rotated dimensions of a head. ratio: tokens of a key of the indexer.
    """
    written = replace(
        indexer_examples.prepare_indexer(model), num_heads=model.num_heads, num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim, rotary_dim=rotary_dim, has_values=True,
    )  # fmt: skip
    yield sizes.rows(written)
    own: dict[str, Any] = {"block_size": block_size, "has_gate": has_gate}
    dense = replace(attention_examples.attention(model), **own)
    tables = [block_size << power for power in range(16)]  # positions that a block table addresses, which is cut to such widths
    yield sizes.at(dense, ("num_tokens", "num_sequences", "k"), ((n, n, k) for k in tables for n in SEQUENCES))
    prompts = replace(attention_examples.attention_prefill(model), **own)
    # One sequence: its tokens reach every number of tiles, and with it every kernel of several.
    yield sizes.at(prompts, ("num_tokens", "max_context_len"), ((rows, k) for k in tables for rows in ROWS))
    if model.index_topk:
        yield from _selected_attention(model, ratio, own)


def _selected_attention(model: ModelShape, ratio: int, own: dict[str, Any]) -> Iterator[Group]:
    selected = model.index_topk + ratio - 1
    decode = replace(attention_examples.sparse_attention_decode(model), **own, k=selected)
    yield sizes.steps(decode, _MOST_DECODE_TOKENS)
    prefill = replace(attention_examples.sparse_attention_prefill(model), **own, k=selected)
    yield sizes.at(prefill, ("num_tokens", "max_context_len"), ((rows, length) for rows in ROWS for length in LENGTHS))


def token_wise_indexer(model: ModelShape, fp8: bool, *, block_size: int) -> Iterator[Group]:
    """A key for every token, and weights of the heads."""
    yield sizes.rows(indexer_examples.prepare_indexer(model, fp8))
    yield from _scores(model, fp8, block_size=block_size, changes={}, cache_dtype="uint8" if fp8 else "bfloat16", ratio=1)


def compressed_indexer(model: ModelShape, fp8: bool, *, block_size: int, ratio: int) -> Iterator[Group]:
    """A key for every `ratio` tokens, no weights, and FP8 without scales."""
    queries = replace(
        indexer_examples.prepare_indexer(model, fp8), num_kv_heads=0, cache_dtype=None, k_norm_dtype=None, slot_dtype=None,
        k_dtype=None, weights_dtype=None, folds_weights=False,
    )  # fmt: skip
    yield sizes.rows(queries)
    yield sizes.rows(replace(indexer_examples.compress_indexer_keys(model, fp8), ratio=ratio))
    changes = {"weights_dtype": None, "has_k_scale": False}
    cache_dtype = "float8_e4m3fn" if fp8 else "bfloat16"
    yield from _scores(model, fp8, block_size=block_size, changes=changes, cache_dtype=cache_dtype, ratio=ratio)


def _scores(
    model: ModelShape, fp8: bool, *, block_size: int, changes: dict[str, Any], cache_dtype: str, ratio: int
) -> Iterator[Group]:
    """Keys gathered for prompts, scores of prompts and of decode, and the selection.

    changes: fields of the logits' problems that differ from the examples'.
    """
    gather: Any = replace(indexer_examples.gather_indexer_cache(model, fp8), cache_dtype=cache_dtype)
    names = ("num_rows", "num_sequences")
    yield sizes.at(gather, names, ((rows, n) for n in SEQUENCES for rows in PROMPTS if n <= rows))
    yield from _ragged(replace(indexer_examples.mqa_logits(model, fp8), clean=False, packed=True, **changes), ratio)
    paged = replace(
        indexer_examples.paged_mqa_logits(model, fp8),
        clean=False,
        page_size=max(1, block_size // ratio),
        per_draft_lengths=True,
        **changes,
    )
    for tokens in range(1, 1 + _MOST_DECODE_TOKENS):  # short prompts of equal lengths come this way too, not drafts alone
        counts = ((n, length) for n in SEQUENCES for length in _keys(ratio))
        yield sizes.at(replace(paged, next_n=tokens), ("batch", "max_context_len"), counts)
    yield from _selection(model, ratio, starts=(indexer_examples.topk(model).starts_dtype, None))


def _keys(ratio: int) -> list[int]:
    """Numbers of keys of the indexer."""
    return sorted({max(1, length // ratio) for length in LENGTHS})


def _ragged(scores: Any, ratio: int) -> Iterator[Group]:
    """Scores of prompts, over the keys of their sequences."""
    names = ("num_queries", "num_keys", "num_columns")
    yield sizes.at(scores, names, ((rows, count, count) for rows in ROWS for count in _keys(ratio)))


def _selection(model: ModelShape, ratio: int, starts: tuple[str | None, ...]) -> Iterator[Group]:
    """starts: dtypes of the rows' first columns; None = rows start at column 0."""
    for dtype in starts:
        one: Any = replace(indexer_examples.topk(model), starts_dtype=dtype, k=model.index_topk // ratio)
        if ratio > 1:
            one = replace(one, ratio=ratio, position_dtype="int64")
        yield sizes.at(one, ("num_rows", "num_columns"), ((rows, count) for rows in ROWS for count in _keys(ratio)))


def indexer(model: ModelShape, *, block_size: int, ratio: int) -> Iterator[Group]:
    """The indexer in bfloat16 and FP8: VLLM_QSA_USE_FP8_INDEXER chooses."""
    for fp8 in (False, True):
        if ratio > 1:
            yield from compressed_indexer(model, fp8, block_size=block_size, ratio=ratio)
        else:
            yield from token_wise_indexer(model, fp8, block_size=block_size)


def selected(model: ModelShape, *, ratio: int) -> Iterator[Group]:
    """Selection and attention of the adapter for Transformers, which makes blocks of 64 tokens and keys of its own."""
    ragged = replace(indexer_examples.mqa_logits(model), clean=False, packed=True, weights_dtype=None)
    yield from _ragged(ragged, ratio)
    yield from _selection(model, ratio, starts=(indexer_examples.topk(model).starts_dtype, None))
    yield from _selected_attention(model, ratio, {"block_size": 64, "has_gate": True})


def residual_norm(model: ModelShape, layer_scale: bool) -> Iterator[Group]:
    """Zero-centred norms, with and without the addition before."""
    added = layer_step_examples.add_rms_norm(model)
    for has_residual, scale in {(False, None), (True, None), (True, "bfloat16" if layer_scale else None)}:
        yield sizes.rows(replace(added, has_residual=has_residual, layer_scale_dtype=scale))
