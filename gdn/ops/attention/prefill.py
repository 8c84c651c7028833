"""Dense attention of prefill rows by its kernel, which reads pages and lengths on the device."""

from collections.abc import Sequence

from torch import Tensor

from gdn import runtime
from gdn.core.tensors import aligned, contiguous, contiguous_int32
from gdn.ops.attention.host_lengths import HostSequence
from gdn.ops.attention.pages import Pages, fields_of
from gdn.ops.attention.problem import AttentionPrefillParams, AttentionPrefillProblem
from gdn.runtime import Prepared

_OP = "attention_prefill"
_TILE_ROWS = 128  # a query token and head each; a block of threads has one tile of one key head
# A block walks a sequence from end to end. Where few of them are at work and the way is long, torch should be faster, since it
# deals a sequence to several SMs. Estimated from the rates of long calls on an H200, 2026-11-29; not measured.
_FEW_BLOCKS, _LONG_CONTEXT = 24, 2048


def is_faster(sequences: Sequence[HostSequence], heads: int, kv_heads: int) -> bool:
    """Whether the kernel is faster than torch on gathered keys and values. Some sequence has new tokens."""
    queries = max(1, _TILE_ROWS * kv_heads // heads)  # of a tile
    blocks = kv_heads * sum(-(-one.query_len // queries) for one in sequences)
    return blocks >= _FEW_BLOCKS or max(one.seq_len for one in sequences if one.query_len) <= _LONG_CONTEXT


def prepare(q: Tensor, pages: Pages, has_gate: bool, backend: str | None) -> Prepared | None:
    """The kernel for these rows; None where none serves them, or where another backend or the reference is ordered."""
    backends = runtime.candidates(_OP)
    if backend is not None and backend not in backends:
        return None
    problem = _problem(q, pages, has_gate)
    if not any(runtime.can_run(problem, q.device, one) for one in ((backend,) if backend else backends)):
        return None
    prepared = runtime.prepare(problem, q.device, backend)
    return None if prepared.choice.backend == "reference" else prepared


def attend(prepared: Prepared, q: Tensor, pages: Pages, scale: float, gate: Tensor | None, o: Tensor, lse: Tensor) -> None:
    """Write o and lse of the rows of q; rows after the last sequence get 0 and -inf.

    q, gate, o [tokens, heads, D]; lse [tokens, heads] float32, contiguous. There is at least one of everything.
    """
    assert prepared.launch is not None
    prepared.launch(
        AttentionPrefillParams(
            contiguous("q", q), pages.k_cache, pages.v_cache, pages.block_tables, contiguous_int32(pages.query_start_loc),
            contiguous_int32(pages.seq_lens), None if gate is None else aligned("gate", gate), o, lse, scale,
        )
    )  # fmt: skip


def _problem(q: Tensor, pages: Pages, has_gate: bool) -> AttentionPrefillProblem:
    sequences, columns = pages.block_tables.shape
    return AttentionPrefillProblem(
        **fields_of(q, pages.k_cache, pages.v_cache), index_dtype=None, has_topk_length=False, has_gate=has_gate,
        num_tokens=q.shape[0], num_sequences=sequences, max_context_len=columns * pages.k_cache.shape[1],
    )  # fmt: skip
