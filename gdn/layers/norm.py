"""RMS norms of the residual stream: `x / sqrt(mean(x * x) + eps) * (1 + weight)`, float32 inside."""

import torch
from torch import Tensor, nn

import gdn


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centred: bool = True) -> Tensor:
    """RMS norm over the last dimension, in float32 inside.

    Parameters
    ----------
    x, weight : Tensor [..., D], Tensor [D]
        Values and gain, any float dtypes.
    eps, zero_centred : float, bool
        Added to the mean square; whether the gain is 1 + weight (else weight).

    Returns
    -------
    Tensor [..., D]
        In the dtype of `x`.
    """
    wide = x.float()
    gain = 1.0 + weight.float() if zero_centred else weight.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * gain).to(x.dtype)


class RMSNorm(nn.Module):
    """Zero-centred RMS norm with its gain.

    Parameters
    ----------
    dim, eps : int, float
        Normalised dimension; added to the mean square.
    """

    def __init__(
        self, dim: int, eps: float = 1e-6, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Norm of x + residual, and that sum; of `x` itself before the first layer, where the residual is None."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return gdn.add_rms_norm(x, residual, self.weight, self.eps)
