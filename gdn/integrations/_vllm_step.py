"""The step of one of vLLM's Gated DeltaNet layers between its projections, on vLLM's own pages.

A batch holds up to three kinds of rows. Each kind is one call of a fused operator (of several, for head dims that it does not
serve: `_vllm_parts`):

    rows                      operator            slots
    one token each            fused_gdn_decode    [rows]
    drafts                    fused_gdn_decode    [rows, 1 + num_spec], with the accepted counts of the step before
    prompts                   fused_gdn_prefill   [rows], with checkpoints for the prefix cache

`_vllm_replay_step` has the step with replay. Nothing of vLLM is imported: the layer and the metadata are taken as they are, by
the names of their attributes.
"""

import copy
from typing import Any, Self

import torch

import gdn
from gdn.integrations._kept import LayerViews, StepView, bound
from gdn.integrations._vllm_pages import Page
from gdn.integrations._vllm_parts import Parts, fuses_decode, fuses_prefill
from gdn.integrations._vllm_rows import NULL_SLOT
from gdn.layers.host_arrays import longest_told

Tensor = torch.Tensor

# A step's metadata is that of many layers.
first_slots = StepView(lambda slots, count: slots[:count])
_offsets_behind, _slots_behind = (StepView(lambda values, count: values[count:, None]) for _ in range(2))


def _keeper(owner: Any, name: str) -> dict[str, Any]:
    """Where a module keeps a parameter or module: `module.name` searches three dictionaries in Python."""
    kept: dict[str, Any] = vars(owner)
    for one in (getattr(owner, "_parameters", {}), getattr(owner, "_modules", {})):
        if name in one:
            kept = one
    return kept


def _are_same(views: Any, others: Any) -> bool:
    """Whether views are the same memory in the same form."""
    return all(
        (x.data_ptr(), x.shape, x.stride()) == (y.data_ptr(), y.shape, y.stride()) for x, y in zip(views, others, strict=True)
    )


def _most_tokens(counted: dict[int, Any], _: int) -> int | None:
    """Of the rows without drafts, rounded up: the host counts blocks of a few tokens of each, for its own convolution."""
    for tokens, of_rows in counted.items():
        blocks = of_rows["nums"]
        return tokens * int(blocks.max()) if blocks.is_cpu and blocks.numel() else None
    return None


_longest = StepView(_most_tokens)


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

    page: Page | None = None  # what a block holds, where decode is by replay

    def __init__(self, layer: Any, *, conv_dim_first: bool, backend: str | None = None) -> None:
        ranks = layer.tp_size
        self.layer = layer
        self.num_value_heads = layer.num_v_heads // ranks
        self.head_v_dim = layer.head_v_dim
        self.channels = (2 * layer.key_dim + layer.value_dim) // ranks
        self.options: dict[str, Any] = {
            "num_k_heads": layer.num_k_heads // ranks,
            "head_k_dim": layer.head_k_dim,
            "head_v_dim": layer.head_v_dim,
            "eps": layer.layer_norm_epsilon,
            "activation": layer.activation,
            "gate_activation": layer.norm.activation,
            "projection_layout": "interleaved" if layer.gqa_interleaved_layout else "merged",
            "state_v_first": True,
            "null_slot": NULL_SLOT,
            "backend": backend,
        }
        parts, dims = Parts(self.options), (layer.head_k_dim, layer.head_v_dim)
        self._decode = bound(gdn.fused_gdn_decode, **self.options) if fuses_decode(*dims) else parts.decode
        self._prefill = bound(gdn.fused_gdn_prefill, **self.options) if fuses_prefill(*dims) else parts.prefill
        self._views = LayerViews(
            lambda pages: pages if conv_dim_first else pages.transpose(-1, -2),
            lambda weight: weight.detach().view(weight.shape[0], -1),
        )
        self._keepers: tuple[Any, ...] = ({}, *(None,) * 8)
        self._width = self.num_value_heads * self.head_v_dim
        self._takes_gates = bool(layer.gqa_interleaved_layout)  # as they come; else it is not known yet

    def with_gates_in_halves(self) -> Self:
        """This step for gates [tokens, 2 * HV] of the rank alone, where the layer's may be those of all ranks."""
        found = copy.copy(self)
        found._takes_gates = True
        return found

    def __call__(self, qkvz: Tensor, ba: Tensor, core: Tensor, metadata: Any, pages: tuple[Tensor, Tensor] | None = None) -> None:
        """Writes the result of a batch into core, and zeros into its rows beyond the batch's: rows of padding go through the
        output projection too.

        Views cost as much as anything here, so that none is made where rows are of one kind.

        Parameters
        ----------
        qkvz, ba : Tensor [tokens, D + HV * V], Tensor [tokens, 2 * HV]
            Output of the two projections.
        core : Tensor [tokens, HV * V] or [tokens, HV, V]
            Contiguous; input of the output projection.
        metadata : GDNAttentionMetadata
            The batch, as vLLM describes it.
        pages : (Tensor, Tensor), optional
            Windows and states [blocks, ...], with replay all that is behind the windows; those of the layer if left out.
        """
        every, out = metadata.num_actual_tokens, core if core.dim() == 2 else core.view(-1, self._width)
        if qkvz.shape[0] != every:
            out[every:].zero_()
            qkvz, ba, out = qkvz[:every], ba[:every], out[:every]
        if not self._takes_gates:
            ba = self._own_gates(ba)
        try:
            fixed = self._fixed(pages)
        except KeyError:
            self._find()
            fixed = self._fixed(pages)
        if metadata.spec_sequence_masks is None:
            if not metadata.num_prefills:
                if every:
                    self._tokens(qkvz, ba, out, fixed, every, metadata)
            elif metadata.num_decode_tokens:
                self._tokens_and_prompts(qkvz, ba, out, fixed, metadata)
            else:
                self._prompts(qkvz, ba, out, fixed, metadata)
        elif not metadata.num_prefills and not metadata.num_decodes:
            self._drafts(qkvz, ba, out, fixed, metadata)
        else:  # drafts among prompts: the rows of each kind are gathered
            for where, run in ((metadata.spec_token_indx, self._drafts), (metadata.non_spec_token_indx, self._prompts)):
                own = qkvz.index_select(0, where), ba.index_select(0, where)
                out.index_copy_(0, where, run(*own, None, fixed, metadata))

    # --- kinds of rows ---------------------------------------------------------------------------------------------------------

    def _tokens(self, qkvz: Any, ba: Any, out: Any, fixed: Any, count: int, metadata: Any) -> None:
        windows, weight, A_log, dt_bias, gain, states, bias = fixed
        slots = metadata.non_spec_state_indices_tensor
        if slots.shape[0] != count:
            slots = first_slots(metadata, slots, count)
        self._decode(qkvz, None, ba, None, windows, weight, A_log, dt_bias, gain, states, slots, conv_bias=bias, out=out)

    def _drafts(self, qkvz: Any, ba: Any, out: Any, fixed: Any, metadata: Any) -> Tensor:
        windows, weight, A_log, dt_bias, gain, states, bias = fixed
        return self._decode(
            qkvz, None, ba, None, windows, weight, A_log, dt_bias, gain, states, metadata.spec_state_indices_tensor,
            conv_bias=bias, out=out, query_start_loc=metadata.spec_query_start_loc,
            num_accepted_tokens=metadata.num_accepted_tokens,
        )  # fmt: skip

    def _prompts(self, qkvz: Any, ba: Any, out: Any, fixed: Any, metadata: Any) -> Tensor:
        windows, weight, A_log, dt_bias, gain, states, bias = fixed
        offsets = slots = None
        checkpoint = metadata.checkpoint
        if checkpoint is not None:  # of all rows without drafts; those that decode come first
            decoding = metadata.num_decodes
            offsets = _offsets_behind(metadata, checkpoint.checkpoint_offsets, decoding)
            slots = _slots_behind(metadata, checkpoint.state_indices, decoding)
        counted = getattr(metadata, "nums_dict", None)
        longest = _longest(metadata, counted, 0) if counted else None
        if longest is not None:
            tokens = qkvz.shape[0]
            longest = longest_told(min(longest, tokens), metadata.prefill_state_indices.shape[0], tokens)
        return self._prefill(
            qkvz, None, ba, None, windows, weight, A_log, dt_bias, gain, states, metadata.prefill_state_indices, conv_bias=bias,
            out=out, query_start_loc=metadata.prefill_query_start_loc, has_initial_state=metadata.prefill_has_initial_state,
            checkpoint_offsets=offsets, checkpoint_slots=slots, max_seqlen=longest,
        )  # fmt: skip

    def _tokens_and_prompts(self, qkvz: Tensor, ba: Tensor, out: Tensor, fixed: Any, metadata: Any) -> None:
        """Rows of one token each, and prompts behind them. The views of both are most of what each of them costs."""
        count = metadata.num_decode_tokens
        sizes = (count, qkvz.shape[0] - count)
        rows_of_tokens, rows_of_prompts = qkvz.split_with_sizes(sizes)
        gates_of_tokens, gates_of_prompts = ba.split_with_sizes(sizes)
        of_tokens, of_prompts = out.split_with_sizes(sizes)
        self._tokens(rows_of_tokens, gates_of_tokens, of_tokens, fixed, count, metadata)
        self._prompts(rows_of_prompts, gates_of_prompts, of_prompts, fixed, metadata)

    # --- tensors of a call -----------------------------------------------------------------------------------------------------

    def _own_gates(self, ba: Tensor) -> Tensor:
        """[b | a] of the rank, as the host cuts them. Where they turn out to be all columns, nothing is asked from then on."""
        parts = self.layer.split_ba(ba)
        widths = [part.shape[1] for part in parts]
        if sum(widths) != ba.shape[1] or not _are_same(parts, ba.split_with_sizes(widths, 1)):
            return torch.cat(parts, 1)
        self._takes_gates = ba.shape[0] > 0
        return ba

    def _fixed(self, pages: tuple[Tensor, Tensor] | None) -> Any:
        """Tensors of the layer in the operators' order, as the host has them now, and the bias of its filter.

        Raises KeyError where they are not known yet, or the host keeps them elsewhere since.
        """
        convs, conv, norms, norm, weights, biases, decays, shifts, gains = self._keepers
        if convs["conv1d"] is not conv or norms["norm"] is not norm:
            raise KeyError
        windows, states = self.layer.kv_cache if pages is None else pages
        windows, weight = self._views(windows, weights["weight"])
        return windows, weight, decays["A_log"], shifts["dt_bias"], gains["weight"], states, biases["bias"]

    def _find(self) -> None:
        """Looks where the layer keeps its modules and parameters."""
        layer, conv, norm = self.layer, self.layer.conv1d, self.layer.norm
        owners = ((conv, "weight"), (conv, "bias"), (layer, "A_log"), (layer, "dt_bias"), (norm, "weight"))
        modules = (_keeper(layer, "conv1d"), conv, _keeper(layer, "norm"), norm)
        self._keepers = (*modules, *(_keeper(*one) for one in owners))
