"""MLPs: dense with a SiLU gate, and a mixture of experts with a shared expert."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from gdn.layers.config import HybridConfig
from gdn.layers.parallel import TensorParallel

_grouped_mm = getattr(torch.nn.functional, "grouped_mm", torch._grouped_mm)  # public from torch 2.10 on
_MOST_ELEMENTS = 2**26  # of an intermediate tensor where every expert sees every token


class MLP(nn.Module):
    """Dense MLP: `down_proj(silu(gate) * up)`.

    Parameters
    ----------
    hidden_size, intermediate_size : int
        Width of the input and output, and of the gate.
    tp_group : torch.distributed.ProcessGroup, optional
        Tensor-parallel ranks: each holds an equal share of the gate's width, and the outputs are summed. None = one rank.
    device, dtype : torch.device, torch.dtype
        Device and dtype of the parameters.

    Attributes
    ----------
    gate_up_proj : Parameter [2 * intermediate, hidden]
        Rows of the gate, then those of its factor: one product.
    down_proj : Parameter [hidden, intermediate]

    Raises
    ------
    TypeError, ValueError
        Where `tp_group` is no group, or its size does not divide the width.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        tp_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.tensor_parallel = TensorParallel(tp_group)
        size = self.tensor_parallel.size
        if intermediate_size % size:
            raise ValueError(f"intermediate_size: expected a multiple of {size} ranks, got {intermediate_size}")
        intermediate_size //= size
        up = torch.empty(2 * intermediate_size, hidden_size, device=device, dtype=dtype)
        self.gate_up_proj = nn.Parameter(up, requires_grad=False)
        self.down_proj = nn.Parameter(
            torch.empty(hidden_size, intermediate_size, device=device, dtype=dtype), requires_grad=False
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Output [tokens, hidden] for hidden states [tokens, hidden]."""
        return self.tensor_parallel.sum(linear(_gated(linear(hidden_states, self.gate_up_proj)), self.down_proj))

    if TYPE_CHECKING:
        __call__ = forward


class MoE(nn.Module):
    """Mixture of experts: softmax router over all experts, the top ones weighted, next to a shared expert with a sigmoid gate.

    Nothing here waits for the device: in bfloat16 on a GPU the tokens are sorted by expert and go through torch's grouped
    product with offsets on the device; otherwise every expert sees every token, which is meant for checks at small sizes.

    Parameters
    ----------
    config : HybridConfig
        Sizes of the whole model; without a group, what this layer holds.
    tp_group : torch.distributed.ProcessGroup, optional
        Tensor-parallel ranks: each holds all experts with an equal share of their widths, so that all have as much to do; the
        outputs, the shared expert's included, are summed once. None = one rank.
    device, dtype : torch.device, torch.dtype
        Device and dtype of the parameters.

    Attributes
    ----------
    router : Parameter [experts, hidden]
        Scores of the experts, whole on every rank.
    gate_up_proj, down_proj : Parameter [experts, 2 * intermediate, hidden], Parameter [experts, hidden, intermediate]
        The experts.
    shared_expert, shared_expert_gate : MLP, Parameter [1, hidden]
        Expert of every token, and the input of its gate.

    Raises
    ------
    TypeError, ValueError
        Where `tp_group` is no group, or its size does not divide the widths.
    """

    def __init__(
        self,
        config: HybridConfig,
        *,
        tp_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.tensor_parallel = TensorParallel(tp_group)
        config = self.tensor_parallel.share(config)
        self.top_k, self.norm_topk_prob, self.num_experts = config.num_experts_per_tok, config.norm_topk_prob, config.num_experts
        hidden, width = config.hidden_size, config.moe_intermediate_size

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)

        self.router = parameter(config.num_experts, hidden)
        self.gate_up_proj = parameter(config.num_experts, 2 * width, hidden)
        self.down_proj = parameter(config.num_experts, hidden, width)
        self.shared_expert = MLP(hidden, config.shared_expert_intermediate_size, device=device, dtype=dtype)
        self.shared_expert_gate = parameter(1, hidden)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Output [tokens, hidden] for hidden states [tokens, hidden]."""
        weights, experts = self.route(hidden_states)
        is_grouped = hidden_states.is_cuda and hidden_states.dtype == torch.bfloat16
        routed = (self._grouped if is_grouped else self._every_expert)(hidden_states, weights, experts)
        shared: Tensor = self.shared_expert(hidden_states)
        return self.tensor_parallel.sum(routed + torch.sigmoid(linear(hidden_states, self.shared_expert_gate)) * shared)

    if TYPE_CHECKING:
        __call__ = forward

    def route(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Weights, in the dtype of the input, and indices [tokens, top_k] of the experts of each token."""
        probabilities = torch.softmax(linear(hidden_states, self.router), dim=-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(hidden_states.dtype), experts

    def _grouped(self, hidden_states: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Rows sorted by expert, one grouped product each way, rows back in the order of the tokens."""
        tokens, hidden = hidden_states.shape
        if tokens == 0:
            return hidden_states.clone()
        expert_of_row, order = experts.flatten().sort(stable=True)
        numbers = torch.arange(self.num_experts, device=experts.device)
        ends = torch.searchsorted(expert_of_row, numbers, right=True).to(torch.int32)
        rows = hidden_states.index_select(0, order // self.top_k)
        inner = _gated(_grouped_mm(rows, self.gate_up_proj.mT, offs=ends))
        outputs = _grouped_mm(inner, self.down_proj.mT, offs=ends)
        unsorted = torch.empty_like(outputs).index_copy_(0, order, outputs)
        return (unsorted.view(tokens, self.top_k, hidden) * weights[..., None]).sum(dim=1)

    def _every_expert(self, hidden_states: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """All experts on all tokens, of which each token takes those that it selected; in parts of bounded memory.

        Taken, not weighted with zero: where another expert overflows, zero times infinity would make the sum NaN.
        """
        widest = self.num_experts * max(self.gate_up_proj.shape[1], self.gate_up_proj.shape[2])
        size, parts = max(1, _MOST_ELEMENTS // widest), []
        for tokens, weight, chosen in zip(*(x.split(size) for x in (hidden_states, weights, experts)), strict=True):
            inner = _gated(torch.einsum("th,eih->tei", tokens, self.gate_up_proj))
            outputs = torch.einsum("tei,ehi->teh", inner, self.down_proj)
            selected = outputs[torch.arange(chosen.shape[0], device=chosen.device)[:, None], chosen]  # [tokens, top_k, hidden]
            parts.append((selected * weight[..., None]).sum(dim=1))
        return torch.cat(parts)


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up
