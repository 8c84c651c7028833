"""Dense attention of prefill rows by its kernel, which reads pages and lengths on the device."""

from collections.abc import Sequence

from torch import Tensor

from gdn import runtime
from gdn.core.call import launch, make
from gdn.core.tensors import aligned, contiguous, contiguous_int32
from gdn.ops.attention.host_lengths import HostSequence
from gdn.ops.attention.pages import Pages, fields_of, rounded_columns
from gdn.ops.attention.problem import AttentionPrefillParams, AttentionPrefillProblem
from gdn.runtime import Prepared

_OP = "attention_prefill"


def prepare(
    q: Tensor, pages: Pages, tokens: int, count: int, known: Sequence[HostSequence], has_gate: bool, backend: str | None
) -> Prepared | None:
    """The kernel for some rows of a call; None where none serves them, or where another backend or the reference is ordered.

    tokens, count: how many rows of q and how many sequences these are. known: the sequences on the host, some of which have new
    tokens; none where it does not know their lengths.
    """
    backends = runtime.candidates(_OP)
    if backend is not None and backend not in backends:
        return None
    problem = _problem(q, pages, tokens, count, known, has_gate)
    if not any(runtime.can_run(problem, q.device, one) for one in ((backend,) if backend else backends)):
        return None
    prepared = runtime.prepare(problem, q.device, backend)
    return None if prepared.choice.backend == "reference" else prepared


def attend(prepared: Prepared, q: Tensor, pages: Pages, scale: float, gate: Tensor | None, o: Tensor, lse: Tensor) -> None:
    """Write o and lse of the rows of q; rows after the last sequence get 0 and -inf.

    q, gate, o [tokens, heads, D]; lse [tokens, heads] float32, contiguous. There is at least one of everything.
    """
    params = AttentionPrefillParams(
        contiguous("q", q), pages.k_cache, pages.v_cache, pages.block_tables, make(contiguous_int32, pages.query_start_loc),
        make(contiguous_int32, pages.seq_lens), None if gate is None else aligned("gate", gate), o, lse, scale,
    )  # fmt: skip
    launch(prepared, params)


def _problem(
    q: Tensor, pages: Pages, tokens: int, count: int, known: Sequence[HostSequence], has_gate: bool
) -> AttentionPrefillProblem:
    """The problem of these rows.

    Its sizes choose tiles alone. Tables keep their width, so that a captured graph serves sequences of other lengths.
    """
    columns, block_size = pages.block_tables.shape[1], pages.k_cache.shape[1]
    if live := [one.seq_len for one in known if one.query_len]:
        count, columns = len(live), min(columns, rounded_columns(max(live), block_size))
    return AttentionPrefillProblem(
        **fields_of(q, pages.k_cache, pages.v_cache), index_dtype=None, has_topk_length=False, has_gate=has_gate,
        num_tokens=tokens, num_sequences=count, max_context_len=columns * block_size,
    )  # fmt: skip
