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
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import gdn
from gdn.integrations._vllm_parts import Parts, fuses_decode, fuses_prefill

Tensor = torch.Tensor
NULL_SLOT = 0  # vLLM's block 0 belongs to nobody


@dataclass(frozen=True)
class Rows:
    """Projected rows of one kind, and where their result goes."""

    qkvz: Tensor
    ba: Tensor
    out: Tensor | None  # [rows, HV * V]
    pages: tuple[Tensor, Tensor]  # windows and states


class _View:
    """A view of a tensor of the host, made again when the host has another tensor or other memory."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        self._make, self._key, self._view = make, (0, 0), torch.empty(0)

    def __call__(self, x: Tensor) -> Tensor:
        key = (id(x), x.data_ptr())
        if key != self._key:
            self._key, self._view = key, self._make(x)
        return self._view


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
        if every != len(qkvz):
            qkvz, ba, out = qkvz[:every], ba[:every], out[:every]
        pages = self.layer.kv_cache if pages is None else pages
        rows = Rows(qkvz, ba, out, pages)
        if metadata.spec_sequence_masks is None:
            self._without_drafts(rows, metadata)
        elif metadata.num_prefills == 0 and metadata.num_decodes == 0:
            self._drafts(rows, metadata)
        else:  # drafts among prompts: the rows of each kind are gathered
            for where, run in ((metadata.spec_token_indx, self._drafts), (metadata.non_spec_token_indx, self._prompts)):
                own = Rows(qkvz.index_select(0, where), ba.index_select(0, where), None, pages)
                out.index_copy_(0, where, run(own, metadata))

    def _without_drafts(self, rows: Rows, metadata: Any) -> None:
        count = metadata.num_decode_tokens if metadata.num_prefills else len(rows.qkvz)
        if count:
            first = _cut(rows, 0, count) if metadata.num_prefills else rows
            self._run(self._decode, first, state_indices=metadata.non_spec_state_indices_tensor[:count])
        if metadata.num_prefills:
            self._prompts(_cut(rows, count, len(rows.qkvz)) if count else rows, metadata)

    def _drafts(self, rows: Rows, metadata: Any) -> Tensor:
        return self._run(
            self._decode,
            rows,
            state_indices=metadata.spec_state_indices_tensor,
            query_start_loc=metadata.spec_query_start_loc,
            num_accepted_tokens=metadata.num_accepted_tokens,
        )

    def _prompts(self, rows: Rows, metadata: Any) -> Tensor:
        checkpoints: dict[str, Tensor] = {}
        if metadata.checkpoint is not None:  # of all rows without drafts; those that decode come first
            first = metadata.num_decodes
            checkpoints["checkpoint_offsets"] = metadata.checkpoint.checkpoint_offsets[first:, None]
            checkpoints["checkpoint_slots"] = metadata.checkpoint.state_indices[first:, None]
        return self._run(
            self._prefill,
            rows,
            state_indices=metadata.prefill_state_indices,
            query_start_loc=metadata.prefill_query_start_loc,
            has_initial_state=metadata.prefill_has_initial_state,
            **checkpoints,
        )

    def _run(self, operator: Callable[..., Tensor], rows: Rows, **batch: Any) -> Tensor:
        layer = self.layer
        if self.is_interleaved:
            mixed_qkv, z, b, a = rows.qkvz, None, rows.ba, None
        else:
            mixed_qkv = rows.qkvz[:, : self.channels]
            z = rows.qkvz[:, self.channels :].unflatten(1, (self.num_value_heads, self.head_v_dim))
            b, a = layer.split_ba(rows.ba)
        windows, states = rows.pages[0], rows.pages[1]
        return operator(
            mixed_qkv, z, b, a, self._windows(windows), self._filter(layer.conv1d.weight), layer.A_log, layer.dt_bias,
            layer.norm.weight, states, conv_bias=layer.conv1d.bias, out=rows.out, **batch,
        )  # fmt: skip


def _cut(rows: Rows, first: int, last: int) -> Rows:
    assert rows.out is not None
    return Rows(rows.qkvz[first:last], rows.ba[first:last], rows.out[first:last], rows.pages)
