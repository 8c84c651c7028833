"""Gated DeltaNet layer: projections around the fused operators, for every kind of batch."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

import gdn
import gdn.distributed
from gdn.layers.caches import Replay
from gdn.layers.config import HybridConfig
from gdn.layers.host_arrays import longest_told
from gdn.layers.parallel import ContextParallel, TensorParallel

ROW_MULTIPLE = 8  # rows of the input projection: a token's projections then start at a multiple of 16 bytes
NO_RING: dict[str, Any] = {}  # arguments of a decode call about its ring, without replay


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet token mixer, with its states in pools.

    One call serves decode, prefill and speculative rows in any mixture that `GDNMetadata` describes. Batches of decode rows
    alone, and of speculative rows alone, run `gdn.fused_gdn_decode` between the two projections, other rows
    `gdn.fused_gdn_prefill`, or where that has no kernel for the head dims, one operator for each of its steps.

    Parameters
    ----------
    config : HybridConfig
        Sizes of the whole model; without a group, what this layer holds.
    null_slot : int
        Largest slot index that means padding (vLLM's convention is 0).
    tp_group : torch.distributed.ProcessGroup, optional
        Tensor-parallel ranks: each holds an equal share of the key heads with their value heads, and the outputs are summed.
        None = one rank; its output is a summand where `config` is a share (`HybridConfig.per_rank`).
    cp_group : torch.distributed.ProcessGroup, optional
        Context-parallel ranks, for steps whose metadata has `parts`: each rank is called with its rows, and all store the
        states. One exchange of states and one of the convolution's windows. None = one rank.
    device, dtype : torch.device, torch.dtype
        Device and dtype of the parameters. `A_log` and `dt_bias` stay float32.

    Notes
    -----
    Which operators run depends on the rows of the batch, and they round in different places. ``GDN_BATCH_INVARIANT=1`` holds for
    each operator by itself, not for a decode row that is alone in one step and next to a prompt in another.

    Attributes
    ----------
    in_proj : Parameter [rows, hidden]
        Rows of q, k, v, z (H * K, H * K, HV * V, HV * V), b and a (HV, HV), in flat order whatever the checkpoint's layout, and
        zeros up to a multiple of 8 rows: a decode step makes one product.
    conv_weight : Parameter [2 * H * K + HV * V, w]
        Filter of the convolution.
    A_log, dt_bias, norm_weight : Parameter [HV], Parameter [HV], Parameter [V]
        Logarithm of the decay rate, bias of the raw decay gate, gain of the gated norm.
    out_proj : Parameter [hidden, HV * V]
        Output projection.

    Raises
    ------
    TypeError, ValueError
        Where `tp_group` or `cp_group` is no group, or the size of `tp_group` does not divide the heads.
    """

    def __init__(
        self,
        config: HybridConfig,
        *,
        null_slot: int = -1,
        tp_group: dist.ProcessGroup | None = None,
        cp_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.tensor_parallel, self.context_parallel = TensorParallel(tp_group), ContextParallel(cp_group)
        config = self.tensor_parallel.share(config)
        self.num_k_heads, self.num_v_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.head_k_dim, self.head_v_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.null_slot, self.eps, self.gate_activation = null_slot, config.rms_norm_eps, config.gdn_gate_activation
        self.hidden_size, self.conv_dim, self.value_dim = config.hidden_size, config.conv_dim, config.linear_value_dim
        # The head dims that the fused prefill step has a kernel for.
        self.has_fused_prefill = self.head_k_dim == self.head_v_dim <= 128 and self.head_k_dim % 8 == 0
        used = self.conv_dim + self.value_dim + 2 * self.num_v_heads
        self._sizes = [self.conv_dim, self.value_dim, self.num_v_heads, self.num_v_heads]
        if used % ROW_MULTIPLE:
            self._sizes.append(-used % ROW_MULTIPLE)

        def parameter(*shape: int, to: torch.dtype | None = dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=to), requires_grad=False)

        self.in_proj = parameter(sum(self._sizes), config.hidden_size)
        self.conv_weight = parameter(self.conv_dim, config.linear_conv_kernel_dim)
        self.A_log = parameter(self.num_v_heads, to=torch.float32)
        self.dt_bias = parameter(self.num_v_heads, to=torch.float32)
        self.norm_weight = parameter(self.head_v_dim)
        self.out_proj = parameter(config.hidden_size, self.value_dim)

    def forward(
        self, hidden_states: Tensor, metadata: Any, conv_states: Tensor, ssm_states: Tensor, replay: Replay | None = None
    ) -> Tensor:
        """Mixes the tokens of a step and updates the states in place.

        Parameters
        ----------
        hidden_states : Tensor [tokens, hidden]
            Inputs of all sequences, packed; where `metadata` has `parts`, this rank's rows of them. Rows from
            `metadata.num_actual_tokens` on are padding.
        metadata : GDNMetadata
            Sequences of the step; an engine's own object with the same fields serves too.
        conv_states : Tensor [slots, conv_dim, columns >= w - 1 + num_spec]
            Windows of the convolution, as for `gdn.causal_conv1d_update`.
        ssm_states : Tensor [slots, HV, V, K]
            Recurrent states, float32 or bfloat16, V first.
        replay : Replay, optional
            Ring and counts of this layer where decode is by replay; `metadata` is then from a builder with `replay`, and
            `GDNStateCache.begin_step` has run. Decode rows next to prompts then take the decode operator too.

        Returns
        -------
        Tensor [tokens, hidden]

        Raises
        ------
        ValueError
            Where `metadata` has `parts` and they are those of another rank, or the rows are not as many as this rank's.
        """
        # A plain dict: attributes of a module that are parameters are looked up in Python, in every step.
        parameters: dict[str, Any] = self._parameters
        projected = linear(hidden_states, parameters["in_proj"])
        pools = (conv_states, ssm_states)
        ring = NO_RING if replay is None else {**replay._asdict(), "num_computed_tokens": metadata.num_computed_tokens}
        if metadata.num_spec_decodes:
            if metadata.num_prefills or metadata.num_decodes:
                core = self._mixed(projected, metadata, *pools, ring)
            else:
                core = self._spec(projected, metadata, *pools, ring)
        elif metadata.num_prefills:
            core = self._prefill(projected, metadata, *pools, ring if metadata.num_decodes else NO_RING)
        elif metadata.num_decodes:
            slots = metadata.non_spec_state_indices_tensor
            # As many tokens as rows: each row has one, or is padding with a null slot. Otherwise the offsets say which has one.
            offsets = None if slots.shape[0] == projected.shape[0] else metadata.non_spec_query_start_loc
            core = self._decode(projected, *pools, slots, offsets, None, ring)
        else:
            core = projected.new_zeros(projected.shape[0], self.value_dim)
        return self.tensor_parallel.sum(linear(core, parameters["out_proj"]))

    if TYPE_CHECKING:
        __call__ = forward

    def _decode(
        self,
        projected: Tensor,
        conv_states: Tensor,
        ssm_states: Tensor,
        slots: Tensor,
        offsets: Tensor | None,
        accepted: Tensor | None,
        ring: dict[str, Any] = NO_RING,
    ) -> Tensor:
        """Decode rows, speculative ones with 2-D `slots` or a ring: everything between the projections in one operator."""
        parameters: dict[str, Any] = self._parameters
        core: Tensor = gdn.fused_gdn_decode(
            projected, None, None, None, conv_states, parameters["conv_weight"], parameters["A_log"], parameters["dt_bias"],
            parameters["norm_weight"], ssm_states, slots, query_start_loc=offsets, num_accepted_tokens=accepted,
            num_k_heads=self.num_k_heads, head_k_dim=self.head_k_dim, head_v_dim=self.head_v_dim, eps=self.eps,
            gate_activation=self.gate_activation, projection_layout="concatenated", state_v_first=True,
            null_slot=self.null_slot, **ring,
        )  # fmt: skip
        return core

    def _beside(self, projected: Tensor, metadata: Any, conv_states: Tensor, ssm_states: Tensor, ring: dict[str, Any]) -> Tensor:
        """Decode rows before prompts, each by its own operators."""
        count, tokens = ring["num_computed_tokens"].shape[0], metadata.num_decode_tokens
        slots, offsets = metadata.non_spec_state_indices_tensor, metadata.non_spec_query_start_loc
        core = self._decode(projected[:tokens], conv_states, ssm_states, slots[:count], offsets[: count + 1], None, ring)
        options = {"has_initial_state": metadata.has_initial_state[count:]}
        for name in ("checkpoint_offsets", "checkpoint_slots"):
            if (kept := getattr(metadata, name, None)) is not None:
                options[name] = kept[count:]
        pools, starts = (conv_states, ssm_states), metadata.prefill_query_start_loc
        return torch.cat(
            [core, self._continue(projected[tokens:], pools, slots[count:], starts, options, _longest(metadata, count))]
        )

    def _spec(self, projected: Tensor, metadata: Any, conv_states: Tensor, ssm_states: Tensor, ring: dict[str, Any]) -> Tensor:
        """Speculative rows: chains of drafts, or draft trees, which the fused operator refuses."""
        slots, offsets = metadata.spec_state_indices_tensor, metadata.spec_query_start_loc
        accepted, parents = metadata.num_accepted_tokens, getattr(metadata, "retrieve_parent_token", None)
        if parents is None:
            return self._decode(projected, conv_states, ssm_states, slots, offsets, accepted, ring)
        mixed_qkv, z, b, a, *_ = projected.split_with_sizes(self._sizes, 1)
        tree: dict[str, Any] = {"num_accepted_tokens": accepted, "parent_token": parents, "null_slot": self.null_slot}
        mixed_qkv = gdn.causal_conv1d_update(
            mixed_qkv, conv_states, self.conv_weight, conv_state_indices=slots, query_start_loc=offsets, **tree
        )
        q, k, v = self._heads(mixed_qkv)
        o, _ = gdn.fused_recurrent_gated_delta_rule(
            q, k, v, **self._gates(a, b), **tree, initial_state=ssm_states, cu_seqlens=offsets, ssm_state_indices=slots, **ring
        )
        return self._norm(o, z)

    def _prefill(
        self, projected: Tensor, metadata: Any, conv_states: Tensor, ssm_states: Tensor, ring: dict[str, Any] = NO_RING
    ) -> Tensor:
        """Prompt chunks, with or without a state to continue, and the decode rows before them. ring: of these, with replay."""
        slots, offsets, mask = (
            metadata.non_spec_state_indices_tensor, metadata.non_spec_query_start_loc, metadata.has_initial_state
        )  # fmt: skip
        pools = (conv_states, ssm_states)
        parts = self.context_parallel.parts(metadata, "hidden_states", projected, own=True)
        if parts is None or self.context_parallel.size == 1:
            if ring:
                return self._beside(projected, metadata, *pools, ring)
            checkpoints = {name: getattr(metadata, name, None) for name in ("checkpoint_offsets", "checkpoint_slots")}
            options = {"has_initial_state": mask, **checkpoints}
            return self._continue(projected, pools, slots, offsets, options, _longest(metadata))
        rows, count = parts.shared_rows, parts.shared_sequences
        ranks = {"group": self.context_parallel.group, "final_rank": None}
        own = (slots[count:], offsets[count:] - rows, {"has_initial_state": mask[count:], **ranks})
        if not rows:
            return self._continue_apart(projected, pools, *own)
        shared = (slots[:count], offsets[: count + 1])
        if ring:
            first = self._decode(projected[:rows], *pools, *shared, None, ring)
        else:
            first = self._continue(projected[:rows], pools, *shared, {"has_initial_state": mask[:count]})
        return torch.cat([first, self._continue_apart(projected[rows:], pools, *own)])

    def _continue(
        self,
        projected: Tensor,
        pools: tuple[Tensor, Tensor],
        slots: Tensor,
        offsets: Tensor,
        options: dict[str, Any],
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Runs all steps between the projections for prompt chunks: one operator where it has a kernel for the head dims."""
        if not self.has_fused_prefill:
            return self._continue_apart(projected, pools, slots, offsets, options)
        parameters: dict[str, Any] = self._parameters
        mixed_qkv, z, b, a, *_ = projected.split_with_sizes(self._sizes, 1)
        core: Tensor = gdn.fused_gdn_prefill(
            mixed_qkv, z.view(-1, self.num_v_heads, self.head_v_dim), b, a, pools[0], parameters["conv_weight"],
            parameters["A_log"], parameters["dt_bias"], parameters["norm_weight"], pools[1], slots, query_start_loc=offsets,
            num_k_heads=self.num_k_heads, head_k_dim=self.head_k_dim, head_v_dim=self.head_v_dim, eps=self.eps,
            gate_activation=self.gate_activation, max_seqlen=max_seqlen, state_v_first=True, null_slot=self.null_slot, **options,
        )  # fmt: skip
        return core

    def _continue_apart(
        self, projected: Tensor, pools: tuple[Tensor, Tensor], slots: Tensor, offsets: Tensor, options: dict[str, Any]
    ) -> Tensor:
        """The same by one operator after the other: any head dims, and this rank's parts where the options have a group."""
        space: Any = gdn.distributed if "group" in options else gdn
        options = {**options, "null_slot": self.null_slot}
        mixed_qkv, z, b, a, *_ = projected.split_with_sizes(self._sizes, 1)
        mixed_qkv = space.causal_conv1d_fn(
            mixed_qkv, self.conv_weight, conv_states=pools[0], query_start_loc=offsets, cache_indices=slots, **options
        )
        q, k, v = self._heads(mixed_qkv)
        o, _ = space.chunk_gated_delta_rule(
            q, k, v, **self._gates(a, b), **options, initial_state=pools[1], cu_seqlens=offsets, state_indices=slots
        )
        return self._norm(o, z)

    def _mixed(self, projected: Tensor, metadata: Any, conv_states: Tensor, ssm_states: Tensor, ring: dict[str, Any]) -> Tensor:
        """Speculative rows and others: each kind by itself, results merged in the order of the tokens."""
        core = projected.new_empty(projected.shape[0], self.value_dim)
        if projected.shape[0] > metadata.num_actual_tokens:
            core.zero_()
        kinds: Any = ((metadata.spec_token_indx, self._spec, ring), (metadata.non_spec_token_indx, self._prefill, NO_RING))
        for indices, part, own in kinds:
            result = part(projected.index_select(0, indices), metadata, conv_states, ssm_states, own)
            core.index_copy_(0, indices.long(), result)
        return core

    def _heads(self, mixed_qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [1, tokens, heads, dim] as views of the convolution's output."""
        key_dim = self.num_k_heads * self.head_k_dim
        q, k, v = mixed_qkv[None].split_with_sizes([key_dim, key_dim, self.value_dim], 2)
        keys, values = (self.num_k_heads, self.head_k_dim), (self.num_v_heads, self.head_v_dim)
        return q.unflatten(2, keys), k.unflatten(2, keys), v.unflatten(2, values)

    def _gates(self, a: Tensor, b: Tensor) -> dict[str, Any]:
        """Arguments of the delta rule that are the same for the chunk and the recurrent form."""
        return {
            "g": a[None], "beta": b[None], "A_log": self.A_log, "dt_bias": self.dt_bias, "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True, "state_v_first": True,
        }  # fmt: skip

    def _norm(self, o: Tensor, z: Tensor) -> Tensor:
        gate = z.view(-1, self.num_v_heads, self.head_v_dim)
        return gdn.rms_norm_gated(o[0], gate, self.norm_weight, self.eps, self.gate_activation).flatten(1)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "GatedDeltaNet":
        parameters: dict[str, Any] = self._parameters
        wide = {name: parameters[name].data for name in ("A_log", "dt_bias")}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, was in wide.items():
            now = parameters[name]
            if now.dtype != was.dtype:  # a conversion of the model's dtype: decays keep their precision
                now.data = was.to(now.device)
        return self


def _longest(metadata: Any, first: int = 0) -> int | None:
    """Tokens of the longest row from `first` on, where the host knows them and they tell something.

    Not in a compiled model, which would be made anew for each length.
    """
    lengths = None if torch.compiler.is_compiling() else getattr(metadata, "non_spec_lengths_host", None)
    if lengths is None:
        return None
    rows = lengths[first:]
    return longest_told(max(rows, default=0), len(rows), sum(rows))
