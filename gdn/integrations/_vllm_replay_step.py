"""The step of a layer of vLLM that decodes by replay.

A sequence has one slot, drafts too (`_vllm_pages`). Before prompts `fold_states` brings the states that they go on with up to
date, and after them the counts of all states that they wrote are set.
"""

from typing import Any

import torch

import gdn
from gdn.integrations._kept import PartViews, bound
from gdn.integrations._vllm_pages import Page, Views
from gdn.integrations._vllm_rows import NULL_SLOT, Fold, Prompts
from gdn.integrations._vllm_step import Step, first_slots

Tensor = torch.Tensor


def step_of(
    layer: Any, *, conv_dim_first: bool, page: Page | None = None, fold_phase: int = 0, backend: str | None = None
) -> Step:
    """The step of a layer: by replay where there is a page for it."""
    if page is None:
        return Step(layer, conv_dim_first=conv_dim_first, backend=backend)
    return ReplayStep(layer, conv_dim_first=conv_dim_first, page=page, fold_phase=fold_phase, backend=backend)


class ReplayStep(Step):
    """The steps of one layer, as in `Step`, with what replay needs of a batch in `metadata.gdn_replay` (`_vllm_rows`).

    Parameters
    ----------
    page : Page
        What a block holds.
    fold_phase : int
        When this layer folds.
    """

    def __init__(self, layer: Any, *, conv_dim_first: bool, page: Page, fold_phase: int = 0, backend: str | None = None) -> None:
        super().__init__(layer, conv_dim_first=conv_dim_first, backend=backend)
        self.page = page
        self._folds: dict[str, Any] = {"fold_every": page.fold_every, "fold_phase": fold_phase}
        self._decode = bound(gdn.fused_gdn_decode, **self.options, **self._folds)
        self._parts = PartViews(page.views)

    def _fixed(self, pages: tuple[Tensor, Tensor] | None) -> Any:
        """As in `Step`, with the parts behind the windows in place of the states."""
        windows, weight, A_log, dt_bias, gain, flat, bias = super()._fixed(pages)
        return windows, weight, A_log, dt_bias, gain, self._parts(flat), bias

    def _tokens(self, qkvz: Any, ba: Any, out: Any, fixed: Any, count: int, metadata: Any) -> None:
        windows, weight, A_log, dt_bias, gain, (states, ring, tokens), bias = fixed
        slots = metadata.non_spec_state_indices_tensor
        if slots.shape[0] != count:
            slots = first_slots(metadata, slots, count)
        self._decode(
            qkvz, None, ba, None, windows, weight, A_log, dt_bias, gain, states, slots, conv_bias=bias, out=out, ring=ring,
            state_tokens=tokens, num_computed_tokens=metadata.gdn_replay.computed,
        )  # fmt: skip

    def _drafts(self, qkvz: Any, ba: Any, out: Any, fixed: Any, metadata: Any) -> Tensor:
        windows, weight, A_log, dt_bias, gain, (states, ring, tokens), bias = fixed
        rows = metadata.gdn_replay
        return self._decode(
            qkvz, None, ba, None, windows, weight, A_log, dt_bias, gain, states, rows.slots, conv_bias=bias, out=out, ring=ring,
            state_tokens=tokens, num_computed_tokens=rows.computed, query_start_loc=metadata.spec_query_start_loc,
            num_accepted_tokens=metadata.num_accepted_tokens,
        )  # fmt: skip

    def _prompts(self, qkvz: Any, ba: Any, out: Any, fixed: Any, metadata: Any) -> Tensor:
        views: Views = fixed[5]
        prompts: Prompts | None = metadata.gdn_replay.prompts
        if prompts is not None and prompts.fold is not None:
            self._fold(fixed[0], views, prompts.fold)
        result = super()._prompts(qkvz, ba, out, (*fixed[:5], views.states, fixed[6]), metadata)
        if prompts is not None:
            views.state_tokens.index_copy_(0, prompts.written, prompts.tokens)
        return result

    def _fold(self, windows: Tensor, views: Views, fold: Fold) -> None:
        """Makes states and windows what prompts go on with."""
        gdn.fold_states(
            views.states, fold.slots, views.ring, views.state_tokens, fold.computed, num_k_heads=self.options["num_k_heads"],
            num_accepted_tokens=fold.accepted, state_v_first=True, null_slot=NULL_SLOT, backend=self.options["backend"],
            **self._folds,
        )  # fmt: skip
        if fold.moved is not None:  # from where drafts left them to the start of their slots
            blocks, to, begin = fold.moved
            columns = windows.mT
            columns[blocks, to] = columns[blocks, begin]
