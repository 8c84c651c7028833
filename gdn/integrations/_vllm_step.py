"""The step of one of vLLM's Gated DeltaNet layers between its projections, on vLLM's own pages.

A batch holds up to three kinds of rows. Each kind is one call of a fused operator (of several, for head dims that it does not
serve: `_vllm_parts`):

    rows                      operator            slots
    one token each            fused_gdn_decode    [rows]
    drafts                    fused_gdn_decode    [rows, 1 + num_spec], with the accepted counts of the step before
    prompts                   fused_gdn_prefill   [rows], with checkpoints for the prefix cache

With replay (`_vllm_pages`) a sequence has one slot, drafts too; before prompts `fold_states` brings the states that they go on
with up to date, and after them the counts of all states that they wrote are set.

Nothing of vLLM is imported: the layer and the metadata are taken as they are, by the names of their attributes.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

import gdn
from gdn.integrations._vllm_pages import Page, Views
from gdn.integrations._vllm_parts import Parts, fuses_decode, fuses_prefill
from gdn.integrations._vllm_rows import NULL_SLOT, Fold, Prompts

Tensor = torch.Tensor
_NO_RING: dict[str, Any] = {}  # arguments of a decode call about its ring, without replay


class Rows(NamedTuple):
    """Projected rows of a batch, and where their result goes."""

    qkvz: Tensor
    ba: Tensor
    out: Tensor | None  # [rows, HV * V]
    pages: tuple[Tensor, Tensor]  # windows and states, with replay all that is behind the windows


class _View:
    """A view of a tensor of the host, made again when the host has another tensor or other memory."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        self._make, self._key, self._view = make, (0, 0), None

    def __call__(self, x: Tensor) -> Any:
        key = (id(x), x.data_ptr())
        if key != self._key:
            self._key, self._view = key, self._make(x)
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
    page : Page, optional
        What a block holds, where decode is by replay.
    fold_phase : int
        When this layer folds.
    backend : str, optional
        As for the operators.
    """

    def __init__(
        self, layer: Any, *, conv_dim_first: bool, page: Page | None = None, fold_phase: int = 0, backend: str | None = None
    ) -> None:
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
        self.page = page
        self._views = None if page is None else _View(page.views)
        self._folds: dict[str, Any] = {} if page is None else {"fold_every": page.fold_every, "fold_phase": fold_phase}
        self._keepers: tuple[dict[str, Any], ...] = ()
        self._split: Callable[[Tensor], Any] = layer.split_ba

    def with_gates_in_halves(self) -> "Step":
        """This step for gates [tokens, 2 * HV] of the rank alone, where the layer's may be those of all ranks."""
        found = copy.copy(self)
        found._split = lambda ba: ba.chunk(2, dim=-1)
        return found

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
            self._run(self._decode, rows, 0, count, state_indices=slots, **self._ring(rows, metadata))
        if metadata.num_prefills:
            self._prompts(rows, every, metadata, count)

    def _drafts(self, rows: Rows, every: int, metadata: Any) -> Tensor:
        return self._run(
            self._decode,
            rows,
            0,
            every,
            state_indices=metadata.spec_state_indices_tensor if self._views is None else metadata.gdn_replay.slots,
            query_start_loc=metadata.spec_query_start_loc,
            num_accepted_tokens=metadata.num_accepted_tokens,
            **self._ring(rows, metadata),
        )

    def _ring(self, rows: Rows, metadata: Any) -> dict[str, Any]:
        if self._views is None:
            return _NO_RING
        _, ring, tokens = self._views(rows.pages[1])
        return {"ring": ring, "state_tokens": tokens, "num_computed_tokens": metadata.gdn_replay.computed, **self._folds}

    def _prompts(self, rows: Rows, every: int, metadata: Any, first: int = 0) -> Tensor:
        checkpoints: dict[str, Tensor] = {}
        if metadata.checkpoint is not None:  # of all rows without drafts; those that decode come first
            offsets, slots = metadata.checkpoint.checkpoint_offsets, metadata.checkpoint.state_indices
            decoding = metadata.num_decodes
            if decoding:
                offsets, slots = offsets[decoding:], slots[decoding:]
            checkpoints = {"checkpoint_offsets": offsets.unsqueeze(1), "checkpoint_slots": slots.unsqueeze(1)}
        prompts: Prompts | None = None if self._views is None else metadata.gdn_replay.prompts
        if prompts is not None and prompts.fold is not None:
            self._fold(rows.pages, prompts.fold)
        result = self._run(
            self._prefill,
            rows,
            first,
            every - first,
            state_indices=metadata.prefill_state_indices,
            query_start_loc=metadata.prefill_query_start_loc,
            has_initial_state=metadata.prefill_has_initial_state,
            **checkpoints,
        )
        if prompts is not None and self._views is not None:
            self._views(rows.pages[1]).state_tokens.index_copy_(0, prompts.written, prompts.tokens)
        return result

    def _fold(self, pages: tuple[Tensor, Tensor], fold: Fold) -> None:
        """Makes states and windows what prompts go on with."""
        assert self._views is not None
        views: Views = self._views(pages[1])
        gdn.fold_states(
            views.states, fold.slots, views.ring, views.state_tokens, fold.computed, num_k_heads=self.options["num_k_heads"],
            num_accepted_tokens=fold.accepted, state_v_first=True, null_slot=NULL_SLOT, backend=self.options["backend"],
            **self._folds,
        )  # fmt: skip
        if fold.moved is not None:  # from where drafts left them to the start of their slots
            blocks, to, begin = fold.moved
            windows = self._windows(pages[0]).mT
            windows[blocks, to] = windows[blocks, begin]

    def _run(self, operator: Callable[..., Tensor], rows: Rows, first: int, count: int, **batch: Any) -> Tensor:
        """One call for rows that follow each other. Views cost as much as anything here: each part is one view of its tensor."""
        qkvz, ba, out, (windows, states) = rows
        if self._views is not None:
            states = self._views(states).states
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
            b, a = self._split(ba)
        return operator(
            mixed_qkv, z, b, a, self._windows(windows), self._filter(weights["weight"]), decays["A_log"], shifts["dt_bias"],
            gains["weight"], states, conv_bias=biases["bias"], out=out, **batch,
        )  # fmt: skip
