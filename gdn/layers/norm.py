"""RMS norm of the residual stream: `x / sqrt(mean(x * x) + eps) * (1 + weight)`, float32 inside."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import gdn


class RMSNorm(nn.Module):
    """Zero-centred RMS norm with its gain.

    Parameters
    ----------
    dim, eps : int, float
        Normalised dimension; added to the mean square.
    device, dtype : torch.device, torch.dtype
        Device and dtype of the gain.
    """

    def __init__(
        self, dim: int, eps: float = 1e-6, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Norm of x [..., dim], in its dtype."""
        return self.add(x, None)[0]

    if TYPE_CHECKING:
        __call__ = forward

    def add(self, x: Tensor, residual: Tensor | None, layer_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Norm of residual + x * (1 + layer_scale), and that sum; of `x` itself where there is no residual yet."""
        return gdn.add_rms_norm(x, residual, self.weight, self.eps, layer_scale=layer_scale)
