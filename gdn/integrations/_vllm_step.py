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
        self._decode = bound(gdn.fused_gdn_decode, **self.options) if fuses_decode(*dims) else parts.decode
        self._prefill = bound(gdn.fused_gdn_prefill, **self.options) if fuses_prefill(*dims) else parts.prefill
        self._views = LayerViews(
            lambda pages: pages if conv_dim_first else pages.transpose(-1, -2),
            lambda weight: weight.detach().view(weight.shape[0], -1),
        )
        self._keepers: tuple[Any, ...] = ({}, *(None,) * 8)
        self._widths = (self.channels, self.num_value_heads * self.head_v_dim)
        self._gates: tuple[int, ...] = ()  # columns of b and of a, where those are all

    def with_gates_in_halves(self) -> Self:
        """This step for gates [tokens, 2 * HV] of the rank alone, where the layer's may be those of all ranks."""
        found = copy.copy(self)
        found._gates = (self.num_value_heads, self.num_value_heads)
        return found

    def __call__(self, qkvz: Tensor, ba: Tensor, core: Tensor, metadata: Any, pages: tuple[Tensor, Tensor] | None = None) -> None:
        """Writes the result of a batch into core [tokens, HV, V], and zeros into its rows beyond the batch's: rows of padding go
        through the output projection too.

        Parameters
        ----------
        qkvz, ba : Tensor [tokens, D + HV * V], Tensor [tokens, 2 * HV]
            Output of the two projections.
        core : Tensor [tokens, HV, V]
            Contiguous; input of the output projection.
        metadata : GDNAttentionMetadata
            The batch, as vLLM describes it.
        pages : (Tensor, Tensor), optional
            Windows and states [blocks, ...], with replay all that is behind the windows; those of the layer if left out.
        """
        every, out = metadata.num_actual_tokens, core.view(-1, self._widths[1])
        if qkvz.shape[0] != every:
            out[every:].zero_()
            qkvz, ba, out = qkvz[:every], ba[:every], out[:every]
        try:
            fixed = self._fixed(pages)
        except KeyError:
            self._find()
            fixed = self._fixed(pages)
        if metadata.spec_sequence_masks is None:
            if not metadata.num_prefills:
                if every:
                    self._tokens(*self._projected(qkvz, ba), out, fixed, every, metadata)
            elif metadata.num_decode_tokens:
                self._tokens_and_prompts(qkvz, ba, out, fixed, metadata)
            else:
                self._prompts(*self._projected(qkvz, ba), out, fixed, metadata)
        elif not metadata.num_prefills and not metadata.num_decodes:
            self._drafts(*self._projected(qkvz, ba), out, fixed, metadata)
        else:  # drafts among prompts: the rows of each kind are gathered
            for where, run in ((metadata.spec_token_indx, self._drafts), (metadata.non_spec_token_indx, self._prompts)):
                own = self._projected(qkvz.index_select(0, where), ba.index_select(0, where))
                out.index_copy_(0, where, run(*own, None, fixed, metadata))

    # --- kinds of rows ---------------------------------------------------------------------------------------------------------

    def _tokens(self, mixed_qkv: Any, z: Any, b: Any, a: Any, out: Any, fixed: Any, count: int, metadata: Any) -> None:
        windows, weight, A_log, dt_bias, gain, states, bias = fixed
        slots = metadata.non_spec_state_indices_tensor
        if slots.shape[0] != count:
            slots = first_slots(metadata, slots, count)
        self._decode(mixed_qkv, z, b, a, windows, weight, A_log, dt_bias, gain, states, slots, conv_bias=bias, out=out)

    def _drafts(self, mixed_qkv: Any, z: Any, b: Any, a: Any, out: Any, fixed: Any, metadata: Any) -> Tensor:
        windows, weight, A_log, dt_bias, gain, states, bias = fixed
        return self._decode(
            mixed_qkv, z, b, a, windows, weight, A_log, dt_bias, gain, states, metadata.spec_state_indices_tensor, conv_bias=bias,
            out=out, query_start_loc=metadata.spec_query_start_loc, num_accepted_tokens=metadata.num_accepted_tokens,
        )  # fmt: skip

    def _prompts(self, mixed_qkv: Any, z: Any, b: Any, a: Any, out: Any, fixed: Any, metadata: Any) -> Tensor:
        windows, weight, A_log, dt_bias, gain, states, bias = fixed
        offsets = slots = None
        checkpoint, decoding = metadata.checkpoint, metadata.num_decodes
        if checkpoint is not None:  # of all rows without drafts; those that decode come first
            offsets = _offsets_behind(metadata, checkpoint.checkpoint_offsets, decoding)
            slots = _slots_behind(metadata, checkpoint.state_indices, decoding)
        return self._prefill(
            mixed_qkv, z, b, a, windows, weight, A_log, dt_bias, gain, states, metadata.prefill_state_indices, conv_bias=bias,
            out=out, query_start_loc=metadata.prefill_query_start_loc, has_initial_state=metadata.prefill_has_initial_state,
            checkpoint_offsets=offsets, checkpoint_slots=slots,
        )  # fmt: skip

    def _tokens_and_prompts(self, qkvz: Tensor, ba: Tensor, out: Tensor, fixed: Any, metadata: Any) -> None:
        """Rows of one token each, and prompts behind them. A view of the rows of both is most of what each of them costs."""
        count = metadata.num_decode_tokens
        sizes = (count, qkvz.shape[0] - count)
        of_tokens, of_prompts = out.split_with_sizes(sizes)
        if self.is_interleaved:
            (token_rows, prompt_rows), (token_gates, prompt_gates) = qkvz.split_with_sizes(sizes), ba.split_with_sizes(sizes)
            self._tokens(token_rows, None, token_gates, None, of_tokens, fixed, count, metadata)
            self._prompts(prompt_rows, None, prompt_gates, None, of_prompts, fixed, metadata)
            return
        mixed_qkv, z, b, a = self._projected(qkvz, ba)
        token_rows, prompt_rows = mixed_qkv.split_with_sizes(sizes)
        token_z, prompt_z = z.split_with_sizes(sizes)
        token_b, prompt_b = b.split_with_sizes(sizes)
        token_a, prompt_a = a.split_with_sizes(sizes)
        self._tokens(token_rows, token_z, token_b, token_a, of_tokens, fixed, count, metadata)
        self._prompts(prompt_rows, prompt_z, prompt_b, prompt_a, of_prompts, fixed, metadata)

    # --- tensors of a call -----------------------------------------------------------------------------------------------------

    def _projected(self, qkvz: Tensor, ba: Tensor) -> tuple[Any, Any, Any, Any]:
        """mixed_qkv, z, b and a of rows. Views cost as much as anything here: one call makes two of them."""
        if self.is_interleaved:
            return qkvz, None, ba, None
        mixed_qkv, z = qkvz.split_with_sizes(self._widths, 1)
        try:
            b, a = ba.split_with_sizes(self._gates, 1) if self._gates else self._split(ba)
        except RuntimeError:  # another width than that of which they were the halves
            b, a = self._split(ba)
        return mixed_qkv, z.view(-1, self.num_value_heads, self.head_v_dim), b, a

    def _split(self, ba: Tensor) -> Any:
        """b and a, as the host cuts them. Where they turn out to be the two halves of the columns, they are from then on."""
        parts, widths = self.layer.split_ba(ba), (self.num_value_heads, self.num_value_heads)
        if ba.shape[0] and ba.shape[1] == sum(widths):
            self._gates = widths if _are_same(parts, ba.split_with_sizes(widths, 1)) else ()
        return parts

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
