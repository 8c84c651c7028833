"""Gated residual streams ("hyper-connections"): several residual streams, mixed before a layer's part and fed back after it.

With S streams x_s, their zero-centred RMS norms n_s, and n = [n_1 | ... | n_S]:

    mixed = mean_s sigmoid(U silu(D n / S))_s * n_s        what the part (attention, GDN, MLP) reads
    x_s  <- x_s + 2 sigmoid(B n / S)_s * part(mixed)       every stream takes the part's output, by a weight of its own

Plain torch: no kernel of this project serves it.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gdn.layers.config import HybridConfig

# Parameter -> its parts in Transformers' Qwen4ExpTextGatedResidual and how a rank takes each, as in `sparse_attention.TENSORS`.
TENSORS = {
    name: ((name, "whole"),)
    for name in ("hc_norm.weight", "input_mix_weight_down.weight", "input_mix_weight_up.weight", "block_inject_weight.weight")
}


class StreamNorm(nn.Module):
    """Zero-centred RMS norm of every stream by itself, float32 inside.

    Parameters
    ----------
    num_streams, hidden_size, eps : int, int, float
        Streams, width of each, and what is added to the mean square.
    """

    def __init__(
        self,
        num_streams: int,
        hidden_size: int,
        eps: float,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_streams, self.eps = num_streams, eps
        weight = torch.zeros(num_streams * hidden_size, device=device, dtype=dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, streams: Tensor) -> Tensor:
        """Normalises streams [..., S * hidden]; the result has their dtype."""
        wide = streams.float().unflatten(-1, (self.num_streams, -1))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        gained: Tensor = normed.flatten(-2) * (1.0 + self.weight.float())
        return gained.to(streams.dtype)

    if TYPE_CHECKING:
        __call__ = forward


class HyperConnection(nn.Module):
    """Connection of one part of a layer to the residual streams.

    Parameters
    ----------
    config : HybridConfig
        Gives hidden_size, hc_count (streams), hc_lowrank (rank of the mixing weights) and rms_norm_eps.
    injects : bool
        Whether the output goes back to the streams; False for the mixer in front of the head.
    device, dtype : torch.device, torch.dtype
        Device and dtype of the parameters.

    References
    ----------
    .. [1] D. Zhu et al., "Hyper-Connections", arXiv:2409.19606.
    """

    def __init__(
        self,
        config: HybridConfig,
        *,
        injects: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_streams, self.hidden_size = config.hc_count, config.hidden_size
        width = self.num_streams * self.hidden_size
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        self.hc_norm = StreamNorm(self.num_streams, self.hidden_size, config.rms_norm_eps, **placed)
        self.input_mix_weight_down = nn.Linear(width, config.hc_lowrank, bias=False, **placed)
        self.input_mix_weight_up = nn.Linear(config.hc_lowrank, width, bias=False, **placed)
        self.block_inject_weight = None
        if injects:
            self.block_inject_weight = nn.Linear(width, self.num_streams, bias=False, **placed)
        self.requires_grad_(False)

    def split(self, hidden_states: Tensor) -> Tensor:
        """Streams [tokens, S * hidden] of an embedding [tokens, hidden]: S copies."""
        return hidden_states.repeat(*(1 for _ in hidden_states.shape[:-1]), self.num_streams)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor | None]:
        """Mixes the streams into the input of the part.

        Parameters
        ----------
        streams : Tensor [tokens, S * hidden]
            Residual streams.

        Returns
        -------
        mixed : Tensor [tokens, hidden]
            Input of the part.
        injection : Tensor [tokens, S] or None
            Weights for `inject`; None where nothing goes back.
        """
        normed = self.hc_norm(streams)
        gate = F.silu(self.input_mix_weight_down(normed) / self.num_streams)
        gate = torch.sigmoid(self.input_mix_weight_up(gate))
        mixed = (gate * normed).unflatten(-1, (self.num_streams, self.hidden_size)).mean(dim=-2)
        if self.block_inject_weight is None:
            return mixed, None
        return mixed, 2 * torch.sigmoid(self.block_inject_weight(normed) / self.num_streams)

    if TYPE_CHECKING:
        __call__ = forward

    def inject(self, streams: Tensor, output: Tensor, injection: Tensor) -> Tensor:
        """Streams [tokens, S * hidden] plus the part's output [tokens, hidden], weighted by injection [tokens, S]."""
        return streams + (output.unsqueeze(-2) * injection.unsqueeze(-1)).flatten(-2)
