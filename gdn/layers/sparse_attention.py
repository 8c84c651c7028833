"""Full attention of a hybrid model on a paged cache: sparse where the layer has an indexer, else dense.

qkv_proj -> q/k norm (zero-centred) -> partial RoPE -> write K and V -> attention * sigmoid(gate) -> o_proj
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import gdn
from gdn.layers.attention_metadata import AttentionMetadata
from gdn.layers.attention_runs import deal
from gdn.layers.config import HybridConfig
from gdn.layers.indexer import Indexer
from gdn.layers.norm import RMSNorm
from gdn.layers.parallel import ContextParallel, DealtRows, TensorParallel
from gdn.layers.rotary import RotaryEmbedding

# Parameter -> (tensor of the checkpoint, how a tensor-parallel rank takes it), concatenated along dim 0. Transformers'
# Qwen3-Next, Qwen3.5 and qwen4_exp have these names in self_attn. Those of the indexer: `indexer.TENSORS`.
#   "rows"      an equal share of dim 0: whole heads, each with its query and its gate
#   "kv_heads"  the same for key and value heads; where there are fewer heads than ranks, neighbouring ranks hold the same head
#   "columns"   an equal share of dim 1: the ranks' results are summed
#   "whole"     all of it on every rank
TENSORS = {
    "qkv_proj.weight": (("q_proj.weight", "rows"), ("k_proj.weight", "kv_heads"), ("v_proj.weight", "kv_heads")),
    "q_norm.weight": (("q_norm.weight", "whole"),),
    "k_norm.weight": (("k_norm.weight", "whole"),),
    "o_proj.weight": (("o_proj.weight", "columns"),),
}


class SparseAttention(nn.Module):
    """Attention layer with q/k norm, partial RoPE, an optional indexer and an optional output gate.

    Parameters
    ----------
    config : HybridConfig
        Sizes of the whole model; without a group, what this layer holds. index_topk 0 = no indexer: every query attends to all
        positions up to its own.
    rotary : RotaryEmbedding, optional
        Table shared by the layers of a model; None = one of its own.
    use_fp8_indexer : bool, optional
        As `use_fp8` of `Indexer`.
    tp_group : torch.distributed.ProcessGroup, optional
        Tensor-parallel ranks: each holds an equal share of the heads (key and value heads that are fewer than the ranks are
        replicated) and the whole indexer, so that all select the same positions; the outputs are summed. None = one rank; its
        output is a summand where `config` is a share (`HybridConfig.per_rank`).
    cp_group : torch.distributed.ProcessGroup, optional
        Context-parallel ranks, for steps whose metadata has rows `dealt` over them: each rank writes all keys, selects and
        attends for its rows, and one exchange puts the outputs together. None = one rank.
    device, dtype : torch.device, torch.dtype
        Device and dtype of the parameters.

    Raises
    ------
    TypeError, ValueError
        Where `tp_group` or `cp_group` is no group, or the size of `tp_group` does not divide the heads.
    """

    def __init__(
        self,
        config: HybridConfig,
        rotary: RotaryEmbedding | None = None,
        *,
        use_fp8_indexer: bool | None = None,
        tp_group: dist.ProcessGroup | None = None,
        cp_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.tensor_parallel, self.context_parallel = TensorParallel(tp_group), ContextParallel(cp_group)
        config = self.tensor_parallel.share(config)
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.rotary_dim, self.eps, self.has_gate = config.rotary_dim, config.rms_norm_eps, config.attn_output_gate
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_width = self.num_heads * self.head_dim * (2 if self.has_gate else 1)
        self.kv_width = self.num_kv_heads * self.head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, self.q_width + 2 * self.kv_width, bias=False, **placed)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, **placed)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, **placed)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False, **placed)
        self.rotary = RotaryEmbedding(config, device=device) if rotary is None else rotary
        self.indexer = None
        if config.index_topk:
            self.indexer = Indexer(config, self.rotary, use_fp8=use_fp8_indexer, **placed)
        self.requires_grad_(False)

    def forward(
        self,
        hidden_states: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        kv_cache: tuple[Tensor, Tensor],
        indexer_cache: Tensor | None = None,
        indexer_ring: Tensor | None = None,
    ) -> Tensor:
        """Attention of the new tokens of a step, prefill and decode mixed.

        Parameters
        ----------
        hidden_states, positions : Tensor [tokens, hidden], Tensor [tokens]
            Packed rows of all sequences, and the position of each in its sequence, int32 or int64.
        metadata : AttentionMetadata
            Lengths, block tables and slots of the step. Without lengths on the host, sequences without new tokens come last.
            Nothing is read back from the device.
        kv_cache : tuple of Tensor
            Pages of keys and values of this layer, each [num_blocks, block_size, kv_heads, D], contiguous inside a block; the
            rows of new tokens are written.
        indexer_cache, indexer_ring : Tensor, optional
            Pages and ring of the indexer, as for `Indexer.forward`; needed where the layer has one.

        Returns
        -------
        Tensor [tokens, hidden]
            Zero, before o_proj, in rows of padding.

        Raises
        ------
        TypeError, ValueError
            Named after the argument. Wrong caches of the indexer, sequences that may be longer than the rotary table, and
            metadata of another context-parallel rank are refused before anything is written.
        """
        with self.context_parallel.refusing(hidden_states):
            self.rotary.check_length(metadata.max_seq_len)
            if self.indexer is not None:
                self.indexer.check_caches(indexer_cache, indexer_ring)
        dealt: DealtRows | None = self.context_parallel.dealt(metadata, hidden_states)
        heads, q = self._project(hidden_states, positions, metadata.slot_mapping, kv_cache, None if dealt is None else dealt.rows)
        step, metadata = metadata, metadata if dealt is None else dealt.metadata  # from here on this rank's rows
        gate = heads[..., self.head_dim :] if self.has_gate else None
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self.indexer is None:
            gdn.attention(
                q, kv_cache, metadata.block_tables, metadata.query_start_loc, metadata.seq_lens,
                seq_lens_host=metadata.seq_lens_host, query_lens_host=metadata.query_lens_host,
                max_query_len=metadata.max_query_len, max_seq_len=metadata.max_seq_len, gate=gate, out=out,
            )  # fmt: skip
        else:
            assert indexer_cache is not None
            selected = self.indexer(hidden_states, positions, step, indexer_cache, indexer_ring)
            self._attend((q, gate), kv_cache, selected, metadata, out)
        projected: Tensor = self.o_proj(out.flatten(1))
        summed = self.tensor_parallel.sum(projected)
        if dealt is None or self.context_parallel.ranks is None:
            return summed
        return self.context_parallel.ranks.gather_rows(summed, dealt.counts)[dealt.order]

    if TYPE_CHECKING:
        __call__ = forward

    def _project(
        self, hidden_states: Tensor, positions: Tensor, slots: Tensor, kv_cache: tuple[Tensor, Tensor], rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Writes keys and values of all rows; returns raw heads (per head: query, then gate) and queries, of some rows or all."""
        table, k_norm, (k_cache, v_cache) = self.rotary.cos_sin, self.k_norm.weight, kv_cache
        options: dict[str, Any] = {"rotary_dim": self.rotary_dim, "eps": self.eps, "fp8": False}
        # The operator of the indexer: norm, RoPE and cache writes in one launch; a block is a page of keys, or of values.
        if rows is None:
            heads, k, v = self.qkv_proj(hidden_states).split([self.q_width, self.kv_width, self.kv_width], dim=-1)
            heads, k, v = heads.unflatten(-1, (self.num_heads, -1)), *(x.unflatten(-1, (self.num_kv_heads, -1)) for x in (k, v))
            raw = heads[..., : self.head_dim]
            q, _ = gdn.prepare_indexer(
                raw, k, None, positions, table, self.q_norm.weight, k_norm, k_cache, slots, v=v, v_cache=v_cache, **options
            )
        else:
            k, v = (
                F.linear(hidden_states, self.qkv_proj.weight[self.q_width :]).unflatten(-1, (2, self.num_kv_heads, -1)).unbind(1)
            )
            # The operator takes queries: for all rows these are the keys, whose result is dropped.
            gdn.prepare_indexer(k, k, None, positions, table, k_norm, k_norm, k_cache, slots, v=v, v_cache=v_cache, **options)
            heads = F.linear(hidden_states[rows], self.qkv_proj.weight[: self.q_width]).unflatten(-1, (self.num_heads, -1))
            raw, none = heads[..., : self.head_dim], (None, None, None)
            q, _ = gdn.prepare_indexer(raw, None, None, positions[rows], table, self.q_norm.weight, *none, **options)
        return heads, q

    def _attend(
        self, heads: tuple[Tensor, Tensor | None], kv_cache: tuple[Tensor, Tensor], selected: Tensor | None, metadata: Any,
        out: Tensor,
    ) -> None:  # fmt: skip
        """Attention run by run, into `out`. heads: queries and gates."""
        assert self.indexer is not None
        (q, gate), tokens = heads, out.shape[0]
        runs = deal(metadata, tokens, self.indexer.dense_below())
        stop = runs[-1].tokens.stop if runs else 0
        if stop < tokens:
            out[stop:] = 0
        for run in runs:
            part, sequences = run.tokens, run.sequences
            starts = metadata.query_start_loc[sequences.start : sequences.stop + 1]
            if part.start:
                starts = starts - part.start
            step = (metadata.block_tables[sequences], starts, metadata.seq_lens[sequences])
            places: dict[str, Any] = {"gate": None if gate is None else gate[part], "out": out[part]}
            if run.form == "dense" or selected is None:
                gdn.attention(
                    q[part], kv_cache, *step, seq_lens_host=run.seq_lens, query_lens_host=run.query_lens,
                    max_query_len=run.max_query_len, max_seq_len=run.max_seq_len, **places,
                )  # fmt: skip
            else:
                gdn.sparse_attention(q[part], kv_cache, selected[part], *step, max_query_len=run.max_query_len, **places)
