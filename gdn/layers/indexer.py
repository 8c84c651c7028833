"""Indexer of a sparse attention layer: scores the cached keys for every query and keeps the best.

token-wise   projection [q | k | w]; a key for every token; w weighs the heads
compressed   projection [q | k]; a key for every `index_ratio` tokens (the mean of their raw keys); no weights. The best groups
             are selected, and the tokens of the unfinished group are added.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import gdn
from gdn.core.modes import is_empty
from gdn.layers.attention_metadata import AttentionMetadata
from gdn.layers.attention_runs import Run, compressed_slots, deal, token_sequences, visible_keys
from gdn.layers.config import HybridConfig
from gdn.layers.norm import RMSNorm
from gdn.layers.rotary import RotaryEmbedding
from gdn.runtime import env

# Parameter -> its parts in the checkpoint and how a rank takes each, as in `sparse_attention.TENSORS`. Compressed: Transformers'
# Qwen4ExpTextQSAIndexer. Token-wise indexers, which Transformers lacks, have index_qkw_proj with the rows [q | k | w].
TENSORS = {
    name: ((name, "whole"),)
    for name in ("index_qk_proj.weight", "index_qkw_proj.weight", "q_layernorm.weight", "k_layernorm.weight")
}


class _Queries(NamedTuple):
    """Inputs of the scores of a step, by token row."""

    q: Tensor  # [tokens, H, D]
    weights: Tensor | None  # [tokens, H]
    visible: Tensor  # [tokens] int32: keys that each row sees
    positions: Tensor | None  # [tokens]; None where every token has a key
    scale: float

    def part(self, rows: slice) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """Queries, weights, visible keys and positions of some rows."""
        weights, positions = (None if x is None else x[rows] for x in (self.weights, self.positions))
        return self.q[rows], weights, self.visible[rows], positions


class Indexer(nn.Module):
    """Selects the positions that each query attends to.

    Parameters
    ----------
    config : HybridConfig
        Gives hidden_size, index_topk, index_n_heads, index_kv_heads, index_head_dim, index_ratio, rms_norm_eps and the rotary
        embedding. Tensor parallelism does not divide an indexer: every rank holds and runs all of it.
    rotary : RotaryEmbedding, optional
        Table of the model, used where the indexer rotates as many dimensions; None = a table of its own.
    use_fp8 : bool, optional
        Whether queries and cached keys are e4m3. None = as ``VLLM_QSA_USE_FP8_INDEXER`` says now.
    zero_centred : bool
        Whether the gain of the norms is 1 + weight (else weight).
    device, dtype : torch.device, torch.dtype
        Device and dtype of the parameters.

    Notes
    -----
    The form of the cache follows from the indexer's: FP8 with scales (uint8 pages) for token-wise and plain e4m3 for compressed
    indexers with `use_fp8`, else the dtype of the model (on a GPU, bfloat16). Another one raises ValueError or TypeError.
    """

    def __init__(
        self,
        config: HybridConfig,
        rotary: RotaryEmbedding | None = None,
        *,
        use_fp8: bool | None = None,
        zero_centred: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.index_n_heads, config.index_kv_heads, config.index_head_dim
        self.ratio, self.topk, self.eps = config.index_ratio, config.index_topk, config.rms_norm_eps
        self.rotary_dim, self.zero_centred = config.index_rotary_dim, zero_centred
        self.use_fp8 = env.current().qsa_use_fp8_indexer if use_fp8 is None else use_fp8
        self.is_compressed = config.index_ratio > 1
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        width = (self.num_heads + self.num_kv_heads) * self.head_dim
        if self.is_compressed:
            self.index_qk_proj = nn.Linear(config.hidden_size, width, bias=False, **placed)
        else:
            self.index_qkw_proj = nn.Linear(config.hidden_size, width + self.num_heads, bias=False, **placed)
        self.q_layernorm = RMSNorm(self.head_dim, config.rms_norm_eps, **placed)
        self.k_layernorm = RMSNorm(self.head_dim, config.rms_norm_eps, **placed)
        self.requires_grad_(False)
        if config.index_rotary_dim < config.rotary_dim:  # a whole head of the indexer, by frequencies of its own
            own = replace(config, head_dim=config.index_head_dim, partial_rotary_factor=1.0)
            rotary = RotaryEmbedding(own, device=device)
        self.rotary = RotaryEmbedding(config, device=device) if rotary is None else rotary

    @property
    def num_selected(self) -> int:
        """Columns of the result: the selected tokens, and those of an unfinished group."""
        return self.topk + self.ratio - 1

    def forward(
        self, hidden_states: Tensor, positions: Tensor, metadata: AttentionMetadata, cache: Tensor, ring: Tensor | None = None
    ) -> Tensor | None:
        """Writes the keys of new tokens to the cache and selects positions for their queries.

        Parameters
        ----------
        hidden_states : Tensor [tokens, hidden]
            Packed rows of all sequences.
        positions : Tensor [tokens]
            Position of each token in its sequence, int32 or int64; a position within the table at padding.
        metadata : AttentionMetadata
            Lengths, block tables and slots of the step. Without lengths on the host, sequences without new tokens come last.
            Where its rows are `dealt`, keys of all rows are written, and queries made of this rank's.
        cache : Tensor
            Pages of this layer, updated in place; a page holds block_size / index_ratio rows.
        ring : Tensor [slots, size, index_kv_heads, D], optional
            Raw keys of unfinished groups, updated in place; needed by compressed indexers alone.

        Returns
        -------
        Tensor [tokens (of this rank, where they are dealt), num_selected] of int32 or None
            Selected positions, -1 after the last; -1 in rows that attend densely. None where all rows do, and where there is no
            sequence.

        Raises
        ------
        TypeError, ValueError
            Named after the argument. Wrong caches are refused before anything is written.
        """
        self.check_caches(cache, ring)
        self.rotary.check_length(metadata.max_seq_len)
        dealt = getattr(metadata, "dealt", None)
        if dealt is None:
            queries = self._prepare(hidden_states, positions, metadata, cache, ring)
        else:
            self._write_keys(hidden_states, positions, metadata, cache, ring)
            hidden_states, positions, metadata = hidden_states[dealt.rows], positions[dealt.rows], dealt.metadata
            queries = self._make_queries(hidden_states, positions, metadata)
        tokens = hidden_states.shape[0]
        runs = deal(metadata, tokens, self.dense_below())
        # Rows of nobody select nothing, and have no block table to look into.
        if is_empty(metadata.block_tables.shape[0]) or all(run.form == "dense" for run in runs):
            return None
        selected = torch.empty(tokens, self.num_selected, dtype=torch.int32, device=hidden_states.device)
        if not (len(runs) == 1 and runs[0].tokens == slice(0, tokens)):
            selected.fill_(-1)
        for run in runs:
            if run.form == "paged":
                self._select_paged(run, queries, cache, metadata, selected)
            elif run.form == "ragged":
                self._select_ragged(run, queries, cache, metadata, selected)
        return selected

    if TYPE_CHECKING:
        __call__ = forward

    def check_caches(self, cache: Tensor | None, ring: Tensor | None) -> None:
        """Raises ValueError or TypeError where the pages or the ring are not those of this indexer."""
        if cache is None:
            raise ValueError("indexer_cache: expected the pages of a layer with an indexer, got None")
        if self.is_compressed and ring is None:
            raise ValueError(f"indexer_ring: expected the ring of raw keys with index_ratio {self.ratio}, got None")
        fp8 = torch.float8_e4m3fn if self.is_compressed else torch.uint8
        if (cache.dtype == fp8) != self.use_fp8 or cache.dtype in {torch.uint8, torch.float8_e4m3fn} - {fp8}:
            wanted = fp8 if self.use_fp8 else "a float dtype of 16 bits or more"
            raise TypeError(f"indexer_cache: expected {wanted} (use_fp8={self.use_fp8}), got {cache.dtype}")

    def dense_below(self) -> int:
        """Length below which a sequence of prefill attends densely: never beyond the top-k, where both are the same."""
        return min(env.current().dsa_dense_prefill_threshold, self.topk)

    def _prepare(self, hidden_states: Tensor, positions: Tensor, metadata: Any, cache: Tensor, ring: Tensor | None) -> _Queries:
        """Makes the queries and writes the keys."""
        heads, kv_heads, dim, table, options = (
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.rotary.cos_sin,
            self._options(),
        )
        slots, visible = metadata.slot_mapping, visible_keys(metadata, positions, self.ratio)
        q_norm, k_norm = self.q_layernorm.weight, self.k_layernorm.weight
        if not self.is_compressed:
            sizes = [heads * dim, kv_heads * dim, heads]
            q, k, weights = self.index_qkw_proj(hidden_states).split(sizes, dim=-1)
            q, k = q.unflatten(-1, (heads, dim)), k.unflatten(-1, (kv_heads, dim))
            prepared, folded = gdn.prepare_indexer(
                q, k, weights, positions, table, q_norm, k_norm, cache, slots, fp8=self.use_fp8, **options
            )
            return _Queries(prepared, folded, visible, None, 1.0 if self.use_fp8 else dim**-0.5)
        assert ring is not None
        q, k = self.index_qk_proj(hidden_states).split([heads * dim, kv_heads * dim], dim=-1)
        q, k = q.unflatten(-1, (heads, dim)), k.unflatten(-1, (kv_heads, dim))
        prepared, _ = gdn.prepare_indexer(q, None, None, positions, table, q_norm, None, None, None, fp8=self.use_fp8, **options)
        ring_slots, group_slots = compressed_slots(metadata, self.ratio)
        gdn.compress_indexer_keys(k, ring, cache, positions, table, k_norm, ring_slots, group_slots, ratio=self.ratio, **options)
        return _Queries(prepared, None, visible, positions, dim**-0.5)

    def _options(self) -> dict[str, Any]:
        return {"rotary_dim": self.rotary_dim, "eps": self.eps, "zero_centred": self.zero_centred}

    def _write_keys(self, hidden_states: Tensor, positions: Tensor, metadata: Any, cache: Tensor, ring: Tensor | None) -> None:
        """Writes the keys alone."""
        width, table, norm = self.num_heads * self.head_dim, self.rotary.cos_sin, self.k_layernorm.weight
        k = linear(hidden_states, self._weight()[width : width + self.num_kv_heads * self.head_dim])
        k = k.unflatten(-1, (self.num_kv_heads, self.head_dim))
        if not self.is_compressed:  # the operator takes queries: here the keys, whose result is dropped
            gdn.prepare_indexer(
                k, k, None, positions, table, norm, norm, cache, metadata.slot_mapping, fp8=self.use_fp8, **self._options()
            )
            return
        assert ring is not None
        ring_slots, group_slots = compressed_slots(metadata, self.ratio)
        gdn.compress_indexer_keys(
            k, ring, cache, positions, table, norm, ring_slots, group_slots, ratio=self.ratio, **self._options()
        )

    def _make_queries(self, hidden_states: Tensor, positions: Tensor, metadata: Any) -> _Queries:
        """Makes the queries alone."""
        width, dim, visible = self.num_heads * self.head_dim, self.head_dim, visible_keys(metadata, positions, self.ratio)
        weight, norm = self._weight(), self.q_layernorm.weight
        weights = None if self.is_compressed else linear(hidden_states, weight[-self.num_heads :])
        prepared, folded = gdn.prepare_indexer(
            linear(hidden_states, weight[:width]).unflatten(-1, (self.num_heads, dim)), None, weights, positions,
            self.rotary.cos_sin, norm, None, None, None, fp8=self.use_fp8, **self._options(),
        )  # fmt: skip
        own, scale = (positions, dim**-0.5) if self.is_compressed else (None, 1.0 if self.use_fp8 else dim**-0.5)
        return _Queries(prepared, folded, visible, own, scale)

    def _weight(self) -> Tensor:
        return (self.index_qk_proj if self.is_compressed else self.index_qkw_proj).weight

    def _select_paged(self, run: Run, queries: _Queries, cache: Tensor, metadata: Any, out: Tensor) -> None:
        """Every row reads the pages of its sequence; rows of a sequence share one read where all have as many."""
        part, count = run.tokens, run.tokens.stop - run.tokens.start
        tables = metadata.block_tables[run.sequences]
        drafts = run.drafts or 1
        in_order = run.drafts is not None or (run.query_lens is None and run.max_query_len <= 1)
        if not in_order or tables.shape[0] * drafts != count:  # row i is not of sequence i // drafts
            tables, drafts = metadata.block_tables[token_sequences(metadata, out.shape[0])[part]], 1
        q, weights, visible, positions = queries.part(part)
        gdn.paged_indexer_topk(
            q.unflatten(0, (-1, drafts)), cache, weights, visible.unflatten(0, (-1, drafts)), tables, self.topk // self.ratio,
            scale=queries.scale, max_context_len=max(1, run.max_seq_len // self.ratio), ratio=self.ratio, positions=positions,
            out=out[part],
        )  # fmt: skip

    def _select_ragged(self, run: Run, queries: _Queries, cache: Tensor, metadata: Any, out: Tensor) -> None:
        """The keys of each sequence are gathered to rows, cached prefix included; a query scores those up to its own."""
        part, sequences = run.tokens, run.sequences
        assert run.seq_lens is not None
        rows = [length // self.ratio for length in run.seq_lens]  # on the host: sizes alone
        lengths = metadata.seq_lens[sequences].div(self.ratio, rounding_mode="floor")
        bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        k, k_scale = gdn.gather_indexer_cache(cache, metadata.block_tables[sequences], bounds, num_rows=sum(rows))
        starts = bounds[token_sequences(metadata, out.shape[0])[part] - sequences.start]
        q, weights, visible, positions = queries.part(part)
        gdn.indexer_topk(
            q, k, weights, starts, starts + visible, self.topk // self.ratio, k_scale=k_scale, scale=queries.scale,
            max_seqlen_k=max(rows), ratio=self.ratio, positions=positions, out=out[part],
        )  # fmt: skip
