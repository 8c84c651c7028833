"""One decoder layer: a token mixer and an MLP on the residual stream."""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gdn.layers.caches import HybridCaches
from gdn.layers.config import HybridConfig
from gdn.layers.gated_delta_net import GatedDeltaNet
from gdn.layers.host_arrays import at_least, refuse
from gdn.layers.hyper import HyperConnection
from gdn.layers.mlp import MLP, MoE
from gdn.layers.norm import RMSNorm
from gdn.layers.parallel import ContextParallel
from gdn.layers.rotary import RotaryEmbedding
from gdn.layers.sparse_attention import SparseAttention
from gdn.layers.step import StepMetadata


class DecoderLayer(nn.Module):
    """Gated DeltaNet or full attention, then a dense MLP or a mixture of experts.

    Parameters
    ----------
    config, layer : HybridConfig, int
        Sizes of the whole model (without a group, what this layer holds); index of the layer in the model, which says what kind
        of layer it is.
    rotary : RotaryEmbedding
        Table that all layers share.
    null_slot : int
        Largest index of a state slot that means padding.
    tp_group : torch.distributed.ProcessGroup, optional
        Tensor-parallel ranks: the mixer and the MLP are divided, each with one sum over the ranks. None = one rank.
    cp_group : torch.distributed.ProcessGroup, optional
        Context-parallel ranks, which part the rows of steps with prompts: a layer takes and returns the rank's own. Attention
        gathers all of them. None = one rank.
    device, dtype : torch.device, torch.dtype
        Device and dtype of the parameters.

    Attributes
    ----------
    linear_attn or self_attn : GatedDeltaNet or SparseAttention
        Token mixer.
    mlp : MLP or MoE
    input_layernorm, post_attention_layernorm : RMSNorm
        Norms before the two parts, with residual "plain".
    attn_layer_scale, mlp_layer_scale : Parameter [hidden]
        Factors less 1 of the outputs of the two parts, with `layer_scale`.
    attn_hyper_connection, mlp_hyper_connection : HyperConnection
        With residual "hyper".
    """

    def __init__(
        self,
        config: HybridConfig,
        layer: int,
        rotary: RotaryEmbedding,
        *,
        null_slot: int = -1,
        tp_group: dist.ProcessGroup | None = None,
        cp_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        at_least("layer", layer, 0)
        if layer >= config.num_hidden_layers:
            refuse("layer", f"0 to {config.num_hidden_layers - 1} (num_hidden_layers)", layer)
        self.layer_type, self.place = config.layer_types[layer], config.place(layer)
        self.context_parallel = ContextParallel(cp_group)
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        divided: dict[str, Any] = {"tp_group": tp_group, **placed}
        if self.layer_type == "linear_attention":
            self.linear_attn = GatedDeltaNet(config, null_slot=null_slot, cp_group=cp_group, **divided)
        else:
            self.self_attn = SparseAttention(config, rotary, cp_group=cp_group, **divided)
        self.mlp: nn.Module
        if config.is_moe(layer):
            self.mlp = MoE(config, **divided)
        else:
            at_least("intermediate_size", config.intermediate_size, 1)  # of the layers without experts
            self.mlp = MLP(config.hidden_size, config.intermediate_size, **divided)
        self.is_hyper, self.has_scale, self.has_indexer = config.residual == "hyper", config.layer_scale, config.index_topk > 0
        if self.is_hyper:
            self.attn_hyper_connection = HyperConnection(config, **placed)
            self.mlp_hyper_connection = HyperConnection(config, **placed)
        else:
            self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, **placed)
            self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, **placed)
        if self.has_scale:
            self.attn_layer_scale = nn.Parameter(torch.zeros(config.hidden_size, **placed), requires_grad=False)
            self.mlp_layer_scale = nn.Parameter(torch.zeros(config.hidden_size, **placed), requires_grad=False)

    def forward(
        self, hidden_states: Tensor, residual: Tensor | None, positions: Tensor, step: StepMetadata, caches: HybridCaches
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the layer on the tokens of a step.

        Parameters
        ----------
        hidden_states : Tensor [tokens, hidden] (with residual "hyper" [tokens, hc_count * hidden])
            Output of the MLP of the layer before, not yet added to the residual (or the streams).
        residual : Tensor [tokens, hidden] or None
            Residual stream; None in the first layer, and always with residual "hyper".
        positions : Tensor [all tokens of the step] of int64
            Position of each token in its sequence.
        step, caches : StepMetadata, HybridCaches
            Sequences of the step, and the caches of all layers, updated in place.

        Returns
        -------
        hidden_states, residual : Tensor, Tensor or None
            As taken by the next layer.
        """
        if self.is_hyper:
            streams = hidden_states
            mixed, injection = self.attn_hyper_connection(streams)
            assert injection is not None
            streams = self.attn_hyper_connection.inject(streams, self._mix(mixed, positions, step, caches), injection)
            mixed, injection = self.mlp_hyper_connection(streams)
            assert injection is not None
            return self.mlp_hyper_connection.inject(streams, self.mlp(mixed), injection), None
        hidden_states, residual = self.input_layernorm.add(hidden_states, residual)
        hidden_states = self._mix(hidden_states, positions, step, caches)
        scale = self.attn_layer_scale if self.has_scale else None
        hidden_states, residual = self.post_attention_layernorm.add(hidden_states, residual, scale)
        hidden_states = self.mlp(hidden_states)
        if self.has_scale:  # the norm that adds this output is the next layer's, which does not know the scale
            hidden_states = torch.addcmul(hidden_states, hidden_states, self.mlp_layer_scale)
        return hidden_states, residual

    if TYPE_CHECKING:
        __call__ = forward

    def _mix(self, hidden_states: Tensor, positions: Tensor, step: StepMetadata, caches: HybridCaches) -> Tensor:
        """Output of the token mixer."""
        place = self.place
        if self.layer_type == "linear_attention":
            states = caches.gdn
            pools = (states.conv_states[place], states.ssm_states[place], states.replay[place])
            mixed: Tensor = self.linear_attn(hidden_states, step.gdn, *pools)
        else:
            keys, ring = (caches.indexer.keys[place], caches.indexer.rings[place]) if self.has_indexer else (None, None)
            parts = self.context_parallel.parts(step.gdn, "positions", positions, own=False)
            hidden_states = self.context_parallel.whole(hidden_states, parts, positions.shape[0])
            mixed = self.self_attn(hidden_states, positions, step.attention, caches.kv.kv[place], keys, ring)
            mixed = self.context_parallel.own(mixed, parts)
        return mixed
