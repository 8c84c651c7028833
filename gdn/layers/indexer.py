"""Indexer of a sparse attention layer: scores the cached keys for every query and keeps the best.

token-wise   projection [q | k | w]; a key for every token; w weighs the heads
compressed   projection [q | k]; a key for every `index_ratio` tokens (the mean of their raw keys); no weights. The best groups
             are selected, and the tokens of the unfinished group are added.
"""

from typing import Any

import torch
from torch import Tensor, nn

import gdn
from gdn.layers.attention_runs import Run, compressed_slots, deal, token_sequences, visible_keys
from gdn.layers.config import HybridConfig
from gdn.layers.norm import RMSNorm
from gdn.layers.rotary import RotaryEmbedding, cos_sin_table
from gdn.runtime import env

# Parameter -> its parts in the checkpoint and how a rank takes each, as in `sparse_attention.TENSORS`. Compressed: Transformers'
# Qwen4ExpTextQSAIndexer. Token-wise indexers, which Transformers lacks, have index_qkw_proj with the rows [q | k | w].
TENSORS = {
    name: ((name, "whole"),)
    for name in ("index_qk_proj.weight", "index_qkw_proj.weight", "q_layernorm.weight", "k_layernorm.weight")
}


class Indexer(nn.Module):
    """Selects the positions that each query attends to.

    Parameters
    ----------
    config : HybridConfig
        Gives hidden_size, index_topk, index_n_heads, index_kv_heads, index_head_dim, index_ratio, rms_norm_eps and the rotary
        embedding. The indexer is replicated: tensor parallelism does not divide it.
    rotary : RotaryEmbedding, optional
        Table of the model, used where the indexer rotates as many dimensions; None = a table of its own.
    use_fp8 : bool, optional
        Whether queries and cached keys are e4m3. None = as ``VLLM_QSA_USE_FP8_INDEXER`` says now.
    zero_centred : bool
        Whether the gain of the norms is 1 + weight (else weight).
    device, dtype : torch.device, torch.dtype
        Of the parameters.

    Notes
    -----
    The form of the cache follows from the indexer's: FP8 with scales (uint8 pages) for token-wise and plain e4m3 for compressed
    indexers with `use_fp8`, else the dtype of the model (on a GPU, bfloat16). Another one raises ValueError or TypeError.
    """

    _own_table: Tensor | None

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
        if rotary is None:
            rotary = RotaryEmbedding(config, device=device)
        self.rotary = rotary
        self._index_angles = (config.index_rotary_dim, config.rope_theta, config.max_position_embeddings)
        self._own_table = None

    @property
    def num_selected(self) -> int:
        """Columns of the result: the selected tokens, and those of an unfinished group."""
        return self.topk + self.ratio - 1

    def _cos_sin(self) -> Tensor:
        """Table of this indexer's rotated dimensions. One that is not the model's is made once, outside of captured graphs."""
        table = self.rotary.cos_sin
        if table.shape[1] == self.rotary_dim:
            return table
        if self._own_table is None or self._own_table.device != table.device:
            self._own_table = cos_sin_table(*self._index_angles, table.device)
        return self._own_table

    def forward(
        self, hidden_states: Tensor, positions: Tensor, metadata: Any, cache: Tensor, ring: Tensor | None = None
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
        cache : Tensor
            Pages of this layer, updated in place; a page holds block_size / index_ratio rows.
        ring : Tensor [slots, size, index_kv_heads, D], optional
            Raw keys of unfinished groups, updated in place; needed by compressed indexers alone.

        Returns
        -------
        Tensor [tokens, num_selected] of int32 or None
            Selected positions, -1 after the last; -1 in rows that attend densely. None where all rows do.

        Raises
        ------
        TypeError, ValueError
            Named after the argument; nothing is written then.
        """
        tokens = hidden_states.shape[0]
        runs = deal(metadata, tokens, self.dense_below())
        queries, weights, scale = self._prepare(hidden_states, positions, metadata, cache, ring)
        if all(run.form == "dense" for run in runs):
            return None
        selected = torch.empty(tokens, self.topk // self.ratio, dtype=torch.int32, device=queries.device)
        if not (len(runs) == 1 and runs[0].tokens == slice(0, tokens)):
            selected.fill_(-1)
        visible = visible_keys(metadata, positions, self.ratio)
        options: dict[str, Any] = {"cache": cache, "metadata": metadata, "scale": scale}
        for run in runs:
            if run.form == "paged":
                self._select_paged(run, queries, weights, visible, selected, **options)
            elif run.form == "ragged":
                self._select_ragged(run, queries, weights, visible, selected, **options)
        if not self.is_compressed:
            return selected
        expanded = gdn.expand_topk_groups(selected, positions, ratio=self.ratio)
        for run in runs:
            if run.form == "dense":
                expanded[run.tokens] = -1  # the tail of an unfinished group would be listed
        return expanded

    def dense_below(self) -> int:
        """Length below which a sequence of prefill attends densely: never beyond the top-k, where both are the same."""
        return min(env.current().dsa_dense_prefill_threshold, self.topk)

    def _prepare(
        self, hidden_states: Tensor, positions: Tensor, metadata: Any, cache: Tensor, ring: Tensor | None
    ) -> tuple[Tensor, Tensor | None, float]:
        """Queries, weights and scale for the scores; the keys are written."""
        heads, kv_heads, dim, table = self.num_heads, self.num_kv_heads, self.head_dim, self._cos_sin()
        options: dict[str, Any] = {"rotary_dim": self.rotary_dim, "eps": self.eps, "zero_centred": self.zero_centred}
        slots = metadata.slot_mapping
        q_norm, k_norm = self.q_layernorm.weight, self.k_layernorm.weight
        if not self.is_compressed:
            sizes = [heads * dim, kv_heads * dim, heads]
            q, k, weights = self.index_qkw_proj(hidden_states).split(sizes, dim=-1)
            q, k = q.unflatten(-1, (heads, dim)), k.unflatten(-1, (kv_heads, dim))
            prepared, folded = gdn.prepare_indexer(
                q, k, weights, positions, table, q_norm, k_norm, cache, slots, fp8=self.use_fp8, **options
            )
            return prepared, folded, 1.0 if self.use_fp8 else dim**-0.5
        if ring is None:
            raise ValueError(f"ring: expected the ring of raw keys with index_ratio {self.ratio}, got None")
        if (cache.dtype == torch.float8_e4m3fn) != self.use_fp8 or cache.dtype == torch.uint8:
            wanted = "float8_e4m3fn" if self.use_fp8 else "a float dtype of 16 bits or more"
            raise TypeError(f"cache: expected {wanted} (compressed keys, use_fp8={self.use_fp8}), got {cache.dtype}")
        q, k = self.index_qk_proj(hidden_states).split([heads * dim, kv_heads * dim], dim=-1)
        q, k = q.unflatten(-1, (heads, dim)), k.unflatten(-1, (kv_heads, dim))
        prepared, _ = gdn.prepare_indexer(q, None, None, positions, table, q_norm, None, None, None, fp8=self.use_fp8, **options)
        ring_slots, group_slots = compressed_slots(metadata, self.ratio)
        gdn.compress_indexer_keys(k, ring, cache, positions, table, k_norm, ring_slots, group_slots, ratio=self.ratio, **options)
        return prepared, None, dim**-0.5

    def _select_paged(
        self,
        run: Run,
        queries: Tensor,
        weights: Tensor | None,
        visible: Tensor,
        out: Tensor,
        *,
        cache: Tensor,
        metadata: Any,
        scale: float,
    ) -> None:
        """Every row reads the pages of its sequence; rows of a sequence share one read where all have as many."""
        part, count = run.tokens, run.tokens.stop - run.tokens.start
        tables = metadata.block_tables[run.sequences]
        drafts = run.drafts or 1
        in_order = run.drafts is not None or (run.query_lens is None and run.max_query_len <= 1)
        if not in_order or tables.shape[0] * drafts != count:  # row i is not of sequence i // drafts
            tables, drafts = metadata.block_tables[token_sequences(metadata, out.shape[0])[part]], 1
        gdn.paged_indexer_topk(
            queries[part].unflatten(0, (-1, drafts)), cache, None if weights is None else weights[part],
            visible[part].unflatten(0, (-1, drafts)), tables, out.shape[1], scale=scale,
            max_context_len=run.max_seq_len // self.ratio, out=out[part],
        )  # fmt: skip

    def _select_ragged(
        self,
        run: Run,
        queries: Tensor,
        weights: Tensor | None,
        visible: Tensor,
        out: Tensor,
        *,
        cache: Tensor,
        metadata: Any,
        scale: float,
    ) -> None:
        """The keys of each sequence are gathered to rows, cached prefix included; a query scores those up to its own."""
        part, sequences = run.tokens, run.sequences
        assert run.seq_lens is not None
        rows = [length // self.ratio for length in run.seq_lens]  # on the host: sizes alone
        lengths = metadata.seq_lens[sequences].div(self.ratio, rounding_mode="floor")
        bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        k, k_scale = gdn.gather_indexer_cache(cache, metadata.block_tables[sequences], bounds, num_rows=sum(rows))
        starts = bounds[token_sequences(metadata, out.shape[0])[part] - sequences.start]
        gdn.indexer_topk(
            queries[part], k, None if weights is None else weights[part], starts, starts + visible[part], out.shape[1],
            k_scale=k_scale, scale=scale, max_seqlen_k=max(rows), out=out[part],
        )  # fmt: skip
