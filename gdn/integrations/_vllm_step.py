"""The step of one of vLLM's Gated DeltaNet layers between its projections, on vLLM's own pages.

A batch holds up to three kinds of rows. Each kind is one call of a fused operator (of several, for head dims that it does not
serve: `_vllm_parts`):

    rows                      operator            slots
    one token each            fused_gdn_decode    [rows]
    drafts                    fused_gdn_decode    [rows, 1 + num_spec], with the accepted counts of the step before
    prompts                   fused_gdn_prefill   [rows], with checkpoints for the prefix cache

Nothing of vLLM is imported: the layer and the metadata are taken as they are, by the names of their attributes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

import gdn
from gdn.integrations._vllm_parts import Parts, fuses_decode, fuses_prefill

Tensor = torch.Tensor
NULL_SLOT = 0  # vLLM's block 0 belongs to nobody


class Rows(NamedTuple):
    """Projected rows of a batch, and where their result goes."""

    qkvz: Tensor
    ba: Tensor
    out: Tensor | None  # [rows, HV * V]
    pages: tuple[Tensor, Tensor]  # windows and states


class _View:
    """A view of a tensor of the host, made again when the host has another tensor or other memory.

    The tensor is kept beside its view: the `id` of one that is gone may be that of the next, laid out otherwise in its memory.
    """

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        self._make, self._of, self._begin = make, torch.empty(0), 0
        self._view = self._of

    def __call__(self, x: Tensor) -> Tensor:
        begin = x.data_ptr()
        if x is not self._of or begin != self._begin:
            self._of, self._begin, self._view = x, begin, self._make(x)
        return self._view


def _keeper(owner: Any, name: str) -> dict[str, Any]:
    """Where a module keeps a parameter: `module.name` searches three dictionaries in Python."""
    kept: dict[str, Any] = getattr(owner, "_parameters", {})
    return kept if name in kept else vars(owner)


class Step:
    """The steps of one layer.

    Parameters
    ----------
    layer : Module
        vLLM's layer; its sizes are read now, its parameters and pages in every step.
    conv_dim_first : bool
        Whether its pages hold windows as [blocks, channels, columns]; else [blocks, columns, channels].
    backend : str, optional
        As for the operators.
    """

    def __init__(self, layer: Any, *, conv_dim_first: bool, backend: str | None = None) -> None:
        ranks = layer.tp_size
        self.layer = layer
        self.num_value_heads = layer.num_v_heads // ranks
        self.head_v_dim = layer.head_v_dim
        self.channels = (2 * layer.key_dim + layer.value_dim) // ranks
        self.is_interleaved = bool(layer.gqa_interleaved_layout)
        self.options: dict[str, Any] = {
            "num_k_heads": layer.num_k_heads // ranks,
            "head_k_dim": layer.head_k_dim,
            "head_v_dim": layer.head_v_dim,
            "eps": layer.layer_norm_epsilon,
            "activation": layer.activation,
            "gate_activation": layer.norm.activation,
            "projection_layout": "interleaved" if self.is_interleaved else "flat",
            "state_v_first": True,
            "null_slot": NULL_SLOT,
            "backend": backend,
        }
        parts, dims = Parts(self.options), (layer.head_k_dim, layer.head_v_dim)
        self._decode = partial(gdn.fused_gdn_decode, **self.options) if fuses_decode(*dims) else parts.decode
        self._prefill = partial(gdn.fused_gdn_prefill, **self.options) if fuses_prefill(*dims) else parts.prefill
        self._filter = _View(lambda weight: weight.detach().view(weight.shape[0], -1))
        self._windows = _View(lambda pages: pages if conv_dim_first else pages.transpose(-1, -2))
        self._keepers: tuple[dict[str, Any], ...] = ()

    def __call__(self, qkvz: Tensor, ba: Tensor, core: Tensor, metadata: Any, pages: tuple[Tensor, Tensor] | None = None) -> None:
        """Writes the result of a batch into core [tokens, HV, V], whose rows beyond the batch's stay as they are.

        Parameters
        ----------
        qkvz, ba : Tensor [tokens, D + HV * V], Tensor [tokens, 2 * HV]
            Output of the two projections.
        core : Tensor [tokens, HV, V]
            Contiguous; input of the output projection.
        metadata : GDNAttentionMetadata
            The batch, as vLLM describes it.
        pages : (Tensor, Tensor), optional
            Windows and states [blocks, ...]; those of the layer if left out.
        """
        every = metadata.num_actual_tokens
        out = core.view(core.shape[0], -1)
        rows = Rows(qkvz, ba, out, self.layer.kv_cache if pages is None else pages)
        if metadata.spec_sequence_masks is None:
            self._without_drafts(rows, every, metadata)
        elif metadata.num_prefills == 0 and metadata.num_decodes == 0:
            self._drafts(rows, every, metadata)
        else:  # drafts among prompts: the rows of each kind are gathered
            for where, run in ((metadata.spec_token_indx, self._drafts), (metadata.non_spec_token_indx, self._prompts)):
                own = Rows(qkvz.index_select(0, where), ba.index_select(0, where), None, rows.pages)
                out.index_copy_(0, where, run(own, where.shape[0], metadata))

    def _without_drafts(self, rows: Rows, every: int, metadata: Any) -> None:
        count = metadata.num_decode_tokens if metadata.num_prefills else every
        if count:
            slots = metadata.non_spec_state_indices_tensor
            if slots.shape[0] != count:
                slots = slots[:count]
            self._run(self._decode, rows, 0, count, state_indices=slots)
        if metadata.num_prefills:
            self._prompts(rows, every, metadata, count)

    def _drafts(self, rows: Rows, every: int, metadata: Any) -> Tensor:
        return self._run(
            self._decode,
            rows,
            0,
            every,
            state_indices=metadata.spec_state_indices_tensor,
            query_start_loc=metadata.spec_query_start_loc,
            num_accepted_tokens=metadata.num_accepted_tokens,
        )

    def _prompts(self, rows: Rows, every: int, metadata: Any, first: int = 0) -> Tensor:
        checkpoints: dict[str, Tensor] = {}
        if metadata.checkpoint is not None:  # of all rows without drafts; those that decode come first
            offsets, slots = metadata.checkpoint.checkpoint_offsets, metadata.checkpoint.state_indices
            decoding = metadata.num_decodes
            if decoding:
                offsets, slots = offsets[decoding:], slots[decoding:]
            checkpoints = {"checkpoint_offsets": offsets.unsqueeze(1), "checkpoint_slots": slots.unsqueeze(1)}
        return self._run(
            self._prefill,
            rows,
            first,
            every - first,
            state_indices=metadata.prefill_state_indices,
            query_start_loc=metadata.prefill_query_start_loc,
            has_initial_state=metadata.prefill_has_initial_state,
            **checkpoints,
        )

    def _run(self, operator: Callable[..., Tensor], rows: Rows, first: int, count: int, **batch: Any) -> Tensor:
        """One call for rows that follow each other. Views cost as much as anything here: each part is one view of its tensor."""
        qkvz, ba, out, (windows, states) = rows
        if not self._keepers:  # the layer has its weights now
            layer, conv = self.layer, self.layer.conv1d
            owners = ((conv, "weight"), (conv, "bias"), (layer, "A_log"), (layer, "dt_bias"), (layer.norm, "weight"))
            self._keepers = tuple(_keeper(*owner) for owner in owners)
        weights, biases, decays, shifts, gains = self._keepers
        is_part = qkvz.shape[0] != count
        if is_part:
            last = first + count
            ba, out = ba[first:last], None if out is None else out[first:last]
        if self.is_interleaved:
            mixed_qkv, z, b, a = qkvz[first : first + count] if is_part else qkvz, None, ba, None
        else:
            row, column = qkvz.stride()
            begin = qkvz.storage_offset() + first * row
            mixed_qkv = qkvz.as_strided((count, self.channels), (row, column), begin)
            inner = (row, self.head_v_dim * column, column)
            z = qkvz.as_strided((count, self.num_value_heads, self.head_v_dim), inner, begin + self.channels * column)
            b, a = self.layer.split_ba(ba)
        return operator(
            mixed_qkv, z, b, a, self._windows(windows), self._filter(weights["weight"]), decays["A_log"], shifts["dt_bias"],
            gains["weight"], states, conv_bias=biases["bias"], out=out, **batch,
        )  # fmt: skip
